"""What a Router knows of one replica that generates: its last state, and the prompts that it was sent since. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from deployments.generation.scheduler.state import StepState

QUIET_S = 0.25  # after which a replica that was sent something and said nothing is asked for its state
_SILENT_S = 1.0  # since it was asked: it may have stopped


@dataclass(slots=True, eq=False)
class StepView:
    """One replica as a Router sees it. Times are the Router's loop time, in seconds.

    `rank` orders replicas that would begin at the same time, the smallest first: (on another node, a hash). `state` is
    None until the first report, and again after the connection broke. `heard_at`: when the last report came.
    """

    replica: str
    rank: tuple[bool, int]
    state: StepState | None = None
    heard_at: float = 0.0
    routers: int = 1  # that are connected to it, this one among them
    _unseen: deque[tuple[int, int]] = field(
        default_factory=deque
    )  # (frame, prompt tokens) that its state does not count
    _asked_at: float = -math.inf

    def hear(self, now: float, state: StepState, seen: int, routers: int = 1) -> None:
        """A report came, made after `seen` frames of this Router."""
        self.state, self.heard_at, self.routers = state, now, routers
        while self._unseen and self._unseen[0][0] <= seen:
            self._unseen.popleft()

    def sent(self, frame: int, tokens: int) -> None:
        """A prompt of so many tokens goes there in that frame."""
        self._unseen.append((frame, tokens))

    @property
    def has_read_all(self) -> bool:
        """Its last report came after all that was sent."""
        return not self._unseen

    def should_be_asked(self, now: float) -> bool:
        """It was sent something, has said nothing for a while, and was not asked yet."""
        return bool(self._unseen) and self._asked_at <= self.heard_at <= now - QUIET_S

    def asked(self, now: float) -> None:
        """For its state."""
        self._asked_at = now

    def is_silent(self, now: float) -> bool:
        """It was asked for its state and has given none: it may have stopped."""
        return self.heard_at < self._asked_at < now - _SILENT_S

    def forget(self) -> None:
        """The connection broke."""
        self.state = None
        self._asked_at = -math.inf
        self._unseen.clear()

    def first_s(self, now: float, tokens: int) -> float:
        """Seconds until a prompt of so many tokens would have its first token there, if it went now."""
        if self.state is None:
            return math.inf
        before = sum(sent for _, sent in self._unseen)
        waits_s = max(0.0, self.heard_at + self.state.first_s - now)
        return waits_s + self.state.prompt_token_s * (before + tokens)

    def opens_s(self, now: float) -> float:
        """Seconds until it admits a usual generation again, by its last state; 0: now."""
        return 0.0 if self.state is None else max(0.0, self.heard_at + self.state.opens_s - now)
