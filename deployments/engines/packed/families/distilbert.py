"""DistilBERT: BERT's blocks under other names. Imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from deployments.engines.packed.attention import HeadLayout, attention_for
from deployments.engines.packed.families.bert import Names, block, embeddings
from deployments.engines.packed.layers import ACTIVATIONS
from deployments.engines.packed.model import Parts
from deployments.engines.packed.tensors import Weights

_NAMES = Names(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    last_norm="output_layer_norm",
)
_EPS = 1e-12  # not in the config


def unsupported(config: Any) -> str | None:
    return None if config.activation in ACTIVATIONS else f"the activation {config.activation} has no packed form here"


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:  # noqa: ARG001 - it has none
    shape = HeadLayout(config.n_heads, config.n_heads, config.dim // config.n_heads)
    attention = attention_for(shape, weights.place)
    layers = [weights.within(f"transformer.layer.{number}") for number in range(config.n_layers)]
    return Parts(
        partial(embeddings, weights.within("embeddings"), _EPS),
        [partial(block, layer, shape, attention, _NAMES, activation=config.activation, eps=_EPS) for layer in layers],
    )
