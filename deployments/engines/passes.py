"""A batch of any size -> passes of the model: few enough tokens each to stay in the caches, of like length. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deployments.engines import TokenBatch

Lengths = npt.NDArray[np.int32]  # tokens of each query
_SMALL_PASS = 8  # queries; splitting a padded pass further costs more in passes than the padding does


def longest_first(batch: TokenBatch) -> tuple[npt.NDArray[np.intp], TokenBatch]:
    """(order, the batch in that order): neighbours are of like length, and the longest work starts first."""
    order = np.argsort(-batch.lengths, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return order, batch
    queries = batch.queries()
    return order, TokenBatch.pack([queries[i] for i in order], each_token=batch.each_token)


def packed_passes(lengths: Lengths, most_tokens: int, at_once: int = 1) -> Iterator[slice]:
    """Slices of the queries (longest first): passes of about equal tokens, `most_tokens` or a query more at the most.

    Where `at_once` passes run side by side there are as many, or a multiple, if there are queries enough.
    """
    ends = np.cumsum(lengths)
    passes = _number_of_passes(lengths, most_tokens, at_once)  # some may be empty: a long query is one by itself
    middles = ends - lengths / 2
    owner = np.minimum((middles * passes / ends[-1]).astype(np.intp), passes - 1)
    cuts = [0, *(np.nonzero(np.diff(owner))[0] + 1).tolist(), len(lengths)]
    return (slice(start, end) for start, end in itertools.pairwise(cuts))


def padded_passes(lengths: Lengths, most_tokens: int, at_once: int = 1) -> Iterator[slice]:
    """Slices of the queries (longest first): at most `most_tokens` once all are as long as the first of the pass.

    They are of about equal tokens; where `at_once` of them run side by side, about as many, or a multiple.
    """
    whole = max(1, most_tokens // int(lengths[0])) * int(lengths[0])  # tokens of a pass that is full
    share = -(-int(lengths.sum()) // _number_of_passes(lengths, whole, at_once))
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        queries = min(-(-share // longest), most_tokens // longest)
        end = min(len(lengths), start + max(1, queries))
        # A pass ends where its queries would waste more than half of the padded tokens.
        wasteful = np.nonzero(lengths[start:end] * 2 < longest)[0]
        if len(wasteful):
            end = min(end, start + max(int(wasteful[0]), _SMALL_PASS))
        yield slice(start, end)
        start = end


def _number_of_passes(lengths: Lengths, most_tokens: int, at_once: int) -> int:
    """A multiple of `at_once`, so that no core waits for the last pass of another."""
    passes = -(-int(lengths.sum()) // most_tokens)
    return -(-passes // at_once) * at_once
