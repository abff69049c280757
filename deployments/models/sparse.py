"""The format of sparse vectors from a replica: of a vocabulary's 30,000 weights, only hundreds are not zero. Pure.

A row holds the indices of these and then their weights, both as float32, which represents whole numbers up to 2**24.
All rows are as wide as the fullest one needs, and padded with zeros.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from deployments.models.outputs import Rows


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
