"""Refuses a JSON body with millions of values before it is read, which would hold up all other requests. Pure."""

from __future__ import annotations

import re

import numpy as np

from deployments.errors import BodyTooLarge

MOST_VALUES = 300_000  # of a body; as many tokens as OpenAI takes in a request. To read them takes some 30 ms
_A_LIST = 4  # a list or an object takes as long to read as so many numbers
LARGE = MOST_VALUES // _A_LIST  # bytes: a smaller body cannot hold too many
_COSTS = np.zeros(256, np.uint8)
_COSTS[list(b",[{")] = 1, _A_LIST, _A_LIST
_PIECE = 2**18  # bytes; numpy lets the event loop run meanwhile
_ESCAPES = re.compile(rb"\\*[^\\]?")


def check_values(body: bytes) -> None:
    """Call it in a thread. Raises BodyTooLarge."""
    pieces = (np.frombuffer(body[start : start + _PIECE], np.uint8) for start in range(0, len(body), _PIECE))
    if sum(int(_COSTS[piece].sum(dtype=np.int64)) for piece in pieces) <= MOST_VALUES:
        return  # whatever its texts hold
    start = found = 0
    inside = np.uint8(0)  # a text
    while start < len(body):
        end = start + _PIECE
        if body[end - 1 : end] == b"\\" and (escapes := _ESCAPES.match(body, end)):
            end = escapes.end()
        piece = np.frombuffer(body[start:end].replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        is_text = np.bitwise_xor.accumulate((piece == ord('"')).view(np.uint8)) ^ inside
        found += int(_COSTS[piece[is_text == 0]].sum(dtype=np.int64))
        if found > MOST_VALUES:
            raise BodyTooLarge(
                f"the body holds more values than this server takes ({MOST_VALUES} token ids in all, a list counts as "
                f"{_A_LIST}); send fewer at once"
            )
        start, inside = end, is_text[-1] if len(is_text) else inside
