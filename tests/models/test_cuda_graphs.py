"""What `CudaGraphs` asks of torch, on a stand-in for `torch.cuda`."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from deployments.engines.cuda_graphs import CudaGraphs

POOL = (0, 7)


class Cuda:
    """Like torch's: when a recording fails, `graph` leaves its stream as the current one."""

    def __init__(self):
        self.streams, self.current, self.recording = 0, "first", None

    def Stream(self, device):  # noqa: N802 - torch's
        assert device == "cuda:1"
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == (POOL, "thread_local")
        before, self.current, self.recording = self.current, stream, graph
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture") from None
        finally:
            self.recording = None
        self.current = before

    def install(self, monkeypatch):
        for name in ("Stream", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: "replayed"))
        here = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
        held = [{"segment_pool_id": pool, "total_size": 2**20} for pool in (POOL, (0, 0), POOL)]
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: held)
        return self


def test_all_graphs_are_warmed_up_and_recorded_on_one_stream(monkeypatch):
    cuda, runs = Cuda().install(monkeypatch), []
    graphs = CudaGraphs("cuda:1")

    def run():
        runs.append((cuda.current, cuda.recording is not None))
        return "result"

    for _ in range(3):
        replay, result = graphs.record(run)
        assert (replay(), result) == ("replayed", "result")
    assert (cuda.streams, cuda.current) == (1, "first")
    assert {recording for _, recording in runs} == {False, True}
    assert len({id(stream) for stream, _ in runs}) == 1
    assert graphs.held_bytes() == 2 * 2**20


def test_a_recording_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    cuda = Cuda().install(monkeypatch)

    def run():
        if cuda.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"):
        CudaGraphs("cuda:1").record(run)
    assert cuda.current == "first"
