"""The heads of models that do not pool: scores, and SPLADE's words. Imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from deployments.engines.micro_batches import even_slices
from deployments.engines.packed.layers import Dense, Layer, dense, layer_norm
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.model import Head, pool
from deployments.engines.packed.tensors import Weights

_SCORES, _WORDS = "ForSequenceClassification", "ForMaskedLM"
_WORD_TOKENS = 2048  # tokens at a time: each has a number for every word of the vocabulary
_OF_ROBERTA = ("classifier.dense", "classifier.out_proj", "tanh")
_SCORED = {  # by the class name's beginning: the first token's layer, the output layer, and the activation between
    "Bert": ("bert.pooler.dense", "classifier", "tanh"),
    "Camembert": _OF_ROBERTA,
    "DistilBert": ("pre_classifier", "classifier", "relu"),
    "Gte": ("gte.pooler.dense", "classifier", "tanh"),
    "JinaBert": ("bert.pooler.dense", "classifier", "tanh"),
    "MPNet": _OF_ROBERTA,
    "Roberta": _OF_ROBERTA,
    "XLMRoberta": _OF_ROBERTA,
}
_WORDED = {"Bert", "Camembert", "DistilBert", "Roberta", "XLMRoberta"}


def unsupported(name: str) -> str | None:
    """Why the head of a transformers class of this name has no packed form here, or None."""
    kin = name.removesuffix(_SCORES)
    if kin != name and (kin in _SCORED or kin == "ModernBert"):
        return None
    if name.endswith(_WORDS) and name.removesuffix(_WORDS) in _WORDED:
        return None
    return f"the head of {name} has no packed form here"


def build_head(name: str, config: Any, weights: Weights) -> Head:
    """The head of a class of that name that is not `unsupported`. `weights`: named as in that class."""
    if name.endswith(_WORDS):
        return _words(name.removesuffix(_WORDS), config, weights)
    if name == f"ModernBert{_SCORES}":
        hidden = Hidden(weights, "head.dense", config.classifier_activation)
        norm = layer_norm(weights, "head.norm", config.norm_eps)
        return Scores(weights, "classifier", lambda x: norm(hidden(x)), config.classifier_pooling)
    first, out, activation = _SCORED[name.removesuffix(_SCORES)]
    return Scores(weights, out, Hidden(weights, first, activation))


def _words(kin: str, config: Any, weights: Weights) -> Words:
    if kin == "Bert":
        words, eps = weights.within("cls.predictions"), config.layer_norm_eps
        transform = dense(words, "transform.dense", activation=config.hidden_act)
        return Words(transform, layer_norm(words, "transform.LayerNorm", eps), dense(words, "decoder"))
    if kin == "DistilBert":
        transform = dense(weights, "vocab_transform", activation=config.activation)
        return Words(transform, layer_norm(weights, "vocab_layer_norm", 1e-12), dense(weights, "vocab_projector"))
    words = weights.within("lm_head")
    norm = layer_norm(words, "layer_norm", config.layer_norm_eps)
    return Words(dense(words, "dense", activation="gelu"), norm, dense(words, "decoder"))


class Hidden:
    """A layer for few rows, one for each query, with its activation."""

    def __init__(self, weights: Weights, name: str, activation: str) -> None:
        self._weight, self._bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        self._activation: Layer = ACT2FN[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activation(functional.linear(x, self._weight, self._bias))


class Scores:
    """Logits, float32 [queries, labels], of each query's first token or of the mean of its tokens, after `hidden`."""

    def __init__(self, weights: Weights, out: str, hidden: Layer, pooling: str = "cls") -> None:
        self._weight, self._bias = weights[f"{out}.weight"], weights[f"{out}.bias"]
        self._hidden, self.pooling = hidden, pooling

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        hidden = self._hidden(pool(x, layout, self.pooling).to(x.dtype))
        return functional.linear(hidden, self._weight, self._bias).float()


class Words:
    """SPLADE's weights, float32 [queries, vocabulary]: log(1 + relu(logit)) of the largest logit that any token gives a
    word. Both functions are monotonic, so the largest logit is taken first.
    """

    def __init__(self, transform: Dense, norm: Layer, decoder: Dense) -> None:
        self._transform, self._norm, self._decoder = transform, norm, decoder

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = self._norm(self._transform(x))
        largest: list[torch.Tensor] = []
        start = 0
        for chosen in even_slices(np.array(layout.lengths, np.int32), -(-layout.tokens // _WORD_TOKENS)):
            lengths = layout.lengths[chosen]
            logits = self._decoder(x[start : start + sum(lengths)])
            largest += [one.amax(0) for one in torch.split(logits, lengths)]
            start += sum(lengths)
        return torch.stack(largest).float().relu().log1p()
