"""What the host takes of a virtual machine's cores: a measurement of latencies beside it says nothing."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_EVERY_S, _WINDOW = 0.05, 6  # looks, and how many of them make a moment
_STAT = Path("/proc/stat")
_STEAL = 8  # place of the field, proc(5)


class Stolen:
    """`async with Stolen() as stolen:`, and then `stolen.most_s`: the most that the host took in any 0.3 s of it, in
    seconds of one core, averaged over the cores; 0 where the system does not tell.
    """

    most_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        looks = deque([_stolen_s()], maxlen=_WINDOW)
        while True:
            await asyncio.sleep(_EVERY_S)
            looks.append(_stolen_s())
            self.most_s = max(self.most_s, looks[-1] - looks[0])


def _stolen_s() -> float:
    """Since the machine started, a core."""
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[_STEAL]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
