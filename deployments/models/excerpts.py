"""Computes the first or last token ids of a long text without tokenizing all of it.

The tokenizers library works in three steps: a normalizer changes characters, a pre-tokenizer splits the text into
words, and a model (WordPiece, BPE, Unigram) turns each word into tokens by itself. So an excerpt has the same words as
the whole text if the first two steps do not depend on what is outside the excerpt. This holds

- for the steps that `_is_local` knows. They go from left to right, and stop at the first character that does not belong
  to a word. Other steps may look anywhere, so with them the whole text is tokenized.
- for words that end before the excerpt's last `_EDGE` characters. Only within these can a character combine with one
  after the cut, or an added token be divided by the cut. Runs of blanks, of combining marks, and of characters that
  normalizers remove have no such limit, so the edge must also contain a letter, a digit or ASCII punctuation.
- from the right, for an excerpt that begins with a single blank between letters or digits, where every word ends, and
  for words that begin after its first `_EDGE` characters, because a normalizer may put something before a text.

If no word ends before the edge, a larger excerpt is tried, and after a few of them the whole text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from string import punctuation
from typing import Any, NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from deployments.models.text_pairs import Side

CHARACTERS_A_TOKEN = 8  # twice that of English, so that the first excerpt is nearly always enough
_EDGE = 256  # characters
_LARGER, _EXCERPTS = 4, 4  # the factor from one excerpt to the next; how many are tried before the whole text
_LONGEST_ADDED = 64  # the most characters of an added token
_BETWEEN_WORDS = re.compile(r"(?<=[^\W_])(?= [^\W_])")

_LOCAL = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip"),
    *("StripAccents", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"),
    *("Whitespace", "WhitespaceSplit"),
}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_BLANKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {" {2,}", rf"{_CONTRACTIONS}\p{{N}}{_BLANKS}", rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_BLANKS}"}  # Qwen2, Llama 3


class Excerpt(NamedTuple):
    """Token ids of a text, without special tokens around it. `is_whole`: they cover the whole text."""

    ids: Sequence[int]
    is_whole: bool = True


class Excerpts:
    """Computes excerpts with one tokenizer. Thread-safe."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        parts = [json.loads(part.__getstate__()) for part in (fast.normalizer, fast.pre_tokenizer) if part is not None]
        added = [token.content for token in fast.get_added_tokens_decoder().values()]
        self._can_cut = all(map(_is_local, parts)) and all(map(_is_short, added))

    def characters(self, tokens: float) -> float:
        """The length, in characters, up to which a text is tokenized whole if `tokens` tokens are wanted."""
        return CHARACTERS_A_TOKEN * tokens + 2 * _EDGE if self._can_cut else math.inf

    def of_all(self, texts: Sequence[str], tokens: float, side: Side) -> list[Excerpt]:
        """More than the first `tokens` tokens of each text, or all that it has. `side` is where the text is cut: with
        "left", the last tokens.
        """
        if max(map(len, texts)) <= self.characters(tokens):
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
            return [Excerpt(one.ids) for one in encodings]
        return [self._of(text, tokens, side) for text in texts]

    def first_characters(self, text: str, tokens: int) -> str:
        """The text up to the end of its token number `tokens` (at least 1), or all of it."""
        for number in range(_EXCERPTS):
            size = self.characters(tokens) * _LARGER**number
            if size >= len(text):
                break
            ends = [end for _, end in self.encode(text[: int(size)]).offsets]
            if len(ends) >= tokens and ends[tokens - 1] <= size - _EDGE:
                return text[: ends[tokens - 1]]
        ends = [end for _, end in self.encode(text).offsets]
        return text[: ends[tokens - 1]] if len(ends) >= tokens else text

    def _of(self, text: str, tokens: float, side: Side) -> Excerpt:
        for number in range(_EXCERPTS):
            size = self.characters(tokens) * _LARGER**number
            if size >= len(text):
                break
            ids = self._first(text[: int(size)]) if side == "right" else self._last(text, len(text) - int(size))
            if len(ids) > tokens:
                return Excerpt(ids, is_whole=False)
        return Excerpt(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _first(self, part: str) -> Sequence[int]:
        """The ids with which any text begins that begins with this part."""
        if not any(character.isalnum() or character in punctuation for character in part[-_EDGE:]):
            return []
        encoding = self.encode(part)
        ids, words, offsets = encoding.ids, encoding.word_ids, encoding.offsets
        end = len(ids)
        while end and offsets[end - 1][1] > len(part) - _EDGE:
            end -= 1
        while end and (end == len(ids) or words[end - 1] == words[end]):
            end -= 1
        return ids[:end]

    def _last(self, text: str, start: int) -> Sequence[int]:
        """The ids with which the text ends, of words that begin after `start`."""
        if (blank := _BETWEEN_WORDS.search(text, start)) is None:
            return []
        encoding = self.encode(text[blank.start() :])
        ids, words, offsets = encoding.ids, encoding.word_ids, encoding.offsets
        begin = 0
        while begin < len(ids) and offsets[begin][0] < _EDGE:
            begin += 1
        while 0 < begin < len(ids) and words[begin - 1] == words[begin]:
            begin += 1
        return ids[begin:]

    def encode(self, text: str) -> Encoding:
        """Encode a whole text, with offsets. Unlike the library's `encode`, this releases the GIL."""
        return self._fast.encode_batch([text], add_special_tokens=False)[0]


def _is_local(part: Mapping[str, Any]) -> bool:
    """Whether the effect of this normalizer or pre-tokenizer on a character depends only on its word."""
    several = part.get("normalizers") or part.get("pretokenizers")
    if several is not None:
        return all(map(_is_local, several))
    if part["type"] in {"Replace", "Split"}:
        ((kind, pattern),) = part["pattern"].items()
        return pattern in _PATTERNS if kind == "Regex" else _is_short(pattern)
    return part["type"] in _LOCAL


def _is_short(text: str) -> bool:
    """Whether a token or pattern can neither reach across the edge nor contain a blank between words."""
    return len(text) <= _LONGEST_ADDED and _BETWEEN_WORDS.search(text) is None
