"""BERT and its kin (RoBERTa, XLM-RoBERTa, CamemBERT): a table of positions, norms after each sum. Imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from deployments.engines.packed.attention import Heads, attention_for
from deployments.engines.packed.layers import ACTIVATIONS, Mlp, PostNorm, SelfAttention, dense, layer_norm
from deployments.engines.packed.model import Embeddings, Parts
from deployments.engines.packed.tensors import Weights


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
    heads = config.num_attention_heads
    shape = Heads(heads, heads, config.hidden_size // heads)
    attention = attention_for(shape, weights.place)

    def block(number: int) -> PostNorm:
        layer = weights.within(f"encoder.layer.{number}")
        qkv = [f"attention.self.{part}" for part in ("query", "key", "value")]
        return PostNorm(
            SelfAttention(
                shape,
                dense(layer, *qkv, scales=(shape.size**-0.5, 1.0, 1.0)),
                dense(layer, "attention.output.dense"),
                attention,
            ),
            layer_norm(layer, "attention.output.LayerNorm", config.layer_norm_eps),
            Mlp(dense(layer, "intermediate.dense", activation=config.hidden_act), dense(layer, "output.dense")),
            layer_norm(layer, "output.LayerNorm", config.layer_norm_eps),
        )

    return Parts(
        partial(_embeddings, config, weights.within("embeddings"), types),
        [partial(block, number) for number in range(config.num_hidden_layers)],
    )


def _embeddings(config: Any, weights: Weights, types: bool) -> Embeddings:
    first = 0 if config.model_type == "bert" else config.pad_token_id + 1  # RoBERTa counts from behind the padding's
    of_type = weights.exact("token_type_embeddings.weight")
    return Embeddings(
        weights["word_embeddings.weight"],
        weights.cast(weights.exact("position_embeddings.weight")[first:] + of_type[0]),
        layer_norm(weights, "LayerNorm", config.layer_norm_eps),
        weights.cast(of_type[1] - of_type[0]) if types else None,
    )
