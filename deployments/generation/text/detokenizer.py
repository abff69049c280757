"""Tokens as text, piece by piece: characters are held back until they are whole, and what may be a stop's beginning
until it is not. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_MOST_SILENT = 64  # tokens without text, special ones or half characters: the library decodes all anew with each more
_HALF = 3  # of them may be half a character


class Detokenizer:
    """One answer's. `stopped`: one of the `stops` (none is empty) has come; nothing from it on is given out."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._decoded = tokenizer, DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stops)
        self._held = ""
        self._silent: list[int] = []  # tokens since the last text
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now. Nothing once it has stopped."""
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
        except Exception:  # noqa: BLE001 - the library has no kind of its own: bytes that are no text came before
            self._decoded = DecodeStream(skip_special_tokens=True)
            return self._decoded.step(self._tokenizer, token)

    def end(self) -> str:
        """What was held back: no token comes any more. Half a character is left out."""
        left, self._held = self._held, ""
        return left

    def _given(self, piece: str) -> str:
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of `text` that `stop` begins with, fewer than all of it."""
    most = min(len(text), len(stop) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)
