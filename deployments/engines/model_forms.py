"""The forms in which a model can run: packed, without padding, on CUDA also with its small passes as graphs; or padded,
with its own code. Imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
)

from deployments.engines import TokenBatch, packed
from deployments.engines.cuda_graphs import NoGraph
from deployments.engines.graphed_model import GraphedModel, has_graphs
from deployments.engines.packed import heads
from deployments.engines.packed.model import ModelOutput, PackedModel, Parts, Recorded, Shadow
from deployments.engines.packed.tensors import MissingWeight, Place, Weights
from deployments.engines.pooled_model import PaddedModel, PooledModel
from deployments.errors import first_line
from deployments.models.model_files import ModelCard
from deployments.models.model_folder import bad_model

logger = logging.getLogger("ray.serve")

Encoder = PackedModel | GraphedModel | PaddedModel
Build = Callable[[], Encoder]


class Forms:
    """The forms of a model whose weights are loaded in float32."""

    def __init__(self, card: ModelCard) -> None:
        """Load the model. Raises SettingsError if its files cannot be loaded."""
        self._card, self._own = card, PooledModel(card)
        self._recipe = _Recipe(card, self._own.transformer.config, type(self._own.model))

    def builds(self, place: Place) -> dict[str, Build]:
        """A builder for each available form. Call the padded form's last: it casts the loaded weights, so nothing can
        be built after it.
        """
        found: dict[str, Build] = {}
        if self._recipe.why_not() is None:
            packed = cache(lambda: self._recipe.build(Weights.of_module(self._own.model, place)))
            found["packed"] = packed
            if has_graphs(self._card, place.device):
                found["graphs"] = lambda: GraphedModel(packed(), self._card)
        found["padded"] = lambda: PaddedModel(self._own, place.dtype, place.device)
        return found

    def exact(self, device: torch.device) -> PaddedModel:
        """The reference for comparisons: the model's own code in float32."""
        return PaddedModel(self._own, torch.float32, device)


class LargeForms:
    """The forms of a model that must never be in memory in float32 as a whole: packed from its files, layer by layer,
    or padded with its own code if it has no packed form.
    """

    def __init__(self, card: ModelCard) -> None:
        """Read the model's config. Raises SettingsError if it cannot be read."""
        config = read_config(card)
        classes = MODEL_MAPPING
        if card.has_head:
            classes = (
                MODEL_FOR_MASKED_LM_MAPPING if card.kind == "sparse" else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
            )
        self._card = card
        self._recipe = _Recipe(card, config, classes[type(config)]) if type(config) in classes else None

    @property
    def has_packed(self) -> bool:
        return self._recipe is not None and self._recipe.why_not() is None

    def padded(self, place: Place) -> PaddedModel:
        return PaddedModel(PooledModel(self._card, dtype=place.dtype), place.dtype, place.device)

    def packed(self, place: Place) -> PackedModel:
        """Build the packed form. Raises SettingsError if a weight is missing."""
        return self._build(place)

    def packed_beside(self, place: Place, batch: TokenBatch) -> tuple[PackedModel, Recorded]:
        """Build the packed form, and compute this batch in float32 for comparison. Each layer computes the batch in
        float32 when its narrow form is built.
        """
        assert self._recipe is not None
        exact = self._recipe.weights(Place(place.device, torch.float32))
        ids = torch.from_numpy(batch.ids).to(place.device)
        with torch.inference_mode():
            shadow = Shadow(self._recipe.parts(exact), ids, batch.lengths, exact.place)
            model = self._build(place, shadow)
            return model, shadow.recorded(self._recipe.answer(exact))

    def with_graphs(self, model: Encoder) -> Encoder:
        """The model with its small passes as CUDA graphs, or the same if that does not pay."""
        if not isinstance(model, PackedModel) or not has_graphs(self._card, model.place.device):
            return model
        try:
            return GraphedModel(model, self._card)
        except NoGraph as why:
            logger.info("no pass runs as a CUDA graph: %s", why)
            return model

    def _build(self, place: Place, shadow: Shadow | None = None) -> PackedModel:
        assert self._recipe is not None
        try:
            return self._recipe.build(self._recipe.weights(place), shadow)
        except MissingWeight as error:
            raise bad_model(
                f"a {self._card.model_type} model's weight {error.args[0]} is missing in {self._card.folder}"
            ) from None


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a model is packed: its config, and the transformers class that names its weights."""

    card: ModelCard
    config: Any
    model_class: Any

    def why_not(self) -> str | None:
        """Why there is no packed form, or None."""
        reason = packed.unsupported(self.config)
        if reason is None and self.card.has_head:
            reason = heads.unsupported(self.model_class.__name__)
        return reason

    def weights(self, place: Place) -> Weights:
        """The tensors in the files that the class has. It may lack a bias that another class has."""
        found, prefix = Weights.of_files(self.card.folder, place), str(self.model_class.base_model_prefix)
        under = f"{prefix}." if found.has(prefix) and not self.card.has_head else ""
        with torch.device("meta"):
            state = self.model_class(self.config).state_dict()
        return found.of_class({under + name: tensor.shape for name, tensor in state.items()})

    def parts(self, weights: Weights) -> Parts:
        """The parts of the model. `weights`: named as in the class or, if saved from a base model, as in its base."""
        prefix = str(self.model_class.base_model_prefix)
        base = weights.within(prefix if weights.has(prefix) else "")
        parts = packed.build(self.config, base, types=self.card.token_types)
        return parts.hiding() if self.card.late is not None and self.card.late.has_unseen else parts

    def answer(self, weights: Weights) -> ModelOutput:
        head = heads.build_head(self.model_class.__name__, self.config, weights) if self.card.has_head else None
        return ModelOutput(self.card.pooling, head)

    def build(self, weights: Weights, shadow: Shadow | None = None) -> PackedModel:
        parts = self.parts(weights)
        return PackedModel(parts if shadow is None else shadow.beside(parts), weights.place, self.answer(weights))


def read_config(card: ModelCard) -> Any:
    """The transformers config of a model. Raises SettingsError if it cannot be read."""
    try:
        if card.config is not None:
            return AutoConfig.for_model(**card.config)
        return AutoConfig.from_pretrained(card.folder, trust_remote_code=card.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        problem = f"{card.folder}/config.json cannot be read: {first_line(error)}"
        raise bad_model(problem) from error
