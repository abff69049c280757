"""Reads tokenizer.json as a fast tokenizer, and adds the begin and end tokens that tokenizer_config.json requires."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers, processors

from deployments.models.model_folder import bad_model, read_json

_ENDS = {"add_bos_token": "bos_token", "add_eos_token": "eos_token"}


def read_tokenizer(folder: Path) -> FastTokenizer | None:
    """The tokenizer, without truncation and padding. None without a tokenizer.json. Raises SettingsError if that cannot
    be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception
        raise bad_model(f"{path} cannot be read: {error}") from None
    fast.no_padding()
    fast.no_truncation()
    return fast


def lower_case(fast: FastTokenizer) -> None:
    """Have the tokenizer lower the case of texts, but not of special tokens in them, as sentence-transformers does
    (`do_lower_case`).
    """
    before = fast.normalizer
    if before is None:
        fast.normalizer = normalizers.Lowercase()
    elif "Lowercase" not in str(before):
        fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), before])


def ends_of(fast: FastTokenizer) -> tuple[list[int], list[int]]:
    """The token ids that the tokenizer puts before and after every text."""
    encoding = fast.encode("a")
    content = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    return (encoding.ids[: content[0]], encoding.ids[content[-1] + 1 :]) if content else ([], [])


def add_ends(fast: FastTokenizer, folder: Path, known: FastTokenizer | None = None) -> list[str]:
    """Have the tokenizer add the begin and end tokens that tokenizer_config.json requires (`add_bos_token`,
    `add_eos_token`) and that tokenizer.json lacks (gte-Qwen2, e5-mistral). Returns their names. transformers 4 did so;
    version 5 relies on tokenizer.json. `known`: the tokenizer with the model's vocabulary, if that is not `fast`.

    Raises SettingsError if the model's files name no such token.
    """
    config = read_json(folder / "tokenizer_config.json")
    first, last = ends_of(fast)
    added = []
    for flag, key in _ENDS.items():
        ends = first if flag == "add_bos_token" else last
        if config.get(flag) is not True:
            continue
        token, number = _token(known or fast, config.get(key), flag)
        if number not in ends:
            ends.insert(0 if ends is first else len(ends), number)
            added.append(token)
    if added:
        _surround(fast, first, last)
    return added


def _token(known: FastTokenizer, named: object, flag: str) -> tuple[str, int]:
    content = named.get("content") if isinstance(named, dict) else named
    number = known.token_to_id(content) if isinstance(content, str) else None
    if not isinstance(content, str) or number is None:
        problem = f"{content} is not in the vocabulary" if content else "it names no such token"
        raise bad_model(f"tokenizer_config.json says {flag}, and {problem}")
    return content, number


def _surround(fast: FastTokenizer, first: list[int], last: list[int]) -> None:
    names = {number: fast.id_to_token(number) for number in (*first, *last)}

    def around(text: str, kind: int) -> list[str]:
        return [*(f"{names[n]}:{kind}" for n in first), f"{text}:{kind}", *(f"{names[n]}:{kind}" for n in last)]

    template = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[(name, number) for number, name in names.items()],
    )
    before = fast.post_processor
    keeps_offsets = isinstance(before, processors.ByteLevel)
    fast.post_processor = processors.Sequence([before, template]) if keeps_offsets else template
