"""Llama and its relatives (Mistral, Qwen2, Qwen3, Gemma 3's text model, EuroBERT): norms before each sum, rotary
positions, gated MLPs, heads that share keys and values. Causal, unless the config says otherwise.

It reads only those keys of a config that the class in transformers reads. For example, Llama ignores a window. Imports
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from deployments.engines.packed.attention import ALL, CAUSAL, Attention, HeadLayout, Reach, attention_for
from deployments.engines.packed.layers import (
    ACTIVATIONS,
    Layer,
    Mlp,
    PreNorm,
    Products,
    RmsNorm,
    SelfAttention,
    TorchProducts,
    rms_norm,
)
from deployments.engines.packed.model import Embeddings, Parts
from deployments.engines.packed.positions import Rotary, rotary_of, unsupported_rotary
from deployments.engines.packed.tensors import Weights

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS = {"gemma3_text", "qwen2", "qwen3"}  # their configs say for each layer what a token attends to

TORCHS = TorchProducts()
Norms = Callable[[RmsNorm], Layer]

# Creates the attention of a layer, which must itself apply norm and rotation to query and key.
Attend = Callable[[int, HeadLayout, Reach, RmsNorm | None, Rotary], Attention]


@dataclass(frozen=True, slots=True)
class _Mixing:
    """A layer's attention, and the norm and rotation before it, if the attention does not apply them itself."""

    attention: Attention
    norm: RmsNorm | None = None
    rotary: Rotary | None = None


def unsupported(config: Any) -> str | None:
    if _activation(config) not in ACTIVATIONS:
        return f"the activation {_activation(config)} has no packed form here"
    if _is_gemma(config) and config.attn_logit_softcapping is not None:
        return "scores that are capped (attn_logit_softcapping) have no packed form here"
    return unsupported_rotary(config)


def build(
    config: Any,
    weights: Weights,
    *,
    types: bool = False,  # noqa: ARG001 - no token types here
    attend: Attend | None = None,
    products: Products = TORCHS,
    norms: Norms = lambda norm: norm,
) -> Parts:
    """Build the parts. `attend`: creates another kind of attention, such as to a cache. `norms`: wraps the norms of
    rows, for example in a kernel.
    """
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = HeadLayout(config.num_attention_heads, config.num_key_value_heads, size)
    kinds = layer_kinds(config)
    attention_to = cache(partial(attention_for, heads, weights.place))
    by_kind = _FULL in config.rope_parameters
    rotaries = {kind: rotary_of(config, weights.place, kind if by_kind else None) for kind in set(kinds)}

    def block(number: int) -> PreNorm:
        kind = kinds[number]
        seen = reach(config, kind)
        layer, rotary = weights.within(f"layers.{number}"), rotaries[kind]
        norm = _norm_of_heads(config, layer, heads)
        if attend is None:
            return _block(config, layer, heads, _Mixing(attention_to(seen), norm, rotary), products, norms)
        return _block(config, layer, heads, _Mixing(attend(number, heads, seen, norm, rotary)), products, norms)

    is_gemma = _is_gemma(config)
    return Parts(
        lambda: Embeddings(weights["embed_tokens.weight"], scale=config.hidden_size**0.5 if is_gemma else 1.0),
        [partial(block, number) for number in range(config.num_hidden_layers)],
        lambda: norms(rms_norm(weights, "norm", config.rms_norm_eps, offset=float(is_gemma))),
    )


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer: "full_attention" or "sliding_attention"."""
    if config.model_type in _KINDS:
        return list(config.layer_types[: config.num_hidden_layers])
    slides = config.model_type == "mistral" and config.sliding_window is not None
    return [_SLIDING if slides else _FULL] * config.num_hidden_layers


def reach(config: Any, kind: str) -> Reach:
    """What a token attends to in such a layer. Causal windows, and Gemma's bidirectional one, include the token."""
    window = config.sliding_window if kind == _SLIDING else None
    if _is_gemma(config) and config.use_bidirectional_attention:
        return ALL if window is None else Reach(window - 1, window - 1)
    if config.model_type == "eurobert" or not getattr(config, "is_causal", True):
        return ALL if window is None else Reach(window, window)
    return CAUSAL if window is None else Reach(window - 1, 0)


def _block(  # noqa: PLR0917 - a layer's parts
    config: Any, layer: Weights, heads: HeadLayout, mixing: _Mixing, products: Products, norms: Norms
) -> PreNorm:
    is_gemma = _is_gemma(config)

    def norm(name: str) -> Layer:
        return norms(rms_norm(layer, name, config.rms_norm_eps, offset=float(is_gemma)))

    scale = 1.0 if _by_head(layer) else _scale(config, heads)
    return PreNorm(
        norm("input_layernorm"),
        SelfAttention(
            heads,
            products.dense(layer, *(f"self_attn.{part}_proj" for part in "qkv"), scales=(scale, 1.0, 1.0)),
            products.dense(layer, "self_attn.o_proj"),
            mixing.attention,
            mixing.norm,
            mixing.rotary,
        ),
        norm("pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"),
        Mlp(
            products.gated(layer, "mlp.gate_proj", "mlp.up_proj", _activation(config)),
            products.dense(layer, "mlp.down_proj"),
        ),
        norm("post_attention_layernorm") if is_gemma else None,
        norm("post_feedforward_layernorm") if is_gemma else None,
    )


def _by_head(layer: Weights) -> bool:
    return "self_attn.q_norm.weight" in layer


def _scale(config: Any, heads: HeadLayout) -> float:
    scale: float = (config.query_pre_attn_scalar if _is_gemma(config) else heads.size) ** -0.5
    return scale


def _norm_of_heads(config: Any, layer: Weights, heads: HeadLayout) -> RmsNorm | None:
    """The norm of query, including the scale of the scores, and key. None if a model has none."""
    if not _by_head(layer):
        return None
    offset = float(_is_gemma(config))
    query = (layer.exact("self_attn.q_norm.weight") + offset) * _scale(config, heads)
    key = layer.exact("self_attn.k_norm.weight") + offset
    both = torch.cat([query.expand(heads.heads, -1), key.expand(heads.groups, -1)])
    return RmsNorm(layer.cast(both), config.rms_norm_eps)


def _activation(config: Any) -> str:
    return str(config.hidden_activation if _is_gemma(config) else config.hidden_act)


def _is_gemma(config: Any) -> bool:
    return bool(config.model_type == "gemma3_text")
