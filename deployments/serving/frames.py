"""The format of frames between Routers and replicas: a small typed head, then raw arrays. Pure.

    frame    size uint32, head size uint32, head (MessagePack), arrays from the next multiple of four; little-endian

On the wire, a head is the list of its fields' values. A new field is appended with a default, and `WIRE` counts up. A
reader uses the default for a missing field and skips fields that it does not know. So adjacent versions understand each
other in both directions, and a service can be upgraded replica by replica. After any other change `WIRE` counts up by
two: then they do not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from deployments.errors import EngineBroken, EngineFailed

WIRE = 8  # the version of all heads; it skipped 4, so that no earlier version counts as adjacent
HEAD, SIZE = struct.Struct("<II"), struct.Struct("<I")  # sizes of a frame and its head; the frame's size alone
LARGEST_FRAME = 2**28  # bytes; frames are cut long before they reach this
CUT_BYTES = 2**24  # nothing more is added to a frame of this size

encode_head = msgspec.msgpack.Encoder(enc_hook=np.ndarray.__len__).encode  # a head holds an array's length in its place
N = TypeVar("N")


class Head(msgspec.Struct, array_like=True, gc=False):
    """The head of a frame, or an item in a head."""


class Failures(Protocol):
    """The offers that have `failed`, in a report: (offer number, message for the client).

    Another replica may answer an offer that is also listed in one of these:

    - `broken`: the engine fails on every input.
    - `suspect`: the engine works, but failed on one of several queries of a run, or prompts of a step.
    """

    failed: list[tuple[int, str]]
    broken: list[int]
    suspect: list[int]


FailureKind = Literal["broken", "suspect"]


def add_failure(report: Failures, number: int, sentence: str, kind: FailureKind | None) -> None:
    """Report that an offer failed. Without a `kind`, no other replica may answer it."""
    report.failed.append((number, sentence))
    if kind is not None:
        (report.broken if kind == "broken" else report.suspect).append(number)


def failure_of(report: Failures, number: int, sentence: str) -> EngineFailed:
    """The error of a failed offer: EngineBroken if other replicas may answer it, else EngineFailed."""
    return (EngineBroken if number in report.broken or number in report.suspect else EngineFailed)(sentence)


def speaks(about: Mapping[str, Any]) -> bool:
    """Whether this version and a replica's, which its metadata states, understand each other."""
    return abs(int(about.get("wire", 0)) - WIRE) <= 1


def known(kind: Callable[..., N], values: Sequence[Any]) -> N:
    """Build a named tuple or dataclass, ignoring values that a newer version may have appended. Raises TypeError if a
    field without a default is missing.
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
