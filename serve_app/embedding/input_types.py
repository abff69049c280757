"""The input types of Cohere and NIM, and the model prompt that each one selects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

InputType = Literal["search_query", "search_document", "classification", "clustering", "query", "document", "passage"]

_QUERY = ("query", "search_query", "retrieval.query", "retrieval-query")
_DOCUMENT = ("document", "passage", "search_document", "corpus", "retrieval.passage", "retrieval-document")
_USUAL: Mapping[InputType, tuple[str, ...]] = {  # names of prompts in models' files, lower case; the first found wins
    "search_query": _QUERY,
    "query": _QUERY,
    "search_document": _DOCUMENT,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}


def prompt_names(prompts: Mapping[str, str]) -> dict[InputType, str]:
    """Input type -> the name of its prompt in a model's `prompts`, or empty if the model has none."""
    known = {name.lower(): name for name in prompts}
    kinds: tuple[InputType, ...] = get_args(InputType)
    return {kind: next((known[name] for name in _USUAL[kind] if name in known), "") for kind in kinds}
