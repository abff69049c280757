"""The GPU benchmark's own arithmetic, and its steps on the CPU with a tiny model."""

import threading

import numpy as np
import pytest
from rich.console import Console

from benchmarks.comparisons import gpu
from benchmarks.kit.bench import Bench, NotAvailable
from calibration.devices.shapes import BERT_LARGE, BertShape, text_of, write_bert
from deployments.engines import TokenBatch, embed
from deployments.engines.torch_engine import TorchEngine
from deployments.models.model_files import read_model_card
from deployments.models.text_pairs import Cuts
from deployments.settings import CpuSettings, ModelSettings

TINY = BertShape(hidden=64, layers=2, heads=4, intermediate=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_bert(TINY, path)
    return path


@pytest.fixture
def bench(tmp_path):
    return Bench("gpu", Console(quiet=True), tmp_path, only=frozenset({gpu.PEAK, *gpu.OURS}))


def test_operations():
    assert BERT_LARGE.layer_weights == 24 * 12 * 1024**2
    assert BERT_LARGE.operations(1) == 2 * 24 * 12 * 1024**2 + 24 * 4 * 1024
    assert BERT_LARGE.operations(512) == pytest.approx(512 * 0.6543e9, rel=1e-3)


def test_the_folder_is_a_model(folder):
    card = read_model_card(ModelSettings(id=str(folder)))
    assert (card.pooling, card.normalize, card.max_tokens, card.dimension, card.layers) == ("cls", True, 512, 64, 2)
    embeddings, pooler = (30_522 + 512 + 2 + 2) * 64, 65 * 64  # with the norm after them
    biases_and_norms = 2 * (4 * 64 + 128 + 64 + 4 * 64)
    assert card.parameters == embeddings + TINY.layer_weights + biases_and_norms + pooler
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    engine = TorchEngine(card, CpuSettings(dtype="float32"), "cpu", 1)
    vectors = embed(engine, TokenBatch.pack([np.arange(5, dtype=np.int32)]), threading.Event())
    assert vectors.shape == (1, 64)


def test_what_is_measured_is_what_is_shown(bench, folder):
    plan = gpu.Plan("cpu", "float32", 1, 0.0, lengths=(75, 512), batches=(1, 8), square=64, rows=64)
    gpu.measure(bench, plan, TINY, folder)
    found = bench.found
    assert not found.get("missing")
    products = [sample for sample in found["samples"] if sample.get("what") == "product"]
    assert len(products) == 5
    assert gpu.peak(found) == max(sample["tflops"] for sample in products)
    cells = [sample for sample in found["samples"] if "contestant" in sample]
    assert len(cells) == 2 * 2 * 2
    for sample in cells:
        assert sample["tokens_s"] == sample["queries_s"] * sample["tokens"]
        assert sample["tflops"] == pytest.approx(sample["queries_s"] * TINY.operations(sample["tokens"]) / 1e12)
        assert len(sample["seconds"]) >= 5
    assert [sheet.title for sheet in gpu.sheets(found)]


def test_texts_of_a_length(folder):
    peerless = gpu.Windve(folder, "cpu")
    assert [len(ids) for ids in peerless.tokenizer.encode([text_of(512), text_of(75)], Cuts(truncate=False))] == [
        512,
        75,
    ]


def test_ratios_and_goals():
    samples = [
        {"what": "product", "product": "square", "size": "1 x 1 x 1", "round": 0, "tflops": 600.0},
        *(
            {"contestant": name, "tokens": 512, "batch": 256, "round": 0, "queries_s": rate, "tflops": rate / 3}
            for name, rate in {
                gpu.WINDVE: 900.0,
                gpu.WINDVE_IDS: 990.0,
                gpu.PEER: 300.0,
                gpu.PEER_WHOLE: 360.0,
                gpu.PEER_FORWARD: 450.0,
            }.items()
        ),
    ]
    found = {"samples": samples}
    share, times = gpu.goals(found)
    assert (share.reached, share.met) == (0.55, True)
    assert (times.reached, times.met) == (2.5, True)
    (ratios,) = (sheet for sheet in gpu.sheets(found) if "faster" in sheet.title)
    assert ratios.rows == [["512", "256", "2.50", "2.20", "-"]]
    nothing = {"samples": []}
    assert [goal.met for goal in gpu.goals(nothing)] == [None, None]
    assert gpu.sheets(nothing)


def test_without_a_gpu(bench, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NotAvailable, match="no CUDA device"):
        gpu.run(bench)
    assert not list(bench.out.iterdir())
