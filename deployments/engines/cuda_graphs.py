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
