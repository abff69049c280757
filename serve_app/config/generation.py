"""The settings of an application that generates, as what plans, starts and checks applications reads them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deployments.generation.settings import GenerationRouterConfig, GenerationSettings
from deployments.generation.text.model_card import read_generation_card
from deployments.hardware.device_detector import ACCELERATOR, CPU

_DEPLOYMENTS = {ACCELERATOR: "AcceleratorGenerator", CPU: "CpuGenerator"}


class GenerationArgs:
    """The `args` of an application; beside `config.models.Args`, those of embeddings. It serves one model."""

    def __init__(self, raw: Any) -> None:
        """Raises SettingsError that names the key."""
        self.shared = GenerationSettings.parse(raw)
        self.models: Mapping[str, GenerationSettings] = {self.shared.model.served_name: self.shared}

    def deployments(self) -> dict[str, dict[str, str]]:
        """Model -> pool -> the name of its Serve deployment."""
        return dict.fromkeys(self.models, _DEPLOYMENTS)

    def locating(self, _: str) -> AbstractContextManager[None]:
        """Where settings are wrong the SettingsError names the key as it is: there is one model."""
        return nullcontext()

    def find_models(self) -> None:
        """Look at the model's files, fetching them if need be. Raises SettingsError."""
        read_generation_card(self.shared.model)

    def router_configs(self, raw: Any) -> dict[str, GenerationRouterConfig]:
        """The model's `user_config` of the Router. Raises SettingsError."""
        return {name: GenerationRouterConfig.parse(raw) for name in self.models}
