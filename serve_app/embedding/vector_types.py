"""Converts vectors to the formats that clients ask for: int8, bits, narrow floats, base64. Pure."""

from __future__ import annotations

import base64
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary"]
FloatType = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
Floats = npt.NDArray[np.float32]

_DEVIATIONS = 8.0  # nearly all numbers of text vectors are closer to 0, except for a few in some models


def largest(dimension: int) -> float:
    """The value that int8's 127 stands for in a vector of this dimension: `8 / sqrt(dimension)`, at most 1.

    All vectors of one dimension have the same scale, so distances and dot products keep their order. The numbers of a
    unit vector have a standard deviation of `1 / sqrt(dimension)`, so a scale of -1 to 1 would waste most of int8.
    """
    return min(1.0, _DEVIATIONS / math.sqrt(dimension))


def quantize(vectors: Floats, kind: EmbeddingType) -> npt.NDArray[Any]:
    """Float32 [vectors, dimension] as another type; `float` leaves them as they are.

    - int8 [vectors, dimension]: of the unit vector, `round(127 * x / largest(dimension))`, from -127 to 127.
    - uint8 [vectors, dimension]: int8 + 128, so that 128 is zero.
    - ubinary, uint8 [vectors, ceil(dimension / 8)]: one bit per number, 1 if it is above 0. The first number is in the
      highest bit; zeros pad the last byte. The same as `quantize_embeddings` of sentence-transformers.
    - binary, int8 of the same shape: ubinary - 128.
    """
    if kind == "float":
        return vectors
    if kind in {"binary", "ubinary"}:
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if kind == "ubinary" else _half_a_range_on(bits).view(np.int8)
    norms = np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), np.float32(1e-12))
    scaled = vectors / norms * np.float32(127 / largest(vectors.shape[-1]))
    whole = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return whole if kind == "int8" else _half_a_range_on(whole.view(np.uint8))


def _half_a_range_on(some: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Add or subtract 128: in eight bits, both flip the highest bit."""
    return some ^ np.uint8(128)


def narrow(vector: Floats, kind: FloatType, endianness: Endianness) -> npt.NDArray[Any]:
    """Float32 [dimension] as `kind`, rounded to the nearest (bfloat16: its bits as uint16); `native` is little."""
    order = ">" if endianness == "big" else "<"
    if kind == "bfloat16":
        bits = vector.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(f"{order}u2")  # ties go to the even one
    return vector.astype(f"{order}f{4 if kind == 'float32' else 2}", copy=False)


def as_base64(vector: npt.NDArray[Any]) -> str:
    """The vector's bytes in memory order, as base64."""
    return base64.b64encode(vector.tobytes()).decode("ascii")
