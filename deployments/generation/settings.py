"""The settings of an application that generates, typed as `deployments.settings` has them: unknown keys are errors.

`GenerationSettings` is what the Serve config gives as `args`. `GenerationRouterConfig` is the Router's `user_config`.
"""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.hardware.device_detector import ACCELERATOR
from deployments.settings import (
    AcceleratorPlace,
    Auto,
    BodyLimits,
    CpuPlace,
    LogConfig,
    OneModelSettings,
    PoolPlace,
    PositiveInt,
    Seconds,
    Share,
    Strict,
    TrialGrant,
    parse_settings,
)

NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
_EMULATED_BLOCKS = 1024


class StepTimeSettings(Strict):
    """What a step takes a device, in seconds: see `step_time.StepTime`."""

    beta_s: NotNegative
    row_s: NotNegative = 0.0
    kv_token_s: NotNegative = 0.0
    prompt_token_s: NotNegative = 0.0
    pair_s: NotNegative = 0.0
    knee: Count = 0

    @property
    def step_time(self) -> StepTime:
        return StepTime(self.beta_s, self.row_s, self.kv_token_s, self.prompt_token_s, self.pair_s, self.knee)


class HostTimeSettings(Strict):
    """What a host's part of the attention takes, in seconds: see `step_time.HostTime`."""

    row_s: NotNegative
    kv_token_s: NotNegative
    copy_token_s: NotNegative = 0.0
    layers: PositiveInt = 32

    @property
    def host_time(self) -> HostTime:
        return HostTime(self.row_s, self.kv_token_s, self.copy_token_s, self.layers)


class EmulatedTimes(StepTimeSettings):
    """A device that is not at hand: its steps take as long as this says, and their tokens follow from all before them
    by a rule (`emulated_steps.following`), so that they mean nothing and can be checked.
    """

    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0  # standard deviation, share of a step's time
    seed: int = 0

    @property
    def blocks(self) -> int:
        """Of its cache, where none are asked for."""
        return _EMULATED_BLOCKS


class EmulatedWithHost(EmulatedTimes):
    """An accelerator, by the name of one whose figures are known, or by its own; and what its host takes."""

    device: str | None = None
    host: HostTimeSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_its_name(cls, given: Any) -> Any:
        """What is given beside the name comes before what is known by it."""
        if not isinstance(given, dict) or (name := given.get("device")) is None:
            return given
        if (found := EMULATED_ACCELERATORS.get(str(name))) is None:
            raise ValueError(f"`device: {name}` is unknown; choose one: {', '.join(EMULATED_ACCELERATORS)}")
        return {**asdict(found.step_time), "host": asdict(found.host_time), **given}

    @property
    def blocks(self) -> int:
        return _EMULATED_BLOCKS if self.device is None else EMULATED_ACCELERATORS[self.device].blocks


class _GenerationEngineSettings(PoolPlace):
    """What both pools of an application that generates have."""

    # Of the cache, each of 128 tokens; auto: as many as the memory holds that the weights leave, half of a machine's
    # and 32 of the model's longest texts at most, 85 % of an accelerator's; emulated: of the named device, or 1024.
    blocks: Auto | PositiveInt = "auto"
    max_num_batched_tokens: PositiveInt = (
        2048  # most in one step: bounds memory, and how long others wait for a long prompt
    )
    emulated: EmulatedTimes | None = None

    @model_validator(mode="after")
    def _emulated_is_described(self) -> Self:
        if self.engine == "emulated" and self.emulated is None:
            raise ValueError("engine: emulated needs `emulated: {beta_s: ..., row_s: ...}` beside it")
        if self.engine != "emulated" and self.emulated is not None:
            raise ValueError(f"`emulated` is given but the engine is {self.engine}: remove one of them")
        return self


class GenerationAcceleratorSettings(AcceleratorPlace, _GenerationEngineSettings):
    """As the accelerator of embeddings is placed. `num_cpu_blocks`: of the host's memory, for each replica. They hold
    keys and values of answers whose attention the host computes; 0: none.
    """

    num_cpu_blocks: Count = 0
    emulated: EmulatedWithHost | None = None

    @model_validator(mode="after")
    def _host_can_be_used(self) -> Self:
        if self.num_cpu_blocks and self.device == "none":
            raise ValueError("num_cpu_blocks requires an accelerator, but device is none: remove one of them")
        if self.num_cpu_blocks and self.emulated is not None and self.emulated.host is None:
            raise ValueError(
                "num_cpu_blocks of an emulated device needs `emulated: {host: {row_s: ..., kv_token_s: ...}}`"
            )
        return self


class GenerationCpuSettings(CpuPlace, _GenerationEngineSettings):
    """As the CPU of embeddings is placed."""

    engine: Literal["torch", "emulated"] = "torch"


class GenerationLimits(BodyLimits):
    """Bounds on one request, checked before any expensive work."""

    max_body_bytes: PositiveInt = 4 * 2**20
    default_tokens: PositiveInt = 256  # of an answer, where the request does not say; never the whole context
    max_answers: PositiveInt = 8  # `n` of one request
    max_prompts: PositiveInt = 16  # of one request; they are admitted together or not at all
    sse_keepalive_s: Seconds = 15.0  # a stream's pause that gets a comment line, so that nobody takes it for dead
    slow_reader_s: Seconds = 10.0  # who takes nothing of a stream for so long is cut off
    special_tokens_in_chats: bool = False  # true: their names in messages are read as those tokens (SECURITY.md)


class GenerationSettings(OneModelSettings):
    """The application's `args`."""

    accelerator: GenerationAcceleratorSettings = GenerationAcceleratorSettings()
    cpu: GenerationCpuSettings = GenerationCpuSettings()
    limits: GenerationLimits = GenerationLimits()

    @classmethod
    def parse(cls, raw: Any) -> GenerationSettings:
        """The `args` of a Serve config as typed settings. Raises SettingsError that names the key."""
        return parse_settings(cls, raw, "args")


class GenerationPoolConfig(Strict):
    """`step_time`: what its steps take; none: what each replica measures at its start."""

    step_time: StepTimeSettings | None = None


class GenerationAcceleratorConfig(GenerationPoolConfig):
    """`host_time`: what the host's part takes; none: what each replica measures at its start."""

    host_time: HostTimeSettings | None = None


class GenerationRouterConfig(LogConfig):
    """The Router's `user_config`: the promise, and what an operator turns, live."""

    ttft_s: Seconds  # from a request's arrival to its first token; shorter: fewer are admitted, and shorter prompts
    tpot_s: Seconds  # of each further token; shorter: fewer answers run side by side
    request_timeout_s: Seconds = 600.0  # of a whole generation; later it is broken off
    max_buffered_tokens: PositiveInt = 1024  # of one generation that wait for a slow reader; one more breaks it off
    bulk_share: Share = 0.5  # of the cache and of a step that bulk generations may take
    accelerator: GenerationAcceleratorConfig = GenerationAcceleratorConfig()
    cpu: GenerationPoolConfig = GenerationPoolConfig()
    trial: TrialGrant | None = None  # written by a calibration while it runs

    @property
    def slo_s(self) -> float:
        """What the access log calls slow: a first token that is later."""
        return self.ttft_s

    def step_time(self, pool: str) -> StepTime | None:
        """Of a pool, where it is calibrated."""
        found = {"accelerator": self.accelerator, "cpu": self.cpu}[pool].step_time
        return None if found is None else found.step_time

    def host_time(self, pool: str) -> HostTime | None:
        """Of a pool's hosts, where it is calibrated."""
        found = self.accelerator.host_time if pool == ACCELERATOR else None
        return None if found is None else found.host_time

    def policy(self, pool: str) -> dict[str, Any]:
        """What the replicas of a pool are told. `model` and `host`: the fields of a `StepTime` and of a `HostTime` in
        their order, or None: what the replica measured at its start.
        """
        model, host = self.step_time(pool), self.host_time(pool)
        return {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "bulk_share": self.bulk_share,
            "model": None if model is None else list(astuple(model)),
            "host": None if host is None else list(astuple(host)),
        }

    @classmethod
    def parse(cls, raw: Any) -> GenerationRouterConfig:
        """A `user_config` as typed settings. Raises SettingsError that names the key."""
        return parse_settings(cls, raw, "user_config")
