"""The settings of an application that generates, typed as `deployments.settings` has them: unknown keys are errors.

`GenerationSettings` is what the Serve config gives as `args`. `GenerationConfig` is the Router's `user_config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deployments.generation.scheduling.step_time import StepTime
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


class StepTimeSettings(Strict):
    """What a step takes a device, in seconds: see `step_time.StepTime`."""

    beta_s: NotNegative
    row_s: NotNegative = 0.0
    kv_token_s: NotNegative = 0.0
    prompt_token_s: NotNegative = 0.0
    pair_s: NotNegative = 0.0
    knee: Annotated[int, Field(ge=0)] = 0

    @property
    def step_time(self) -> StepTime:
        return StepTime(self.beta_s, self.row_s, self.kv_token_s, self.prompt_token_s, self.pair_s, self.knee)


class EmulatedTimes(StepTimeSettings):
    """A device that is not at hand: its steps take as long as this says, and their tokens follow from all before them
    by a rule (`emulated_steps.following`), so that they mean nothing and can be checked.
    """

    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0  # standard deviation, share of a step's time
    seed: int = 0


class _Generates(PoolPlace):
    """What both pools of an application that generates have."""

    # Of the cache, each of 128 tokens; auto: as many as the memory holds that the weights leave, half of a machine's
    # and 16 GiB at most, 85 % of an accelerator's; emulated: 1024.
    blocks: Auto | PositiveInt = "auto"
    step_tokens: PositiveInt = 2048  # most in one step: bounds memory, and how long others wait for a long prompt
    emulated: EmulatedTimes | None = None

    @model_validator(mode="after")
    def _emulated_is_described(self) -> _Generates:
        if self.engine == "emulated" and self.emulated is None:
            raise ValueError("engine: emulated needs `emulated: {beta_s: ..., row_s: ...}` beside it")
        if self.engine != "emulated" and self.emulated is not None:
            raise ValueError(f"`emulated` is given but the engine is {self.engine}: remove one of the two")
        return self


class GeneratingAccelerator(AcceleratorPlace, _Generates):
    """As the accelerator of embeddings is placed."""


class GeneratingCpu(CpuPlace, _Generates):
    """As the CPU of embeddings is placed."""

    engine: Literal["torch", "emulated"] = "torch"


class GenerationLimits(BodyLimits):
    """Bounds on one request, checked before any expensive work."""

    max_body_bytes: PositiveInt = 4 * 2**20
    default_tokens: PositiveInt = 256  # of an answer, where the request does not say; never the whole context
    most_answers: PositiveInt = 8  # `n` of one request
    most_prompts: PositiveInt = 16  # of one request; they are admitted together or not at all
    ping_s: Seconds = 15.0  # a stream's pause that gets a comment line, so that nobody takes it for dead
    slow_reader_s: Seconds = 10.0  # who takes nothing of a stream for so long is cut off
    special_tokens_in_chats: bool = False  # true: their names in messages are read as those tokens (SECURITY.md)


class GenerationSettings(OneModelSettings):
    """The application's `args`."""

    accelerator: GeneratingAccelerator = GeneratingAccelerator()
    cpu: GeneratingCpu = GeneratingCpu()
    limits: GenerationLimits = GenerationLimits()

    @classmethod
    def parse(cls, raw: Any) -> GenerationSettings:
        """The `args` of a Serve config as typed settings. Raises SettingsError that names the key."""
        return parse_settings(cls, raw, "args")


class CalibratedPool(Strict):
    """`step_time`: what its steps take; none: what each replica measures at its start."""

    step_time: StepTimeSettings | None = None


class GenerationConfig(LogConfig):
    """The Router's `user_config`: the promise, and what an operator turns, live."""

    ttft_s: Seconds  # from a request's arrival to its first token; shorter: fewer are admitted, and shorter prompts
    tpot_s: Seconds  # of each further token; shorter: fewer answers run side by side
    request_timeout_s: Seconds = 600.0  # of a whole generation; later it is broken off
    unread_tokens: PositiveInt = 1024  # of one generation that wait for a slow reader; one more breaks it off
    bulk_share: Share = 0.5  # of the cache and of a step that bulk generations may take
    accelerator: CalibratedPool = CalibratedPool()
    cpu: CalibratedPool = CalibratedPool()
    trial: TrialGrant | None = None  # written by a calibration while it runs

    @property
    def slo_s(self) -> float:
        """What the access log calls slow: a first token that is later."""
        return self.ttft_s

    def step_time(self, pool: str) -> StepTime | None:
        """Of a pool, where it is calibrated."""
        found = {"accelerator": self.accelerator, "cpu": self.cpu}[pool].step_time
        return None if found is None else found.step_time

    def policy(self, pool: str) -> dict[str, Any]:
        """What the replicas of a pool are told (`GenerationPool.configure`)."""
        model = self.step_time(pool)
        return {
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "bulk_share": self.bulk_share,
            "model": None if model is None else list(model.as_tuple()),
        }

    @classmethod
    def parse(cls, raw: Any) -> GenerationConfig:
        """A `user_config` as typed settings. Raises SettingsError that names the key."""
        return parse_settings(cls, raw, "user_config")
