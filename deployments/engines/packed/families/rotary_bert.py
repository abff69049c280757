"""nomic-embed and gte: BERT's blocks with rotary positions and gated MLPs. Imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from deployments.engines.packed.attention import HeadLayout, attention_for
from deployments.engines.packed.families.bert import embeddings
from deployments.engines.packed.layers import (
    ACTIVATIONS,
    GatedMlp,
    PostNorm,
    SelfAttention,
    dense,
    dense_qkv,
    layer_norm,
)
from deployments.engines.packed.model import Parts
from deployments.engines.packed.positions import rotary_of, unsupported_rotary
from deployments.engines.packed.tensors import Weights


def unsupported(config: Any) -> str | None:
    if config.hidden_act not in ACTIVATIONS:
        return f"the activation {config.hidden_act} has no packed form here"
    return unsupported_rotary(config)


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:
    heads, eps = config.num_attention_heads, config.layer_norm_eps
    shape = HeadLayout(heads, heads, getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention, rotary = attention_for(shape, weights.place), rotary_of(config, weights.place)

    def block(number: int) -> PostNorm:
        layer = weights.within(f"layers.{number}")
        qkv = dense_qkv(layer, shape, *(f"self_attn.{part}_proj" for part in "qkv"))
        gate = dense(layer, "mlp.gate_proj", activation=config.hidden_act)
        return PostNorm(
            SelfAttention(shape, qkv, dense(layer, "self_attn.o_proj"), attention, rotary=rotary),
            layer_norm(layer, "post_attention_layernorm", eps),
            GatedMlp(gate, dense(layer, "mlp.up_proj"), dense(layer, "mlp.down_proj")),
            layer_norm(layer, "post_mlp_layernorm", eps),
        )

    return Parts(
        partial(embeddings, weights.within("embeddings"), eps, types=types),
        [partial(block, number) for number in range(config.num_hidden_layers)],
    )
