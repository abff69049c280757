"""BERT and its relatives (RoBERTa, XLM-RoBERTa, CamemBERT): a table of positions, norms after each sum. Imports torch.

Families with the same blocks under other names describe them with `Names`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deployments.engines.packed.attention import Attention, Bias, HeadLayout, attention_for
from deployments.engines.packed.layers import ACTIVATIONS, Mlp, PostNorm, SelfAttention, dense, dense_qkv, layer_norm
from deployments.engines.packed.model import Embeddings, Parts
from deployments.engines.packed.tensors import Weights


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a block's weights."""

    qkv: tuple[str, str, str]
    out: str
    norm: str
    up: str
    down: str
    last_norm: str


NAMES = Names(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    last_norm="output.LayerNorm",
)


def unsupported(config: Any) -> str | None:
    if config.hidden_act not in ACTIVATIONS:
        return f"the activation {config.hidden_act} has no packed form here"
    if getattr(config, "is_decoder", False) or getattr(config, "position_embedding_type", None) not in {
        None,
        "absolute",
    }:
        return "a decoder, or relative positions, have no packed form here"
    return None


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:
    padding = None if config.model_type == "bert" else config.pad_token_id
    make = partial(block, names=NAMES, activation=config.hidden_act)
    return encoder(config, weights, make, types=types, padding=padding)


def encoder(
    config: Any, weights: Weights, make: Callable[..., Any], bias: Bias | None = None, **embedded: Any
) -> Parts:
    """A model structured like BERT. `make` creates a block; `bias` is added to the scores; `embedded`: see
    `embeddings`.
    """
    heads, eps = config.num_attention_heads, config.layer_norm_eps
    shape = HeadLayout(heads, heads, config.hidden_size // heads)
    attention = attention_for(shape, weights.place, bias=bias)
    layers = [weights.within(f"encoder.layer.{number}") for number in range(config.num_hidden_layers)]
    return Parts(
        partial(embeddings, weights.within("embeddings"), eps, **embedded),
        [partial(make, layer, shape, attention, eps=eps) for layer in layers],
    )


def block(
    layer: Weights, shape: HeadLayout, attention: Attention, names: Names, *, activation: str, eps: float
) -> PostNorm:
    return PostNorm(
        SelfAttention(shape, dense_qkv(layer, shape, *names.qkv), dense(layer, names.out), attention),
        layer_norm(layer, names.norm, eps),
        Mlp(dense(layer, names.up, activation=activation), dense(layer, names.down)),
        layer_norm(layer, names.last_norm, eps),
    )


def embeddings(weights: Weights, eps: float, *, types: bool = False, padding: int | None = None) -> Embeddings:
    """Embeddings of words and, if the model has them, of positions and token types. The first token type is added into
    one of the other two tables.
    """
    words, positions, kinds = (f"{name}_embeddings.weight" for name in ("word", "position", "token_type"))
    of_type = weights.exact(kinds) if kinds in weights else None
    holder = positions if positions in weights else words

    def table(name: str) -> torch.Tensor:
        return weights[name] if of_type is None or name != holder else weights.cast(weights.exact(name) + of_type[0])

    return Embeddings(
        table(words),
        table(positions) if positions in weights else None,
        layer_norm(weights, "LayerNorm", eps),
        weights.cast(of_type[1] - of_type[0]) if types and of_type is not None else None,
        padding=padding,
    )
