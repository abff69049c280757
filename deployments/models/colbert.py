"""How a ColBERT model reads queries and documents: markers, lengths, and mask tokens that pad queries.

Three libraries save such models, each in its own format: PyLate, Stanford's ColBERT, and sentence-transformers.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from deployments.models.folder_keys import PYLATE
from deployments.models.model_folder import bad_model, read_json
from deployments.models.modules import module_config, transformer_config

Role = Literal["query", "document"]

# A token that pads a query may attend to the others without any attending to it. Its id carries that, as with a second
# text's tokens (`text_pairs.TYPE`).
UNSEEN = 1 << 29
_QUERY_TOKENS, _DOCUMENT_TOKENS = 32, 180  # PyLate's and ColBERT's defaults


@dataclass(frozen=True, slots=True)
class Reading:
    """How texts of one role become tokens.

    - `most`: the most tokens, special ones included; None: as many as the model takes.
    - `marker`: a token that is inserted after the first one. `prompt`: a text that goes before the text.
    - `fill`: a shorter text is padded to this many tokens with the mask token. `seen`: other tokens attend to these.
    """

    most: int | None = None
    marker: str | None = None
    prompt: str = ""
    fill: int = 0
    seen: bool = False


@dataclass(frozen=True, slots=True)
class Late:
    """How a late-interaction model reads texts. `skipped`: words whose tokens get no vector in a document."""

    query: Reading
    document: Reading
    skipped: tuple[str, ...] = ()

    @property
    def has_unseen(self) -> bool:
        """Whether queries are padded with tokens to which no other token attends."""
        return self.query.fill > 0 and not self.query.seen


def is_stanford(config: Mapping[str, Any]) -> bool:
    """Whether Stanford's ColBERT saved the model, by its config.json."""
    return "HF_ColBERT" in (config.get("architectures") or [])


def read_late(folder: Path, config: Mapping[str, Any]) -> Late:
    """Read the files of a ColBERT model. Raises SettingsError for what is not supported."""
    if is_stanford(config):
        return _stanford(read_json(folder / "artifact.metadata"))
    sentence = read_json(folder / "config_sentence_transformers.json")
    return _pylate(sentence) if sentence.get("model_type", "ColBERT") == "ColBERT" else _sentence(folder, sentence)


def _stanford(about: Mapping[str, Any]) -> Late:
    length = about.get("query_maxlen") or _QUERY_TOKENS
    return Late(
        Reading(
            length,
            about.get("query_token_id") or "[unused0]",
            fill=length,
            seen=bool(about.get("attend_to_mask_tokens")),
        ),
        Reading(about.get("doc_maxlen") or _DOCUMENT_TOKENS, about.get("doc_token_id") or "[unused1]"),
        tuple(string.punctuation) if about.get("mask_punctuation", True) else (),
    )


def _pylate(about: Mapping[str, Any]) -> Late:
    if any((about.get("prompts") or {}).values()):
        raise bad_model("a model of PyLate with prompts is not supported")
    length = about.get("query_length") or _QUERY_TOKENS
    query, document = (about.get(f"{role}_prefix") for role in ("query", "document"))
    skipped = about.get("skiplist_words")
    return Late(
        Reading(
            length,
            "[Q] " if query is None else query or None,
            fill=length if about.get("do_query_expansion", True) is not False else 0,
            seen=bool(about.get("attend_to_expansion_tokens", about.get("attend_to_mask_tokens"))),
        ),
        Reading(about.get("document_length") or _DOCUMENT_TOKENS, "[D] " if document is None else document or None),
        tuple(string.punctuation if skipped is None else skipped),
    )


def _sentence(folder: Path, about: Mapping[str, Any]) -> Late:
    """Read the format of sentence-transformers' MultiVectorEncoder."""
    transformer = transformer_config(folder)
    mask = module_config(folder, "MultiVectorMask") or {}
    prompts = about.get("prompts") or {}
    filled = transformer.get("query_expansion") or {}
    if filled.get("token") is not None:
        raise bad_model(f"the model's query_expansion: token {filled['token']} is not supported")
    if found := [key for key in sorted(PYLATE) if about.get(key) is not None]:
        raise bad_model(f"the model's {found[0]} is PyLate's, and its model_type is {about['model_type']}")
    if (module_config(folder, "Normalize") or {}).get("module_input_name") != "token_embeddings":
        raise bad_model("the model has no module Normalize of token_embeddings, and only unit vectors are served")
    length = filled.get("length", 0)
    return Late(
        Reading(
            length if filled.get("strategy") == "fixed" else transformer.get("query_length"),
            prompt=prompts.get("query") or "",
            fill=length,
            seen=bool(filled.get("attend")),
        ),
        Reading(transformer.get("document_length"), prompt=prompts.get("document") or ""),
        tuple(mask.get("skiplist_words") or ()),
    )


class ColbertTokens:
    """Completes the token ids of queries and documents."""

    def __init__(self, late: Late, folder: Path, token_id: Callable[[str], int | None]) -> None:
        """Look up the tokens. Raises SettingsError if the tokenizer lacks a marker or the mask token."""

        def known(token: str) -> int:
            if (number := token_id(token)) is None:
                raise bad_model(f"the tokenizer has no token {token!r}, which the model's files name")
            return number

        mask = read_json(folder / "tokenizer_config.json").get("mask_token") or "[MASK]"
        self._readings = {"query": late.query, "document": late.document}
        self._markers = {role: known(one.marker) for role, one in self._readings.items() if one.marker is not None}
        self._mask = known(mask["content"] if isinstance(mask, dict) else mask) if late.query.fill else 0
        self._skipped = [number for word in late.skipped if (number := token_id(word)) is not None]

    def prompt(self, role: Role) -> str:
        return self._readings[role].prompt

    def fills(self, role: Role) -> bool:
        """Whether short texts are padded. Long ones are then always cut."""
        return self._readings[role].fill > 0

    def most(self, role: Role, max_tokens: int) -> int:
        """The most tokens of a text before its marker is inserted."""
        return min(self._readings[role].most or max_tokens, max_tokens) - (role in self._markers)

    def complete(self, ids: npt.NDArray[np.int32], role: Role) -> npt.NDArray[np.int32]:
        """Insert the marker after the first token, and pad."""
        reading = self._readings[role]
        if role in self._markers:
            ids = np.insert(ids, 1, self._markers[role])
        filling = self._mask if reading.seen else self._mask | UNSEEN
        return np.pad(ids, (0, max(0, reading.fill - len(ids))), constant_values=filling)

    def compared(self, ids: npt.NDArray[np.int32], role: Role) -> npt.NDArray[np.bool_]:
        """Which tokens get a vector: all tokens of a query, and a document's tokens that are not skipped."""
        return np.full(len(ids), True) if role == "query" else ~np.isin(ids, self._skipped)
