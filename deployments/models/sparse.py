"""Sparse vectors on their way from a replica: of a vocabulary's thirty thousand weights, hundreds are not zero. Pure.

A row is the indices of those and then their weights, both as float32 (which holds whole numbers up to 2**24), and as
wide as the fullest row needs; what a row does not need is zero.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from deployments.models.outputs import Rows


def pack(weights: Rows) -> Rows:
    """[queries, vocabulary] -> [queries, 2 * most weights of one query]. Weights are 0 or more."""
    row, index = np.nonzero(weights)
    counts = np.bincount(row, minlength=len(weights))
    most = int(counts.max(initial=1))
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    packed = np.zeros((len(weights), 2 * most), np.float32)
    packed[row, column] = index
    packed[row, most + column] = weights[row, index]
    return packed


def largest_weights(ids: npt.NDArray[np.int32], weights: Rows, without: Collection[int]) -> Rows:
    """A row for `unpack`: of each token id of a text, [tokens], the largest weight that it has there. Ids `without`
    weight are left out (FlagEmbedding's `M3Embedder`).
    """
    there = (weights > 0) & ~np.isin(ids, list(without))
    index, place = np.unique(ids[there], return_inverse=True)
    largest = np.zeros(len(index), np.float32)
    np.maximum.at(largest, place, weights[there])
    return np.concatenate([index.astype(np.float32), largest])


def unpack(row: Rows) -> tuple[npt.NDArray[np.int64], Rows]:
    """One row of `pack` -> (indices ascending, their weights)."""
    index, weight = np.split(row, 2)
    there = weight != 0
    return index[there].astype(np.int64), weight[there]
