"""When an idle device admits a request as a probe, although the learned slowdown predicts that it would be late. Pure.

A device that was slow would refuse every request, and never learn that it is fast again, because only work shows that.
So after some time without work, it admits one request that its rule would refuse. While probes find that the device is
still slow, the interval between them doubles. A promise is the SLO, or the time to the first token.

    the first probe                     after one promise without work
    each further probe                  after twice as long, at most 8 promises
    after work that was no probe        after one promise again
    a request that would be late even   after 8 promises
    on a device at planned speed
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _LAST = 1.0, 8.0  # promises


@dataclass(slots=True)
class IdleProbe:
    """The time before the next probe, in `promises`."""

    promises: float = _FIRST

    def after_s(self, promise_s: float, *, hopeful: bool = True) -> float:
        """Seconds without work after which a request is a probe. `hopeful`: the request would be in time on a device at
        planned speed.
        """
        return (self.promises if hopeful else _LAST) * promise_s

    def back_off(self) -> None:
        """A probe has run: double the interval."""
        self.promises = min(2 * self.promises, _LAST)

    def reset(self) -> None:
        """Work that was no probe has run: start again at the first interval."""
        self.promises = _FIRST

    @property
    def has_backed_off(self) -> bool:
        """Whether a probe has run since the last work that was no probe."""
        return self.promises > _FIRST
