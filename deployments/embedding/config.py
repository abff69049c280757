"""What may change while embeddings are served (Serve's `user_config`), typed. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from deployments.errors import SettingsError
from deployments.settings import Depth, LogConfig, PositiveInt, Seconds, Share, Strict, TrialGrant, parse_settings


class CostConfig(Strict):
    """Device seconds of a query of n tokens: `query_s + token_s * n + token2_s * n^2`, one of them above 0."""

    query_s: Annotated[float, Field(ge=0)]
    token_s: Annotated[float, Field(ge=0)]
    token2_s: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _is_not_free(self) -> Self:
        if not self.query_s + self.token_s + self.token2_s:
            raise ValueError("a query would cost nothing: set query_s, token_s or token2_s above 0")
        return self


class PoolConfig(Strict):
    """A pool's queue, and the latency model `t = alpha*C + beta` (Eq. 12) that serving starts from, if calibrated.

    `queue_depth`: with `admission: depth` the most queries in flight for each live replica; with `deadline` a bound on
    the work of one run (so many queries of 75 tokens), none for no bound. 0 closes the pool.
    """

    queue_depth: Depth | None = None
    alpha_s: Seconds | None = None
    beta_s: Annotated[float, Field(ge=0)] | None = None
    cost: CostConfig | None = None  # by tokens; without it, in proportion to them

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.alpha_s is None) != (self.beta_s is None):
            raise ValueError("set both alpha_s and beta_s, or neither")
        if self.cost is not None and self.alpha_s is None:
            raise ValueError("cost requires alpha_s and beta_s: set them too")
        return self


class BulkConfig(Strict):
    """Requests with more queries than fit at once, or marked `x-windve-priority: bulk`."""

    share: Share = 0.5  # of the SLO, or of each depth, that they may take of a run; the rest is for single queries
    max_waiting: PositiveInt = 20_000  # queries; past that a bulk request is answered busy
    timeout_s: Seconds = 600.0  # in place of request_timeout_s: a thousand texts take their time on a slow device


class FairShareConfig(Strict):
    """Clients whose API keys have names, while they ask for more than there is."""

    # Of a run: while a client that asks for less than its share sends queries, those who ask for more have so much of
    # each run. Less lowers the former's latency, and the device's throughput, as runs get shorter. None: half as much
    # work as a run's beta, 0.1 to 0.25 of a run.
    max_batch_fraction: Share | None = None


class CalibrationRecord(Strict):
    """Where depths come from: written by the calibration beside them, shown by `/info`, read by people."""

    at: str  # UTC, ISO 8601
    where: str  # the machine and its devices
    shape: Literal["burst", "steady"]  # the traffic that the depths are for
    slo_s: Seconds
    tokens: PositiveInt  # of each query
    quantile: Share  # of a burst's latencies that meets the SLO; 1: the slowest
    r2: dict[str, float]  # of each pool's fit
    verified: str  # what was admitted in the last run, and how much of it in time
    # What held the SLO: "bursts" or "steady", "stream", "mixed lengths".
    proved: list[str] = Field(default_factory=list)
    cpu_overflow: str | None = None  # why the CPU does not help, where it does not


class RouterConfig(LogConfig):
    """The Router's `user_config`: what calibration writes and an operator turns, live."""

    slo_s: Seconds
    admission: Literal["deadline", "depth"] = "deadline"  # by predicted finish, or by a count (the paper's Algorithm 1)
    request_timeout_s: Seconds = 60.0
    accelerator: PoolConfig | None = None
    cpu: PoolConfig | None = None
    bulk: BulkConfig = BulkConfig()
    fair_share: FairShareConfig = FairShareConfig()
    calibration: CalibrationRecord | None = None
    trial: TrialGrant | None = None

    def pool(self, name: str) -> PoolConfig:
        pools: dict[str, PoolConfig | None] = {"accelerator": self.accelerator, "cpu": self.cpu}
        return pools[name] or PoolConfig()

    @classmethod
    def parse(
        cls, raw: Any, pools: tuple[str, ...] = (), key: str = "user_config", *, max_inputs: int = 1
    ) -> RouterConfig:
        """A `user_config` as typed settings, checked against the pools that exist and the most inputs of a request.
        `key`: where it is found.

        Raises SettingsError that names the key: unknown ones, impossible depths, a pool without the depth it needs.
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
