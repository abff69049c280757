"""What a replica says when Serve asks whether it is healthy, and what it sends of a vector."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.embedding.replica import Embedder
from deployments.errors import SettingsError
from deployments.models.outputs import TEXT


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


@pytest.mark.parametrize(
    ("dtype", "sentence"),
    [
        (
            "float16",
            "args.cpu.dtype: m computes numbers that are not finite in float16: set it to auto",
        ),
        ("float32", "args.model.id: m computes numbers that are not finite in float32"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_at_the_first_run(dtype, sentence):
    """Before Serve asks for its health, which it would ask of three replicas."""
    runs = []

    def passes(batch, _stop):
        runs.append(len(batch))
        yield np.arange(len(batch)), (np.full((len(batch), 2), np.nan, np.float32),)

    one = embedder()
    one._card = SimpleNamespace(name="m", kind="embedding", vocab_size=9, max_tokens=512, outputs_for=lambda _: TEXT)
    one._engine = SimpleNamespace(info=SimpleNamespace(dtype=dtype, emulated=False), passes=passes)
    with pytest.raises(SettingsError, match=sentence):
        one._measure()
    assert runs == [1]


def test_a_model_that_keeps_fewer_numbers_sends_fewer():
    """As sentence-transformers does: `truncate_dim`, of the vector before it is normalized."""
    one = embedder()
    one._card = SimpleNamespace(kind="embedding", dimension=2)
    rows = np.array([[3.0, 4.0, 12.0], [0.6, 0.8, 0.0]], np.float32)
    (unit,), norms = one._shape([rows], TEXT, np.array([5, 7]))
    assert unit.tolist() == pytest.approx(np.array([[0.6, 0.8], [0.6, 0.8]]))
    assert norms.tolist() == pytest.approx([5.0, 1.0])
