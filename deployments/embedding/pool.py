"""A pool as a Router sees it: its live replicas, with a link to each."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.embedding.config import PoolConfig
from deployments.embedding.link import Channel, Link
from deployments.embedding.scheduler.cost_model import CostModel
from deployments.embedding.view import UNKNOWN_COST, Ask
from deployments.serving.replica_set import ReplicaSet

# Replicas compared for one query, and those looked at to find open ones: comparing a thousand would take milliseconds.
_COMPARED, _LOOKED_AT = 16, 32
LEAST_SHARE = 0.05  # what a CPU pool must add: less is hard to tell from the accelerator's own variation
_DIFFERENT = 1.25  # a choice stands until the share is this factor beyond the limit: learned figures vary by less


class Speed(NamedTuple):
    """A pool: the latency model of its replicas, in s, and how many answer. `alpha_s` is 0 until it is known."""

    alpha_s: float
    beta_s: float
    replicas: int

    def concurrency(self, slo_s: float) -> float:
        """How many queries of 75 tokens it answers within the SLO if all come at once (the paper's Eq. 12)."""
        return self.replicas * max(0.0, slo_s - self.beta_s) / self.alpha_s


class Pool(ReplicaSet[Link]):
    """A pool. `name` is "accelerator" or "cpu"; `deployment` is the name of its Serve deployment. Call `configure`
    before `connect`.
    """

    link_type = Link
    channel_type = Channel
    config = PoolConfig()  # until it is configured

    def __init__(self, name: str, **where: Any) -> None:
        super().__init__(name, **where)
        self.left_out = False  # it gets no queries, because it adds too little (`is_left_out`)
        self._turn = 0  # where the next look at the replicas of a large pool begins
        self._first: Link | None = None  # the preferred live replica, or the last one that lived

    def configure(self, config: PoolConfig, policy: Mapping[str, Any]) -> None:
        """Apply a new config, and send it to every replica.

        `policy` has `slo_s` (s), `admission` ("deadline" or "depth"), `bulk_share` and `max_batch_fraction` (0 to 1).
        The replicas also get `router` (this Router's replica id), `depth` (int or None) and `model` ([query_s, token_s,
        token2_s, beta_s], or None to use what the replica measured at warm-up). `RunLoop._configure` reads it.
        """
        self.config = config
        model = None
        if config.alpha_s is not None and config.beta_s is not None:
            cost = config.cost or CostModel.of_curve(config.alpha_s, config.beta_s)
            model = [cost.query_s, cost.token_s, cost.token2_s, config.beta_s]
        self.put_in_force({**policy, "depth": config.queue_depth, "model": model})

    def changed(self) -> None:
        super().changed()
        if self.live:
            self._first = self.live[0]

    @property
    def is_open(self) -> bool:
        return self.may_answer and not self.left_out

    @property
    def may_answer(self) -> bool:
        return self.config.queue_depth != 0 and bool(self.live)

    @property
    def by_count(self) -> bool:
        """Whether admission is by depth (Algorithm 1)."""
        return bool(self.policy.get("admission") == "depth")

    def capacity(self, tokens: float, slo_s: float, enough: float = math.inf) -> float:
        """How many queries of `tokens` tokens idle replicas would admit at once. It counts replica by replica, up to
        `enough` queries.
        """
        if not self.is_open:
            return 0.0
        if self.by_count:
            return (self.config.queue_depth or 0) * len(self.live)
        return _counted((link.view.most_queries(tokens, slo_s) for link in _as_many(self.live, enough)), enough)

    def room_now(self, now: float, tokens: float, enough: float = math.inf) -> float:
        """For how many queries of `tokens` tokens the replicas have room now. It stops counting at `enough`."""
        depth = self.config.queue_depth if self.by_count else None
        links = self.live if self.is_open else ()  # no sample: the first fill first, so the room is at the others
        return _counted((link.view.room_now(now, tokens, self.policy["slo_s"], depth) for link in links), enough)

    def is_idle(self, now: float) -> bool:
        """Whether a replica is idle."""
        return self.is_open and any(link.view.is_idle and link.view.opens_s(now) <= 0 for link in self.live)

    @property
    def queries_per_s(self) -> float:
        """Roughly how many queries of 75 tokens the live replicas answer in a second."""
        return sum(1 / max(link.view.model.alpha_s, 1e-6) for link in self.live)

    @property
    def model(self) -> CostModel:
        """The cost model of the first live replica, or of the last one that lived, which may still answer."""
        return UNKNOWN_COST if self._first is None else self._first.view.model

    @property
    def calibrated(self) -> bool:
        return self.config.alpha_s is not None  # the settings require beta_s with it

    @property
    def latency_model(self) -> tuple[float, float]:
        """(alpha_s, beta_s): calibrated if the config has them, else measured by a replica at warm-up."""
        if self.config.alpha_s is not None and self.config.beta_s is not None:
            return self.config.alpha_s, self.config.beta_s
        return self.model.alpha_s, self.model.beta_s

    @property
    def speed(self) -> Speed:
        """How quick it is. Replicas that are ejected or hang do nothing."""
        now = self._loop.time()
        well = sum(not (link.hangs or link.view.outlier.is_ejected(now)) for link in self.live)
        return Speed(*self.latency_model, well)

    def soonest(
        self,
        now: float,
        lengths: Sequence[int],
        most: int,
        *,
        ask: Ask,
        slo_s: float = math.inf,
        depth: int | None = None,
    ) -> Iterator[Link]:
        """At most `most` live replicas: those with room for the first query come first, and then by predicted finish.
        Replicas that have stopped, are ejected or were sent enough already are left out. `ask`: the first query.
        """

        def suits(link: Link) -> bool:
            return not (link.view.is_out(now) or link.view.is_flooded(slo_s, depth))

        live = self._compared(now, ask.tenant, suits)
        if len(live) == 1:
            yield live[0]
            return
        yield from heapq.nsmallest(
            most,
            live,
            key=lambda link: link.view.order(not link.view.has_room(now, ask), link.view.finish_s(now, lengths)),
        )

    def is_full(self, now: float, ask: Ask) -> bool:
        """Whether none of the replicas that are looked at has reported room for this query."""
        for link in self._looked_at():  # not `all`, which takes a microsecond longer
            if link.view.has_room(now, ask):
                return False
        self._turn += _LOOKED_AT  # others for the next query
        return True

    def _looked_at(self) -> Sequence[Link]:
        """All replicas or, in a large pool, as many as one query may look at, in turn: so Routers do not all choose the
        one that seems best.
        """
        live, start = self.live, self._turn % max(1, len(self.live))
        if len(live) <= _COMPARED:
            return live
        count = min(_LOOKED_AT, len(live))
        return live[start : start + count] + live[: max(0, start + count - len(live))]

    def _compared(self, now: float, tenant: Tenant | None, suits: Callable[[Link], bool]) -> Sequence[Link]:
        """The replicas that are compared for one query: open ones, if there are so many. Others fill up: they must hear
        which work was refused because they are full, and some queries may wait for them.
        """
        if len(self.live) <= _COMPARED:
            return [link for link in self.live if suits(link)]
        is_open, others = list[Link](), list[Link]()
        for link in self._looked_at():
            if suits(link):
                (others if link.view.opens_s(now, tenant) > 0 else is_open).append(link)
                if len(is_open) == _COMPARED:
                    break
        self._turn += _COMPARED
        return (is_open + others)[:_COMPARED]

    def gauges(self) -> dict[str, float]:
        """The pool's state for the metrics, by the names of `RouterMetrics`'s gauges."""
        alpha_s, beta_s = self.latency_model
        return {
            "is_open": self.config.queue_depth != 0,
            "depth": self.config.queue_depth or 0,
            "live_replicas": len(self.live),
            "ejected_replicas": len(self.ejected()),
            "alpha_s": alpha_s,
            "beta_s": beta_s,
            "calibrated": self.calibrated,
        }

    @property
    def in_flight(self) -> int:
        """Unanswered queries of all Routers."""
        return sum(link.view.in_flight for link in self.live)

    def describe(self) -> dict[str, Any]:
        """The pool as `/info` shows it."""
        alpha_s, beta_s = self.latency_model
        states = [link.view.state for link in self.live if link.view.state is not None]
        return {
            "queue_depth": self.config.queue_depth,
            "live_replicas": len(self.live),
            "in_flight": self.in_flight,
            "waiting": sum(state.waiting for state in states),
            "free_s": round(max((state.free_s for state in states), default=0.0), 4),  # until the last one is idle
            "latency_model": {
                "alpha_s": round(alpha_s, 6),
                "beta_s": round(beta_s, 6),
                "source": "calibrated" if self.calibrated else "measured at warm-up",
            },
            "replicas": {link.view.replica: link.describe() for link in self.live},
        }


def added_share(accelerator: Speed, cpu: Speed, slo_s: float) -> float | None:
    """What the CPU pool adds, as a share of what the accelerator does alone. None: that is not known yet, or the
    accelerator answers nothing.
    """
    if not (accelerator.alpha_s > 0 and cpu.alpha_s > 0):
        return None
    alone = accelerator.concurrency(slo_s)
    return cpu.concurrency(slo_s) / alone if alone > 0 and cpu.replicas else None


def is_left_out(share: float | None, *, before: bool) -> bool:
    """Whether the CPU pool gets no queries: it adds little, and takes cores from Routers. `before`: the choice so far.
    Without a share the CPU pool serves. Its processes stay: if the accelerator is lost, they answer at once.
    The paper's Xeon adds a fifth to its V100, and the CPU of an H200's host less than a hundredth.
    """
    if share is None:
        return False
    return share < (LEAST_SHARE * _DIFFERENT if before else LEAST_SHARE / _DIFFERENT)


def _as_many(links: Iterable[Link], enough: float) -> Iterable[Link]:
    """The replicas to count for `enough` queries, however large the pool: a few, and one for each query. More are
    needed only where an idle replica has no room for a single query.
    """
    return links if enough == math.inf else itertools.islice(links, _COMPARED + math.ceil(enough))


def _counted(rooms: Iterable[float], enough: float) -> float:
    """The sum of `rooms`, or of the first ones that are `enough` together."""
    total = 0.0
    for room in rooms:
        total += room
        if total >= enough:
            break
    return total
