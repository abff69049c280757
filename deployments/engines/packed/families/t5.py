"""The encoders of T5 and mT5: norms before each sum, scores without a scale, and a learned bias by distance that all
blocks share. Imports torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from deployments.engines.packed.attention import HeadLayout, attention_for
from deployments.engines.packed.layers import ACTIVATIONS, GatedMlp, Mlp, PreNorm, SelfAttention, dense, rms_norm
from deployments.engines.packed.model import Embeddings, Parts
from deployments.engines.packed.positions import relative_buckets
from deployments.engines.packed.tensors import Weights

_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def unsupported(config: Any) -> str | None:
    activation = config.dense_act_fn
    return None if activation in ACTIVATIONS else f"the activation {activation} has no packed form here"


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:  # noqa: ARG001 - it has none
    heads = HeadLayout(config.num_heads, config.num_heads, config.d_kv)
    bias = relative_buckets(weights.exact(_BIAS), config.relative_attention_max_distance)
    attention = attention_for(heads, weights.place, bias=bias)
    norm = partial(rms_norm, eps=config.layer_norm_epsilon)

    def block(number: int) -> PreNorm:
        layers = weights.within(f"encoder.block.{number}.layer")
        first, second = layers.within("0.SelfAttention"), layers.within("1.DenseReluDense")
        return PreNorm(
            norm(layers, "0.layer_norm"),
            SelfAttention(heads, dense(first, "q", "k", "v"), dense(first, "o"), attention),
            norm(layers, "1.layer_norm"),
            _mlp(second, config.dense_act_fn),
        )

    return Parts(
        lambda: Embeddings(weights["shared.weight"]),
        [partial(block, number) for number in range(config.num_layers)],
        partial(norm, weights, "encoder.final_layer_norm"),
    )


def _mlp(weights: Weights, activation: str) -> Mlp | GatedMlp:
    down = dense(weights, "wo")
    if "wi.weight" in weights:
        return Mlp(dense(weights, "wi", activation=activation), down)
    return GatedMlp(dense(weights, "wi_0", activation=activation), dense(weights, "wi_1"), down)
