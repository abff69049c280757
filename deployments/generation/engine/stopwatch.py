"""How long an accelerator computes, without what lies between. Imports torch."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Adds up the seconds between each `begin` and its `end`. What they enclose is done when it ends."""

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        """Since it was made."""
        return self._seconds


class CudaStopwatch(Stopwatch):
    """Adds up the seconds that a CUDA device computes what is submitted between each `begin` and its `end`."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun = _timed_event()

    def begin(self) -> None:
        self._begun = _timed_event()
        self._begun.record()

    def end(self) -> None:
        ended = _timed_event()
        ended.record()
        self._pieces.append((self._begun, ended))

    def seconds(self) -> float:
        """Since it was made. Waits until the device has done the last piece."""
        if self._pieces:
            self._pieces[-1][1].synchronize()  # they end in their order
        self._seconds += sum(began.elapsed_time(ended) for began, ended in self._pieces) / 1000  # it gives milliseconds
        self._pieces = []
        return self._seconds


class NoStopwatch(Stopwatch):
    """0 seconds, which stand for untimed (`step.ComputeSeconds`): of a device that computes later than it is told, and
    whose events nobody here has tried (NPU).
    """

    def end(self) -> None:
        """Nothing is added."""


def stopwatch_for(device: torch.device) -> Stopwatch:
    """That of a device of this type."""
    return {"cpu": Stopwatch, "cuda": CudaStopwatch}.get(device.type, NoStopwatch)()


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
