"""Turns texts into token ids with the model's own fast tokenizer, and checks token ids that clients send."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from deployments.errors import EmptyInput, InvalidInput, SettingsError
from deployments.models.colbert import ColbertTokens, Role
from deployments.models.excerpts import Excerpt, Excerpts
from deployments.models.llm_reranker import RerankPrompts
from deployments.models.model_files import SCORING, ModelCard
from deployments.models.model_folder import bad_model, read_json
from deployments.models.text_pairs import Cuts, Pair, Template, cut_longest_first
from deployments.models.tokenizer_files import add_ends, ends_of, lower_case, read_tokenizer

TokenIds = npt.NDArray[np.int32]  # shape [tokens]
Query = str | Sequence[int] | Pair  # what a client sends: a text, its token ids, or two texts to read together


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text. `start`, `stop`: its position in the text's UTF-8 bytes; None for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


_CHARACTERS_TO_TOKENIZE = 100_000  # each listed token costs some hundred bytes, and interpreter time
_WEIGHTLESS = {"cls": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}  # XLM-RoBERTa's
_FOREIGN = (
    "ids of another tokenizer mean other words here (in LangChain set check_embedding_ctx_length=False to send text)"
)


class Tokenizer:
    """A model's tokenizer. Thread-safe: encoding releases the GIL and keeps no state."""

    def __init__(self, card: ModelCard, fast: FastTokenizer | None = None) -> None:
        """`fast`: from `checked_tokenizer`; None: tokenizer.json, unchecked. Raises SettingsError if it is unusable."""
        self._max_tokens = card.max_tokens
        self._vocab_size = card.vocab_size
        self._side = card.truncation_side
        self._fast = fast or _load(card.folder)  # does not truncate: this class does
        if card.lower_case:
            lower_case(self._fast)
        self._excerpts = Excerpts(self._fast)
        self._first, self._last = _special_ids(self._fast, card)
        self._judge = None if card.judge is None else RerankPrompts(card.judge, self._excerpts, card.max_tokens)
        self._pair = _template(self._fast, card) if card.kind in SCORING and card.judge is None else None
        self._late = None if card.late is None else ColbertTokens(card.late, card.folder, self._fast.token_to_id)
        self.weightless = _weightless(self._fast, card) if "sparse" in card.token_widths else frozenset()

    def encode(self, texts: Sequence[str], cuts: Cuts, *, first: int = 0, role: Role = "document") -> list[TokenIds]:
        """The token ids of each text, int32, with special tokens, which are kept when a text is cut.

        `first`: the number of the first text, for errors. `role`: matters for models that treat queries differently. Of
        a text longer than `whole_characters`, only an excerpt is tokenized if possible.

        Raises EmptyInput for an empty text, and InvalidInput if a text exceeds the model's `max_tokens` or the bounds,
        and must not be cut.
        """
        check_texts(texts, first)
        if self._judge is not None:  # a single text is a document with an empty query
            return self.encode_pairs([Pair("", text) for text in texts], cuts, first=first)
        if self._late is not None:
            texts = [self._late.prompt(role) + text for text in texts]
        most = self._most(cuts, len(self._first) + len(self._last))
        found = self._excerpts.of_all(texts, most, cuts.side or self._side)
        return [self._whole(one, index, cuts, role, most) for index, one in enumerate(found, first)]

    @property
    def whole_characters(self) -> float:
        """The length, in characters, up to which texts are tokenized whole."""
        return self._excerpts.characters(self._max_tokens)

    def encode_pairs(self, pairs: Sequence[Pair], cuts: Cuts, *, first: int = 0) -> list[TokenIds]:
        """As `encode`, for pairs, with the tokenizer's own template. Ids include token types if the model has them.

        Raises EmptyInput if both texts are empty; and InvalidInput if a pair is too long and must not be cut, or if the
        model takes no pairs.
        """
        pairs = self._bounded(pairs, cuts)
        if self._judge is not None:
            return self._judged(self._judge, pairs, cuts, first)
        if self._pair is None:
            raise InvalidInput("this model takes single texts, not pairs", param="input")
        # a reranker's query repeats in all its pairs, so each distinct text is encoded once
        texts = list(dict.fromkeys(text for pair in pairs for text in (pair.first, pair.second)))
        most, side = self._most(cuts, self._pair.special_tokens), cuts.side or self._side
        room = most - self._pair.special_tokens
        found = dict(zip(texts, self._excerpts.of_all(texts, room, side), strict=True))
        filled = []
        for index, pair in enumerate(pairs, first):
            _check_pair(pair, index)
            a, b = found[pair.first], found[pair.second]
            is_whole = a.is_whole and b.is_whole
            if len(a.ids) + len(b.ids) > room and not cuts.truncate:
                tokens = len(a.ids) + len(b.ids) + self._pair.special_tokens
                raise self._too_long(index, tokens if is_whole else None, most)
            if room % 2 and not is_whole and min(len(a.ids), len(b.ids)) > room:  # the longer one gets the odd token
                a, b = self._excerpts.of_all([pair.first, pair.second], math.inf, side)
            filled.append(self._pair.fill(*cut_longest_first(a.ids, b.ids, room, side)))
        return filled

    def _bounded(self, pairs: Sequence[Pair], cuts: Cuts) -> Sequence[Pair]:
        """Cut each text to its bound. Raises InvalidInput if texts are cut on the left and a bound is not below the
        model's.
        """
        bounds = cuts.bounds
        if bounds.first is None and bounds.second is None:
            return pairs

        def cut(texts: Sequence[str], tokens: int | None) -> Sequence[str]:
            if tokens is None:
                return texts
            if tokens >= self._max_tokens:  # the model's own limit cuts more, and reads less of a long text
                if cuts.side != "left":
                    return texts
                problem = f"a bound of {tokens} tokens on a text is no less than the model takes ({self._max_tokens})"
                raise InvalidInput(f"{problem}; send a smaller one, or cut on the right")
            first = {text: self._excerpts.first_characters(text, tokens) for text in set(texts)}
            return [first[text] for text in texts]

        firsts = cut([pair.first for pair in pairs], bounds.first)
        seconds = cut([pair.second for pair in pairs], bounds.second)
        return [Pair(*texts) for texts in zip(firsts, seconds, strict=True)]

    def _most(self, cuts: Cuts, special_tokens: int) -> int:
        """The most tokens of a query. Raises InvalidInput if the bound leaves no room for text."""
        bound = cuts.bounds.query
        if bound is None:
            return self._max_tokens
        if bound <= special_tokens:
            raise InvalidInput(
                f"a bound of {bound} tokens leaves no room for text: {special_tokens} are special tokens of the model; "
                "allow more"
            )
        return min(bound, self._max_tokens)

    def _judged(self, judge: RerankPrompts, pairs: Sequence[Pair], cuts: Cuts, first: int) -> list[TokenIds]:
        most = self._most(cuts, judge.least_tokens)
        found = judge.fill(pairs, cuts.side or self._side, most)
        filled = []
        for index, (pair, (tokens, ids)) in enumerate(zip(pairs, found, strict=True), first):
            _check_pair(pair, index)
            if (tokens is None or tokens > most) and not cuts.truncate:
                raise self._too_long(index, tokens, most)
            filled.append(ids)
        return filled

    def check(self, ids: Sequence[int], index: int, cuts: Cuts, *, role: Role = "document") -> TokenIds:
        """Check token ids that a client sent, special tokens included, and cut them like a text.

        Raises EmptyInput, and InvalidInput for ids that the model's tokenizer would not produce. Otherwise, ids of
        another tokenizer would be computed without an error but mean other words (those of a short English text in
        OpenAI's cl100k_base are mostly small enough).
        """
        self._check_known(ids, f"input {index}", "input")
        start, end = len(self._first), len(ids) - len(self._last)
        if list(ids[:start]) != self._first or list(ids[end:]) != self._last:
            raise InvalidInput(
                f"the token ids of input {index} should begin with {self._first} and end with {self._last}, "
                f"this model's special tokens: {_FOREIGN}",
                param="input",
            )
        most = self._most(cuts, len(self._first) + len(self._last))
        return self._whole(Excerpt(ids[start:end]), index, cuts, role, most)

    def compared(self, ids: TokenIds, role: Role) -> npt.NDArray[np.bool_]:
        """Which tokens of a text get a vector in its multi-vector. bge-m3 leaves out the first token."""
        return np.arange(len(ids)) > 0 if self._late is None else self._late.compared(ids, role)

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[Token]]:
        """Each text's tokens, without truncation. Raises EmptyInput, or InvalidInput for too much text."""
        check_texts(texts)
        if (characters := sum(map(len, texts))) > _CHARACTERS_TO_TOKENIZE:
            raise InvalidInput(
                f"the inputs have {characters} characters and {_CHARACTERS_TO_TOKENIZE} are tokenized in one request; "
                "send fewer at once",
                param="inputs",
            )
        encodings = self._fast.encode_batch(texts, add_special_tokens=special_tokens)
        return [_tokens(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Decode token ids into texts. Raises EmptyInput or InvalidInput."""
        for index, some in enumerate(ids):
            self._check_known(some, f"ids[{index}]", "ids")
        return self._fast.decode_batch(ids, skip_special_tokens=skip_special_tokens)

    def _whole(self, content: Excerpt, index: int, cuts: Cuts, role: Role, most: int) -> TokenIds:
        if self._late is None:
            return self._cut(content, index, cuts, most)
        if self._late.fills(role):
            cuts = cuts._replace(truncate=True)
        return self._late.complete(self._cut(content, index, cuts, self._late.most(role, most)), role)

    def _cut(self, content: Excerpt, index: int, cuts: Cuts, most: int) -> TokenIds:
        """Cut ids, and add the special tokens. Raises EmptyInput or InvalidInput."""
        ids, around = content.ids, len(self._first) + len(self._last)
        if not ids and not around:
            raise EmptyInput(f"input {index} contains nothing that the model's tokenizer knows", param="input")
        over = len(ids) + around - most
        if over > 0:
            if not cuts.truncate:
                raise self._too_long(index, len(ids) + around if content.is_whole else None, most)
            ids = ids[:-over] if (cuts.side or self._side) == "right" else ids[over:]
        return np.array([*self._first, *ids, *self._last], dtype=np.int32)

    def _check_known(self, ids: Sequence[int], where: str, param: str) -> None:
        if not ids:
            raise EmptyInput(f"{where} is an empty list of token ids; leave it out", param=param)
        largest, smallest = max(ids), min(ids)
        if smallest < 0 or largest >= self._vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise InvalidInput(
                f"token id {wrong} in {where} is outside this model's vocabulary of {self._vocab_size}: {_FOREIGN}",
                param=param,
            )

    def _too_long(self, index: int, tokens: int | None, most: int) -> InvalidInput:
        """The error for a long input. `tokens`: None if not all were counted."""
        return InvalidInput(
            f"input {index} has {tokens or f'more than {most}'} tokens and the model takes {most}; shorten it, or send "
            '"truncate": true to have it cut',
            param="input",
        )


def _check_pair(pair: Pair, index: int) -> None:
    if not len(pair):
        raise EmptyInput(f"input {index} is two empty strings; send text or leave it out", param="input")


def check_texts(texts: Sequence[str], first: int = 0) -> None:
    """Raises EmptyInput for an empty text. `first`: the number of the first text."""
    for index, text in enumerate(texts, first):
        if not text:
            raise EmptyInput(f"input {index} is an empty string; send text or leave it out", param="input")


def _special_ids(fast: FastTokenizer, card: ModelCard) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after every text. Raises SettingsError if they leave no room."""
    first, last = ends_of(fast)
    if len(first) + len(last) != fast.num_special_tokens_to_add(is_pair=False):
        raise bad_model("the tokenizer puts special tokens inside a text, which is not supported")
    if len(first) + len(last) >= card.max_tokens:
        raise SettingsError("args.model.max_tokens", f"{card.max_tokens} leaves no room beside the special tokens")
    return first, last


def _tokens(text: str, encoding: Encoding) -> list[Token]:
    at = list(itertools.accumulate((len(character.encode()) for character in text), initial=0))
    return [
        Token(number, token, True, None, None)
        if special
        else Token(number, text[start:stop], False, at[start], at[stop])
        for number, token, special, (start, stop) in zip(
            encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
        )
    ]


def _load(folder: Path) -> FastTokenizer:
    fast = read_tokenizer(folder)
    if fast is None:
        raise bad_model(f"{folder} holds no tokenizer.json (the fast tokenizer's file)")
    add_ends(fast, folder)
    return fast


def _weightless(fast: FastTokenizer, card: ModelCard) -> frozenset[int]:
    """The ids that get no weight in bge-m3's sparse vectors."""
    config = read_json(card.folder / "tokenizer_config.json")
    named = [config.get(f"{name}_token") or usual for name, usual in _WEIGHTLESS.items()]
    ids = [fast.token_to_id(one["content"] if isinstance(one, dict) else one) for one in named]
    return frozenset(number for number in ids if number is not None)


def _template(fast: FastTokenizer, card: ModelCard) -> Template:
    try:
        template = Template(fast.encode("a", "b"), types=card.token_types)
    except ValueError as error:
        raise bad_model(f"{error}, which is not supported") from None
    if template.special_tokens >= card.max_tokens:
        raise SettingsError("args.model.max_tokens", f"{card.max_tokens} leaves no room beside the special tokens")
    return template
