"""Passes as graphs give the packed form's answers. A tape stands in for CUDA's graphs: see `tests.kit.tape_graphs`."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.kit.launches import launches
from deployments.engines import graphed_model, torch_engine
from deployments.engines.cuda_graphs import NoGraph
from deployments.engines.graph_sizes import GraphSize
from deployments.engines.graphed_model import GraphedModel, has_graphs
from deployments.engines.model_forms import Forms
from deployments.engines.packed.fixed_layout import FixedLayout
from deployments.engines.packed.tensors import Place
from deployments.engines.torch_engine import TorchEngine
from deployments.settings import CpuSettings
from tests.kit.engines import card_of, rows_of
from tests.kit.kinds_of_models import KINDS, save_model
from tests.kit.packed_models import CPU
from tests.kit.published_models import CONFIGS, FAMILIES, JINA, jina_weights, published_weights, reference, save_folder
from tests.kit.tape_graphs import Failing, TapeGraphs

PASSES = [[1], [3, 9, 1], [16], [5, 11], [40], [20, 1, 30], [2] * 20, [70, 50, 3], [3, 9, 1], [100]]
TAKEN = [0, 0, 0, 0, 2, 3, 4, 5, 0, 5]  # of the sizes 16, 32, 48, 64, 96 and 128


@pytest.fixture(autouse=True)
def few_sizes_that_win(monkeypatch):
    monkeypatch.setattr("deployments.engines.graph_sizes.TOKENS", (16, 32, 48, 64, 96, 128))
    monkeypatch.setattr(graphed_model, "is_quicker", lambda *_: True)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    save_folder(folder, CONFIGS["distilbert"], published_weights("distilbert", reference("distilbert")))
    return card_of(folder, pooling="mean")


def packed_of(card):
    return Forms(card).builds(Place(CPU, torch.float32))["packed"]()


def check(card):
    packed, tape = packed_of(card), TapeGraphs()
    graphs = GraphedModel(packed, card, tape)
    assert tape.recorded == 6
    tape.replayed.clear()
    draw = np.random.default_rng(2)
    with torch.inference_mode():
        for lengths in (np.array(one, np.int32) for one in PASSES):
            ids = torch.from_numpy(draw.integers(0, card.vocab_size, lengths.sum(), np.int32))
            torch.testing.assert_close(graphs(ids, lengths), packed(ids, lengths), atol=1e-4, rtol=1e-4)
    assert tape.replayed == TAKEN


@pytest.mark.parametrize("name", [*FAMILIES, "jina"])
def test_same_answers_as_without(tmp_path, name):
    if name == "jina":
        save_folder(tmp_path, JINA, jina_weights(JINA))
    else:
        save_folder(tmp_path, CONFIGS[name], published_weights(name, reference(name)))
    for pooling in ("cls", "mean", "last"):
        check(card_of(tmp_path, pooling=pooling))


@pytest.mark.parametrize("name", KINDS)
def test_heads(tmp_path, name):
    card = card_of(save_model(name, tmp_path), **({"kind": "sparse"} if "sparse" in name else {}))
    assert has_graphs(card, torch.device("cuda")) == ("sparse" not in name)
    assert not has_graphs(card, CPU)
    if has_graphs(card, torch.device("cuda")):
        check(card)


def test_what_fits_no_graph_runs_without(bert):
    packed, tape = packed_of(bert), TapeGraphs()
    graphs = GraphedModel(packed, bert, tape)
    tape.replayed.clear()
    with torch.inference_mode():
        for each, each_token in [([129], False), ([1] * 33, False), ([9], True)]:
            lengths = np.array(each, np.int32)
            ids = torch.arange(lengths.sum(), dtype=torch.int32)
            found = graphs(ids, lengths, each_token=each_token)
            torch.testing.assert_close(found, packed(ids, lengths, each_token=each_token))
    assert not tape.replayed


def test_a_pass_is_one_copy_in_one_graph_and_one_copy_out(bert):
    graphs, replayed = GraphedModel(packed_of(bert), bert, TapeGraphs()), []
    graphs._graphs = [replace(graph, replay=lambda: replayed.append(0)) for graph in graphs._graphs]
    ids, lengths = torch.zeros(9, dtype=torch.int32), np.array([9], np.int32)
    assert launches(lambda: graphs(ids, lengths), CPU) == 2
    assert len(replayed) == 2  # the first call is not counted


def test_one_query_that_is_not_finite_leaves_the_means_of_the_others():
    size = GraphSize(16, 16)
    inputs, lengths = np.empty(sum(size.parts), np.int32), np.array([2, 5, 1], np.int32)
    size.fill(inputs, np.zeros(8, np.int32), lengths)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    x[3, 1], x[12] = torch.inf, torch.nan  # of the second query, and of padding
    means = FixedLayout.of_size(size, torch.from_numpy(inputs), Place(CPU, torch.float32), []).means(x)
    assert means[1].isnan().all()
    torch.testing.assert_close(means[[0, 2]], torch.stack([x[:2].mean(0), x[7]]))


@pytest.mark.parametrize(
    ("recorder", "quicker", "most", "reason"),
    [
        (Failing(2), 9, 32, "not of 48: RuntimeError: operation not permitted when stream is capturing"),
        (Failing(1, off=1.1), 9, 16, "not of 32: its numbers are off by 0.1 of their size"),
        (Failing(1, off=float("nan")), 9, 16, "not of 32: its numbers are off by nan of their size"),
        (TapeGraphs(), 3, 48, "not of 64: it is not quicker than the packed form"),
        (TapeGraphs(), 9, 128, "larger passes need none"),
    ],
)
def test_graphs_end_where_one_does_not_pay(bert, monkeypatch, caplog, recorder, quicker, most, reason):
    races = iter([True] * quicker + [False])
    monkeypatch.setattr(graphed_model, "is_quicker", lambda *_: next(races))
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        graphs = GraphedModel(packed_of(bert), bert, recorder)
    (line,) = (record.message for record in caplog.records if "graphs" in record.message)
    assert line.startswith(f"passes of at most {most} tokens run as CUDA graphs, which hold ")
    assert line.endswith(f" MiB; {reason}")
    lengths = np.array([most], np.int32)
    with torch.inference_mode():
        ids = torch.zeros(most, dtype=torch.int32)
        torch.testing.assert_close(graphs(ids, lengths), graphs.model(ids, lengths), atol=1e-4, rtol=1e-4)


class Stale(TapeGraphs):
    """Each graph repeats its first result."""

    def record(self, run):
        replay, result = super().record(run)
        kept = []

        def again():
            replay()
            kept.append(result.clone())
            result.copy_(kept[0])

        return again, result


def test_a_graph_that_ignores_its_inputs_is_found_out(bert):
    with pytest.raises(NoGraph, match="not of 16: its numbers are off by"):
        GraphedModel(packed_of(bert), bert, Stale())


class Noisy(TapeGraphs):
    def record(self, run):
        replay, result = super().record(run)
        return (lambda: (replay(), result.add_(0.02))), result


def test_scores_near_zero_may_be_off_by_their_own_size(tmp_path):
    """Half precision errs by the size of what it adds up, and a logit may be a small difference of that."""
    card = card_of(save_model("bert reranker", tmp_path))
    packed = packed_of(card)
    scores = packed._answer.head
    scores._weight, scores._bias = scores._weight * 1e-3, scores._bias * 0
    assert len(GraphedModel(packed, card, Noisy())._graphs) == 6


@pytest.mark.parametrize("large", [10**9, 1000])
def test_without_a_single_graph_the_form_is_left_out(bert, monkeypatch, caplog, large):
    monkeypatch.setattr("deployments.engines.model_forms.has_graphs", lambda *_: True)
    monkeypatch.setattr(torch_engine, "LARGE", large)
    tapes = [Failing(0), TapeGraphs()]
    monkeypatch.setattr(graphed_model, "CudaGraphs", lambda _: tapes.pop(0))
    assert TorchEngine(bert, CpuSettings(dtype="float32"), "cpu", 1).form == "packed"
    assert "the graphs form in float32 is left out: NoGraph: not of 16: RuntimeError: operation not" in caplog.text
    assert TorchEngine(bert, CpuSettings(dtype="float32"), "cpu", 1).form == "graphs"


def test_the_engine_computes_by_graphs(bert, monkeypatch):
    """Also if a pass of several is computed ahead of the one before."""
    tape = TapeGraphs()
    monkeypatch.setattr("deployments.engines.model_forms.has_graphs", lambda *_: True)
    monkeypatch.setattr(graphed_model, "CudaGraphs", lambda _: tape)
    engine = TorchEngine(bert, CpuSettings(dtype="float32"), "cpu", 1)
    assert "graphs; " in engine.info.why
    queries = [np.arange(length, dtype=np.int32) for length in (5, 90, 12, 300, 7)]
    engine.use("packed", "float32")
    wanted = rows_of(engine, queries)
    engine.use("graphs", "float32")
    tape.replayed.clear()
    assert engine.form == "graphs"
    np.testing.assert_allclose(rows_of(engine, queries), wanted, atol=1e-4)
    np.testing.assert_allclose(rows_of(engine, queries[:1]), wanted[:1], atol=1e-4)
    assert tape.replayed
