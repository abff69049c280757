"""The metrics of generation: every name, tag and bucket that it does not share with embeddings.

Metrics with the same meaning have the same name (`serving.metrics`), so that alerts and panels serve both kinds: a
generation counts as a query, a step as a run, and a row as a query of that run. docs/operations.md explains each one.

The Router has one `GenerationRouterMetrics`, and a `Streamed` for each generation. A replica has one
`GeneratorMetrics`. Pure: the clock and Ray's instruments are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from deployments.generation.scheduler.state import MODES, HostState
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
REFUSED_BECAUSE = (  # a replica's reasons, in the order of `GeneratorState.refusals`
    "full",  # a first token or a pace would be late, or the cache has no room
    "never",  # even an idle device would be late
)

# Ray's agent keeps one set of bounds per name and node, and sorts all processes' counts into it. So the bounds do not
# depend on the promise. For a promise that is one of them the share of kept ones is exact.
_BOUNDS_S = [round(step * 10.0**power, 6) for power in range(-3, 2) for step in (1, 2, 3, 4, 5, 7.5)]
_POOL = ("pool",)


class Promise(NamedTuple):
    """The promise of a generation: seconds from its arrival to its first token, and seconds per later token of an
    answer. None: no promise (bulk has neither).
    """

    ttft_s: float | None
    tpot_s: float | None


class GenerationPoolState(NamedTuple):
    """One pool as a Router sees it now."""

    is_open: bool
    live_replicas: int
    ejected_replicas: int  # how many of them get nothing because their engines fail or hang
    calibrated: bool


class GeneratorState(NamedTuple):
    """A replica's state for the metrics."""

    in_flight: int  # generations admitted and not ended
    waiting: int  # those of them without a first token
    slowdown: float
    margin: float
    kv_blocks_used: int
    kv_blocks_free: int
    refusals: Sequence[int]  # since the start, in the order of REFUSED_BECAUSE
    preemptions: int  # since the start
    host: HostState | None = None  # set if the host has a part of the cache


class GenerationRouterMetrics:
    """A Router's metrics. All methods are called in the event loop's thread."""

    def __init__(self, instruments: Instruments) -> None:
        def count(name: str, about: str, tags: tuple[str, ...] = _POOL) -> None:
            self._tallies[name] = tally(instruments, f"windve_{name}", about, tags)

        def measure(name: str, about: str) -> Histogram:
            return Histogram(instruments, f"windve_{name}", about, _BOUNDS_S, _POOL)

        self._tallies: dict[str, Tally] = {}
        count("queries", "Queries by pool and by the outcome of their request", ("pool", "outcome"))
        count("answers", "Answers that have ended, by reason", ("pool", "reason"))
        count("prompt_tokens", "Tokens of the prompts of admitted generations")
        count("cached_prompt_tokens", "Tokens of these prompts that the cache held already")
        count("answer_tokens", "Tokens that were generated")
        count("ttft_promised", "Generations whose first token was promised")
        count("ttft_missed", "Generations of these whose first token was late, or missing because of a server error")
        count("tpot_promised", "Answers with a promised time per output token that got a second token or broke off")
        count("tpot_missed", "Answers of these that were slower, or that a server error broke off")
        self.first_token = measure("time_to_first_token_seconds", "From arrival to the first token")
        self.pace = measure("time_per_output_token_seconds", "Mean seconds per token after an answer's first")
        self.gap = measure("worst_gap_seconds", "The longest gap in an answer after its first token")
        self.tenants = TenantMetrics(instruments)
        self._gauges = pool_gauges(instruments, REACHED)
        self.recent = Recent()
        self._slo: Gauge = instruments.Gauge("windve_slo_seconds", "The promised latency")
        self._tpot: Gauge = instruments.Gauge("windve_tpot_seconds", "The promised time per output token")

    def count(self, name: str, step: float, *tags: str) -> None:
        """Add to the counter windve_NAME. `tags`: the pool, then its other tags."""
        self._tallies[name].add(step, *tags)

    def judge(self, name: str, pool: str, *, late: bool) -> None:
        """Count a promise, kept or not."""
        self.count(f"{name}_promised", 1, pool)
        self.count(f"{name}_missed", late, pool)

    def publish(self, promise: Promise, pools: Mapping[str, GenerationPoolState]) -> None:
        """Publish what was counted since the last call, the settings' promise, and each pool's gauges, to Ray."""
        self.tenants.publish()
        for counted in self._tallies.values():
            counted.publish()
        for histogram in (self.first_token, self.pace, self.gap):
            histogram.publish()
        for gauge, seconds in zip((self._slo, self._tpot), promise, strict=True):
            if seconds is not None:
                gauge.set(seconds, {})
        for pool, state in pools.items():
            for key, gauge in self._gauges.items():
                gauge.set(float(getattr(state, key)), {"pool": pool})


class _Answer:
    """The tokens of one answer so far."""

    __slots__ = ("ended", "first_s", "gap_s", "last_s", "tokens")

    def __init__(self) -> None:
        self.first_s = self.last_s = self.gap_s = 0.0
        self.tokens = 0
        self.ended: End | None = None

    @property
    def pace_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)

    def more(self, now: float) -> None:
        if self.tokens:
            self.gap_s = max(self.gap_s, now - self.last_s)
        else:
            self.first_s = now
        self.last_s = now
        self.tokens += 1


class Streamed:
    """A generation while it is streamed: call `admitted`, then `arrived` for each token, `ended` for each answer (0 ..
    answers - 1), and `over` once. Times are the Router's clock when a frame arrives, not when a client, which may be
    slow, reads it. `client`: the name of its API key, if it has one.
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
        self.first_at: float | None = None  # when its first token came
        self.over_at: float | None = None
        self.is_broken = False  # an error of ours ended it
        self.predicted_s: float | None = None  # from its arrival to its first token, where it was admitted

    @property
    def tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(found.tokens for found in self._answers)

    @property
    def first_s(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    @property
    def pace_s(self) -> float | None:
        """Seconds per token of its slowest answer. None if no answer has two tokens."""
        return max((found.pace_s for found in self._answers if found.tokens > 1), default=None)

    @property
    def gap_s(self) -> float:
        """The longest wait for the next token of an answer, in seconds."""
        return max(found.gap_s for found in self._answers)

    @property
    def is_late(self) -> bool:
        """Whether its first token, or the pace of an answer, missed the promise."""
        pairs = zip((self.first_s, self.pace_s), self.promise, strict=True)
        return any(took_s is not None and allowed_s is not None and took_s > allowed_s for took_s, allowed_s in pairs)

    def admitted(self, pool: str) -> None:
        """A replica of that pool has admitted it. Called again if it is placed elsewhere later."""
        if self._pool == NO_POOL:
            self._metrics.count("prompt_tokens", self._prompt_tokens, pool)
        self._pool = pool

    def count_cached(self, tokens: int) -> None:
        """Count the tokens of its prompt that the replica's cache held."""
        self._metrics.count("cached_prompt_tokens", tokens, self._pool)

    def arrived(self, now: float, answer: int) -> None:
        """Count a new token of that answer."""
        if self.first_at is None:
            self.first_at = now
            if (allowed_s := self.promise.ttft_s) is not None:
                took_s = now - self.arrived_at
                self._metrics.first_token.observe(took_s, self._pool)
                self._metrics.judge("ttft", self._pool, late=took_s > allowed_s)
                if self.predicted_s is not None:
                    self._metrics.recent.finished(self.predicted_s, took_s, self._pool, late=took_s > allowed_s)
        self._answers[answer].more(now)
        self._metrics.count("answer_tokens", 1, self._pool)

    def ended(self, answer: int, why: End) -> None:
        """Count an answer that has ended."""
        found = self._answers[answer]
        found.ended = why
        self._metrics.count("answers", 1, self._pool, why)
        if (allowed_s := self.promise.tpot_s) is None:
            return
        if found.tokens > 1:
            self._metrics.pace.observe(found.pace_s, self._pool)
            self._metrics.gap.observe(found.gap_s, self._pool)
        broken = why == "failed" and found.tokens > 0
        if found.tokens > 1 or broken:
            self._metrics.judge("tpot", self._pool, late=broken or found.pace_s > allowed_s)

    def over(self, now: float, error: BaseException | None = None, device_s: float = 0.0) -> None:
        """Count the end of the generation: all its answers have ended, or it ends with `error`, which is what the
        client gets, or CancelledError if the client has disconnected. Its other answers count as ended by the error.
        `device_s`: the device seconds that it used, for the tenant's metrics.
        """
        outcome = OK if error is None else outcome_of(error)
        self.over_at, self.is_broken = now, outcome == ERROR
        if self._pool != NO_POOL:
            for answer, found in enumerate(self._answers):
                if found.ended is None:
                    self.ended(answer, "failed" if outcome == ERROR else "cancelled")
        allowed_s = self.promise.ttft_s
        is_overdue = self._pool != NO_POOL and allowed_s is not None and now - self.arrived_at > allowed_s
        breaks = outcome == ERROR or (outcome == CANCELLED and is_overdue)
        never_came = self.first_at is None and breaks
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
        if self._client is not None and error is None:
            self._metrics.tenants.used(self._client, 1, tokens=self._prompt_tokens + self.tokens, device_s=device_s)
        elif self._client is not None and error is not None:
            self._metrics.tenants.refused(self._client, error, 1)


class GeneratorMetrics(ReplicaMetrics):
    """A replica's metrics. `ran(rows, tokens, seconds, planned_s)` counts a step, with its rows and their tokens."""

    def __init__(self, instruments: Instruments, pool: str, info: Mapping[str, str]) -> None:
        def count(name: str, about: str, *tags: str) -> None:
            self._of_host[name] = tally(instruments, f"windve_{name}", about, (*_POOL, *tags))

        blocks = {
            "kv_blocks_used": "Blocks of the cache that hold keys and values",
            "kv_blocks_free": "Blocks of the cache that are free",
        }
        super().__init__(instruments, pool, info, {**REPLICA_GAUGES, **blocks}, REFUSED_BECAUSE)
        lost = "Answers that lost their blocks of the cache to others, so that their tokens were computed again"
        self._preempted = tally(instruments, "windve_preempted_answers", lost, _POOL)
        self._of_host: dict[str, Tally] = {}
        count("mode_steps", "Steps by what the host did in them", "mode")
        count("moved_generations", "Generations that moved between the caches", "to")
        count("host_tokens", "Tokens of answers whose attention the host computed")
        made = "Tokens that accelerator and host made; a prompt counts as the answers' tokens of its time"
        count("hybrid_tokens", made)
        count("alone_tokens", "What the accelerator alone would have made in the same time, counted likewise")
        gauges = {
            "cpu_blocks_used": "Blocks of the host's cache that hold keys and values",
            "cpu_blocks_free": "Blocks of the host's cache that are free",
            "parked_rows": "Answers whose next token takes several steps",
            "host_slowdown_ratio": "What the host's attention takes now, as a share of what its model says",
        }
        self._host_gauges = pool_gauges(instruments, gauges)

    def publish(self, state: GeneratorState) -> None:
        """See the base. Also publishes what the host did, if it has a part of the cache."""
        super().publish(state)
        self._preempted.reached(state.preemptions, self._pool["pool"])
        self._preempted.publish()
        if (host := state.host) is None:
            return
        moved = zip(("accelerator", "host"), host.moved, strict=True)
        counts: dict[str, dict[tuple[str, ...], float]] = {
            "mode_steps": {(mode,): steps for mode, steps in zip(MODES, host.steps, strict=True)},
            "moved_generations": {(to,): count for to, count in moved},
            "host_tokens": {(): host.tokens},
            "hybrid_tokens": {(): host.alone + host.gained},
            "alone_tokens": {(): host.alone},
        }
        for name, totals in counts.items():
            for tags, total in totals.items():
                self._of_host[name].reached(total, self._pool["pool"], *tags)
        for counted in self._of_host.values():
            counted.publish()
        figures = host.blocks - host.free_blocks, host.free_blocks, host.parked, host.slowdown
        for gauge, figure in zip(self._host_gauges.values(), figures, strict=True):
            gauge.set(float(figure), self._pool)
