"""A pool's waiting queries -> batches. Pure asyncio: the clock, the timer and the sending are arguments.

The rule. A replica that is idle gets what waits, but not before the arrivals pause: a burst cut in two pays beta twice
(first query alone, the rest after it: alpha*C + 2*beta). The pause is a small share of beta, smallest for a lone
query, which loses next to nothing; a burst that fills the pool goes at once, since nobody can join it. Several idle
replicas share evenly, and a lone query goes to the preferred one. Where one Router has one replica, a busy one gets a
second batch ahead of time only if nobody can join it any more; until then it waits here, where it can grow or be
cancelled. Where there are several of either, what waits goes to a replica that has a place, to be merged there.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deployments.errors import EngineFailed
from deployments.queue_manager import Permit
from deployments.retry_after import Running

_MAX_OUT = 2  # batches out at one replica: one runs, one is ready
_PAUSE_SHARE = 0.022  # of beta, for each query that waits, up to _PAUSE_QUERIES of them
_PAUSE_QUERIES = 3  # a lone query is hardly held back; several at once are a burst, and more patience saves a beta
_LONGEST_WAIT_SHARE = 0.25  # of beta: the most that a stream without pauses holds back an idle device
_SHORTEST_PAUSE_S = 0.001  # about three arrivals of one burst through the HTTP path
_LATE_S = 0.002  # a timer later than this was kept waiting by a busy loop
_LARGEST_PAUSE_SHARE = 0.1  # of beta, where beta is so small that the shortest pause would matter


@dataclass(frozen=True, slots=True)
class Answer:
    """One query's unit vector, float32 [dimension], the norm it had, and where its time went. Where a vector of each
    token was wanted: float32 [tokens, dimension], as the model gave them, and norm 1.
    """

    vector: npt.NDArray[np.float32]
    norm: float
    pool: str
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class Job:
    """One admitted query. `permit` is released here and nowhere else, when the device has done with the query."""

    ids: npt.NDArray[np.int32]
    permit: Permit
    answer: asyncio.Future[Answer]
    each_token: bool = False  # not one vector is wanted, but one of each token
    submitted: float = 0.0
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    id: str
    replica: str
    jobs: list[Job]
    started: float  # sent
    begun: float | None  # runs since; None: another runs there first
    task: asyncio.Task[None] | None = None
    called_off: bool = False


@dataclass(frozen=True, slots=True)
class Pacing:
    """How long an idle device waits for a burst to arrive. Both zero while beta is unknown."""

    pause_s: float = 0.0  # for each waiting query, up to _PAUSE_QUERIES
    longest_wait_s: float = 0.0

    @classmethod
    def from_beta(cls, beta_s: float | None) -> Pacing:
        if not beta_s:
            return cls()
        pause_s = min(max(_PAUSE_SHARE * beta_s, _SHORTEST_PAUSE_S), _LARGEST_PAUSE_SHARE * beta_s)
        return cls(pause_s, _LONGEST_WAIT_SHARE * beta_s)

    def wait_s(self, waiting: int, *, now: float, first: float, last: float) -> float:
        """Seconds until the batch should go: a pause after the `last` arrival, but not long after the `first`."""
        pause_s = self.pause_s * min(waiting, _PAUSE_QUERIES)
        return max(0.0, min(last + pause_s, first + self.longest_wait_s) - now)


Reply = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float]


class Send(Protocol):
    """Runs one batch on one replica: (unit vectors float32 [n, dimension], norms float32 [n], engine seconds), n the
    number of queries, or of their tokens where `each_token`.
    """

    def __call__(
        self, replica: str, batch_id: str, queries: Sequence[npt.NDArray[np.int32]], each_token: bool
    ) -> Awaitable[Reply]: ...


class Timer(Protocol):
    def cancel(self) -> None: ...


@dataclass(slots=True)
class Counters:
    """What went through, since the start."""

    queries: int = 0
    batches: int = 0
    failed_batches: int = 0
    largest_batch: int = 0
    by_replica: dict[str, int] = field(default_factory=dict)  # queries sent to each live one since it joined


@dataclass(slots=True, repr=False, eq=False)
class Batcher:
    """Batches of one pool. All methods are called from the event loop's own thread."""

    pool: str
    send: Send
    abandon: Callable[[str, str], None]  # (replica, batch_id): nobody waits for that batch any more
    is_full: Callable[[], bool]  # no further query can be admitted to the pool
    places: Callable[[str], int] = lambda _: sys.maxsize  # at that replica, which this Router holds
    grace_s: float = 10.0  # how long a replica that has left may still answer what it runs
    depth: int = 1
    pacing: Pacing = Pacing()
    clock: Callable[[], float] = time.monotonic
    call_later: Callable[[float, Callable[[], None]], Timer] | None = None
    counters: Counters = field(default_factory=Counters)
    _first_in_line: deque[Job] = field(default_factory=deque)
    _bulk: deque[Job] = field(default_factory=deque)
    _out: dict[str, list[_Batch]] = field(default_factory=dict)
    _live: set[str] = field(default_factory=set)
    _live_waiting: int = 0
    _first: float = 0.0
    _last: float = 0.0
    _timer: Timer | None = None
    _timer_due: float = 0.0
    _next_id: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def waiting(self) -> int:
        """Queries that wait for a device."""
        return self._live_waiting

    def running(self) -> Iterator[Running]:
        """What each replica does that has something to do."""
        now = self.clock()
        for batches in self._out.values():
            run = [batch for batch in batches if batch.begun is not None]
            if run:
                queries = sum(len(batch.jobs) for batch in run)
                since = min(batch.begun for batch in run if batch.begun is not None)
                yield Running(queries, now - since, sum(len(batch.jobs) for batch in batches) - queries)

    def out(self, replica: str) -> int:
        """Queries in the batches that are out at this replica."""
        return sum(len(batch.jobs) for batch in self._out.get(replica, ()))

    def look_again(self) -> None:
        """Places have come: what waits may go where it could not."""
        self._pump()

    def submit(self, jobs: Iterable[Job]) -> None:
        """Take admitted queries in; they go out by the rule above."""
        now = self.clock()
        for job in jobs:
            job.submitted = now
            (self._bulk if job.permit.bulk else self._first_in_line).append(job)
            if not self._live_waiting:
                self._first = now
            self._live_waiting += 1
        self._last = now
        self._pump()

    def leave(self, jobs: Iterable[Job]) -> None:
        """The client of these queries has gone. Those that wait free their place at once; those that run free it when
        the device has done with them, and a batch that nobody waits for any more is called off.
        """
        gone = [job for job in jobs if not job.permit.released and not job.abandoned]
        for job in gone:
            job.abandoned = True
        waiting = {id(job) for line in (self._first_in_line, self._bulk) for job in line if job.abandoned}
        for job in gone:
            if id(job) in waiting:
                self._live_waiting -= 1
                job.permit.release()
        if waiting:
            self._first_in_line = deque(job for job in self._first_in_line if not job.abandoned)
            self._bulk = deque(job for job in self._bulk if not job.abandoned)
        for batch in [batch for batches in self._out.values() for batch in batches]:
            if not batch.called_off and all(job.abandoned for job in batch.jobs):
                batch.called_off = True
                self.abandon(batch.replica, batch.id)

    def set_replicas(self, replicas: Iterable[str], lost: Callable[[str], BaseException]) -> None:
        """The live replicas of the pool, those first that are to be preferred where several are idle. One that has gone
        gets nothing new; what it runs may still end well (it may be draining), fails by itself (it has died), or ends
        with `lost(replica)` after `grace_s`.
        """
        order = list(replicas)
        live = set(order)
        for replica in self._live - live:
            self.counters.by_replica.pop(replica, None)
            if self._out[replica]:
                self._later(self.grace_s, lambda replica=replica: self.give_up(replica, lost(replica)))  # type: ignore[misc]
            else:
                del self._out[replica]
        leaving = {replica: batches for replica, batches in self._out.items() if replica not in live}
        self._out = {replica: self._out.get(replica, []) for replica in order} | leaving
        self._live = live
        if not live:
            self._fail_waiting(lost("(all of them)"))
        self._pump()

    def give_up(self, replica: str, error: BaseException) -> None:
        """A replica that is not live any more will not answer: what it runs ends with `error`, at once."""
        if replica in self._live:
            return
        for batch in list(self._out.get(replica, ())):
            self._end(batch, error)
            if batch.task is not None:
                batch.task.cancel()

    def _fail_waiting(self, error: BaseException) -> None:
        jobs = [*self._first_in_line, *self._bulk]
        self._first_in_line.clear()
        self._bulk.clear()
        self._live_waiting = 0
        for job in jobs:
            _finish(job, error)

    def _pump(self) -> None:
        while self._live_waiting:
            idle = [
                replica
                for replica, batches in self._out.items()
                if not batches and replica in self._live and self.places(replica) > 0
            ]
            if idle or self._merges_elsewhere():
                wait_s = self._wait_s(busy=not idle)
                if wait_s > 0:
                    self._arm(wait_s)
                    return
            if idle:
                self._spread(idle)
            elif not self._dispatch_ahead():
                return

    def _spread(self, idle: Sequence[str]) -> None:
        """All that waits, evenly, the preferred one first: who is left of a batch has waited already."""
        for left, replica in zip(range(len(idle), 0, -1), idle, strict=True):
            if not self._live_waiting:
                return
            self._dispatch(replica, -(-self._live_waiting // left))

    def _merges_elsewhere(self) -> bool:
        """What waits here may miss a run there: another Router's batch, or another replica's turn, is not seen. So it
        goes to a replica that has a place, which merges all that waits into its next run: no query waits for more than
        one run before its own (`alpha*C + 2*beta`).
        """
        return len(self._live) > 1 or any(self.places(replica) < sys.maxsize for replica in self._live)

    def _wait_s(self, *, busy: bool) -> float:
        if self.is_full():
            return 0.0
        now = self.clock()
        wait_s = self.pacing.wait_s(self._live_waiting, now=now, first=self._first, last=self._last)
        if busy:  # nothing is torn apart by going now: it only saves messages
            wait_s = max(0.0, min(wait_s, self._first + _PAUSE_QUERIES * self.pacing.pause_s - now))
        return wait_s

    def _dispatch_ahead(self) -> bool:
        """Another batch for a busy replica: it starts the moment the first ends, without the way there and back."""
        if self._merges_elsewhere():
            part = -(-self._live_waiting // len(self._live))
            while self._live_waiting:
                room, replica = max((self._room(replica), replica) for replica in self._live)
                if room <= 0:
                    return False
                self._dispatch(replica, min(part, room))
            return True
        if not self.is_full():
            return False
        for replica, batches in self._out.items():
            if replica in self._live and len(batches) < _MAX_OUT and (room := self._room(replica)) > 0:
                self._dispatch(replica, room)
                return True
        return False

    def _room(self, replica: str) -> int:
        return min(self.depth, self.places(replica)) - self.out(replica)

    def _arm(self, wait_s: float) -> None:
        if self._timer is not None:
            return  # it looks again when it fires
        self._timer_due = self.clock() + wait_s
        self._timer = self._later(wait_s, self._on_timer)

    def _later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        if self.call_later is not None:
            return self.call_later(delay_s, callback)
        return asyncio.get_running_loop().call_later(delay_s, callback, context=contextvars.Context())

    def _on_timer(self) -> None:
        self._timer = None
        # A loop that was too busy to fire in time has arrivals in its sockets that it has not looked at yet: what
        # seems a pause may be none. Look once more after the sockets have been read.
        late_s = self.clock() - self._timer_due
        if late_s > _LATE_S and self.clock() - self._first < self.pacing.longest_wait_s:
            self._arm(self.pacing.pause_s / 2)
        else:
            self._pump()

    def _dispatch(self, replica: str, most: int) -> None:
        out = self.out(replica)
        room = min(max(1, self.depth - out), self.places(replica) - out)
        count = min(most, room, self._live_waiting)
        jobs = list(self._take(count))
        now = self.clock()
        rest = self._first_in_line or self._bulk
        self._first = rest[0].submitted if rest else now  # who is left has waited already
        self._next_id += 1
        begun = None if self._out[replica] else now
        batch = _Batch(f"{self.pool}-{self._next_id}", replica, jobs, now, begun)
        self._out[replica].append(batch)
        self.counters.batches += 1
        self.counters.queries += len(jobs)
        self.counters.by_replica[replica] = self.counters.by_replica.get(replica, 0) + len(jobs)
        self.counters.largest_batch = max(self.counters.largest_batch, len(jobs))
        # An empty context: the call must not be tied to the one HTTP request in whose context it happens to be sent,
        # or Serve would cancel the whole batch with that request.
        batch.task = asyncio.get_running_loop().create_task(self._run(batch), context=contextvars.Context())
        self._tasks.add(batch.task)
        batch.task.add_done_callback(self._tasks.discard)

    def _take(self, count: int) -> Iterator[Job]:
        """Up to `count` jobs that want the same of an engine."""
        each_token = (self._first_in_line or self._bulk)[0].each_token
        for _ in range(count):
            line = self._first_in_line or self._bulk
            if line[0].each_token != each_token:
                return
            self._live_waiting -= 1
            yield line.popleft()

    async def _run(self, batch: _Batch) -> None:
        try:
            ids = [job.ids for job in batch.jobs]
            reply = await self.send(batch.replica, batch.id, ids, batch.jobs[0].each_token)
        except asyncio.CancelledError as cancelled:  # given up, and ended already; or the loop is closing
            self._end(batch, cancelled)
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to the batch's queries, each of which raises it
            self._end(batch, error)
        else:
            self._answer(batch, reply)
            self._end(batch)

    def _answer(self, batch: _Batch, reply: Reply) -> None:
        if batch not in self._out.get(batch.replica, ()):
            return  # given up meanwhile
        vectors, norms, compute_s = _by_query(reply, batch.jobs) if batch.jobs[0].each_token else reply
        away_s = max(0.0, self.clock() - batch.started - compute_s)
        for job, vector, norm in zip(batch.jobs, vectors, norms.tolist(), strict=True):
            if math.isfinite(norm):
                queue_s = batch.started - job.submitted + away_s
                _finish(job, Answer(vector, norm, self.pool, queue_s, compute_s))
            else:
                _finish(job, EngineFailed(f"the {self.pool} engine gave no finite numbers for this input"))

    def _end(self, batch: _Batch, error: BaseException | None = None) -> None:
        """Exactly once for each batch; a second call does nothing."""
        batches = self._out.get(batch.replica, [])
        if batch not in batches:
            return
        batches.remove(batch)
        for other in batches:  # the replica merges what waits there into its next run
            if other.begun is None:
                other.begun = self.clock()
        if not batches and batch.replica not in self._live:
            del self._out[batch.replica]
        if error is not None:
            self.counters.failed_batches += 1
            for job in batch.jobs:
                _finish(job, error)
        if not isinstance(error, asyncio.CancelledError):
            self._pump()


def _by_query(
    reply: Reply, jobs: Sequence[Job]
) -> tuple[list[npt.NDArray[np.float32]], npt.NDArray[np.float32], float]:
    """Vectors of tokens as the model gave them, query by query; the norm is 1, or none where one is not finite."""
    unit, norms, compute_s = reply
    cuts = np.cumsum([len(job.ids) for job in jobs])[:-1]
    vectors = np.split(unit * norms[:, None], cuts)
    finite = [np.isfinite(some).all() for some in np.split(norms, cuts)]
    return vectors, np.where(finite, np.float32(1), np.float32(np.nan)), compute_s


def _finish(job: Job, outcome: Answer | BaseException) -> None:
    """Free the place, then tell whoever still waits. A client that has gone has cancelled its future: not an error."""
    job.permit.release()
    if job.answer.done():
        return
    if isinstance(outcome, BaseException):
        job.answer.set_exception(outcome)
    else:
        job.answer.set_result(outcome)
