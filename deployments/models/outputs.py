"""A query's outputs, one or several from the same run, and how they are sent together. Pure.

- "text": one row per text: the pooled vector, a score for each label, or a weight for each word of the vocabulary
- "tokens": the transformer's vector for each token
- "sparse": a weight for each token (bge-m3)
- "multi_vector": a vector for each token, which are compared one by one (ColBERT, bge-m3)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Output = Literal["text", "tokens", "sparse", "multi_vector"]
Outputs = tuple[Output, ...]
Rows = npt.NDArray[np.float32]  # [rows, numbers]
Numbers = npt.NDArray[np.float32]  # [numbers]: the outputs of one query, concatenated

TEXT: Outputs = ("text",)


def join(found: Sequence[Rows], outputs: Outputs, lengths: npt.ArrayLike) -> Iterable[Numbers]:
    """The numbers of each query. `found`: for each output, the rows of all queries, one per query or one per token."""
    ends = np.cumsum(lengths)[:-1]
    each: list[Iterable[Numbers]] = [
        rows if output == "text" else [one.reshape(-1) for one in np.split(rows, ends)]
        for output, rows in zip(outputs, found, strict=True)
    ]
    return each[0] if len(each) == 1 else [np.concatenate(one) for one in zip(*each, strict=True)]


def split(numbers: Numbers, outputs: Outputs, tokens: int, widths: Mapping[Output, int]) -> dict[Output, Rows]:
    """Split a query's numbers into the rows of each output: one row for "text", else one per token. `widths`: numbers
    in a token's row, by output.
    """
    sizes: dict[Output, int] = {output: tokens * widths[output] for output in outputs if output != "text"}
    sizes["text"] = len(numbers) - sum(sizes.values())
    ends = np.cumsum([sizes[output] for output in outputs])[:-1]
    parts = zip(outputs, np.split(numbers, ends), strict=True)
    return {output: part.reshape(1 if output == "text" else tokens, -1) for output, part in parts}


# Of a vocabulary's 30,000 weights, only hundreds are not zero. A row of sparse vectors holds the indices of these and
# then their weights, both as float32, which represents whole numbers up to 2**24. All rows are as wide as the fullest
# one needs, and padded with zeros.


def pack(weights: Rows) -> Rows:
    """[queries, vocabulary] -> [queries, 2 * most weights of a query]. Weights must not be negative."""
    row, index = np.nonzero(weights)
    counts = np.bincount(row, minlength=len(weights))
    most = int(counts.max(initial=1))
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    packed = np.zeros((len(weights), 2 * most), np.float32)
    packed[row, column] = index
    packed[row, most + column] = weights[row, index]
    return packed


def largest_weights(ids: npt.NDArray[np.int32], weights: Rows, without: Collection[int]) -> Rows:
    """A row for `unpack` with the largest weight of each token id in a text. `ids`, `weights`: [tokens]. Ids in
    `without` are left out (as in FlagEmbedding's `M3Embedder`).
    """
    there = (weights > 0) & ~np.isin(ids, list(without))
    index, place = np.unique(ids[there], return_inverse=True)
    largest = np.zeros(len(index), np.float32)
    np.maximum.at(largest, place, weights[there])
    return np.concatenate([index.astype(np.float32), largest])


def unpack(row: Rows) -> tuple[npt.NDArray[np.int64], Rows]:
    """Unpack a row of `pack` into (ascending indices, their weights)."""
    index, weight = np.split(row, 2)
    there = weight != 0
    return index[there].astype(np.int64), weight[there]
