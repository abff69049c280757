"""Measures how long an accelerator computes, without the time between. Imports torch."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Adds up the seconds between each `begin` and its `end`, for work that is done when `end` is called."""

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        """The total so far."""
        return self._seconds


class CudaStopwatch(Stopwatch):
    """Adds up the seconds for which a CUDA device computes the work submitted between each `begin` and its `end`."""

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
        """The total so far. Waits until the device has done the last piece."""
        if self._pieces:
            self._pieces[-1][1].synchronize()  # pieces end in order
        self._seconds += sum(began.elapsed_time(ended) for began, ended in self._pieces) / 1000  # from milliseconds
        self._pieces = []
        return self._seconds


class NoStopwatch(Stopwatch):
    """Always 0 seconds, which means untimed (`work.ComputeSeconds`): for an asynchronous device whose timing events are
    untested (NPU).
    """

    def end(self) -> None:
        """Add nothing."""


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch for a device of this type."""
    return {"cpu": Stopwatch, "cuda": CudaStopwatch}.get(device.type, NoStopwatch)()


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
