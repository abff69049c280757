"""What a model's own tokenizer said, kept on disk: a Router that starts again need not ask transformers again.

The answer is kept beside the hub's cache, under everything that it depends on: the question, the model's files and the
versions of the libraries. What cannot be kept, or read again, is asked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import constants

from deployments.models.own_tokenizer import OwnTokenizer, Question, ask

Ask = Callable[[Question], OwnTokenizer | str]


def ask_once(question: Question, ask: Ask = ask) -> OwnTokenizer | str:
    """As `ask`, and at once where it was asked before. Answers of a model's own code are not kept, because
    it may read more than its files.
    """
    if question.trust_remote_code:
        return ask(question)
    kept = Path(constants.HF_HOME) / "windve" / "tokenizers" / f"{_name(question)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return OwnTokenizer(**json.loads(kept.read_text(encoding="utf-8")))
    answer = ask(question)
    if isinstance(answer, OwnTokenizer):
        with contextlib.suppress(OSError):
            _keep(kept, json.dumps(asdict(answer)))
    return answer


def _keep(path: Path, text: str) -> None:
    """All of it or nothing, whoever else writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(path)


def _name(question: Question) -> str:
    files = [(path.name, status.st_size, status.st_mtime_ns) for path, status in _files(Path(question.folder))]
    libraries = [version("transformers"), version("tokenizers"), sys.version]
    return hashlib.sha256(json.dumps([asdict(question), files, libraries]).encode()).hexdigest()


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    return [(path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
