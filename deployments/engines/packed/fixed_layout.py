"""A layout whose shapes do not depend on the pass, so that a graph can compute any pass of its size. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, Self

import numpy as np
import torch

from deployments.engines.graph_sizes import GraphSize
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.tensors import Place


@dataclass(slots=True, kw_only=True)
class FixedLayout(Layout):
    """The layout of all passes of a size. They differ only in what `ids`, `positions` and `bounds` hold, which are
    parts of the pass's inputs. Nothing here reads a length on the host. Like every layout, it serves one computation.
    """

    ids: torch.Tensor  # int32 [tokens]
    positions: torch.Tensor  # int32 [tokens]
    held: list[torch.Tensor]  # tables that a graph reads, and that must not be freed before it

    @classmethod
    def of_size(cls, size: GraphSize, inputs: torch.Tensor, place: Place, held: list[torch.Tensor]) -> Self:
        """`inputs`: int32 on the device, see `GraphSize.fill`."""
        ids, positions, bounds = torch.split(inputs, list(size.parts))
        return cls(
            place=place, queries=size.slots, longest=size.longest, ragged=True, tokens=size.tokens, spare=0,
            bounds=bounds, lengths=[], _starts=np.empty(0, np.int32), ids=ids, positions=positions, held=held,
        )  # fmt: skip

    def firsts(self, table: torch.Tensor) -> torch.Tensor:
        self.held.append(table)
        return table.index_select(0, self.positions)

    def starts(self) -> torch.Tensor:
        """int64 [tokens]: where the query of each token begins. A row of padding begins itself."""
        return self.once("starts", lambda: torch.arange(self.tokens, device=self.place.device) - self.positions)

    def counted(self, some: torch.Tensor) -> torch.Tensor:
        counts = some.cumsum(0)
        return (counts - (counts - some.long()).index_select(0, self.starts())) * some

    def only(self, rows: torch.Tensor) -> None:
        self.wanted = rows.clamp(max=self.tokens - 1)  # an empty query begins after the last row

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of each query's rows: [tokens, width] -> float32 [queries, width]. A query with a number that is not
        finite gets NaN, and only that query.
        """
        rows = torch.arange(self.tokens, device=x.device)
        inside = (rows >= self.bounds[:-1, None]) & (rows < self.bounds[1:, None])
        broken = ~x.isfinite().all(1)
        shares = inside.float().div_(self.bounds.diff().clamp(min=1)[:, None])
        means = shares @ x.float().masked_fill(broken[:, None], 0)
        return means.masked_fill_((inside & broken).any(1, keepdim=True), torch.nan)

    def _valid(self) -> NoReturn:
        raise NotImplementedError("padded queries have no fixed shape")
