"""Asks a model's own tokenizer, as transformers builds it, once at start and in a separate process.

It runs as a script that reads a question as JSON from stdin, and writes one line of JSON: the fast tokenizer, or why
there is none. It imports nothing of windve, and no torch, which shortens the import from 2.5 s to 1 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_TIMEOUT_S = 300.0  # enough for a large vocabulary on a slow disk


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask the tokenizer in `folder`. Each of `texts` is one text, or two that are tokenized together."""

    folder: str
    trust_remote_code: bool
    texts: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class OwnTokenizer:
    """`backend`: transformers' tokenizer for the tokenizers library, as the JSON of a tokenizer.json. None if it has
    none, or does more in Python: then the tokens of some text, or their types, differ.
    """

    name: str
    backend: str | None


Ask = Callable[[Question], OwnTokenizer | str]


def ask(question: Question) -> OwnTokenizer | str:
    """The tokenizer's answer, from a new process. A string says why transformers cannot build the tokenizer."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(  # noqa: S603 - ourselves
            command,
            input=json.dumps(asdict(question)),
            capture_output=True,
            encoding="utf-8",
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"it took more than {_TIMEOUT_S:.0f} s"
    except (IndexError, ValueError):
        return f"the process ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"
    return answer["problem"] if "problem" in answer else OwnTokenizer(**answer)


def _answer(question: Question) -> dict[str, Any]:
    try:
        tokenizer = _build(question)
        own = [tokenizer(*text) for text in question.texts]
    except Exception as error:  # noqa: BLE001 - whatever the reason is, it is reported
        return {"problem": f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        fast = [backend.encode(*text) for text in question.texts]
        if any(
            (one["input_ids"], one.get("token_type_ids", here.type_ids)) != (here.ids, here.type_ids)
            for one, here in zip(own, fast, strict=True)
        ):
            backend = None
    return asdict(OwnTokenizer(type(tokenizer).__name__, backend and backend.to_str()))


def _build(question: Question) -> Any:
    """Build the tokenizer by the model's class or, if that is unknown or is code that must not run, by transformers'
    generic class.
    """
    if not question.trust_remote_code:
        sys.modules["torch"] = None  # type: ignore[assignment] # as if it were not installed
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(question.folder, trust_remote_code=question.trust_remote_code)
    except Exception:
        try:
            return PreTrainedTokenizerFast.from_pretrained(question.folder)
        except Exception:  # noqa: BLE001, S110 - the first problem says more
            pass
        raise


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(_answer(Question(**asked))))
