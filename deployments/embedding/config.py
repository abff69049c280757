"""The settings of embeddings that can change while serving (Serve's `user_config`), typed. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from deployments.errors import SettingsError
from deployments.settings import Depth, LogConfig, PositiveInt, Seconds, Share, Strict, parse_settings


class CostConfig(Strict):
    """Device seconds of a query of n tokens: `query_s + token_s * n + token2_s * n^2`. At least one is above 0."""

    query_s: Annotated[float, Field(ge=0)]
    token_s: Annotated[float, Field(ge=0)]
    token2_s: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _is_not_free(self) -> Self:
        if not self.query_s + self.token_s + self.token2_s:
            raise ValueError("a query would cost nothing: set query_s, token_s or token2_s above 0")
        return self


class PoolConfig(Strict):
    """A pool's queue and, if calibrated, the latency model `t = alpha*C + beta` (Eq. 12) that serving starts from.

    `queue_depth`: with `admission: depth`, the most queries in flight at each live replica; with `deadline`, a limit on
    the work of one run, in queries of 75 tokens, or none for no limit. 0 closes the pool.
    """

    queue_depth: Depth | None = None
    alpha_s: Seconds | None = None
    beta_s: Annotated[float, Field(ge=0)] | None = None
    cost: CostConfig | None = None  # the cost of a query by its tokens; none: proportional to the tokens

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.alpha_s is None) != (self.beta_s is None):
            raise ValueError("set both alpha_s and beta_s, or neither")
        if self.cost is not None and self.alpha_s is None:
            raise ValueError("cost requires alpha_s and beta_s: set them too")
        return self


class BulkConfig(Strict):
    """Requests with more queries than fit at once, or with the header `x-windve-priority: bulk`."""

    share: Share = 0.5  # how much of the SLO, or of each depth, they may use of a run; the rest is for other queries
    max_waiting: PositiveInt = 20_000  # waiting bulk queries; a request that would exceed it is refused
    timeout_s: Seconds = 600.0  # replaces request_timeout_s: a thousand texts take long on a slow device


class FairShareConfig(Strict):
    """Applies to clients with named API keys while they ask for more than the device can do."""

    # How much of a run clients over their share may use while a client under its share sends queries. Smaller: queries
    # of clients under their share wait less, but throughput falls because runs are shorter. 1: runs are as long as
    # these queries' deadlines allow.
    max_batch_fraction: Share = 1.0


class CalibrationRecord(Strict):
    """How the depths were measured. The calibration writes it, `/info` shows it, and only people read it."""

    at: str  # UTC, ISO 8601
    where: str  # the machine and its devices
    shape: Literal["burst", "steady"]  # the traffic for which the depths hold
    slo_s: Seconds
    tokens: PositiveInt  # of each query
    r2: dict[str, float]  # of each pool's fit
    verified: str  # how many queries the last run admitted, and how many of them were in time
    # The loads under which the SLO held: "bursts" or "steady", "stream", "mixed lengths".
    proved: list[str] = Field(default_factory=list)
    cpu_overflow: str | None = None  # why the CPU does not help, if it does not


class RouterConfig(LogConfig):
    """The Router's `user_config`: settings that calibration writes and operators change while serving."""

    slo_s: Seconds
    admission: Literal["deadline", "depth"] = "deadline"  # by predicted finish, or by a count (the paper's Algorithm 1)
    request_timeout_s: Seconds = 60.0
    accelerator: PoolConfig | None = None
    cpu: PoolConfig | None = None
    bulk: BulkConfig = BulkConfig()
    fair_share: FairShareConfig = FairShareConfig()
    calibration: CalibrationRecord | None = None

    def pool(self, name: str) -> PoolConfig:
        pools: dict[str, PoolConfig | None] = {"accelerator": self.accelerator, "cpu": self.cpu}
        return pools[name] or PoolConfig()

    @classmethod
    def parse(
        cls, raw: Any, pools: tuple[str, ...] = (), key: str = "user_config", *, max_inputs: int = 1
    ) -> RouterConfig:
        """Read a `user_config`, and check it against the existing pools and the most inputs of a request. `key`: its
        place in the Serve config, for messages.

        Raises SettingsError, which names the key, for unknown keys, impossible values, and a missing depth.
        """
        config = parse_settings(cls, raw, key)
        if config.slo_s > config.request_timeout_s:
            raise SettingsError(
                f"{key}.slo_s",
                f"{config.slo_s:g} s are promised, request_timeout_s gives up after {config.request_timeout_s:g} s: "
                "raise that as well",
            )
        if config.bulk.max_waiting < max_inputs:
            raise SettingsError(
                f"{key}.bulk.max_waiting",
                f"{config.bulk.max_waiting} is less than limits.max_inputs_per_request ({max_inputs}), so the "
                "largest requests would always be refused; increase it, or lower the limit",
            )
        for name in pools:
            if config.admission == "depth" and config.pool(name).queue_depth is None:
                raise SettingsError(
                    f"{key}.{name}.queue_depth", f"missing: admission: depth requires one for the {name} pool"
                )
        if pools and not any(config.pool(name).queue_depth != 0 for name in pools):
            keys = " and ".join(f"{key}.{name}.queue_depth" for name in pools)
            raise SettingsError(keys, "0 closes a pool, and all pools would be closed; set one above 0")
        return config
