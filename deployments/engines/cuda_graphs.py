"""Records work on a CUDA device as a graph, which then starts all its kernels by one launch. Imports torch.

Not run on a card yet. What uses it compares it with the same work without a graph at each start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy.typing as npt
import torch

Run = Callable[[], torch.Tensor]
S = TypeVar("S")  # a size


class NoGraph(Exception):
    """Why nothing of a model runs as graphs."""


class Recorder(Protocol):
    """Records what `run` computes from tensors that stay where they are."""

    def record(self, run: Run) -> tuple[Callable[[], object], torch.Tensor]:
        """(replay, result). `replay()` computes the same again, from what the tensors hold then, into the same
        `result`, which holds until the next replay of any graph. `run` may neither wait for the device, nor copy from
        the host's memory, nor use memory that somebody frees later, except its own.
        """
        ...

    def held_bytes(self) -> int:
        """The memory that all graphs hold together, about."""
        ...


class CudaGraphs:
    """`Recorder`. All graphs share one pool of memory, because they are replayed one after another, on one stream. They
    are recorded on one stream, too: torch keeps a workspace of cuBLAS for each, of 32 MiB on Hopper.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Run) -> tuple[Callable[[], object], torch.Tensor]:
        """See `Recorder`. Raises RuntimeError, which includes that the memory is full."""
        here, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):  # left also if recording fails, which `torch.cuda.graph` does not do
            run()  # loads kernels and makes tables, which is not allowed while recording
            # Other threads of the process may allocate memory meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = run()
        here.wait_stream(self._stream)
        return graph.replay, result

    def held_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(int(one["total_size"]) for one in segments if one["segment_pool_id"] == self._pool)


@dataclass(frozen=True, slots=True)
class Graph(Generic[S]):
    """Recorded work of one size. `held`: what it reads besides the model and `inputs`."""

    size: S
    inputs: torch.Tensor
    replay: Callable[[], object]
    result: torch.Tensor
    held: list[torch.Tensor]

    @classmethod
    def record(
        cls,
        recorder: Recorder,
        size: S,
        example: npt.NDArray[Any],
        device: torch.device,
        compute: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor],
    ) -> Self:
        """Record `compute(inputs, held)`, with inputs on the device like the example's. It adds to `held`."""
        inputs, held = torch.from_numpy(example).to(device, copy=True), list[torch.Tensor]()
        return cls(size, inputs, *recorder.record(lambda: compute(inputs, held)), held)

    def run(self, fill: Callable[[npt.NDArray[Any]], None]) -> torch.Tensor:
        """Compute with inputs that `fill` writes: one copy and one launch. The result holds until the next replay."""
        # torch reuses pinned memory only once the copies from it have ended, so the work before may still be waiting.
        inputs = torch.empty(len(self.inputs), dtype=self.inputs.dtype, pin_memory=self.inputs.is_cuda)
        fill(inputs.numpy())
        self.inputs.copy_(inputs, non_blocking=True)
        self.replay()
        return self.result


def off_by(found: torch.Tensor, wanted: torch.Tensor, least: float = 0.0) -> float:
    """The RMS error, relative to the RMS of what is wanted, or to `least` if that is more. NaN if a number is."""
    scale = max(float(wanted.square().mean().sqrt()), least)
    return float((found - wanted).square().mean().sqrt()) / scale
