"""MPNet: BERT's blocks, and a learned bias of the scores by the distance of two tokens. Imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from deployments.engines.packed.families.bert import Names, block, encoder
from deployments.engines.packed.layers import ACTIVATIONS
from deployments.engines.packed.model import Parts
from deployments.engines.packed.positions import relative_buckets
from deployments.engines.packed.tensors import Weights

_NAMES = Names(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    last_norm="output.LayerNorm",
)
_PADDING = 1  # of transformers' code, as are the buckets, whatever the config says
_BUCKETS = 32


def unsupported(config: Any) -> str | None:
    if config.relative_attention_num_buckets != _BUCKETS:
        return f"relative positions of {config.relative_attention_num_buckets} kinds have no packed form here"
    return None if config.hidden_act in ACTIVATIONS else f"the activation {config.hidden_act} has no packed form here"


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:  # noqa: ARG001 - it has none
    bias = relative_buckets(weights.exact("encoder.relative_attention_bias.weight"))
    make = partial(block, names=_NAMES, activation=config.hidden_act)
    return encoder(config, weights, make, bias, padding=_PADDING)
