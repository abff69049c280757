"""Where the queries of one pass lie in its packed tokens, and what every layer of the pass shares. Imports torch."""

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

_ROWS = 32  # oneDNN prepares a product anew for each number of rows that it has not met
_T = TypeVar("_T")


@dataclass(slots=True)
class Layout:
    """Of one pass. The queries follow one another; `spare` rows after the last token only make products' shapes few."""

    place: Place
    queries: int
    longest: int
    ragged: bool
    tokens: int
    spare: int
    bounds: torch.Tensor  # int32 [queries + 1]: where each begins, and the end
    lengths: list[int]
    _starts: npt.NDArray[np.int32]  # the same bounds, on the host
    wanted: torch.Tensor | None = None  # rows, where the last block may leave out all others behind its attention
    hidden: torch.Tensor | None = None  # bool [tokens]: those that no token attends to, if there are any
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
        """What `make` gives the first time: a mask or a table that the layers of this pass share."""
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
        """[tokens + spare, ...] -> [queries, longest, ...]; what a query lacks is some other finite row of its own."""
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
        """From now on blocks compute nothing but these rows, one for each query, behind their attention."""
        spare = -len(rows) % _ROWS if self.place.device.type == "cpu" else 0
        if len(rows) + spare < self.tokens:
            self.wanted = functional.pad(rows, (0, spare))

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Of [tokens + spare, width] the rows that are wanted: all of them, or one for each query and some spare."""
        return x if self.wanted is None else x.index_select(0, self.wanted)

    def ended(self) -> torch.Tensor | None:
        """[queries, 1, 1, longest]: 0, or -inf where a query has ended or a token is hidden; None where none is."""
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
        """int64: the padded form's rows among the packed ones, and the packed rows, the spare too, among the padded."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            valid, starts = self._valid(), self._starts[:-1, None]
            rows = np.where(valid, starts + np.arange(self.longest), starts).reshape(-1)
            back = np.pad(np.flatnonzero(valid), (0, self.spare))
            return torch.from_numpy(rows).to(self.place.device), torch.from_numpy(back).to(self.place.device)

        return self.once("rows", make)
