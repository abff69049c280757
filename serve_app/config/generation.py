"""The settings of an application that generates, in the form that planning, starting and checking use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deployments.generation.settings import GenerationRouterConfig, GenerationSettings
from deployments.generation.text.model_card import read_generation_card
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.models.model_folder import pinned

_DEPLOYMENTS = {ACCELERATOR: "AcceleratorGenerator", CPU: "CpuGenerator"}


class GenerationArgs:
    """The `args` of an application that generates, which serves one model. For embeddings see `config.models.Args`."""

    def __init__(self, raw: Any) -> None:
        """Raises SettingsError that names the key."""
        self.shared = GenerationSettings.parse(raw)
        self.models: Mapping[str, GenerationSettings] = {self.shared.model.served_name: self.shared}

    def deployments(self) -> dict[str, dict[str, str]]:
        """Model -> pool -> the name of its Serve deployment."""
        return dict.fromkeys(self.models, _DEPLOYMENTS)

    def locating(self, _: str) -> AbstractContextManager[None]:
        """Does nothing: with one model, a SettingsError already names the right key."""
        return nullcontext()

    def find_models(self) -> None:
        """Check the model's files, downloading them if necessary. Raises SettingsError."""
        read_generation_card(self.shared.model)

    def pin_revisions(self) -> None:
        """Replace the revision of a model from the hub by the commit it names now. Raises SettingsError."""
        self.shared = self.shared.model_copy(update={"model": pinned(self.shared.model)})
        self.models = {self.shared.model.served_name: self.shared}

    def router_configs(self, raw: Any) -> dict[str, GenerationRouterConfig]:
        """The Router's `user_config`, by the model's name. Raises SettingsError."""
        return {name: GenerationRouterConfig.parse(raw) for name in self.models}
