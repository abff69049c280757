"""Names the space of a model's numbers. Where two names are equal, the same text gets the same vector.

Vectors of two spaces must never meet in one index, even if both have the same shape. So each replica announces its
space, a Router uses only replicas of its own, and each answer names it. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from deployments.models.disk_cache import KeptFile
from deployments.models.model_files import ModelCard
from deployments.models.modules import modules_of
from deployments.models.weights import find_weights

_READ = {".json", ".txt", ".model", ".jinja"}  # configs, tokenizers and templates
_HEADS = ("sparse_linear.safetensors", "colbert_linear.safetensors")
_BYTES = 8  # of the hash


def space_of(card: ModelCard) -> str:
    """The name of the model's space: 16 hexadecimal digits.

    It covers the contents of the model's files (weights, tokenizer, modules, templates) and how the settings read them
    (pooling, normalization, prompts, lengths), but not where they lie, their revision, device or number format. A
    revision that changes only the model's README leaves the space as it is. Hashing takes about a second per GB, so the
    result is kept beside the hub's cache, under the files' sizes and times. Raises OSError.
    """
    paths = sorted(set(_files(card)))
    kept = KeptFile("spaces", [_reading(card), [_state(card.root or card.folder, path) for path in paths]])
    found = kept.read()
    if not isinstance(found, str):
        found = _hash(card, paths)
        with contextlib.suppress(OSError):
            kept.write(found)
    return found


def _hash(card: ModelCard, paths: list[Path]) -> str:
    whole = hashlib.blake2b(_reading(card).encode(), digest_size=_BYTES)
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, hashlib.blake2b)
        whole.update(f"\0{path.relative_to(card.root or card.folder).as_posix()}\0".encode() + content.digest())
    return whole.hexdigest()


def _reading(card: ModelCard) -> str:
    """How the files are read, in a form that is equal on every machine."""
    prompts = sorted(card.prompts.items()), card.default_prompt_name
    how = card.kind, card.pooling, card.normalize, card.lower_case, card.max_tokens, card.dimension
    return repr((how, prompts, card.judge, card.late, *(["left"] if card.truncation_side == "left" else [])))


def _files(card: ModelCard) -> Iterator[Path]:
    """The files that a model's numbers depend on: its own code only where that is run."""
    folder, read = card.root or card.folder, {*_READ, ".py"} if card.trust_remote_code else _READ
    yield from find_weights(card.folder)
    yield from filter(Path.is_file, (folder / name for name in _HEADS))
    modules = {folder / module["path"] for module in modules_of(folder)} - {folder}
    for place in (folder, *modules):
        suffixes = read if place == folder else {*read, ".safetensors"}
        yield from (path for path in place.glob("*") if path.suffix in suffixes and path.is_file())


def _state(folder: Path, path: Path) -> tuple[str, str, int, int]:
    status = path.stat()
    return str(path.resolve()), str(path.relative_to(folder)), status.st_size, status.st_mtime_ns
