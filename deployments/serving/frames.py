"""What frames between Routers and replicas share: a small typed head, then arrays as they lie in memory. Pure.

    frame    size uint32, head size uint32, head (MessagePack), arrays from the next multiple of four; little-endian

On the wire a head is the list of its fields' values. New fields are appended, with defaults, and `WIRE` counts up: a
reader has the default for what is missing, and passes over what it does not know. So neighbouring versions understand
each other in both directions, and a service can be upgraded replica by replica.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from deployments.errors import EngineBroken, EngineFailed

WIRE = 2  # the version of all heads; the first was positional JSON, without a number
HEAD, SIZE = struct.Struct("<II"), struct.Struct("<I")  # of a frame and its head; of the frame, which comes first
LARGEST_FRAME = 2**28  # bytes; a frame is cut long before
CUT_BYTES = 2**24  # a frame that has so much takes nothing more

encode_head = msgspec.msgpack.Encoder(enc_hook=np.ndarray.__len__).encode  # an array's place in a head has its length
N = TypeVar("N")


class Head(msgspec.Struct, array_like=True, gc=False):
    """The head of a frame, or of one of the things in it."""


class Failures(Protocol):
    """What a report says of offers that have `failed`: (offer, the sentence for the client).

    Other replicas may answer these of them:

    - `broken`: the engine fails whatever it is given.
    - `suspect`: it is well, and failed at one of several queries of a run, or prompts of a step.
    """

    failed: list[tuple[int, str]]
    broken: list[int]
    suspect: list[int]


FailureKind = Literal["broken", "suspect"]


def add_failure(report: Failures, number: int, sentence: str, kind: FailureKind | None) -> None:
    """Without a `kind` nobody else may answer it."""
    report.failed.append((number, sentence))
    if kind is not None:
        (report.broken if kind == "broken" else report.suspect).append(number)


def failure_of(report: Failures, number: int, sentence: str) -> EngineFailed:
    """The error of an offer that failed: EngineBroken where other replicas may answer it."""
    return (EngineBroken if number in report.broken or number in report.suspect else EngineFailed)(sentence)


def speaks(about: Mapping[str, Any]) -> bool:
    """Whether a replica's version, by what it says of itself, and this one understand each other."""
    return abs(int(about.get("wire", 0)) - WIRE) <= 1


def known(kind: Callable[..., N], values: Sequence[Any]) -> N:
    """What this version knows of a named tuple or a dataclass that another may have appended to. Raises TypeError where
    it lacks more than has defaults.
    """
    return kind(*values[: len(kind.__match_args__)])  # type: ignore[attr-defined]  # both kinds have it


def frame_of(head: bytes, arrays: Sequence[bytes]) -> list[bytes]:
    """The buffers of one frame: its sizes, the head, the arrays."""
    padding = bytes(-len(head) % 4)
    size = HEAD.size + len(head) + len(padding) + sum(map(len, arrays))
    return [HEAD.pack(size, len(head)), head, padding, *arrays]


def head_of(frame: bytes) -> tuple[bytes, int]:
    """(a frame's head, where its arrays begin). Raises struct.error."""
    _, size = HEAD.unpack_from(frame)
    end = HEAD.size + size
    return frame[HEAD.size : end], end + -size % 4
