"""What comes after the tokens of a model that does not pool: scores, and SPLADE's words. Imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.packed.layers import Dense, Layer, dense, layer_norm
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.model import Head
from deployments.engines.packed.tensors import Weights
from deployments.engines.passes import even_slices

_KIN = ("Bert", "Camembert", "Roberta", "XLMRoberta")
_SCORES, _WORDS = "ForSequenceClassification", "ForMaskedLM"
_WORD_TOKENS = 2048  # whose numbers, one for each word of the vocabulary, are in memory at once


def unsupported(name: str) -> str | None:
    """Why the head of a transformers class of this name has no packed form here, or None."""
    if any(name in {f"{kin}{_SCORES}", f"{kin}{_WORDS}"} for kin in _KIN):
        return None
    return f"the head of {name} has no packed form here"


def build_head(name: str, config: Any, weights: Weights) -> Head:
    """The head of a class of that name, which is not `unsupported`; `weights` are under that class's names."""
    is_bert = name.startswith("Bert")
    if name.endswith(_SCORES):
        return Scores(weights, *(("bert.pooler.dense", "classifier") if is_bert else _ROBERTA_SCORES))
    if is_bert:
        words, eps = weights.within("cls.predictions"), config.layer_norm_eps
        transform = dense(words, "transform.dense", activation=config.hidden_act)
        return Words(transform, layer_norm(words, "transform.LayerNorm", eps), dense(words, "decoder"))
    words = weights.within("lm_head")
    norm = layer_norm(words, "layer_norm", config.layer_norm_eps)
    return Words(dense(words, "dense", activation="gelu"), norm, dense(words, "decoder"))


_ROBERTA_SCORES = ("classifier.dense", "classifier.out_proj")


class Scores:
    """Logits float32 [queries, labels] of each query's first token: a product, tanh, and another product."""

    def __init__(self, weights: Weights, hidden: str, out: str) -> None:
        self._weight, self._bias = weights[f"{hidden}.weight"], weights[f"{hidden}.bias"]
        self._out_weight, self._out_bias = weights[f"{out}.weight"], weights[f"{out}.bias"]

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        first = x.index_select(0, layout.bounds[:-1])
        hidden = functional.linear(first, self._weight, self._bias).tanh()
        return functional.linear(hidden, self._out_weight, self._out_bias).float()


class Words:
    """SPLADE's weights float32 [queries, vocabulary]: of each word the largest logit that any token gives it, as
    log(1 + relu(logit)). Both functions grow with the logit, so that the largest is taken first.
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
