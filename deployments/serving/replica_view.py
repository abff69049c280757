"""What a Router knows about one replica: its last reported state, and the work sent to it since. Pure: the time is an
argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUIET_S = 0.25  # a replica that owes a report is asked for its state after this time
_SILENT_S = 1.0  # if it does not answer within this time, it may have stopped
FAILURES, BASE_S, LONGEST_S = 5, 30.0, 300.0  # of engines in a row until an ejection; how long that lasts (`ejections`)
_HANGS, _HANGS_PROMISE = 2.0, 0.5  # of the predicted time, and of the promised one: a replica hangs after both
_AWAY = 1.25  # factor on the time of a replica on another node: one slow run must not send queries to others

S = TypeVar("S")


def hangs_after_s(predicted_s: float, promise_s: float) -> float:
    """Seconds without any progress after which a replica hangs."""
    return max(_HANGS * predicted_s, _HANGS_PROMISE * promise_s)


@dataclass(slots=True)
class Outlier:
    """A Router's counts for one replica. `until`: when its ejection ends, in the Router's loop time."""

    failures: int = 0  # in a row
    ejections: int = 0
    until: float = -math.inf
    last_overdue_at: float = -math.inf  # when an overdue first token was last counted

    def count(self, *, worked: int, failed: int) -> None:
        """Count the outcomes of offers since the last report. `worked`: those that show that the engine works."""
        self.failures = failed if worked else self.failures + failed

    def count_overdue(self, now: float, offered_at: float) -> bool:
        """Count an overdue first token, unless its prompt was offered before the last one was counted: one pause may
        explain both. Returns whether it counts.
        """
        if offered_at < self.last_overdue_at:
            return False
        self.last_overdue_at = now
        self.failures += 1
        return True

    def should_be_ejected(self, now: float) -> bool:
        return self.failures >= FAILURES and not self.is_ejected(now)

    def is_ejected(self, now: float) -> bool:
        return now < self.until

    def eject(self, now: float) -> float:
        """Eject the replica. Returns for how many seconds."""
        well_s = now - self.until
        self.ejections = 1 if well_s > min(BASE_S * self.ejections, LONGEST_S) else self.ejections + 1
        ejected_s = min(BASE_S * self.ejections, LONGEST_S)
        self.until = now + ejected_s
        return ejected_s


@dataclass(slots=True, eq=False)
class ReplicaView(Generic[S]):
    """One replica as a Router sees it. Times are the Router's loop time, in seconds.

    `rank` orders replicas that are otherwise equal, smallest first: (is on another node, a hash). `state` is None until
    the first report, and again after the connection breaks. `heard_at`: when the last report came.
    """

    replica: str
    rank: tuple[bool, int]
    state: S | None = None
    heard_at: float = 0.0
    # Offers that the replica had not read when it made its last report: (frame number, requests, work).
    _unseen: deque[tuple[int, int, float]] = field(default_factory=deque)
    _unseen_work: float = 0.0  # their total: planned seconds, or prompt tokens
    _asked_at: float = -math.inf
    outlier: Outlier = field(default_factory=Outlier)

    def hear(self, now: float, state: S, seen: int) -> None:
        """Take a report that the replica made after it had read `seen` frames of this Router."""
        self.state, self.heard_at = state, now
        while self._unseen and self._unseen[0][0] <= seen:
            self._unseen.popleft()
        self._unseen_work = sum(work for _, _, work in self._unseen)

    def sent(self, frame: int, count: int, work: float) -> None:
        """Note that `count` requests with this much work were sent in that frame."""
        self._unseen.append((frame, count, work))
        self._unseen_work += work

    @property
    def has_read_all(self) -> bool:
        """Whether its last report covers everything that was sent."""
        return not self._unseen

    def should_be_asked(self, now: float) -> bool:
        """Whether it has been quiet for a while and was not asked since its last report."""
        return self._asked_at <= self.heard_at <= now - QUIET_S

    def asked(self, now: float) -> None:
        """Note that it was asked for its state."""
        self._asked_at = now

    def order(self, is_full: bool, ready_s: float) -> tuple[bool, float, tuple[bool, int]]:
        """Its sort key: replicas with room come first, and then by the predicted seconds until an answer."""
        return is_full, round(ready_s * (_AWAY if self.rank[0] else 1.0), 4), self.rank

    def is_silent(self, now: float) -> bool:
        """Whether it was asked for its state and did not answer: it may have stopped."""
        return self.heard_at < self._asked_at < now - _SILENT_S

    def is_out(self, now: float) -> bool:
        """Whether it gets no queries, because it seems to have stopped or is ejected."""
        return self.outlier.is_ejected(now) or self.is_silent(now)

    def forget(self) -> None:
        """Forget its state: the connection broke."""
        self.state = None
        self._asked_at = -math.inf
        self._unseen.clear()  # the next connection's first report starts a new count
