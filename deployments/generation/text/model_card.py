"""Reads a generating model's files: its card, end tokens, sampling defaults and chat template. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deployments.errors import SettingsError
from deployments.generation.text.sampling import Sampling
from deployments.models.model_files import ModelCard, read_model_card
from deployments.models.model_folder import read_json, understood
from deployments.settings import ModelSettings

_TEMPLATE_FILE = "chat_template.jinja"
_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_AS_DECODER = {"kind": "embedding", "pooling": "last", "normalize": False}  # so that any decoder's files can be read


@dataclass(frozen=True, slots=True)
class GenerationCard:
    """A generating model. `model.max_tokens` is its context: the most tokens of a prompt and its answer together.

    - `end_tokens`: ids that each end an answer. See `with_end_of`.
    - `defaults`: the sampling options of requests that do not set them.
    - `chat_template`: the model's own Jinja template; None if it has none.
    - `special_tokens`: tokens that templates know by name: `bos_token` and others.
    """

    model: ModelCard
    end_tokens: tuple[int, ...]
    defaults: Sampling
    chat_template: str | None
    special_tokens: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def context(self) -> int:
        return self.model.max_tokens


def read_generation_card(settings: ModelSettings) -> GenerationCard:
    """Read a model's files, fetched if `id` is a hub name. Raises SettingsError, which names the setting."""
    model = read_model_card(settings.model_copy(update=_AS_DECODER))
    folder = model.folder
    with understood(settings.id):
        config, own = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
        return GenerationCard(
            model=model,
            end_tokens=_end_tokens(own, config, model.vocab_size),
            defaults=_defaults(own),
            chat_template=_chat_template(folder),
            special_tokens=_special_tokens(read_json(folder / "tokenizer_config.json"), folder),
        )


def with_end_of(card: GenerationCard, tokenizer: Tokenizer) -> GenerationCard:
    """The card with the tokenizer's own `eos_token` among its end tokens, as vLLM has it."""
    token = tokenizer.token_to_id(card.special_tokens.get("eos_token", ""))
    if token is None or token in card.end_tokens or token >= card.model.vocab_size:
        return card
    return replace(card, end_tokens=(*card.end_tokens, token))


def _end_tokens(own: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end tokens of generation_config.json, else of config.json. Raises SettingsError."""
    named = own.get("eos_token_id", config.get("eos_token_id"))
    found = tuple(named) if isinstance(named, list) else () if named is None else (named,)
    if not all(type(one) is int and 0 <= one < vocab_size for one in found):
        raise SettingsError("args.model.id", f"eos_token_id is {named}, but the model has {vocab_size} tokens")
    return found


def _defaults(own: Mapping[str, Any]) -> Sampling:
    """The file's sampling options, completed as vLLM does: all tokens may come, at a temperature of 1."""
    values = {name: own[name] for name in _DEFAULTED if own.get(name) is not None}
    if (
        not all(type(value) in {int, float} for value in values.values())
        or not values.get("temperature", 1) >= 0
        or not values.get("top_k", 0) >= -1
        or not 0 < values.get("top_p", 1) <= 1
        or not 0 <= values.get("min_p", 0) <= 1
        or not 0 < values.get("repetition_penalty", 1) < math.inf
    ):
        raise SettingsError("args.model.id", f"generation_config.json has invalid sampling values: {values}")
    found: dict[str, Any] = {name: float(value) for name, value in values.items()}
    return Sampling(**found | {"top_k": max(0, int(values.get("top_k", 0)))})


def _special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    named = {**config, **read_json(folder / "special_tokens_map.json")} if "bos_token" not in config else config
    contents = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in named.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _chat_template(folder: Path) -> str | None:
    """The template in its own file, else the default one in tokenizer_config.json, as transformers reads them."""
    path = folder / _TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    named = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(named, list):
        named = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}.get("default")
    if named is not None and not isinstance(named, str):
        raise SettingsError("args.model.id", "chat_template in tokenizer_config.json is not a template")
    return named
