"""When an idle device admits a request as a probe, although its learned slowdown says that the request would be late.
Pure.

A device that was slow refuses every request, and so never learns that it is quick again. Only work shows that. So after
some time without work it admits one request that its rule would refuse. While probes show that the device is still
slow, the time between two of them doubles.

    the first probe                     after one promise (the SLO, or the time to the first token) without work
    each probe that follows             after twice as long, 8 promises at most
    after work that was no probe        after one promise again
    a request that would be late on     after 8 promises
    a device as quick as planned, too
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _LAST = 1.0, 8.0  # promises


@dataclass(slots=True)
class IdleProbe:
    """The time before the next probe. `promises`: it is so many times `promise_s`."""

    promises: float = _FIRST

    def after_s(self, promise_s: float, *, hopeful: bool = True) -> float:
        """Seconds without work after which a request is a probe. `hopeful`: it would be in time on a device that is as
        quick as planned.
        """
        return (self.promises if hopeful else _LAST) * promise_s

    def back_off(self) -> None:
        """There was a probe."""
        self.promises = min(2 * self.promises, _LAST)

    def reset(self) -> None:
        """There was work that was no probe."""
        self.promises = _FIRST

    @property
    def has_backed_off(self) -> bool:
        """There was a probe since work that was none."""
        return self.promises > _FIRST
