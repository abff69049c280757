"""The error for a model that is not served."""

from __future__ import annotations

from deployments.errors import UnknownModel

LATEST = ":latest"  # the tag that Ollama's clients append to a name


def unknown_model(name: str, there: tuple[str, ...]) -> UnknownModel:
    return UnknownModel(f"there is no model '{name}' here; this server serves {listed(there)}", param="model")


def listed(names: tuple[str, ...]) -> str:
    *others, last = (f"'{name}'" for name in names)
    return f"{', '.join(others)} and {last}" if others else last
