"""The settings of generation, typed as in `deployments.settings`. Unknown keys are errors.

`GenerationSettings` is the application's `args` in the Serve config. `GenerationRouterConfig` is the Router's
`user_config`.
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
    parse_settings,
)

NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
_EMULATED_BLOCKS = 1024


class StepTimeSettings(Strict):
    """How long a step takes, in seconds. See `step_time.StepTime`."""

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
    """How long the host's part of the attention takes, in seconds. See `step_time.HostTime`."""

    row_s: NotNegative
    kv_token_s: NotNegative
    copy_token_s: NotNegative = 0.0
    layers: PositiveInt = 32

    @property
    def host_time(self) -> HostTime:
        return HostTime(self.row_s, self.kv_token_s, self.copy_token_s, self.layers)


class EmulatedTimes(StepTimeSettings):
    """A simulated device: its steps take this long. Its tokens follow from all tokens before them by a rule
    (`emulated_steps.following`), so they are meaningless but can be checked.
    """

    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0  # standard deviation, as a share of a step's time
    seed: int = 0

    @property
    def blocks(self) -> int:
        """The default number of cache blocks."""
        return _EMULATED_BLOCKS


class EmulatedWithHost(EmulatedTimes):
    """An accelerator, by the name of a known `device` or by its own figures, with the times of its host."""

    device: str | None = None
    host: HostTimeSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_its_name(cls, given: Any) -> Any:
        """Fill in the figures of a named device. Figures that are given take precedence."""
        if not isinstance(given, dict) or (name := given.get("device")) is None:
            return given
        if (found := EMULATED_ACCELERATORS.get(str(name))) is None:
            raise ValueError(f"`device: {name}` is unknown; choose one: {', '.join(EMULATED_ACCELERATORS)}")
        return {**asdict(found.step_time), "host": asdict(found.host_time), **given}

    @property
    def blocks(self) -> int:
        return _EMULATED_BLOCKS if self.device is None else EMULATED_ACCELERATORS[self.device].blocks


class _GenerationEngineSettings(PoolPlace):
    """What both pools of generation have."""

    # Cache blocks of 128 tokens; 256 on NVIDIA GPUs from compute capability 8.0 on without num_cpu_blocks. auto: 85
    # % of the accelerator's memory that the weights leave free; on a CPU half of the machine's, at most 32 of the
    # model's longest texts; emulated: as the named device, or 1024.
    blocks: Auto | PositiveInt = "auto"
    max_num_batched_tokens: PositiveInt = (
        2048  # the most tokens in one step: limits memory, and how long others wait for a long prompt
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
    """The accelerator pool of generation. `num_cpu_blocks`: cache blocks in the host's memory for each replica. They
    hold the keys and values of answers whose attention the host computes. 0: no hybrid decoding.
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
    """The CPU pool of generation."""

    engine: Literal["torch", "emulated"] = "torch"


_TOKEN_BYTES = 8  # of a token in a body's JSON: of English about 4, of "\\u4f60" 6


class GenerationLimits(BodyLimits):
    """Limits on a request, checked before any expensive work."""

    max_body_bytes: PositiveInt = 4 * 2**20
    default_tokens: PositiveInt = 256  # the most tokens of an answer to /v1/completions if the request does not say
    max_answers: PositiveInt = 8  # the largest `n` of a request
    max_prompts: PositiveInt = 16  # the most prompts of a request; all are admitted together or none
    sse_keepalive_s: Seconds = 15.0  # a stream that pauses so long gets a comment line, to show that it is alive
    slow_reader_s: Seconds = 10.0  # a client that reads nothing of a stream for so long is disconnected
    special_tokens_in_chats: bool = False  # true: names of special tokens in messages become those tokens (SECURITY.md)

    def body_bytes(self, context: int) -> int:
        """The bytes of the largest body: what is set, or else enough for the text of `context` tokens."""
        is_set = "max_body_bytes" in self.model_fields_set
        return self.max_body_bytes if is_set else max(self.max_body_bytes, _TOKEN_BYTES * context)


class GenerationSettings(OneModelSettings):
    """The `args` of generation."""

    accelerator: GenerationAcceleratorSettings = GenerationAcceleratorSettings()
    cpu: GenerationCpuSettings = GenerationCpuSettings()
    limits: GenerationLimits = GenerationLimits()

    @classmethod
    def parse(cls, raw: Any) -> GenerationSettings:
        """Read the `args` of a Serve config. Raises SettingsError, which names the key."""
        return parse_settings(cls, raw, "args")


class GenerationPoolConfig(Strict):
    """`step_time`: how long a step takes; none: as each replica measures at its start."""

    step_time: StepTimeSettings | None = None


class GenerationAcceleratorConfig(GenerationPoolConfig):
    """`host_time`: how long the host's part takes; none: as each replica measures at its start."""

    host_time: HostTimeSettings | None = None


class GenerationRouterConfig(LogConfig):
    """The Router's `user_config`: the promise, and settings that operators change while serving."""

    ttft_s: Seconds  # from a request's arrival to its first token; shorter: fewer requests and only shorter prompts
    tpot_s: Seconds  # time per later token; shorter: fewer answers run side by side
    request_timeout_s: Seconds = 600.0  # a generation that takes longer is stopped
    max_buffered_tokens: PositiveInt = 1024  # unread tokens of a generation; beyond that it is stopped
    bulk_share: Share = 0.5  # the most that bulk generations may use of the cache and of a step
    accelerator: GenerationAcceleratorConfig = GenerationAcceleratorConfig()
    cpu: GenerationPoolConfig = GenerationPoolConfig()

    @property
    def slo_s(self) -> float:
        """The access log calls a request slow if its first token takes longer."""
        return self.ttft_s

    def step_time(self, pool: str) -> StepTime | None:
        """A pool's step time, if it is calibrated."""
        found = {"accelerator": self.accelerator, "cpu": self.cpu}[pool].step_time
        return None if found is None else found.step_time

    def host_time(self, pool: str) -> HostTime | None:
        """The time of a pool's hosts, if it is calibrated."""
        found = self.accelerator.host_time if pool == ACCELERATOR else None
        return None if found is None else found.host_time

    def policy(self, pool: str) -> dict[str, Any]:
        """The policy that a pool's replicas get. `model` and `host`: the fields of a `StepTime` and a `HostTime` in
        order, or None for what the replica measured at its start.
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
        """Read a `user_config`. Raises SettingsError, which names the key."""
        return parse_settings(cls, raw, "user_config")
