"""What a replica says when Serve asks whether it is healthy."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from deployments.embedding.replica import Embedder


def embedder(*, probe=lambda: None, problem=None, running_s=0.0):
    """Without Serve, model and device."""
    one = object.__new__(Embedder)
    one._pool, one._settings, one._thread = "cpu", SimpleNamespace(batch_timeout_s=30.0), ThreadPoolExecutor(1)
    one._engine, one._worker = SimpleNamespace(probe=probe), SimpleNamespace(problem=problem, running_s=running_s)
    one.__class__ = type("Embedder", (Embedder,), {"__del__": lambda _: None})
    return one


def fails():
    raise OSError("the device is lost")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({}, None),
        ({"probe": fails}, "the device is lost"),
        ({"probe": fails, "running_s": 30.0}, None),  # a run shows as much
        ({"running_s": 31.0}, "in one run for 31 s"),
        ({"problem": "no kernel", "running_s": 0.1}, "no kernel: it now fails on inputs that it answered before"),
    ],
)
def test_a_replica_is_healthy(how, problem):
    checked = embedder(**how).check_health()
    if problem is None:
        asyncio.run(checked)
    else:
        with pytest.raises((OSError, RuntimeError), match=problem):
            asyncio.run(checked)
