"""What a Router knows of one replica: the last state that it reported, and the work that it was sent since. Pure: the
time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deployments.serving.outliers import Outlier

QUIET_S = 0.25  # after which a replica that was sent something and said nothing is asked for its state
_SILENT_S = 1.0  # since it was asked: it may have stopped

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class ReplicaView(Generic[S]):
    """One replica as a Router sees it. Times are the Router's loop time, in seconds.

    `rank` orders replicas that are otherwise equal, the smallest first: (on another node, a hash). `state` is None
    until the first report, and again after the connection broke. `heard_at`: when the last report came.
    """

    replica: str
    rank: tuple[bool, int]
    state: S | None = None
    heard_at: float = 0.0
    # Sent after the frames that its last state counts: (number of the frame, requests, work) of each offer.
    _unseen: deque[tuple[int, int, float]] = field(default_factory=deque)
    _unseen_work: float = 0.0  # of all of these: planned seconds, or tokens of prompts
    _asked_at: float = -math.inf
    outlier: Outlier = field(default_factory=Outlier)

    def hear(self, now: float, state: S, seen: int) -> None:
        """A report came, made after `seen` frames of this Router."""
        self.state, self.heard_at = state, now
        while self._unseen and self._unseen[0][0] <= seen:
            self._unseen.popleft()
        self._unseen_work = sum(work for _, _, work in self._unseen)

    def sent(self, frame: int, count: int, work: float) -> None:
        """So many requests, so much work, go there in that frame."""
        self._unseen.append((frame, count, work))
        self._unseen_work += work

    @property
    def has_read_all(self) -> bool:
        """Its last report came after all that was sent."""
        return not self._unseen

    def should_be_asked(self, now: float) -> bool:
        """It has said nothing for a while, and was not asked yet."""
        return self._asked_at <= self.heard_at <= now - QUIET_S

    def asked(self, now: float) -> None:
        """For its state."""
        self._asked_at = now

    def is_silent(self, now: float) -> bool:
        """It was asked for its state and has given none: it may have stopped."""
        return self.heard_at < self._asked_at < now - _SILENT_S

    def is_out(self, now: float) -> bool:
        """It has stopped, or is ejected: it is sent nothing."""
        return self.outlier.is_ejected(now) or self.is_silent(now)

    def forget(self) -> None:
        """The connection broke."""
        self.state = None
        self._asked_at = -math.inf
        self._unseen.clear()  # and with the first report of the next one counted anew
