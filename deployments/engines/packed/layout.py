"""The layout of a pass: where its queries lie in the packed tokens, and what its layers share. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from deployments.engines.micro_batches import Lengths
from deployments.engines.packed.tensors import Place

_ROWS = 32  # rows are padded to multiples of it, since oneDNN prepares a new product for each new number of rows
_T = TypeVar("_T")


@dataclass(slots=True)
class Layout:
    """The layout of one pass. The queries are concatenated. After the last token come `spare` rows, which only reduce
    the number of different shapes.
    """

    place: Place
    queries: int
    longest: int
    ragged: bool
    tokens: int
    spare: int
    bounds: torch.Tensor  # int32 [queries + 1]: where each begins, and the end
    lengths: list[int]
    _starts: npt.NDArray[np.int32]  # the same bounds, on the host
    wanted: torch.Tensor | None = None  # the only rows that the last block computes after its attention; None: all
    hidden: torch.Tensor | None = None  # bool [tokens]: tokens to which no token attends; None: there are none
    _kept: dict[Hashable, object] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Lengths, place: Place) -> Layout:
        longest = int(lengths.max())
        bounds = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        tokens = int(bounds[-1])
        return cls(
            place=place,
            queries=len(lengths),
            longest=longest,
            ragged=int(lengths.min()) != longest,
            tokens=tokens,
            spare=-tokens % _ROWS if place.device.type == "cpu" else 0,
            bounds=torch.from_numpy(bounds).to(place.device, non_blocking=True),
            lengths=lengths.tolist(),
            _starts=bounds,
        )

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The result of the first call of `make` for this key: a mask or a table that the pass's layers share."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast("_T", self._kept[key])

    def firsts(self, table: torch.Tensor) -> torch.Tensor:
        """[positions, ...] -> [tokens, ...]: the row of each token's position in its query."""
        return torch.cat([table[:length] for length in self.lengths])

    def counted(self, some: torch.Tensor) -> torch.Tensor:
        """int64 [tokens]: of each of `some`, bool [tokens], its number among those of its query, from 1; else 0."""
        counts = some.cumsum(0)
        before = (counts - some.long()).index_select(0, self.bounds[:-1])
        return (counts - before.repeat_interleave(self.bounds.diff(), output_size=self.tokens)) * some

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens + spare, ...] -> [queries, longest, ...]. A query is padded with copies of one of its own rows."""
        packed = packed.index_select(0, self._rows()[0]) if self.ragged else packed[: self.tokens]
        return packed.view(self.queries, self.longest, *packed.shape[1:])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[queries, longest, width] -> [tokens + spare, width]."""
        flat = padded.reshape(self.queries * self.longest, -1)
        if self.ragged:
            return flat.index_select(0, self._rows()[1])
        return self.add_spare(flat)

    def add_spare(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> [tokens + spare, width]."""
        return functional.pad(packed, (0, 0, 0, self.spare)) if self.spare else packed

    def only(self, rows: torch.Tensor) -> None:
        """Have blocks compute only these rows, one for each query, after their attention."""
        spare = -len(rows) % _ROWS if self.place.device.type == "cpu" else 0
        if len(rows) + spare < self.tokens:
            self.wanted = functional.pad(rows, (0, spare))

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """The wanted rows of [tokens + spare, width]: all, or one for each query plus some spare rows."""
        return x if self.wanted is None else x.index_select(0, self.wanted)

    def ended(self) -> torch.Tensor | None:
        """A mask, [queries, 1, 1, longest]: -inf after a query's end and for hidden tokens, else 0. None if it would be
        all 0.
        """
        if not self.ragged and self.hidden is None:
            return None

        def make() -> torch.Tensor:
            seen = torch.from_numpy(self._valid()).to(self.place.device)
            if self.hidden is not None:
                seen &= ~self.pad(self.hidden)
            bias = torch.zeros(seen.shape, dtype=self.place.dtype, device=self.place.device)
            return bias.masked_fill_(~seen, -torch.inf)[:, None, None, :]

        return self.once("ended", make)

    def _valid(self) -> npt.NDArray[np.bool_]:
        columns = np.arange(self.longest)
        valid: npt.NDArray[np.bool_] = columns < np.diff(self._starts)[:, None]
        return valid

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two indices, int64: for each padded row the packed one, and for each packed row, spare ones included, the
        padded one.
        """

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            valid, starts = self._valid(), self._starts[:-1, None]
            rows = np.where(valid, starts + np.arange(self.longest), starts).reshape(-1)
            back = np.pad(np.flatnonzero(valid), (0, self.spare))
            return torch.from_numpy(rows).to(self.place.device), torch.from_numpy(back).to(self.place.device)

        return self.once("rows", make)
