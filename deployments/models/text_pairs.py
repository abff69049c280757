"""Pairs of texts that a model reads together, as a reranker does: built by the tokenizer's template, cut as in TEI."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# A model may need to know to which text a token belongs (BERT's token types). The token's id carries it, so that
# batches are just ids and lengths for all models: TYPE is added to the ids of the second text.
TYPE = 1 << 30
Side = Literal["left", "right"]  # the side on which a long input is cut


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts that form one query."""

    first: str
    second: str

    def __len__(self) -> int:
        return len(self.first) + len(self.second)


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """The most tokens that a request allows. None: as many as the model takes.

    - `query`: of each query, special tokens included. A longer query is cut or refused, like one that is too long for
      the model.
    - `first`, `second`: of the texts of a pair, without special tokens. Longer texts are always cut.
    """

    query: int | None = None
    first: int | None = None
    second: int | None = None


NO_BOUNDS = TokenBounds()


class Cuts(NamedTuple):
    """How a request's inputs are cut. `truncate`: cut inputs that are too long (True) or refuse them (False); None: as
    the settings say. `side`: the side on which they are cut; None: as the model's
    tokenizer says.
    """

    truncate: bool | None = None
    side: Side | None = None
    bounds: TokenBounds = NO_BOUNDS


class Template:
    """The special tokens that a tokenizer puts before, between and after two texts."""

    def __init__(self, encoding: Any, *, types: bool) -> None:
        """`encoding`: the encoding of two short texts. Raises ValueError if these do not follow one another."""
        ids = _typed(encoding.ids, encoding.type_ids if types else [0] * len(encoding.ids))
        runs = [(text, len(list(run))) for text, run in itertools.groupby(encoding.sequence_ids)]
        if [text for text, _ in runs if text is not None] != [0, 1]:
            raise ValueError("the tokenizer does not put two texts one after the other")
        bounds = [0, *itertools.accumulate(length for _, length in runs)]
        starts = {text: (bounds[i], bounds[i + 1]) for i, (text, _) in enumerate(runs) if text is not None}
        (a, a_ends), (b, b_ends) = starts[0], starts[1]
        self._before, self._between, self._behind = ids[:a], ids[a_ends:b], ids[b_ends:]
        self._first, self._second = (types * encoding.type_ids[at] * TYPE for at in (a, b))
        self.special_tokens = len(self._before) + len(self._between) + len(self._behind)

    def fill(self, first: Sequence[int], second: Sequence[int]) -> npt.NDArray[np.int32]:
        """The ids of a pair, int32 [tokens], with special tokens and types."""
        parts = (self._before, _ids(first) + self._first, self._between, _ids(second) + self._second, self._behind)
        return np.concatenate(parts, dtype=np.int32)


def cut_longest_first(
    first: Sequence[int], second: Sequence[int], room: int, side: Literal["left", "right"]
) -> tuple[Sequence[int], Sequence[int]]:
    """Cut two texts' ids to `room` in all: first the longer text until both are equally long, then both
    (`longest_first` of the tokenizers library and TEI).
    """
    a, b = longest_first(len(first), len(second), room)
    return (first[:a], second[:b]) if side == "right" else (first[len(first) - a :], second[len(second) - b :])


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if 2 * shorter > room:
        shorter = room // 2
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)


def _typed(ids: Sequence[int], types: Sequence[int]) -> npt.NDArray[np.int32]:
    return _ids(ids) + _ids(types) * np.int32(TYPE)


def _ids(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)
