"""What an input is for, in the words of Cohere and NIM, and which of a model's prompts that is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

InputType = Literal["search_query", "search_document", "classification", "clustering", "query", "document", "passage"]

_QUERY = ("query", "search_query", "retrieval.query", "retrieval-query")
_DOCUMENT = ("document", "passage", "search_document", "corpus", "retrieval.passage", "retrieval-document")
_USUAL: Mapping[InputType, tuple[str, ...]] = {  # names of prompts in models' files, in small letters; the first counts
    "search_query": _QUERY,
    "query": _QUERY,
    "search_document": _DOCUMENT,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}


def prompt_names(prompts: Mapping[str, str]) -> dict[InputType, str]:
    """By type of input, the name of the prompt in a model's `prompts`; empty where it has none."""
    known = {name.lower(): name for name in prompts}
    kinds: tuple[InputType, ...] = get_args(InputType)
    return {kind: next((known[name] for name in _USUAL[kind] if name in known), "") for kind in kinds}
