"""Turns tokens into text, piece by piece. It holds back incomplete characters, and what may be the beginning of a stop
string. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from deployments.models.tokenizer import TokenIds

_MOST_SILENT = 64  # tokens without text (special, or incomplete characters): with each more, all are decoded again
_HALF = 3  # the last of these tokens may be an incomplete character


class Detokenizer:
    """The detokenizer of one answer. `stopped`: one of the `stops` (none empty) has come. It and all later text is
    dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        before: Sequence[int] | TokenIds = (),
        min_tokens: int = 0,
    ) -> None:
        """`before`: the tokens that the answer's text continues: some tokenizers leave out a text's first blank.
        `min_tokens`: the text of so many tokens is not searched for stops.
        """
        self._tokenizer, self._decoded = tokenizer, DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stops)
        self._held, self._unsearched = "", min_tokens
        self._silent: list[int] = []  # tokens since the last text
        self.stopped = False
        for token in before[-_HALF:]:
            self._decode(int(token))

    def add(self, token: int) -> str:
        """Add a token. Returns the new text that is final; nothing once it has stopped."""
        if self.stopped:
            return ""
        piece = self._decode(token) or ""
        self._silent = [] if piece else [*self._silent, token]
        if len(self._silent) > _MOST_SILENT:
            self._decoded, self._silent = DecodeStream(skip_special_tokens=True), self._silent[-_HALF:]
            piece = "".join(self._decode(one) or "" for one in self._silent)
        return self._given(piece)

    def _decode(self, token: int) -> str | None:
        try:
            return self._decoded.step(self._tokenizer, token)
        except Exception:  # noqa: BLE001 - the library raises no type of its own; earlier bytes were not valid text
            self._decoded = DecodeStream(skip_special_tokens=True)
            return self._decoded.step(self._tokenizer, token)

    def end(self) -> str:
        """The text that was held back, after the last token. An incomplete character is dropped."""
        left, self._held = self._held, ""
        return left

    def _given(self, piece: str) -> str:
        if self._unsearched > 0:
            self._unsearched -= 1
            return piece
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` with which `text` ends."""
    most = min(len(text), len(stop) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)
