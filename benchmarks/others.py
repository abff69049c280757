"""How much of the machine others take while something is measured here."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Self

import psutil


class OtherWork:
    """Around a measurement; `share` is then what went to other processes than this one's family, of all cores' time."""

    def __init__(self) -> None:
        self.share = 0.0

    def __enter__(self) -> Self:
        self._before = _used_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        everything, busy, ours = (after - before for after, before in zip(_used_s(), self._before, strict=True))
        self.share = max(0.0, busy - ours) / everything if everything else 0.0


def _used_s() -> tuple[float, float, float]:
    """Seconds of all cores so far: in all, busy, and busy for this process and all that it started."""
    times = psutil.cpu_times()
    everything = sum(
        getattr(times, name) for name in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    )
    mine = os.times()
    ours = mine.user + mine.system + mine.children_user + mine.children_system
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            taken = process.cpu_times()
            ours += taken.user + taken.system + taken.children_user + taken.children_system
    return everything, everything - times.idle - times.iowait, ours
