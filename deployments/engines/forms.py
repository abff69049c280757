"""The forms in which a model can run: packed, without padding, and padded, in its own code. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from deployments.engines import packed
from deployments.engines.packed import heads
from deployments.engines.packed.model import PackedModel
from deployments.engines.packed.tensors import Place, Weights
from deployments.engines.pooled_model import PaddedModel, PooledModel
from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard

Build = Callable[[], PackedModel | PaddedModel]


class Forms:
    """Of one model whose weights are loaded; or, of a family without code in the transformers library, lie in files."""

    def __init__(self, card: ModelCard) -> None:
        """Raises SettingsError where the model's files cannot be loaded."""
        self._card = card
        config = read_config(card)
        self._own: PooledModel | None = None
        if packed.has_own_code(config):
            self._own = PooledModel(card)
            config = self._own.transformer.config
        self._config = config

    def builds(self, place: Place) -> dict[str, Build]:
        """What builds each form that there is. The padded one is the last: it casts the weights that were loaded, so
        that nothing can be built behind it.
        """
        found: dict[str, Build] = {}
        if self._why_not_packed() is None:
            found["packed"] = lambda: self._pack(place)
        if self._own is not None:
            own = self._own
            found["padded"] = lambda: PaddedModel(own, place.dtype, place.device)
        return found

    def exact(self, device: torch.device) -> PackedModel | PaddedModel:
        """What the others are compared with: float32, in the model's own code where it has any."""
        return list(self.builds(Place(device, torch.float32)).values())[-1]()

    def _why_not_packed(self) -> str | None:
        reason = packed.unsupported(self._config)
        if self._card.late is not None and self._card.late.has_unseen:
            return "tokens that no other token attends to have no packed form here"
        if reason is None and self._card.has_head:
            reason = heads.unsupported(self._class_name())
        return reason

    def _class_name(self) -> str:
        return type(self._own.model).__name__ if self._own is not None else str((self._config.architectures or [""])[0])

    def _pack(self, place: Place) -> PackedModel:
        weights = self._weights(place)
        base = weights.within(self._prefix(weights))
        parts = packed.build(self._config, base, types=self._card.token_types)
        head = None
        if self._card.has_head:
            head = heads.build_head(self._class_name(), self._config, weights)
        return PackedModel(parts, place, self._card.pooling, head)

    def _weights(self, place: Place) -> Weights:
        if self._own is not None:
            return Weights.of_module(self._own.model, place)
        return Weights.of_files(self._card.folder, place)

    def _prefix(self, weights: Weights) -> str:
        """Of the base model's names: models with a head have it."""
        prefix = "bert" if self._own is None else str(self._own.model.base_model_prefix)
        return prefix if prefix and weights.has(prefix) else ""


def read_config(card: ModelCard) -> Any:
    """The transformers config of a model. Raises SettingsError where there is none."""
    if card.config is not None:
        return AutoConfig.for_model(**card.config)
    try:
        return AutoConfig.from_pretrained(card.folder, trust_remote_code=card.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SettingsError("args.model.id", f"{card.folder}/config.json cannot be read: {reason}") from error
