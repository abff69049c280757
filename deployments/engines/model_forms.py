"""The forms in which a model can run: packed, without padding, on CUDA also with its small passes as graphs; or padded,
with its own code. Imports torch.
"""

from __future__ import annotations

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

from deployments.engines import Vectors, packed
from deployments.engines.graphed_model import GraphedModel, has_graphs
from deployments.engines.memory import give_back_freed_memory, keep_freed_memory
from deployments.engines.packed import heads
from deployments.engines.packed.model import ModelOutput, PackedModel, Parts
from deployments.engines.packed.tensors import MissingWeight, Place, Weights
from deployments.engines.pooled_model import PaddedModel, PooledModel
from deployments.engines.projection_heads import PooledEncoder
from deployments.errors import first_line
from deployments.models.model_files import ModelCard
from deployments.models.model_folder import bad_model

Encoder = PackedModel | GraphedModel | PaddedModel
Build = Callable[[], Encoder]
Run = Callable[[PooledEncoder], Vectors]  # of the probe: its first output


class Forms:
    """The forms of a model whose weights are loaded in float32. `reference`: what the model's own code computes."""

    reference: Vectors | None = None

    def __init__(self, card: ModelCard) -> None:
        """Load the model. Raises SettingsError if its files cannot be loaded."""
        self._card, self._own = card, PooledModel(card)
        self._recipe = _Recipe(card, self._own.transformer.config, type(self._own.model))
        self._is_cast = False

    def builds(self, place: Place, run: Run | None = None) -> dict[str, Build]:
        """A builder for each available form, the best first. Call the padded form's last: it casts the loaded weights.
        `run`: computes the `reference`.
        """
        if self._is_cast:  # the low bits are lost
            self._own, self._is_cast = PooledModel(self._card), False
        if run is not None and self.reference is None:
            self.reference = run(PaddedModel(self._own, torch.float32, place.device))
        own, found = self._own, dict[str, Build]()
        if self._recipe.why_not() is None:
            found = _with_graphs(lambda: self._recipe.build(Weights.of_module(own.model, place)), self._card, place)

        def padded() -> PaddedModel:
            self._is_cast = True
            return PaddedModel(own, place.dtype, place.device)

        return found | {"padded": padded}


class LargeForms:
    """The forms of a model that must never be in memory in float32 as a whole: packed from its files, layer by layer,
    or padded with its own code if it has no packed form. `reference`: what the layers compute in float32, one after the
    other before the narrow form is built; None if nothing is narrow, or nothing packed.
    """

    reference: Vectors | None = None

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

    def builds(self, place: Place, run: Run) -> dict[str, Build]:
        """As of `Forms`. Building raises SettingsError if a weight is missing."""
        recipe = self._recipe
        if recipe is None or recipe.why_not() is not None:
            return {
                "padded": lambda: PaddedModel(PooledModel(self._card, dtype=place.dtype), place.dtype, place.device)
            }
        return _with_graphs(lambda: self._packed(recipe, place, run), self._card, place)

    def _packed(self, recipe: _Recipe, place: Place, run: Run) -> PackedModel:
        self.reference = None
        give_back_freed_memory()
        try:
            if place.dtype != torch.float32:
                exact = recipe.weights(Place(place.device, torch.float32))
                parts = recipe.parts(exact).on_demand()
                self.reference = run(PackedModel(parts, exact.place, recipe.answer(exact)))
            return recipe.build(recipe.weights(place))
        except MissingWeight as error:
            raise bad_model(
                f"a {self._card.model_type} model's weight {error.args[0]} is missing in {self._card.folder}"
            ) from None
        finally:
            keep_freed_memory()


def _with_graphs(build: Callable[[], PackedModel], card: ModelCard, place: Place) -> dict[str, Build]:
    """Builders of the packed form, and of the same with graphs before it."""
    packed = cache(build)
    graphs: dict[str, Build] = {}
    if has_graphs(card, place.device):
        graphs["graphs"] = lambda: GraphedModel(packed(), card)
    return graphs | {"packed": packed}


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

    def build(self, weights: Weights) -> PackedModel:
        return PackedModel(self.parts(weights), weights.place, self.answer(weights))


def read_config(card: ModelCard) -> Any:
    """The transformers config of a model. Raises SettingsError if it cannot be read."""
    try:
        if card.config is not None:
            return AutoConfig.for_model(**card.config)
        return AutoConfig.from_pretrained(card.folder, trust_remote_code=card.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        problem = f"{card.folder}/config.json cannot be read: {first_line(error)}"
        raise bad_model(problem) from error
