"""Checks the Router's tokenizer against the model's own in transformers, before the first query.

A raw tokenizer.json is not always the model's tokenizer, because the model's class in transformers may build another
one:

- If both produce the same tokens, the file is used as it is.
- If they agree on the words of plain texts, but differ in the tokens around a text or in odd cases (blanks, names of
  special tokens), transformers' tokenizer is used.
- If they differ in plain words, one of them belongs to another model, and nothing is served.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as FastTokenizer

from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard
from deployments.models.model_folder import bad_model
from deployments.models.model_kind import SCORING
from deployments.models.reference_tokenizer import Ask, OwnTokenizer, Question, ask
from deployments.models.tokenizer_files import add_ends, read_tokenizer
from deployments.models.tokenizer_probes import ENGLISH, ODD, PAIRS, PLAIN

logger = logging.getLogger("ray.serve")

_VOCABULARIES = ("vocab.*", "*.model", "tekken.json")  # what transformers reads without a tokenizer.json
_SPECIAL_TOKENS = 12  # how many of the tokenizer's own special tokens are compared
_REMEDY = (
    "one of the two is not this model's: set it to file (tokenizer.json as it is) or transformers, "
    "whichever the model was trained with"
)
Texts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a text in which two tokenizers differ. None: this tokenizer has no more tokens."""

    text: str
    place: int
    here: int | None
    own: int | None

    def __str__(self) -> str:
        here, own = ("nothing" if token is None else token for token in (self.here, self.own))
        return f"token {self.place} of {self.text} is {here} by tokenizer.json and {own} by transformers"


def checked_tokenizer(card: ModelCard, wanted: str = "auto", ask: Ask = ask) -> FastTokenizer:
    """The tokenizer that produces the model's own tokens. `wanted`: the setting `args.model.tokenizer`; "auto"
    compares, "file" takes tokenizer.json unchecked, "transformers" takes what transformers builds.

    Raises SettingsError if the tokens would not be the model's, or if no tokenizer can be built.
    """
    here = read_tokenizer(card.folder)
    if here is None and (wanted == "file" or not any(any(card.folder.glob(name)) for name in _VOCABULARIES)):
        older = "" if wanted == "file" else " and no older vocabulary"
        raise SettingsError("args.model.tokenizer", f"{card.folder} holds no tokenizer.json{older}")
    texts = _texts(card, here)
    if wanted == "file" and here is not None:
        chosen = here
    else:
        pairs = PAIRS if card.kind in SCORING and card.judge is None else {}
        own = ask(Question(str(card.folder), card.trust_remote_code, [*texts.values()], [*pairs.values()]))
        if isinstance(own, str):
            chosen = _unchecked(card, here if wanted == "auto" else None, own)
        else:
            chosen = _compared(card, here, own, texts) if wanted == "auto" else _fast(card, own, texts)
        if added := add_ends(chosen, card.folder, known=here):
            logger.info("%s is put around each text, as tokenizer_config.json says", " and ".join(added))
    _check_vocabulary(card, chosen, texts, whole=here is None)
    return chosen


def _unchecked(card: ModelCard, here: FastTokenizer | None, problem: str) -> FastTokenizer:
    """tokenizer.json's tokenizer, unchecked. Raises SettingsError without one."""
    if here is None:
        if any(card.folder.glob("*.model")) and importlib.util.find_spec("sentencepiece") is None:
            problem = "its vocabulary needs the package sentencepiece (pip install windve[sentencepiece])"
        raise bad_model(f"transformers cannot build the tokenizer of {card.folder}: {problem}")
    logger.warning("tokenizer.json is used unchecked: transformers cannot build the model's tokenizer: %s", problem)
    return here


def _compared(card: ModelCard, here: FastTokenizer | None, own: OwnTokenizer, texts: Texts) -> FastTokenizer:
    """tokenizer.json's tokenizer if it produces the same tokens, else transformers' if that is known to be right."""
    if here is None:
        return _fast(card, own, texts)
    first = next(_differences(card, here, own, texts), None)
    if first is None:
        return here
    theirs = _fast(card, own, texts, first)
    if wrong := next(_other_words(here, theirs, texts), None):
        raise SettingsError("args.model.tokenizer", f"{wrong}: {_REMEDY}")
    logger.warning("%s of transformers is used in place of tokenizer.json: %s", own.name, first)
    return theirs


def _fast(card: ModelCard, own: OwnTokenizer, texts: Texts, first: Difference | None = None) -> FastTokenizer:
    """The fast tokenizer inside transformers'. Raises SettingsError if the latter does more in Python."""
    theirs = None if own.backend is None else FastTokenizer.from_str(own.backend)
    if theirs is None or next(_differences(card, theirs, own, texts), None):
        here = f"{first}, and " if first else ""
        raise SettingsError(
            "args.model.tokenizer",
            f"{here}{own.name} of transformers is no fast tokenizer, which alone is served; file takes tokenizer.json",
        )
    return theirs


def _texts(card: ModelCard, here: FastTokenizer | None) -> dict[str, str]:
    """The texts to compare, by name: fixed texts, the tokenizer's own special tokens, and the model's prompts."""
    special = [] if here is None else [token.content for token in here.get_added_tokens_decoder().values()]
    texts = {
        **PLAIN,
        **ODD,
        "names of its own special tokens": " x ".join(special[:_SPECIAL_TOKENS]) or "x",
        **{f"a text with the prompt {name}": prompt + ENGLISH for name, prompt in card.prompts.items()},
    }
    if card.judge is not None:
        texts["the reranker's prompt"] = card.judge.before + " ".join((*card.judge.texts, *card.judge.after))
    return texts


def _differences(card: ModelCard, fast: FastTokenizer, own: OwnTokenizer, texts: Texts) -> Iterator[Difference]:
    """The first difference in each text and pair."""
    for name, encoding, ids in zip(texts, fast.encode_batch([*texts.values()]), own.texts, strict=True):
        yield from _first(name, encoding.ids, ids)
    for (name, pair), (ids, types) in zip(PAIRS.items(), own.pairs, strict=False):
        encoding = fast.encode(*pair)
        yield from _first(name, encoding.ids, ids)
        if card.token_types and types:
            yield from _first(f"the types of {name}", encoding.type_ids, types)


def _other_words(here: FastTokenizer, theirs: FastTokenizer, texts: Texts) -> Iterator[Difference]:
    """The first difference in each plain text, without the tokens around it."""
    for name in PLAIN:
        ids = [fast.encode(texts[name], add_special_tokens=False).ids for fast in (here, theirs)]
        yield from _first(f"{name}, without special tokens,", *ids)


def _first(text: str, here: Sequence[int], own: Sequence[int]) -> Iterator[Difference]:
    for place, tokens in enumerate(itertools.zip_longest(here, own), 1):
        if tokens[0] != tokens[1]:
            yield Difference(text, place, *tokens)
            return


def _check_vocabulary(card: ModelCard, fast: FastTokenizer, texts: Texts, *, whole: bool) -> None:
    """Raises SettingsError if the tokenizer does not fit the model's vocabulary. `whole`: also check that the
    vocabulary is complete, because transformers builds a tokenizer even if it does not find the files.
    """
    if whole and 2 * fast.get_vocab_size() < card.vocab_size:
        raise bad_model(
            f"transformers finds {fast.get_vocab_size()} of the model's {card.vocab_size} tokens in {card.folder}"
        )
    for name, encoding in zip(texts, fast.encode_batch([*texts.values()]), strict=True):
        if (largest := max(encoding.ids, default=0)) >= card.vocab_size:
            raise bad_model(
                f"the tokenizer is not this model's: {name} has token {largest}, and the model knows {card.vocab_size}"
            )
