"""ModernBERT (gte-modernbert, granite-embedding): norms before attention and MLP, rotary positions, gated MLPs; two of
three layers attend only to nearby tokens. Imports torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from deployments.engines.packed.attention import ALL, HeadLayout, Reach, attention_for
from deployments.engines.packed.layers import (
    ACTIVATIONS,
    GatedMlp,
    PreNorm,
    SelfAttention,
    dense,
    dense_halves,
    dense_qkv,
    layer_norm,
)
from deployments.engines.packed.model import Embeddings, Parts
from deployments.engines.packed.positions import rotary_of, unsupported_rotary
from deployments.engines.packed.tensors import Weights


def unsupported(config: Any) -> str | None:
    if config.hidden_activation not in ACTIVATIONS:
        return f"the activation {config.hidden_activation} has no packed form here"
    return unsupported_rotary(config)


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:  # noqa: ARG001 - it has none
    heads, eps, place = config.num_attention_heads, config.norm_eps, weights.place
    shape = HeadLayout(heads, heads, config.hidden_size // heads)
    near = config.local_attention // 2
    reaches = {"full_attention": ALL, "sliding_attention": Reach(near, near)}
    kinds = {
        kind: (attention_for(shape, place, reaches[kind]), rotary_of(config, place, kind))
        for kind in sorted(set(config.layer_types))
    }

    def block(number: int) -> PreNorm:
        layer = weights.within(f"layers.{number}")
        attention, rotary = kinds[config.layer_types[number]]
        gate, up = dense_halves(layer, "mlp.Wi", config.hidden_activation, None)
        return PreNorm(
            layer_norm(layer, "attn_norm", eps) if number else None,
            SelfAttention(
                shape, dense_qkv(layer, shape, "attn.Wqkv"), dense(layer, "attn.Wo"), attention, rotary=rotary
            ),
            layer_norm(layer, "mlp_norm", eps),
            GatedMlp(gate, up, dense(layer, "mlp.Wo")),
        )

    return Parts(
        partial(_embeddings, weights.within("embeddings"), eps),
        [partial(block, number) for number in range(config.num_hidden_layers)],
        partial(layer_norm, weights, "final_norm", eps),
    )


def _embeddings(weights: Weights, eps: float) -> Embeddings:
    return Embeddings(weights["tok_embeddings.weight"], norm=layer_norm(weights, "norm", eps))
