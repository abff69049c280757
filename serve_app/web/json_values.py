"""Refuses a JSON body with millions of values before it is parsed, because parsing would block other requests. Pure."""

from __future__ import annotations

import re

import numpy as np

from deployments.errors import BodyTooLarge

MOST_VALUES = 300_000  # in a body; OpenAI accepts as many tokens in a request. Parsing them takes about 30 ms
_A_LIST = 4  # parsing a list or an object takes as long as parsing this many numbers
LARGE = MOST_VALUES // _A_LIST  # bytes; a smaller body cannot have too many values
_COSTS = np.zeros(256, np.uint8)
_COSTS[list(b",[{")] = 1, _A_LIST, _A_LIST
_PIECE = 2**18  # bytes; numpy releases the GIL, so the event loop goes on
_ESCAPES = re.compile(rb"\\*[^\\]?")


def check_values(body: bytes) -> None:
    """Raises BodyTooLarge if the body has too many values. Call it in a thread."""
    pieces = (np.frombuffer(body[start : start + _PIECE], np.uint8) for start in range(0, len(body), _PIECE))
    if sum(int(_COSTS[piece].sum(dtype=np.int64)) for piece in pieces) <= MOST_VALUES:
        return  # even if all of these characters are outside of strings
    start = found = 0
    inside = np.uint8(0)  # 1 within a string
    while start < len(body):
        end = start + _PIECE
        if body[end - 1 : end] == b"\\" and (escapes := _ESCAPES.match(body, end)):
            end = escapes.end()
        piece = np.frombuffer(body[start:end].replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        is_text = np.bitwise_xor.accumulate((piece == ord('"')).view(np.uint8)) ^ inside
        found += int(_COSTS[piece[is_text == 0]].sum(dtype=np.int64))
        if found > MOST_VALUES:
            raise BodyTooLarge(
                f"the body has more values than this server accepts ({MOST_VALUES} token ids in all; a list counts as "
                f"{_A_LIST}); send fewer at once"
            )
        start, inside = end, is_text[-1] if len(is_text) else inside
