"""Ollama's API: what its routes take, and its descriptions of the models. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from deployments.models.model_files import ModelCard
from deployments.models.text_pairs import NO_BOUNDS, TokenBounds
from deployments.models.tokenizer import Query
from serve_app.embedding.options import Options
from serve_app.web.fields import Constraint, DimensionsOrAll, Fields, Model, Text, one_or_many
from serve_app.web.openapi import Route

_FOREVER = "9999-12-31T23:59:59Z"  # models are never unloaded


class ModelOptions(Fields):
    """Ollama's `options`."""

    num_ctx: int | None = None
    """Maximum tokens per input, special tokens included; `truncate` decides on longer ones. 0: the model's maximum."""

    unused: ClassVar = {
        **dict.fromkeys(
            ("num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict"),
            "the server's settings decide how the model runs",
        ),
        **dict.fromkeys(
            (
                *("num_keep", "seed", "num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n"),
                *("temperature", "repeat_penalty", "presence_penalty", "frequency_penalty", "stop"),
            ),
            "it applies only to generated text",
        ),
    }


class OllamaOptions(Options):
    """The fields that Ollama's routes share."""

    model: Model = None
    options: ModelOptions = ModelOptions()

    unused: ClassVar = {"keep_alive": "the model stays loaded"}

    @property
    def bounds(self) -> TokenBounds:
        most = self.options.num_ctx
        return NO_BOUNDS if most is None or most <= 0 else TokenBounds(query=most)


class OllamaEmbedRequest(OllamaOptions):
    """Ollama's `POST /api/embed`."""

    input: str | Annotated[list[Text], Constraint("a list of strings", "max_inputs", may_be_empty=True)] = ""
    """An empty string or list gets no vectors."""
    dimensions: DimensionsOrAll = None

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input) if self.input else []


class OllamaPromptRequest(OllamaOptions):
    """Ollama's older `POST /api/embeddings`."""

    prompt: str = ""
    """An empty string gets an empty vector."""

    @property
    def queries(self) -> Sequence[Query]:
        return [self.prompt] if self.prompt else []


class OllamaShowRequest(Fields):
    """Ollama's `POST /api/show`."""

    model: Model = None

    other_names: ClassVar = {"name": "model"}
    unused: ClassVar = dict.fromkeys(
        ("verbose", "system", "template", "options"), "the answer describes the model as it is served"
    )


_MODELS = {"models": [{"name": str, "model": str, "modified_at": str, "size": int}]}
ABOUT = {
    "/api/tags": Route("ollama_tags", "The models that embed (Ollama)", _MODELS),
    "/api/ps": Route("ollama_ps", "The models that are loaded: all (Ollama)", _MODELS),
    "/api/version": Route("ollama_version", "The version of windve (Ollama)", {"version": str}),
    "/api/show": Route(
        "ollama_show",
        "What a model is (Ollama)",
        {"details": dict, "model_info": dict, "capabilities": [str]},
        OllamaShowRequest,
        statuses=(400, 404, 413),
    ),
}


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
