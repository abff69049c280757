"""The heads of BERT and its kin, over the packed tokens of `PackedBert`: scores, and SPLADE's words. Imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.packed_bert import Cast, Head, Layout, dense_of, norm_of
from deployments.engines.passes import even_slices

_SCORES = {"Bert", "Camembert", "Roberta", "XLMRoberta"}
_WORD_TOKENS = 2048  # whose numbers, one for each word of the vocabulary, are in memory at once


def unsupported(model: Any) -> str | None:
    """Why the head of this transformers model has no packed form here, or None."""
    name = type(model).__name__
    if any(name in {f"{kin}ForSequenceClassification", f"{kin}ForMaskedLM"} for kin in _SCORES):
        return None
    return f"the head of {name} has no packed form here"


def head_of(model: Any, cast: Cast) -> Head:
    """The model's head, with its weights laid out for the device. It must not be `unsupported`."""
    is_bert = type(model).__name__.startswith("Bert")
    if type(model).__name__.endswith("ForSequenceClassification"):
        return _bert_scores(model, cast) if is_bert else _roberta_scores(model, cast)
    if is_bert:
        words = model.cls.predictions
        transform = words.transform
        return _Words(transform.dense, model.config.hidden_act, transform.LayerNorm, words.decoder, cast)
    words = model.lm_head
    return _Words(words.dense, "gelu", words.layer_norm, words.decoder, cast)


def _bert_scores(model: Any, cast: Cast) -> Head:
    return _Scores(model.bert.pooler.dense, model.classifier, cast)


def _roberta_scores(model: Any, cast: Cast) -> Head:
    return _Scores(model.classifier.dense, model.classifier.out_proj, cast)


class _Scores:
    """Logits float32 [queries, labels] of each query's first token."""

    def __init__(self, dense: Any, out: Any, cast: Cast) -> None:
        self._weight, self._bias = cast(dense.weight), cast(dense.bias)
        self._out_weight, self._out_bias = cast(out.weight), cast(out.bias)

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        first = x.index_select(0, layout.bounds[:-1])
        hidden = functional.linear(first, self._weight, self._bias).tanh()
        return functional.linear(hidden, self._out_weight, self._out_bias).float()


class _Words:
    """SPLADE's weights float32 [queries, vocabulary]: of each word the largest logit that any token gives it, as
    log(1 + relu(logit)). Both functions grow with the logit, so that the largest is taken first.
    """

    def __init__(self, dense: Any, activation: str, norm: Any, decoder: Any, cast: Cast) -> None:
        self._dense, self._norm = dense_of(dense, cast, activation), norm_of(norm, cast)
        self._decoder = dense_of(decoder, cast)

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = self._norm(self._dense(x))
        largest: list[torch.Tensor] = []
        start = 0
        for chosen in even_slices(np.array(layout.lengths, np.int32), -(-layout.tokens // _WORD_TOKENS)):
            lengths = layout.lengths[chosen]
            logits = self._decoder(x[start : start + sum(lengths)])
            largest += [one.amax(0) for one in torch.split(logits, lengths)]
            start += sum(lengths)
        return torch.stack(largest).float().relu().log1p()
