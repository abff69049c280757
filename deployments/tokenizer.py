"""Text -> token ids, with the model's own fast tokenizer; token ids that a client sends are checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from deployments.errors import EmptyInput, InvalidInput, SettingsError
from deployments.model_files import ModelCard

TokenIds = npt.NDArray[np.int32]  # shape [tokens]
Query = str | Sequence[int]  # what a client sends: a text, or its token ids

_FOREIGN = (
    "ids of another tokenizer mean other words here (in LangChain set check_embedding_ctx_length=False to send text)"
)


class Tokenizer:
    """Thread-safe: the encoding releases the GIL and keeps no state."""

    def __init__(self, card: ModelCard) -> None:
        self._max_tokens = card.max_tokens
        self._vocab_size = card.vocab_size
        self._lower_case = card.lower_case
        self._fast = _load(card.folder)
        self._fast.no_padding()
        self._fast.enable_truncation(card.max_tokens)  # on the right, the special tokens kept; what is cut is reported
        self._first, self._last = self._special_ids()

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[TokenIds]:
        """One int32 array of token ids for each text, special tokens included.

        Raises EmptyInput for an empty text, and InvalidInput where a text has more than the model's `max_tokens` and
        `truncate` is off.
        """
        for index, text in enumerate(texts):
            if not text:
                raise EmptyInput(f"input {index} is an empty string; send text or leave it out", param="input")
        if self._lower_case:
            texts = [text.lower() for text in texts]
        encodings = self._fast.encode_batch_fast(texts)
        if not truncate:
            for index, encoding in enumerate(encodings):
                if encoding.overflowing:
                    special = sum(encoding.special_tokens_mask)
                    cut = sum(len(piece.ids) - special for piece in encoding.overflowing)
                    raise self._too_long(index, len(encoding.ids) + cut)
        token_ids = [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        for index, ids in enumerate(token_ids):
            if not len(ids):
                raise EmptyInput(f"input {index} holds nothing that the model's tokenizer knows", param="input")
        return token_ids

    def check(self, ids: Sequence[int], index: int, *, truncate: bool) -> TokenIds:
        """Token ids as a client sent them, the special tokens included; cut as a text is.

        Raises EmptyInput, and InvalidInput for ids that the model's tokenizer does not make: they would be computed
        without an error, and mean other words (a short English text's in OpenAI's cl100k_base are mostly small enough).
        """
        if not ids:
            raise EmptyInput(f"input {index} is an empty list of token ids; leave it out", param="input")
        largest, smallest = max(ids), min(ids)
        if smallest < 0 or largest >= self._vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise InvalidInput(
                f"token id {wrong} in input {index} is outside this model's vocabulary of {self._vocab_size}: "
                f"{_FOREIGN}",
                param="input",
            )
        content = len(ids) - len(self._last)
        if list(ids[: len(self._first)]) != self._first or list(ids[content:]) != self._last:
            raise InvalidInput(
                f"the token ids of input {index} should begin with {self._first} and end with {self._last}, "
                f"this model's special tokens: {_FOREIGN}",
                param="input",
            )
        if len(ids) > self._max_tokens:
            if not truncate:
                raise self._too_long(index, len(ids))
            ids = [*ids[: self._max_tokens - len(self._last)], *self._last]
        return np.array(ids, dtype=np.int32)

    def _special_ids(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after every text; nothing where a tokenizer adds none."""
        encoding = self._fast.encode("a")
        content = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
        if not content:
            return [], []
        return encoding.ids[: content[0]], encoding.ids[content[-1] + 1 :]

    def _too_long(self, index: int, tokens: int) -> InvalidInput:
        return InvalidInput(
            f"input {index} has {tokens} tokens and the model takes {self._max_tokens}; shorten it, or send "
            '"truncate": true to have it cut',
            param="input",
        )


def _load(folder: Path) -> FastTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SettingsError("args.model.id", f"{folder} holds no tokenizer.json (the fast tokenizer's file)")
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises plain Exception
        raise SettingsError("args.model.id", f"{path} cannot be read: {error}") from None
