"""The metrics of generation: every name, tag and bucket beside those that it shares with embeddings.

What means the same has the same name (`serving.metrics`), so that alerts and panels serve both kinds: a generation is
counted as a query, a step as a run, and a row as a query of that run. docs/operations.md says what each one means.

The Router has one `GenerationRouterMetrics`. For each generation it calls::

    streamed = Streamed(metrics, arrived_at, Promise(ttft_s, tpot_s), prompt_tokens=..., answers=..., client=...)
    streamed.admitted("cpu")                # a replica has taken it
    streamed.arrived(now, answer, tokens)   # with each frame that brings tokens of an answer: 0 .. answers - 1
    streamed.ended(answer, "stop")          # one answer has its last token
    streamed.over(now)                      # once, at the end of all; with the error if it ended by one, device seconds

A replica has one `GeneratorMetrics`: `ran` after each step, `failed` after one that failed, and `publish` every two
seconds. Pure: the clock and Ray's instruments are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from deployments.generation.scheduler.hybrid.host_cache import HostState
from deployments.generation.scheduler.hybrid.planner import MODES
from deployments.serving.metrics import (
    BUSY,
    CANCELLED,
    ERROR,
    NO_POOL,
    OK,
    REACHED,
    REPLICA_GAUGES,
    Gauge,
    Histogram,
    Instruments,
    ReplicaMetrics,
    Tally,
    TenantMetrics,
    outcome_of,
    pool_gauges,
    tally,
)
from deployments.serving.recent import LATE, REFUSED, Recent

End = Literal["stop", "length", "cancelled", "failed"]
REFUSED_BECAUSE = (  # of a replica, in the order of `GeneratorState.refusals`
    "full",  # a first token or a pace would be late, or its keys and values have no room
    "never",  # an idle device would be late, too
)

# Ray's agent keeps one set of bounds for a name on each node, and puts other processes' counts into these. So they are
# the same for all promises, with the usual ones among them: the share below such a promise is exact.
_FIRST_TOKEN_S = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0]
_PACE_S = [0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0]
_GAP_S = [0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 10.0]
_POOL = ("pool",)


class Promise(NamedTuple):
    """Of one generation: seconds from its arrival to its first token, and for each token of an answer after that.
    None: there is none (bulk has neither).
    """

    ttft_s: float | None
    tpot_s: float | None


class GenerationPoolState(NamedTuple):
    """One pool as a Router sees it now."""

    is_open: bool
    live_replicas: int
    ejected_replicas: int  # of these, those that are sent nothing because their engines fail
    calibrated: bool


class GeneratorState(NamedTuple):
    """What a replica says of itself."""

    in_flight: int  # generations admitted and not ended
    waiting: int  # of these, those of whose prompt nothing is computed yet
    slowdown: float
    margin: float
    kv_blocks_used: int
    kv_blocks_free: int
    refusals: Sequence[int]  # since the start, as REFUSED_BECAUSE
    host: HostState | None = None  # where it has a part of the cache


class GenerationRouterMetrics:
    """A Router's. All methods are called from the event loop's own thread."""

    def __init__(self, instruments: Instruments) -> None:
        def count(name: str, about: str, tags: tuple[str, ...] = _POOL) -> None:
            self._tallies[name] = tally(instruments, f"windve_{name}", about, tags)

        def measure(name: str, about: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(instruments, f"windve_{name}", about, bounds, _POOL)

        self._tallies: dict[str, Tally] = {}
        count("queries", "Queries by pool and by the outcome of their request", ("pool", "outcome"))
        count("answers", "Answers that have ended, by reason", ("pool", "reason"))
        count("prompt_tokens", "Tokens of the prompts of admitted generations")
        count("answer_tokens", "Tokens that were generated")
        count("ttft_promised", "Generations whose first token was promised")
        count("ttft_missed", "Generations of these whose first token was late, or missing because of a server error")
        count("tpot_promised", "Answers with a promised time per output token that got a second token or broke off")
        count("tpot_missed", "Answers of these that were slower, or that a server error broke off")
        self._first_token = measure("time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S)
        self._pace = measure("time_per_output_token_seconds", "Mean seconds per token after an answer's first", _PACE_S)
        self._gap = measure("worst_gap_seconds", "The longest gap in an answer after its first token", _GAP_S)
        self.tenants = TenantMetrics(instruments)
        self._gauges = pool_gauges(instruments, REACHED)
        self.recent = Recent()
        self._slo: Gauge = instruments.Gauge("windve_slo_seconds", "The promised latency")
        self._tpot: Gauge = instruments.Gauge("windve_tpot_seconds", "The promised time per output token")

    def count(self, name: str, step: float, *tags: str) -> None:
        """Of the counter windve_NAME; `tags` are the pool, and what else it has."""
        self._tallies[name].add(step, *tags)

    def first_token(self, pool: str, seconds: float, allowed_s: float) -> None:
        """Of a generation that had a promise."""
        self._first_token.observe(seconds, pool)
        self.judge("ttft", pool, late=seconds > allowed_s)

    def pace(self, pool: str, seconds: float, gap_s: float) -> None:
        """Of an answer that had a promise; the longest gap of it beside."""
        self._pace.observe(seconds, pool)
        self._gap.observe(gap_s, pool)

    def judge(self, name: str, pool: str, *, late: bool) -> None:
        """One promise more, kept or not."""
        self.count(f"{name}_promised", 1, pool)
        self.count(f"{name}_missed", late, pool)

    def publish(self, promise: Promise, pools: Mapping[str, GenerationPoolState]) -> None:
        """Give Ray what was counted since the last call, the promise of the settings, and the gauges of each pool."""
        self.tenants.publish()
        for counted in self._tallies.values():
            counted.publish()
        for histogram in (self._first_token, self._pace, self._gap):
            histogram.publish()
        for gauge, seconds in zip((self._slo, self._tpot), promise, strict=True):
            if seconds is not None:
                gauge.set(seconds, {})
        for pool, state in pools.items():
            for key, gauge in self._gauges.items():
                gauge.set(float(getattr(state, key)), {"pool": pool})


class _Answer:
    """What has come of one."""

    __slots__ = ("ended", "first_s", "gap_s", "last_s", "tokens")

    def __init__(self) -> None:
        self.first_s = self.last_s = self.gap_s = 0.0
        self.tokens = 0
        self.ended: End | None = None

    @property
    def pace_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)

    def more(self, now: float, tokens: int) -> None:
        if self.tokens:
            self.gap_s = max(self.gap_s, now - self.last_s)
        else:
            self.first_s = now
        self.last_s = now
        self.tokens += tokens


class Streamed:
    """One generation while it is streamed. Times are the Router's clock, when a frame arrives: not when a client, which
    may be slow, reads on. `client`: the name of its API key, if it has one.
    """

    def __init__(
        self,
        metrics: GenerationRouterMetrics,
        arrived_at: float,
        promise: Promise,
        *,
        prompt_tokens: int,
        answers: int,
        client: str | None,
    ) -> None:
        self.arrived_at, self.promise = arrived_at, promise
        self._metrics, self._prompt_tokens, self._client, self._pool = metrics, prompt_tokens, client, NO_POOL
        self._answers = [_Answer() for _ in range(answers)]
        self.first_at: float | None = None  # its first token came
        self.over_at: float | None = None
        self.is_broken = False  # by an error of ours
        self.predicted_s: float | None = None  # from its arrival to its first token, as it was offered last

    @property
    def tokens(self) -> int:
        """Of all answers so far."""
        return sum(found.tokens for found in self._answers)

    @property
    def first_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    @property
    def pace_s(self) -> float | None:
        """Of its slowest answer; None where none has two tokens."""
        return max((found.pace_s for found in self._answers if found.tokens > 1), default=None)

    @property
    def gap_s(self) -> float:
        """The longest wait for more of an answer."""
        return max(found.gap_s for found in self._answers)

    @property
    def is_late(self) -> bool:
        """Its first token or the pace of an answer is later than promised."""
        pairs = zip((self.first_s, self.pace_s), self.promise, strict=True)
        return any(took_s is not None and allowed_s is not None and took_s > allowed_s for took_s, allowed_s in pairs)

    def admitted(self, pool: str) -> None:
        """By a replica of that pool; a second time, where the first one died."""
        if self._pool == NO_POOL:
            self._metrics.count("prompt_tokens", self._prompt_tokens, pool)
        self._pool = pool

    def arrived(self, now: float, answer: int, tokens: int) -> None:
        """So many more of that answer's tokens; at least one."""
        if self.first_at is None:
            self.first_at = now
            if (allowed_s := self.promise.ttft_s) is not None:
                self._metrics.first_token(self._pool, now - self.arrived_at, allowed_s)
                if self.predicted_s is not None and self._metrics.recent.wants_finish():
                    self._metrics.recent.finished(self.predicted_s, now - self.arrived_at, self._pool)
        self._answers[answer].more(now, tokens)
        self._metrics.count("answer_tokens", tokens, self._pool)

    def ended(self, answer: int, why: End) -> None:
        """No more comes of it."""
        found = self._answers[answer]
        found.ended = why
        self._metrics.count("answers", 1, self._pool, why)
        if (allowed_s := self.promise.tpot_s) is None:
            return
        if found.tokens > 1:
            self._metrics.pace(self._pool, found.pace_s, found.gap_s)
        broken = why == "failed" and found.tokens > 0
        if found.tokens > 1 or broken:
            self._metrics.judge("tpot", self._pool, late=broken or found.pace_s > allowed_s)

    def over(self, now: float, error: BaseException | None = None, device_s: float = 0.0) -> None:
        """All its answers have ended, or it ends by this error: the one that the client is told, or asyncio's
        CancelledError if the client has gone. Answers that have not ended are counted as broken off by it. `device_s`:
        what it took of a device, for its client's account.
        """
        outcome = OK if error is None else outcome_of(error)
        self.over_at, self.is_broken = now, outcome == ERROR
        if self._pool != NO_POOL:
            for answer, found in enumerate(self._answers):
                if found.ended is None:
                    self.ended(answer, "failed" if outcome == ERROR else "cancelled")
        never_came = self.first_at is None and self._breaks_promise(now, outcome)
        if never_came:
            self._metrics.judge("ttft", self._pool, late=True)
        self._metrics.count("queries", 1, self._pool if outcome == OK else NO_POOL, outcome)
        for name, holds in (
            (self._pool, outcome == OK),
            (REFUSED, outcome == BUSY),
            (LATE, never_came or self.is_broken or self.is_late),
        ):
            if holds:
                self._metrics.recent.add(name)
        if self._client is not None:
            self._charge(self._client, error, device_s)

    def _breaks_promise(self, now: float, outcome: str) -> bool:
        allowed_s = self.promise.ttft_s
        late = self._pool != NO_POOL and allowed_s is not None and now - self.arrived_at > allowed_s
        return outcome == ERROR or (outcome == CANCELLED and late)

    def _charge(self, client: str, error: BaseException | None, device_s: float) -> None:
        if error is None:
            self._metrics.tenants.used(client, 1, tokens=self._prompt_tokens + self.tokens, device_s=device_s)
        else:
            self._metrics.tenants.refused(client, error, 1)


class GeneratorMetrics(ReplicaMetrics):
    """A replica's. `ran(rows, tokens, seconds, planned_s)`: a step of so many rows, and tokens of them together."""

    def __init__(self, instruments: Instruments, pool: str, info: Mapping[str, str]) -> None:
        blocks = {
            "kv_blocks_used": "Blocks of the cache that hold keys and values",
            "kv_blocks_free": "Blocks of the cache that are free",
        }
        super().__init__(instruments, pool, info, {**REPLICA_GAUGES, **blocks}, REFUSED_BECAUSE)
        self._host = _HostMetrics(instruments, pool)

    def publish(self, state: GeneratorState) -> None:  # type: ignore[override]
        """And what the host did, where it has a part of the cache."""
        super().publish(state)
        if state.host is not None:
            self._host.publish(state.host)


class _HostMetrics:
    """Of a replica's host, which has a part of its cache."""

    def __init__(self, instruments: Instruments, pool: str) -> None:
        def count(name: str, about: str, *tags: str) -> Tally:
            return tally(instruments, f"windve_{name}", about, (*_POOL, *tags))

        self._pool = pool
        self._steps = count("mode_steps", "Steps by what the host did in them", "mode")
        self._moved = count("moved_generations", "Generations that moved between the caches", "to")
        self._tokens = count("host_tokens", "Tokens of answers whose attention the host computed")
        self._hybrid = count(
            "hybrid_tokens", "Tokens that accelerator and host made; a prompt counts as the answers' tokens of its time"
        )
        self._alone = count(
            "alone_tokens", "What the accelerator alone would have made in the same time, counted likewise"
        )
        gauges = {
            "cpu_blocks_used": "Blocks of the host's cache that hold keys and values",
            "cpu_blocks_free": "Blocks of the host's cache that are free",
            "parked_rows": "Answers whose next token takes several steps",
            "host_slowdown_ratio": "What the host's attention takes now, as a share of what its model says",
        }
        self._gauges = pool_gauges(instruments, gauges)
        self._told: dict[tuple[int, tuple[str, ...]], float] = {}  # of each counter, so far

    def publish(self, host: HostState) -> None:
        """Give Ray what was counted since the last call, and the gauges."""
        for mode, steps in zip(MODES, host.steps, strict=True):
            self._count(self._steps, steps, mode)
        for to, moved in zip(("accelerator", "host"), host.moved, strict=True):
            self._count(self._moved, moved, to)
        self._count(self._tokens, host.tokens)
        self._count(self._hybrid, host.alone + host.gained)
        self._count(self._alone, host.alone)
        figures = host.blocks - host.free_blocks, host.free_blocks, host.parked, host.slowdown
        for gauge, figure in zip(self._gauges.values(), figures, strict=True):
            gauge.set(float(figure), {"pool": self._pool})

    def _count(self, counted: Tally, total: float, *tags: str) -> None:
        """So many since the start."""
        key = id(counted), tags
        before = self._told.get(key, 0.0)
        counted.add(total - before, self._pool, *tags)
        self._told[key] = max(total, before)
        counted.publish()
