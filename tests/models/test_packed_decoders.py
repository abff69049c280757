"""Decoders, packed, against the transformers library's own code."""

import pytest
import torch
from transformers import (
    EuroBertConfig,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

from deployments.engines.packed import unsupported
from tests.kit.packed_models import LENGTHS, build, compare, cosine_in

SHAPE = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}
STRAY = {  # what one of these classes reads, and the others pass over
    "attn_logit_softcapping": 5.0,
    "hidden_activation": "relu",
    "query_pre_attn_scalar": 4,
    "sliding_window": 30,
    "use_bidirectional_attention": True,
}
STRAY_KINDS = STRAY | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {
    "qwen3, keys of others": (Qwen3Model, Qwen3Config, STRAY),
    "qwen2, keys of others": (Qwen2Model, Qwen2Config, STRAY),
    "llama, keys of others": (LlamaModel, LlamaConfig, STRAY_KINDS),
    "mistral, keys of others": (MistralModel, MistralConfig, STRAY_KINDS),
    "eurobert, keys of others": (EuroBertModel, EuroBertConfig, STRAY_KINDS | {"is_causal": True}),
    "llama, both ways": (LlamaModel, LlamaConfig, {"is_causal": False}),
    "qwen3": (Qwen3Model, Qwen3Config, {"head_dim": 32}),
    "qwen3, sliding": (Qwen3Model, Qwen3Config, {"head_dim": 16, **SLIDING}),
    "qwen2": (Qwen2Model, Qwen2Config, {}),
    "qwen2, sliding": (Qwen2Model, Qwen2Config, SLIDING),
    "qwen2, both ways": (Qwen2Model, Qwen2Config, {"is_causal": False, **SLIDING}),
    "llama": (LlamaModel, LlamaConfig, {}),
    "llama, biases": (LlamaModel, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralModel, MistralConfig, {"sliding_window": None}),
    "mistral, sliding": (MistralModel, MistralConfig, {"sliding_window": 50}),
    "gemma3, both ways": (
        Gemma3TextModel,
        Gemma3TextConfig,
        {"use_bidirectional_attention": True, "sliding_window": 40, "sliding_window_pattern": 2, "head_dim": 32},
    ),
    "gemma3, causal": (Gemma3TextModel, Gemma3TextConfig, {"sliding_window": 40, "sliding_window_pattern": 2}),
} | {
    f"llama, {name}": (LlamaModel, LlamaConfig, {"rope_parameters": {"rope_type": name, "rope_theta": 5e5, **values}})
    for name, values in SCALED.items()
}
ROTARY_ONLY = [name for name in FAMILIES if name.removeprefix("llama, ") in SCALED]


def made(name):
    model, config, changes = FAMILIES[name]
    return build(model, config, pad_token_id=0, attn_implementation="eager", **{**SHAPE, **changes})


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_the_librarys_own(name, lengths):
    compare(made(name), "last", lengths, atol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ROTARY_ONLY])
def test_other_pooling(name, pooling):
    compare(made(name), pooling, LENGTHS["ragged"], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mistral, sliding", "gemma3, both ways"])
def test_bfloat16_stays_near(name):
    assert cosine_in(torch.bfloat16, made(name), "last", LENGTHS["ragged"]) >= 0.999


def test_what_has_no_packed_form_is_named():
    assert "capped" in unsupported(Gemma3TextConfig(attn_logit_softcapping=50.0))
    assert "the activation tanh" in unsupported(LlamaConfig(hidden_act="tanh"))
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = LlamaConfig(**SHAPE, rope_parameters=long | {"original_max_position_embeddings": 100})
    assert "longrope" in unsupported(config)
    assert "a part of each head" in unsupported(LlamaConfig(**SHAPE, partial_rotary_factor=0.5))
