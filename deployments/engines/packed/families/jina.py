"""jina-embeddings-v2: BERT's attention with ALiBi instead of positions, and gated MLPs. Imports torch.

The model for code normalizes queries and keys, and adds a block's input to its attention a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deployments.engines.packed.attention import Attention, HeadLayout
from deployments.engines.packed.families import bert
from deployments.engines.packed.layers import (
    GatedMlp,
    Layer,
    LayerNorm,
    PostNorm,
    SelfAttention,
    dense,
    dense_halves,
    dense_qkv,
    layer_norm,
)
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.model import Parts
from deployments.engines.packed.positions import alibi
from deployments.engines.packed.tensors import Weights

_GATES = {"geglu": "gelu", "reglu": "relu"}


def unsupported(config: Any) -> str | None:
    return bert.unsupported(config) if config.feed_forward_type == "original" else None


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:
    block = _for_code if config.qk_norm else _gated
    if config.feed_forward_type == "original":
        block = partial(bert.block, names=bert.NAMES)
    make = partial(block, activation=_GATES.get(config.feed_forward_type, config.hidden_act))
    return bert.encoder(config, weights, make, alibi(config.num_attention_heads), types=types)


def _gated(layer: Weights, shape: HeadLayout, attention: Attention, *, activation: str, eps: float) -> PostNorm:
    gate, up = dense_halves(layer, "mlp.gated_layers", activation, None)
    qkv, out = dense_qkv(layer, shape, *bert.NAMES.qkv), dense(layer, bert.NAMES.out)
    return PostNorm(
        SelfAttention(shape, qkv, out, attention),
        layer_norm(layer, bert.NAMES.norm, eps),
        GatedMlp(gate, up, dense(layer, "mlp.wo")),
        layer_norm(layer, "mlp.layernorm", eps),
    )


def _for_code(layer: Weights, shape: HeadLayout, attention: Attention, *, activation: str, eps: float) -> CodeBlock:
    up, gate = dense_halves(layer, "mlp.up_gated_layer", None, activation)
    qkv, out = dense(layer, *bert.NAMES.qkv), dense(layer, bert.NAMES.out)
    norm = QueryKeyNorm(layer.within("attention.self"), shape, eps)
    return CodeBlock(
        SelfAttention(shape, qkv, out, attention, norm),
        layer_norm(layer, bert.NAMES.norm, eps),
        layer_norm(layer, "layer_norm_1", eps),
        GatedMlp(gate, up, dense(layer, "mlp.down_layer")),
        layer_norm(layer, "layer_norm_2", eps),
    )


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """BERT's block with a second sum and norm after its attention."""

    attention: SelfAttention
    norm: Layer
    second_norm: Layer
    mlp: GatedMlp
    last_norm: Layer

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = self.second_norm(self.norm(self.attention.plus(x, x, layout)) + layout.pick(x))
        return self.last_norm(self.mlp.plus(x, x))


class QueryKeyNorm:
    """The norms of queries and of keys, over all heads at once. The queries' norm includes the attention's scale."""

    def __init__(self, weights: Weights, shape: HeadLayout, eps: float) -> None:
        scale = shape.size**-0.5
        weight, bias = (weights.cast(weights.exact(f"layer_norm_q.{name}") * scale) for name in ("weight", "bias"))
        self._norms = LayerNorm(weight, bias, eps), layer_norm(weights, "layer_norm_k", eps)

    def in_place(self, heads: torch.Tensor) -> None:
        """Normalize [rows, heads of queries and keys, size] in place."""
        for norm, part in zip(self._norms, heads.flatten(1).chunk(2, 1), strict=True):
            part.copy_(norm(part))
