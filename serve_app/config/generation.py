"""The settings of an application that generates, in the form that planning, starting and checking use. Pure."""

from __future__ import annotations

from typing import Any, ClassVar

from deployments.generation.settings import GenerationRouterConfig, GenerationSettings
from deployments.generation.text.model_card import GenerationCard, read_generation_card
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.settings import ModelSettings
from serve_app.config.models import ArgsOf


class GenerationArgs(ArgsOf[GenerationSettings]):
    """The `args` of an application that generates, which serves one model."""

    pools: ClassVar = {ACCELERATOR: "AcceleratorGenerator", CPU: "CpuGenerator"}

    def __init__(self, raw: Any) -> None:
        """Raises SettingsError that names the key."""
        self.shared = only = GenerationSettings.parse(raw)
        self.models = {only.model.served_name: only}

    def read_card(self, model: ModelSettings) -> GenerationCard:
        return read_generation_card(model)

    def router_configs(self, raw: Any) -> dict[str, GenerationRouterConfig]:
        """The Router's `user_config`, by the model's name. Raises SettingsError."""
        return {name: GenerationRouterConfig.parse(raw) for name in self.models}
