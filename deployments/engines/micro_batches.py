"""Cuts a batch of any size into passes of the model: small enough for the CPU's caches, with queries of similar length,
earliest deadlines first. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deployments.engines import Queries

Lengths = npt.NDArray[np.int32]  # tokens of each query
_PADDED_WINDOW = 2  # padded passes in a window per concurrent pass: more of them need less padding but answer later
_PADDING = 1 / 24  # the most padding in a padded pass, of its most tokens; less would cost more passes than it saves


def window_tokens(most_tokens: int, at_once: int, *, padded: bool) -> int:
    """Roughly how many tokens a window of `cut_batch` holds."""
    return most_tokens * _window_passes(at_once, padded=padded)


def _window_passes(at_once: int, *, padded: bool) -> int:
    return at_once * (_PADDED_WINDOW if padded else 1)


def cut_batch(lengths: Lengths, most_tokens: int, at_once: int, *, padded: bool) -> list[Queries]:
    """The queries of each pass, in the order in which passes start. `at_once` passes run side by side.

    `lengths` are sorted by deadline, and cut in this order into windows of about `window_tokens`. Only inside a window
    do the longest queries come first, so that those of a pass have similar lengths. So a query starts at most a window
    later than one with a later deadline.

    A packed pass holds at most `most_tokens` plus two of the longest queries. A padded pass holds at most `most_tokens`
    including padding, or a single query.
    """
    longest = int(lengths.max())
    full = max(1, most_tokens // longest) * longest if padded else most_tokens  # tokens of a pass
    passes: list[Queries] = []
    number = _window_passes(at_once, padded=padded)
    for window in even_slices(lengths, _ceil(int(lengths.sum()), number * full)):
        order = window.start + np.argsort(-lengths[window], kind="stable")
        cut = padded_slices(lengths[order], most_tokens, number) if padded else even_slices(lengths[order], number)
        passes.extend(order[one] for one in cut)
    return passes


def even_slices(lengths: Lengths, number: int) -> Iterator[slice]:
    """`number` slices of the queries with about equal tokens, or fewer if a query exceeds its share. A slice holds at
    most a share plus one query.
    """
    ends = np.cumsum(lengths)
    middles = ends - lengths / 2
    owner = np.minimum((middles * number / ends[-1]).astype(np.intp), number - 1)
    cuts = [0, *(np.nonzero(np.diff(owner))[0] + 1).tolist(), len(lengths)]
    return (slice(start, end) for start, end in itertools.pairwise(cuts))


def padded_slices(lengths: Lengths, most_tokens: int, number: int) -> Iterator[slice]:
    """Slices of the queries, longest first, of at most `most_tokens` when padded to the first query of the slice.

    There are about `number` slices with about equal tokens, or more if these would be too large or need too much
    padding.
    """
    share = _ceil(int(lengths.sum()), number)
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        queries = min(_ceil(share, longest), most_tokens // longest)
        end = min(len(lengths), start + max(1, queries))
        padding = np.cumsum(longest - lengths[start:end])
        end = start + int(np.searchsorted(padding, most_tokens * _PADDING, side="right"))
        yield slice(start, end)
        start = end


def _ceil(some: int, by: int) -> int:
    return -(-some // by)
