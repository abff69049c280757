"""Steps of tiny random models beside transformers: greedy tokens alone and in any mix of joins, leaves and chunks."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers import MistralConfig, Qwen2Config

from deployments.engines.packed.layers import TorchProducts
from deployments.engines.packed.tensors import Place, Weights
from deployments.generation.engine.causal_model import CausalModel, unsupported
from deployments.generation.engine.graphed_decoder import ModelSteps
from deployments.generation.kernels.packed_products import PackedProducts, forms
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.work import Chunk
from tests.kit.causal_models import FAMILIES, causal, check, prompt_of
from tests.kit.hybrid_worlds import EVENTS, FIRST, World
from tests.kit.packed_models import EXACT

PRODUCTS = {"torch": TorchProducts()} | {f"in C, {form}": PackedProducts(form) for form in forms(torch.float32)[:1]}
BLOCKS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def own(request):
    """transformers' model."""
    return causal(request.param)


@pytest.fixture(scope="module", params=PRODUCTS)
def models(own, request):
    """transformers' own, and ours of the same weights."""
    return own, CausalModel(own.config, Weights.of_module(own, EXACT), BLOCKS, PRODUCTS[request.param])


class Steps(ModelSteps):
    layers = 1

    def __init__(self, model):
        super().__init__(model, lambda logits: logits.numpy())


def test_alone_it_is_generate(models):
    own, model = models
    for length in (1, BLOCK, 2 * BLOCK + 3):
        prompt, world = prompt_of(length), World(Steps(model), BLOCKS, 0)
        world.join("a", prompt)
        for _ in range(12):
            world.step({"a": (length, FIRST)})
        wanted = own.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert world.leave("a") == (wanted[0].tolist(), length)


@settings(max_examples=12, deadline=None)
@given(EVENTS)
def test_in_any_mix_each_is_as_if_alone(models, events):
    own, model = models
    for ids, prompt in World(Steps(model), BLOCKS, 0).run(events, prompt_of):
        if len(ids) > prompt:
            check(own, ids, prompt)


def test_only_torchs_products_are_padded(models, request, monkeypatch):
    """Of 9 tokens with a prompt among them 16 rows, then of their 2 chunks 2; of 9 chunks 16."""
    model, rows = models[1], []
    in_c = isinstance(PRODUCTS[request.node.callspec.params["models"]], PackedProducts)
    head, (first, *others) = model.head, model.layers
    monkeypatch.setattr(model, "head", lambda x: rows.append(len(x)) or head(x))
    counted = [lambda x, layout: rows.append(len(x)) or first(x, layout), *others]
    monkeypatch.setattr(model, "layers", counted)
    one = [Chunk(np.ones(1, np.int32), 0, (at,), wanted=True) for at in range(9)]
    for chunks in ([Chunk(np.ones(8, np.int32), 0, (0,), wanted=True), one[1]], one):
        model.step(chunks)
    assert rows == ([9, 2, 9, 9] if in_c else [16, 2, 16, 16])


@pytest.mark.parametrize("form", ["torch", *forms(torch.bfloat16)])
def test_in_bfloat16_logits_are_as_near_as_those_of_transformers(own, form):
    """docs/generation.md states the bounds; 51 tokens behind a prompt of a chunk and then one by one."""
    half, products = Place(EXACT.device, torch.bfloat16), TorchProducts() if form == "torch" else PackedProducts(form)
    model = CausalModel(own.config, Weights.of_module(own, half), BLOCKS, products)
    ids = np.array(prompt_of(200), np.int32)
    starts = [0, *range(150, 200)]
    chunks = [Chunk(ids[start:end], start, (0, 1), wanted=True) for start, end in pairwise([*starts, 200])]
    ours = torch.cat([model.step([chunk]) for chunk in chunks])
    with torch.inference_mode():
        exact, theirs = (
            whole(input_ids=torch.from_numpy(ids)[None].long()).logits[0, 149:].float()
            for whole in (own, copy.deepcopy(own).to(torch.bfloat16))
        )
    error, own_error, spread = (
        (x - y).square().mean().sqrt() for x, y in ((ours, exact), (theirs, exact), (exact, exact.mean()))
    )
    assert error <= 0.02 * spread
    assert error <= 1.5 * own_error
    assert (ours - exact).abs().max() <= 0.1 * spread
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.2 * spread
    assert clear.any()
    assert (ours.argmax(1) == exact.argmax(1))[clear].all()


def test_windows_and_other_families_are_refused():
    assert "mistral" in unsupported(MistralConfig(sliding_window=8))
    sliding = Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert "sliding_attention" in unsupported(sliding)
    assert unsupported(Qwen2Config()) is None
