"""Caches the answers of a model's own tokenizer on disk, so that a restarted Router need not ask transformers again."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from deployments.models.disk_cache import KeptFile, state_of_files
from deployments.models.reference_tokenizer import Ask, OwnTokenizer, Question, ask


def ask_once(question: Question, ask: Ask = ask) -> OwnTokenizer | str:
    """`ask` with a cache on disk. Answers of a model's own code are not cached, because it may read more than the
    model's files.
    """
    if question.trust_remote_code:
        return ask(question)
    libraries = [version("transformers"), version("tokenizers"), sys.version]
    kept = KeptFile("tokenizers", [asdict(question), state_of_files(Path(question.folder)), libraries])
    with contextlib.suppress(TypeError):  # nothing stored, or another format
        return OwnTokenizer(**kept.read())
    answer = ask(question)
    if isinstance(answer, OwnTokenizer):
        with contextlib.suppress(OSError):
            kept.write(asdict(answer))
    return answer
