"""Steps as graphs give the model's own tokens. A tape stands in for CUDA's graphs: see `tests.kit.tape_graphs`."""

import logging
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from benchmarks.kit.launches import launches
from deployments.engines.cuda_graphs import NoGraph
from deployments.engines.packed.layers import TorchProducts
from deployments.engines.packed.tensors import Weights
from deployments.generation.engine import decode_sizes, graphed_decoder, paged_attention
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.graphed_decoder import GraphedDecoder, ModelSteps, with_graphs
from deployments.generation.kernels import native
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.work import Chunk
from tests.kit.causal_models import FAMILIES, causal, check, prompt_of
from tests.kit.hybrid_worlds import EVENTS, FIRST, World
from tests.kit.packed_models import CPU, EXACT
from tests.kit.tape_graphs import Failing, TapeGraphs

BLOCKS = 12
CONTEXT = 4 * BLOCK


@pytest.fixture(scope="module", autouse=True)
def few_sizes_that_win():
    """By torch's operations, because a tape does not record C: of 1, 2 and 4 rows, with 1 and 4 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda _: None)
        patch.setattr(native, "forms", lambda _: [])
        patch.setattr(decode_sizes, "ROWS", (1, 2, 4))
        patch.setattr(decode_sizes, "_TOKENS", BLOCK)
        patch.setattr(graphed_decoder, "is_quicker", lambda *_: True)
        yield


def model_of(own, block_size=BLOCK):
    return CausalModel(own.config, Weights.of_module(own, EXACT), BLOCKS, TorchProducts(), block_size=block_size)


def by_tables(q, keys, values, bounds, _, most_q, most_k, *, window, seqused_k, block_table):
    """Flash attention over blocks by its documentation, for rows of one token, as torch's operations."""
    assert (most_q, window, keys.shape[1], most_k) == (1, (-1, 0), 256, block_table.shape[1] * 256)
    assert bounds.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    k, v = (stored[block_table.long()].flatten(1, 2).transpose(1, 2) for stored in (keys, values))
    seen = (torch.arange(most_k) < seqused_k[:, None])[:, None, None]
    found = functional.scaled_dot_product_attention(q[:, :, None], k, v, seen, scale=1.0, enable_gqa=True)
    return found[:, :, 0].flatten(1)


@pytest.fixture(scope="module", params=[*FAMILIES, "llama, in place"])
def graphed(request):
    """transformers' own model, ours with graphs, and the tape."""
    own, tape = causal(request.param), TapeGraphs()
    model = model_of(own, 256 if "in place" in request.param else BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        if "in place" in request.param:
            patch.setattr(paged_attention, "varlen", by_tables)
            for attention in model.attention:
                attention._fixed = paged_attention.by_tables
        yield own, GraphedDecoder(model, CONTEXT, tape), tape


class Steps(ModelSteps):
    layers = 1

    def __init__(self, model):
        super().__init__(model, lambda logits: logits.numpy())


def test_ragged_rows_over_many_steps(graphed):
    """In the sizes for 1, 2 and 4 rows, each with 1 block or all; with 5 rows or with a prompt none is taken."""
    own, model, tape = graphed
    size = model.cache.block_size
    assert tape.recorded == 6
    assert not model.cache.tensor.any()  # the trials have left nothing
    world, lengths = World(Steps(model), BLOCKS, 0, size), [5, size - 1, 40, 7, 300]
    taken = []

    def step(names):
        tape.replayed.clear()
        world.step(dict.fromkeys(names, (BLOCKS * BLOCK, FIRST)))
        taken.append(tape.replayed[0] if tape.replayed else None)

    for name, length in enumerate(lengths):
        world.join(name, prompt_of(length))
        step(range(name + 1))  # with a prompt
    for names in ([0], [2, 3], [0, 2, 3], [0, 1, 2, 3], [0, 4], [4], [0, 1, 3, 4], [3, 2], range(5)):
        for _ in range(2):
            step(names)
    assert taken[:5] == [None] * 5
    assert taken[5::2] == [0, 1, 2, 5, 4, 3, 5, 1, None]
    for name, length in enumerate(lengths):
        ids, prompt = world.leave(name)
        assert (prompt, len(ids) > length + 4) == (length, True)
        check(own, ids, prompt)


@settings(max_examples=3, deadline=None)
@given(EVENTS)
def test_in_any_mix_each_is_as_if_alone(graphed, events):
    own, model, _ = graphed
    for ids, prompt in World(Steps(model), BLOCKS, 0, model.cache.block_size).run(events, prompt_of):
        if len(ids) > prompt:
            check(own, ids, prompt)


@pytest.fixture(scope="module")
def llama():
    return causal("llama")


def rows(count):
    return [Chunk(np.full(1, 5 + row, np.int32), 3, [row]) for row in range(count)]


def test_a_step_is_one_copy_in_and_one_graph(llama):
    model, replayed = GraphedDecoder(model_of(llama), CONTEXT, TapeGraphs()), []
    model._graphs = [replace(graph, replay=lambda: replayed.append(0)) for graph in model._graphs]
    assert launches(lambda: model.step(rows(3)), CPU) == 1
    assert len(replayed) == 2  # the first call is not counted
    assert all(len(graph.held) == 2 for graph in model._graphs)  # the angles, in both runs


class Pool(TapeGraphs):
    """Like torch's, whose graphs use the same memory one after another, also what a refused one took."""

    held = 0

    def record(self, run):
        replay, result = super().record(run)
        self.held = max(self.held, len(result) * 2**20)
        return replay, result

    def held_bytes(self):
        return self.held


@pytest.mark.parametrize(
    ("changes", "recorder", "left", "reason"),
    [
        ({}, TapeGraphs(), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (4, 4)], "larger steps need none"),
        ({}, Failing(2), [(1, 1), (2, 1), (1, 4), (2, 4)],
         "not of 4 rows with 1 blocks: RuntimeError: operation not permitted when stream is capturing"),
        ({}, Failing(1, off=1.1), [(1, 1), (1, 4)], "not of 2 rows with 1 blocks: its logits are off by 0.1 of their"),
        ({}, Failing(3, off=float("nan")), [(1, 1), (2, 1), (4, 1)], "not of 1 rows with 4 blocks: its logits are off"),
        ({"is_quicker": Mock(side_effect=[True] * 4 + [False])}, TapeGraphs(),
         [(1, 1), (2, 1), (4, 1), (1, 4)], "not of 2 rows with 4 blocks: it is not quicker than without"),
        ({"_MOST_BYTES": 2 * 2**20}, TapeGraphs(), [(1, 1), (2, 1)], "not of 1 rows with 4 blocks: the graphs would"),
        ({"_MOST_BYTES": 2 * 2**20}, Pool(), [(1, 1), (2, 1), (1, 4), (2, 4)],
         "not of 4 rows with 1 blocks: the graphs would"),
        ({"_MOST_S": 2.5}, TapeGraphs(), [(1, 1), (2, 1)], "not of 1 rows with 4 blocks: 2 s are over"),
        ({"_MOST_COPIED": 4 * BLOCK}, TapeGraphs(), [(1, 1), (2, 1), (4, 1), (1, 4)],
         "not of 2 rows with 4 blocks: more than 512 tokens would be copied out of their blocks"),
    ],
)  # fmt: skip
def test_steps_run_without_a_graph_where_it_does_not_pay(llama, monkeypatch, caplog, changes, recorder, left, reason):
    for name, value in changes.items():
        monkeypatch.setattr(graphed_decoder, name, value)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        model = GraphedDecoder(model_of(llama), CONTEXT, recorder, clock=count().__next__)
    assert [(graph.size.rows, graph.size.blocks) for graph in model._graphs] == left
    (line,) = (record.message for record in caplog.records if "graphs" in record.message)
    assert line.startswith(f"steps of at most {max(left)[0]} rows run as CUDA graphs, which hold ")
    assert f" MiB; {reason}" in line
    for number in (1, 2, 4, 5):
        torch.testing.assert_close(model.step(rows(number)), model.model.step(rows(number)), atol=1e-4, rtol=1e-4)


def test_attention_to_the_wrong_blocks_is_noticed(llama):
    model = model_of(llama)
    for attention in model.attention:
        right = attention._fixed
        attention._fixed = lambda q, keys, values, step, right=right: right(q, keys.roll(1, 0), values, step)
    with pytest.raises(NoGraph, match="its logits are off by"):
        GraphedDecoder(model, CONTEXT, TapeGraphs())


def test_without_a_single_graph_the_model_computes_each_step(llama, monkeypatch, caplog):
    model = model_of(llama)
    assert with_graphs(model, CONTEXT) is model  # on a CPU
    with pytest.raises(NoGraph, match="not of 1 rows with 1 blocks: RuntimeError: operation not permitted"):
        GraphedDecoder(model, CONTEXT, Failing(0))
    monkeypatch.setattr(model, "place", replace(model.place, device=torch.device("cuda")))
    for recorder, reason in ((lambda _: Failing(0), "not of 1 rows"), (no_card, "no card")):
        monkeypatch.setattr(graphed_decoder, "CudaGraphs", recorder)
        with caplog.at_level(logging.INFO, logger="ray.serve"):
            assert with_graphs(model, CONTEXT) is model
        assert f"no step runs as a CUDA graph: {reason}" in caplog.text


def test_a_torch_that_cannot_state_the_memory_costs_only_the_graphs(llama):
    recorder = TapeGraphs()
    recorder.held_bytes = Mock(side_effect=KeyError("segment_pool_id"))
    with pytest.raises(NoGraph, match="not of 1 rows with 1 blocks: KeyError"):
        GraphedDecoder(model_of(llama), CONTEXT, recorder)


def no_card(_):
    raise RuntimeError("no card\nand more")
