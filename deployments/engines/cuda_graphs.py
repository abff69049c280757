"""Records work on a CUDA device as a graph, which then starts all its kernels by one launch. Imports torch.

Not run on a card yet. What uses it compares it with the same work without a graph at each start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], torch.Tensor]


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
    """`Recorder`. All graphs share one pool of memory, because they are replayed one after another, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._before = torch.cuda.memory_reserved(device)

    def record(self, run: Run) -> tuple[Callable[[], object], torch.Tensor]:
        """See `Recorder`. Raises RuntimeError, which includes that the memory is full."""
        with torch.cuda.device(self._device):
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(here)
            with torch.cuda.stream(side):  # loads kernels and makes tables, which is not allowed while recording
                run()
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may allocate memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        return graph.replay, result

    def held_bytes(self) -> int:
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)
