"""Ollama's descriptions of the models: their list and their details. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from deployments.models.model_files import ModelCard

ABOUT = ("/api/tags", "/api/ps", "/api/version", "/api/show")
_FOREVER = "9999-12-31T23:59:59Z"  # models are never unloaded


def listed(card: ModelCard, started: float) -> dict[str, Any]:
    """The entry in `/api/tags`. `started`: Unix time in seconds. `size`: bytes, at four per parameter."""
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": _time(started),
        "size": 4 * card.parameters,
        "digest": card.revision or "",
        "details": _details(card),
        "capabilities": ["embedding"],
    }


def running(card: ModelCard, started: float) -> dict[str, Any]:
    """The entry in `/api/ps`."""
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": card.max_tokens}
    return {**listed(card, started), **more}


def shown(card: ModelCard, started: float) -> dict[str, Any]:
    """The answer of `/api/show`."""
    family = card.model_type
    return {
        "details": _details(card),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": card.parameters,
            f"{family}.context_length": card.max_tokens,
            f"{family}.embedding_length": card.dimension,
        },
        "capabilities": ["embedding"],
        "modified_at": _time(started),
    }


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.model_type,
        "families": [card.model_type],
        "parameter_size": f"{card.parameters / 1e6:.1f}M",
        "quantization_level": "",
    }


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
