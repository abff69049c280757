"""Log probabilities of prompts' tokens beside transformers: in chunks of any size, beside others, in both memories."""

from itertools import count

import numpy as np
import pytest
import torch

from deployments.engines.packed.layers import TorchProducts
from deployments.engines.packed.tensors import Weights
from deployments.generation.engine import scoring
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.causal_stages import CausalStages
from deployments.generation.engine.device_sampling import logits_of
from deployments.generation.engine.graphed_decoder import ModelSteps
from deployments.generation.engine.hybrid_steps import HybridSteps
from deployments.generation.kernels.packed_products import PackedProducts, forms
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk, Scoring, Work
from deployments.generation.text.prompt_scores import PromptScores
from tests.kit.causal_models import causal, prompt_of
from tests.kit.packed_models import EXACT, VOCABULARY

ENGINES = ["plain", "hybrid, its own", "hybrid, the host's"] + ["in C"] * bool(forms(torch.float32))


@pytest.fixture(scope="module")
def own():
    return causal("qwen3")


@pytest.fixture(params=ENGINES)
def engine(own, request):
    """(its steps, whether prompts are in the host's cache)."""
    products = PackedProducts(forms(torch.float32)[0]) if request.param == "in C" else TorchProducts()
    hosts = 12 if "hybrid" in request.param else 0
    model = CausalModel(own.config, Weights.of_module(own, EXACT), 12, products, num_cpu_blocks=hosts)
    steps = HybridSteps(CausalStages(model)) if hosts else ModelSteps(model, logits_of(torch.device("cpu")))
    return steps, "the host's" in request.param


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
@pytest.mark.parametrize("at_once", [1, 32 * VOCABULARY * 2])
def test_a_prompt_s_tokens_have_transformers_log_probabilities(own, engine, chunk, at_once, monkeypatch):
    """Two of them, with 3 alternatives and none, beside a third prompt whose first tokens are picked meanwhile."""
    monkeypatch.setattr(scoring, "_AT_ONCE", at_once)
    steps, on_host = engine
    asked = {0: (prompt_of(131), 3), 1: (prompt_of(70), 0), 2: (prompt_of(9), None)}
    tables = {name: range(4 * name, 4 * name + blocks_of(len(ids), BLOCK)) for name, (ids, _) in asked.items()}
    found, picked = {0: [], 1: []}, {}
    for start in count(0, chunk):
        chunks = {}
        for name, (ids, alternatives) in asked.items():
            size = chunk if alternatives is not None else 9  # the third is computed again and again, in a single chunk
            at = start if alternatives is not None else 0
            some, behind = (np.array(ids[first:][:size], np.int32) for first in (at, at + 1))
            scored = None if alternatives is None else Scoring(behind, alternatives)
            if len(some):
                is_last = at + size >= len(ids)
                chunks[name] = Chunk(some, at, tuple(tables[name]), is_last, on_host and name < 2, scored)
        if 0 not in chunks:
            break
        computed = steps.step(Work(list(chunks.values())))
        wanted = [name for name, one in chunks.items() if one.wanted]
        for name, logits in zip(wanted, computed.logits.logits, strict=True):
            picked[name] = logits.copy()
        for name, scores in zip([name for name in chunks if name < 2], computed.scores, strict=True):
            found[name].append(scores)
    with torch.inference_mode():
        theirs = {name: own(input_ids=torch.tensor([ids])).logits[0] for name, (ids, _) in asked.items()}
    for name, logits in picked.items():
        np.testing.assert_allclose(logits, theirs[name][-1], atol=1e-4)
    assert set(picked) == set(asked)
    for name, parts in found.items():
        ids, alternatives = asked[name]
        shares = theirs[name][:-1].log_softmax(1)
        whole = PromptScores.joined((number * chunk, part) for number, part in enumerate(parts))
        assert whole.ids.shape == whole.logprobs.shape == (len(ids) - 1, 1 + alternatives)
        assert whole.ids[:, 0].tolist() == ids[1:]
        expected = shares.gather(1, torch.from_numpy(whole.ids).long())
        np.testing.assert_allclose(whole.logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(whole.logprobs[:, 1:], shares.topk(alternatives).values, atol=1e-4)
        low, high = ((shares > expected[:, :1] + error).sum(1) + 1 for error in (1e-4, -1e-4))
        assert (low <= torch.from_numpy(whole.ranks)).all()
        assert (torch.from_numpy(whole.ranks) <= high).all()


def test_no_more_logits_are_in_memory_than_the_bound(own, monkeypatch):
    model = CausalModel(own.config, Weights.of_module(own, EXACT), 12, TorchProducts())
    rows, head = [], model.head
    monkeypatch.setattr(scoring, "_AT_ONCE", 40 * VOCABULARY)
    monkeypatch.setattr(model, "head", lambda x: rows.append(len(x)) or head(x))
    ids = np.array(prompt_of(131), np.int32)
    model.scored_step([Chunk(ids, 0, range(9), wanted=True, scoring=Scoring(ids[1:], 1))])
    assert max(rows) == 32
    assert sum(rows) >= 131
