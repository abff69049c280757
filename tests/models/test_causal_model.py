"""Steps of tiny random models beside transformers: greedy tokens alone and in any mix of joins, leaves and chunks."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deployments.engines.packed.layers import TorchProducts
from deployments.engines.packed.tensors import Place, Weights
from deployments.generation.engine.causal_model import CausalModel, unsupported
from deployments.generation.kernels.packed_products import PackedProducts, forms
from deployments.generation.scheduling.blocks import BLOCK, Blocks, NoBlocks
from deployments.generation.scheduling.chunk import Chunk
from tests.kit.packed_models import EXACT, VOCABULARY
from tests.kit.packed_models import build as build_transformers

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 1}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"num_key_value_heads": 2, "head_dim": 32}),
    "tied": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}
PRODUCTS = {"torch": TorchProducts()} | {f"in C, {form}": PackedProducts(form) for form in forms(torch.float32)[:1]}
NEAR = 1e-4  # of the two best logits: either token is right
BLOCKS = 12


@pytest.fixture(scope="module", params=FAMILIES)
def own(request):
    """transformers' model."""
    model, config, more = FAMILIES[request.param]
    return build_transformers(model, config, **{"tie_word_embeddings": False} | SHAPE | more)


@pytest.fixture(scope="module", params=PRODUCTS)
def models(own, request):
    """transformers' own, and ours of the same weights."""
    return own, CausalModel(own.config, Weights.of_module(own, EXACT), BLOCKS, PRODUCTS[request.param])


class World:
    """Sequences at one model, each step as a schedule says."""

    def __init__(self, model):
        self.model, self.blocks, self.at = model, Blocks(model.cache.tensor.shape[2]), {}

    def join(self, name, prompt):
        self.at[name] = {"ids": list(prompt), "prompt": len(prompt), "computed": 0, "table": []}

    def leave(self, name):
        """(all tokens, how many of them were its prompt)."""
        one = self.at.pop(name)
        self.blocks.give_back(one["table"])
        return one["ids"], one["prompt"]

    def step(self, shares):
        """A chunk of each of these sequences: of what is left of its prompt so many tokens, or its last token. Raises
        NoBlocks, and nothing is computed.
        """
        ends = {}
        for name, share in shares.items():
            one = self.at[name]
            ends[name] = min(len(one["ids"]), one["computed"] + max(1, share))
            self.blocks.grow(one["table"], ends[name])
        chunks = []
        for name, end in ends.items():
            one = self.at[name]
            ids = np.array(one["ids"][one["computed"] : end], np.int32)
            chunks.append(Chunk(ids, one["computed"], tuple(one["table"]), wanted=end == len(one["ids"])))
            one["computed"] = end
        logits = self.model.step(chunks)
        wanted = [name for name, chunk in zip(ends, chunks, strict=True) if chunk.wanted]
        for name, numbers in zip(wanted, logits, strict=True):
            self.at[name]["ids"].append(int(numbers.argmax()))


def check(own, ids, prompt):
    """Each token after the prompt is the one that transformers' logits say, given those before it."""
    with torch.inference_mode():
        logits = own(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1]
    picked = logits.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0]
    assert (logits.amax(1) - picked <= NEAR).all()


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(5, VOCABULARY, length).tolist()


@pytest.mark.parametrize("length", [1, 7, BLOCK, 2 * BLOCK + 3])
def test_alone_it_is_generate(models, length):
    own, model = models
    prompt, world = prompt_of(length), World(model)
    world.join("a", prompt)
    for _ in range(12):
        world.step({"a": length})
    wanted = own.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, length, dtype=torch.int64),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert world.leave("a") == (wanted[0].tolist(), length)


EVENTS = st.tuples(
    st.sampled_from(["join", "join", "step", "step", "step", "step", "leave"]),
    st.integers(1, 200),
    st.lists(st.integers(0, 150), min_size=5, max_size=5),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(EVENTS, min_size=5, max_size=60))
def test_in_any_mix_each_is_as_if_alone(models, events):
    own, model = models
    world, joined, done = World(model), 0, []
    for what, number, shares in events:
        if what == "join" and len(world.at) < 5:
            joined += 1
            world.join(joined, prompt_of(number, joined))
        elif what == "leave" and world.at:
            done.append(world.leave(sorted(world.at)[number % len(world.at)]))
        elif named := {name: share for name, share in zip(sorted(world.at), shares, strict=False) if share}:
            try:
                world.step(named)
            except NoBlocks:
                done.append(world.leave(max(world.at)))
    done += [world.leave(name) for name in list(world.at)]
    assert world.blocks.free == BLOCKS
    for ids, prompt in done:
        if len(ids) > prompt:
            check(own, ids, prompt)


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


def test_blocks_are_taken_whole_or_not_at_all():
    blocks, table = Blocks(3), []
    blocks.grow(table, BLOCK + 1)
    assert (len(table), blocks.free) == (2, 1)
    with pytest.raises(NoBlocks, match="2 blocks are wanted, 1 are free"):
        blocks.grow(table, 4 * BLOCK)
    assert (len(table), blocks.free) == (2, 1)
    blocks.give_back(table)
    assert (table, blocks.free) == ([], 3)
