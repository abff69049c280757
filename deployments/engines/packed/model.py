"""A transformer over packed tokens: embeddings, blocks, and pooling or a head. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from deployments.engines.packed.layers import Block, Layer
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.tensors import Place
from deployments.engines.passes import Lengths
from deployments.models.pairs import TYPE

Head = Callable[[torch.Tensor, Layout], torch.Tensor]  # [tokens, width] -> float32 [queries, numbers]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Token ids -> [tokens, width]. `words` and `positions` are tables; what all tokens of the first kind get beside
    them is in one of the two. `second`, [width], is how the second text's tokens differ from the first's.
    """

    words: torch.Tensor
    positions: torch.Tensor | None = None
    norm: Layer | None = None
    second: torch.Tensor | None = None
    scale: float = 1.0

    def __call__(self, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        is_second = None
        if self.second is not None:
            is_second = ids >= TYPE
            ids = torch.where(is_second, ids - TYPE, ids)
        x = functional.embedding(ids, self.words)
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.positions is not None:
            x.add_(layout.firsts(self.positions))
        if is_second is not None and self.second is not None:
            x.add_(is_second[:, None] * self.second)
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True, slots=True)
class Parts:
    """A family's model, each part built when it is asked for: of a large one, one block at a time."""

    embeddings: Callable[[], Embeddings]
    blocks: Sequence[Callable[[], Block]]
    norm: Callable[[], Layer] | None = None  # after the last block


class PackedModel:
    """(ids int32 [tokens], lengths [queries]) -> float32 [queries, dimension]: pooled and not normalised, or what
    `head` makes of the tokens; or the vector of each token, [tokens, dimension].
    """

    padded = False

    def __init__(self, parts: Parts, place: Place, pooling: str, head: Head | None = None) -> None:
        self._place, self._pooling, self._head = place, pooling, head
        self._embeddings = parts.embeddings()
        self._blocks = [build() for build in parts.blocks]
        self._norm = None if parts.norm is None else parts.norm()

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor:
        layout = Layout.of(lengths, self._place)
        x = layout.add_spare(self._embeddings(ids, layout))
        for block in self._blocks:
            x = block(x, layout)
        x = x[: layout.tokens]
        if self._norm is not None:
            x = self._norm(x)
        if each_token:
            return x.float()
        return pool(x, layout, self._pooling) if self._head is None else self._head(x, layout)


def pool(x: torch.Tensor, layout: Layout, pooling: str) -> torch.Tensor:
    """[tokens, width] -> float32 [queries, width], by "cls", "last" or "mean"."""
    if pooling == "cls":
        return x.index_select(0, layout.bounds[:-1]).float()
    if pooling == "last":
        return x.index_select(0, layout.bounds[1:] - 1).float()
    if not layout.ragged:
        return x.view(layout.queries, layout.longest, -1).mean(1, dtype=torch.float32)
    return torch.stack([one.mean(0, dtype=torch.float32) for one in torch.split(x, layout.lengths)])
