"""A batch of any size -> passes of the model: few enough tokens each to stay in the caches, of like length, and the
earliest deadlines first. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deployments.engines import Queries

Lengths = npt.NDArray[np.int32]  # tokens of each query
_PADDED_WINDOW = 2  # padded passes in a window for each that runs at once: more are less padding, and answer later
_PADDING = 1 / 24  # of a padded pass's most tokens may be padding; less costs more in passes than it saves


def window_tokens(most_tokens: int, at_once: int, *, padded: bool) -> int:
    """About how many tokens a window of `cut_batch` holds."""
    return most_tokens * _window_passes(at_once, padded=padded)


def _window_passes(at_once: int, *, padded: bool) -> int:
    return at_once * (_PADDED_WINDOW if padded else 1)


def cut_batch(lengths: Lengths, most_tokens: int, at_once: int, *, padded: bool) -> list[Queries]:
    """The queries of each pass; the passes in the order in which they start, `at_once` of them side by side.

    `lengths` stand in the order of deadlines. They are cut in this order into windows of about `window_tokens`. Only
    inside a window the longest come first, so that the queries of a pass are of like length. A query therefore starts
    at most a window later than one behind it.

    Packed passes hold at most `most_tokens` and two of the longest queries more. Padded ones hold at most `most_tokens`
    once all their queries are as long as the longest of them, or are one query.
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
    """Slices of the queries, in any order, of about equal tokens: `number` of them, or fewer where one query is more
    than its share. A slice holds at most a share and a query more.
    """
    ends = np.cumsum(lengths)
    middles = ends - lengths / 2
    owner = np.minimum((middles * number / ends[-1]).astype(np.intp), number - 1)
    cuts = [0, *(np.nonzero(np.diff(owner))[0] + 1).tolist(), len(lengths)]
    return (slice(start, end) for start, end in itertools.pairwise(cuts))


def padded_slices(lengths: Lengths, most_tokens: int, number: int) -> Iterator[slice]:
    """Slices of the queries (longest first): at most `most_tokens` once all are as long as the first of the slice.

    They are of about equal tokens, and about `number`; more where that would be too large, or too much padding.
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
