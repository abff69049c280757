"""A transformer with its pooling or head, as one torch module, and the padding of queries for it. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)
from transformers.utils import logging as transformers_logging

import deployments.engines.jina_bert  # noqa: F401 - registers its classes
from deployments.engines import TokenBatch, Vectors
from deployments.engines.micro_batches import Lengths
from deployments.errors import WindveError
from deployments.models.colbert import UNSEEN
from deployments.models.model_files import SCORING, ModelCard
from deployments.models.model_folder import bad_model
from deployments.models.text_pairs import TYPE

logger = logging.getLogger("ray.serve")

_WITH_DECODER = {"mt5", "t5", "umt5"}  # only the encoder of these is an embedding model
_PROBE_LENGTHS = (3, 8, 24, 75, 200)  # tokens of the inputs for comparisons


class PooledModel(torch.nn.Module):
    """(ids, mask), int64 [queries, tokens], padded on the right -> float32 [queries, dimension], not normalized.

    The result depends on the model's kind: a pooled vector; a logit for each label; or SPLADE's weight for each word of
    the vocabulary, which is the largest log(1 + relu(logit)) of any token.
    """

    def __init__(self, card: ModelCard, dtype: torch.dtype = torch.float32) -> None:
        """Load the weights. Raises SettingsError if the model's files cannot be loaded."""
        super().__init__()
        self._pooling, self._types = card.pooling, card.token_types
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one line in the log, not a bar
        logger.info("loading %s from %s", card.name, card.folder)
        with one_sentence("loaded", card):
            model, report = _class_of(card).from_pretrained(
                card.folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=card.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are rejected below, by name
                **({"config": AutoConfig.for_model(**card.config)} if card.config else {}),
            )
        absent = sorted(
            key
            for key in {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
            if card.pooling == "none" or "pooler." not in key  # unused unless scores come from it
        )
        if absent:  # transformers would fill them with random numbers
            raise bad_model(
                f"{len(absent)} weights of a {card.model_type} model are missing in {card.folder}, or of another size "
                f"({absent[0]}); if it comes with code of its own, set args.model.trust_remote_code"
            )
        strange = sorted(key for key in report["unexpected_keys"] if card.config and ".layer" in str(key))
        if strange:
            raise bad_model(f"{card.folder} has weights that no {card.model_type} model has ({strange[0]})")
        self.model = model.eval()
        self.transformer = model.base_model if card.has_head else model
        self._options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        self._padding: Any = getattr(model.config, "pad_token_id", None)
        if card.pooling == "none" and self._padding is None:
            raise bad_model(f"{card.folder}/config.json gives no pad_token_id, which scoring needs")

    def hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vector of each token, [queries, tokens, dimension]."""
        found: torch.Tensor = self.transformer(input_ids=ids, attention_mask=mask, **self._options).last_hidden_state
        return found

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._pooling == "none":
            return self._score(ids, mask)
        if self._pooling == "splade":
            return self._weigh(ids, mask)
        hidden = self.hidden(ids, mask)
        if self._pooling == "cls":
            return hidden[:, 0].float()
        if self._pooling == "last":
            last = (mask.sum(1) - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
            return hidden.gather(1, last).squeeze(1).float()
        assert self._pooling == "mean"  # `modules.pooled_by` refuses others
        weights = mask.unsqueeze(-1).float()
        return (hidden.float() * weights).sum(1) / weights.sum(1)

    def _score(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inputs = {"attention_mask": mask}
        if self._types:
            second = (ids >= TYPE).to(torch.int64)
            inputs["token_type_ids"] = second
            ids = ids - second * TYPE
        # decoders look for the last token that is not padding
        inputs["input_ids"] = ids.masked_fill(mask == 0, self._padding)
        logits: torch.Tensor = self.model(**inputs, **self._options).logits
        return logits.float()

    def _weigh(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, attention_mask=mask, **self._options).logits
        largest = (logits * mask.unsqueeze(-1).to(logits.dtype)).amax(1)
        weights: torch.Tensor = largest.float().relu().log1p()
        return weights


@contextmanager
def one_sentence(what: str, card: ModelCard) -> Iterator[None]:
    """Turn whatever a model's own code raises into a SettingsError with one sentence. `what`: what is being done, as a
    participle ("loaded").
    """
    try:
        yield
    except WindveError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        if not isinstance(error, OSError | ValueError | RuntimeError):
            reason = f"{type(error).__name__}: {reason}"
        raise bad_model(f"{card.folder}, a {card.model_type} model, cannot be {what} here: {reason}") from error


def _class_of(card: ModelCard) -> Any:
    if not card.has_head:
        return AutoModelForTextEncoding if card.model_type in _WITH_DECODER else AutoModel
    return AutoModelForMaskedLM if card.kind == "sparse" else AutoModelForSequenceClassification


class PaddedModel:
    """Any transformer, with its own code: packed queries are padded for it. For models without a packed form."""

    form, padded = "padded", True

    def __init__(self, model: PooledModel, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model.to(device, dtype)
        self._device = device

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor:
        columns = torch.arange(int(lengths.max()), device=self._device)
        mask = columns < torch.from_numpy(lengths).to(self._device)[:, None]
        padded = torch.zeros(mask.shape, dtype=torch.int64, device=self._device)
        padded[mask] = ids.to(torch.int64)
        if each_token:
            seen = mask & (padded < UNSEEN)
            return self._model.hidden(padded & (UNSEEN - 1), seen.to(torch.int64))[mask].float()
        pooled: torch.Tensor = self._model(padded, mask.to(torch.int64))
        return pooled


def probe_batch(card: ModelCard) -> TokenBatch:
    """A batch of fixed pseudo-random token ids of several lengths, on which number formats are compared."""
    lengths = [min(length, card.max_tokens) for length in _PROBE_LENGTHS]
    batch = TokenBatch.random(card.vocab_size, lengths, 0, card.outputs_for(card.kind))
    if card.token_types:
        for query in batch.queries():
            query[len(query) // 2 :] += TYPE
    return batch


def agreement(one: Vectors, other: Vectors) -> float:
    """The smallest cosine between corresponding rows; NaN if a vector contains NaN."""
    return float(np.min(_cosines(one, other)))


def _cosines(one: Vectors, other: Vectors) -> Vectors:
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: Vectors = np.sum(one * other, axis=1) / norms
    return found


def score_agreement(exact: Vectors, other: Vectors) -> float:
    """1 minus the largest difference of a logit, relative to the logits' spread (the range of `exact`), or to 1 if that
    is larger. NaN if a logit is NaN.

    A cosine means nothing for one number, and little for three. Logits have an absolute scale: a difference of 0.05
    moves a score, which is the sigmoid of a logit, by at most 0.0125.
    """
    return 1 - float(np.max(np.abs(exact - other))) / max(1.0, float(np.ptp(exact)))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How results are compared with float32, and the least agreement of a default."""

    of: Callable[[Vectors, Vectors], float]
    least: float
    words: str

    def describe(self, value: float) -> str:
        return f"{self.words} {value:.5f}"


_COSINE = Tolerance(agreement, 0.999, "cosine to float32")
_MEAN_COSINE = Tolerance(lambda one, other: float(np.mean(_cosines(one, other))), 0.999, "mean cosine to float32")
_OF_SCORES = Tolerance(score_agreement, 0.95, "agreement of logits with float32")


def tolerance(card: ModelCard) -> Tolerance:
    if card.kind == "multi_vector":  # its tokens' similarities are added up
        return _MEAN_COSINE
    return _OF_SCORES if card.kind in SCORING else _COSINE
