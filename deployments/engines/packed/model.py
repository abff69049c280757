"""A transformer over packed tokens: embeddings, blocks, and pooling or a head. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from deployments.engines.micro_batches import Lengths
from deployments.engines.packed.fixed_layout import FixedLayout
from deployments.engines.packed.layers import Block, Layer
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.tensors import Place
from deployments.models.colbert import UNSEEN
from deployments.models.text_pairs import TYPE

Head = Callable[[torch.Tensor, Layout], torch.Tensor]  # [tokens, width] -> float32 [queries, numbers]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Token ids -> [tokens, width].

    - `words`, `positions`: tables. One of them includes the embedding of the first token type.
    - `second`: [width], the difference of the second text's token type from the first's.
    - `padding`: the padding token (RoBERTa). Positions are counted from its number on, and it is not counted itself.
    """

    words: torch.Tensor
    positions: torch.Tensor | None = None
    norm: Layer | None = None
    second: torch.Tensor | None = None
    scale: float = 1.0
    padding: int | None = None
    hides: bool = False  # there may be tokens to which no token attends; their ids carry `colbert.UNSEEN`

    def __call__(self, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        if self.hides and bool((hidden := ids >= UNSEEN).any()):
            layout.hidden, ids = hidden, ids & (UNSEEN - 1)
        is_second = None
        if self.second is not None:
            is_second = ids >= TYPE
            ids = torch.where(is_second, ids - TYPE, ids)
        x = functional.embedding(ids, self.words)
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.positions is not None:
            x.add_(self._of_positions(self.positions, ids, layout))
        if is_second is not None and self.second is not None:
            x.add_(is_second[:, None] * self.second)
        return x if self.norm is None else self.norm(x)

    def _of_positions(self, table: torch.Tensor, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        if self.padding is None:
            return layout.firsts(table)
        return functional.embedding(layout.counted(ids.ne(self.padding)) + self.padding, table)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model whose parts are built on request, so that a large one can be built one block at a time."""

    embeddings: Callable[[], Embeddings]
    blocks: Sequence[Callable[[], Block]]
    norm: Callable[[], Layer] | None = None  # after the last block

    def hiding(self) -> Parts:
        """The same, but allowing for tokens to which no token attends."""
        return replace(self, embeddings=lambda: replace(self.embeddings(), hides=True))

    def on_demand(self) -> Parts:
        """The same, but each block is built anew whenever it computes, so that no two of them are in memory at once."""

        def late(build: Callable[[], Block]) -> Callable[[], Block]:
            def block(x: torch.Tensor, layout: Layout) -> torch.Tensor:
                return build()(x, layout)

            return lambda: block

        return replace(self, blocks=[late(build) for build in self.blocks])


class PackedModel:
    """(ids int32 [tokens], lengths [queries]) -> float32 [queries, dimension], pooled but not normalized, or the head's
    result. With `each_token`, the vector of each token, [tokens, dimension].
    """

    form, padded = "packed", False

    def __init__(self, parts: Parts, place: Place, answer: ModelOutput) -> None:
        self.place, self._answer = place, answer
        self._embeddings = parts.embeddings()
        self._blocks = [build() for build in parts.blocks]
        self._norm = None if parts.norm is None else parts.norm()

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor:
        return self.compute(ids, Layout.of(lengths, self.place), each_token=each_token)

    def compute(self, ids: torch.Tensor, layout: Layout, *, each_token: bool = False) -> torch.Tensor:
        """The same for a pass of that layout."""
        x = layout.add_spare(self._embeddings(ids, layout))
        for number, block in enumerate(self._blocks, 1):
            if number == len(self._blocks) and not each_token:
                self._answer.narrow(layout)
            x = block(x, layout)
        x = x[: layout.tokens if layout.wanted is None else layout.queries]
        return self._answer(x if self._norm is None else self._norm(x), layout, each_token=each_token)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """[tokens, width] -> float32: the pooling or head of a model."""

    pooling: str
    head: Head | None = None

    def narrow(self, layout: Layout) -> None:
        """Tell the last block if only one token of each query is needed."""
        pooling = self.pooling if self.head is None else getattr(self.head, "pooling", "")
        if pooling in _TOKENS:
            layout.only(_TOKENS[pooling](layout.bounds))

    def __call__(self, x: torch.Tensor, layout: Layout, *, each_token: bool) -> torch.Tensor:
        if each_token:
            return x.float()
        return pool(x, layout, self.pooling) if self.head is None else self.head(x, layout)


_TOKENS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {  # each query's token, by the bounds of the queries
    "cls": lambda bounds: bounds[:-1],
    "last": lambda bounds: bounds[1:] - 1,
}


def pool(x: torch.Tensor, layout: Layout, pooling: str) -> torch.Tensor:
    """Pool by "cls", "last" or "mean": [tokens, width], or [queries, width] if only those rows were computed -> float32
    [queries, width].
    """
    if layout.wanted is not None:
        return x.float()
    if pooling == "mean" and isinstance(layout, FixedLayout):
        return layout.means(x)
    if pooling == "mean" and not layout.ragged:
        return x.view(layout.queries, layout.longest, -1).mean(1, dtype=torch.float32)
    return pool_rows(x, layout.bounds, layout.lengths, pooling)


def pool_rows(x: torch.Tensor, bounds: torch.Tensor, lengths: Sequence[int], pooling: str) -> torch.Tensor:
    """Pool [tokens, width] -> float32 [queries, width]. `bounds`: 0 and the end of each query."""
    if pooling == "mean":
        return torch.stack([one.mean(0, dtype=torch.float32) for one in torch.split(x, list(lengths))])
    return x.index_select(0, _TOKENS[pooling](bounds)).float()
