"""What clients get of an answer: vectors in the shape and the format that they ask for (int8, bits, narrow floats,
base64), and scores. Pure.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from deployments.embedding.request import Embedded

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary"]
FloatType = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
Vector = npt.NDArray[np.float32]

_DEVIATIONS = 8.0  # nearly all numbers of text vectors are closer to 0, except for a few in some models


def shape_vectors(done: Embedded, *, unit: bool, dimensions: int | None) -> Sequence[Vector]:
    """Unit vectors, or vectors with the model's own lengths; cut to `dimensions` numbers, then normalized if `unit`."""
    vectors = done.vectors
    if not unit:
        vectors = [vector * np.float32(norm) for vector, norm in zip(vectors, done.norms, strict=True)]
    if dimensions is None:
        return vectors
    cut = [vector[:dimensions] for vector in vectors]
    return [vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12)) for vector in cut] if unit else cut


def cut_rows(texts: Sequence[Vector], dimensions: int | None) -> Sequence[Vector]:
    """Cut the token vectors of each text, [tokens, numbers], to `dimensions` numbers, and normalize them again."""
    if dimensions is None:
        return texts
    cut = [rows[:, :dimensions] for rows in texts]
    return [rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12)) for rows in cut]


def scores(done: Embedded, *, raw: bool) -> Vector:
    """Float32 [queries, labels]: logits if `raw`; else, as TEI, the sigmoid of one label or the softmax of several."""
    logits = np.stack(done.vectors)
    if raw:
        return logits
    if logits.shape[1] == 1:
        return np.float32(1) / (1 + np.exp(-logits.astype(np.float64))).astype(np.float32)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares: Vector = powers / powers.sum(1, keepdims=True)
    return shares


def best_first(some: Vector) -> list[tuple[int, np.float32]]:
    """(index, score) pairs of a row of scores, the best first. Equal scores keep their order."""
    return [(int(index), some[index]) for index in np.argsort(-some, kind="stable")]


def largest(dimension: int) -> float:
    """The value that int8's 127 stands for in a vector of this dimension: `8 / sqrt(dimension)`, at most 1.

    All vectors of one dimension have the same scale, so distances and dot products keep their order. The numbers of a
    unit vector have a standard deviation of `1 / sqrt(dimension)`, so a scale of -1 to 1 would waste most of int8.
    """
    return min(1.0, _DEVIATIONS / math.sqrt(dimension))


def quantize(vectors: Vector, kind: EmbeddingType) -> npt.NDArray[Any]:
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


def narrow(vector: Vector, kind: FloatType, endianness: Endianness) -> npt.NDArray[Any]:
    """Float32 [dimension] as `kind`, rounded to the nearest (bfloat16: its bits as uint16); `native` is little."""
    order = ">" if endianness == "big" else "<"
    if kind == "bfloat16":
        bits = vector.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(f"{order}u2")  # ties go to the even one
    return vector.astype(f"{order}f{4 if kind == 'float32' else 2}", copy=False)


def as_base64(vector: npt.NDArray[Any]) -> str:
    """The vector's bytes in memory order, as base64."""
    return base64.b64encode(vector.tobytes()).decode("ascii")
