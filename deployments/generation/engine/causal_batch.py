"""A batch of a step that is computed half a layer at a time: its tensors between two halves. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import torch

from deployments.engines.packed.tensors import Place
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.host_attention import HostAttention
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.scheduler.work import Chunk

_CPU = torch.device("cpu")


class CausalBatch:
    """`hybrid_steps.Batch`. `x`, [tokens, width], holds the tokens of three kinds of chunks, in this order.

    - `_own`: chunks in the accelerator's cache.
    - `_long`: chunks of several tokens in the host's cache. The accelerator computes their attention.
    - `_ones`: host rows, of one token each. The host computes their attention.
    """

    attention: Future[torch.Tensor]  # of `_ones`, in the layer that was begun: [rows, heads * size]
    _qkv: torch.Tensor  # in that layer, [tokens, heads + 2 groups, size]
    _arriving: list[tuple[_Part, torch.Tensor]]  # the parts of it that are on their way to the host

    def __init__(self, model: CausalModel, chunks: Sequence[Chunk]) -> None:
        self._model, self._chunks = model, list(chunks)
        self._kept: torch.Tensor | None = None  # the rows of `attention` that are still wanted; None: all
        self._mixed: list[torch.Tensor] = []  # the attention of `_own` and `_long`, [tokens, heads * size]
        self._own: _Part | None
        self._long: _Part | None
        self._ones: _Part | None
        self._lay_out()
        self.x = torch.cat([model.embed(part.layout) for part in self._parts])

    def _lay_out(self) -> None:
        kinds: tuple[list[Chunk], ...] = ([], [], [])
        for chunk in self._chunks:
            kinds[0 if not chunk.on_host else 2 if len(chunk.ids) == 1 else 1].append(chunk)
        place = self._model.place
        on_host = Place(_CPU, place.dtype)
        found, end, lasts = [], 0, {}
        for chunks, stored in zip(kinds, (place, on_host, on_host), strict=True):
            found.append(_Part.of_chunks(self._model, chunks, end, stored) if chunks else None)
            for chunk in chunks:
                end += len(chunk.ids)
                lasts[id(chunk)] = end - 1
        self._own, self._long, self._ones = found
        self._parts = [part for part in found if part is not None]
        wanted = [lasts[id(chunk)] for chunk in self._chunks if chunk.wanted]
        self._last = torch.tensor(wanted, dtype=torch.int64, device=place.device)

    @property
    def on_host(self) -> bool:
        return self._long is not None or self._ones is not None

    def rows(self, is_last: bool) -> int:
        """How many rows there are after that layer."""
        return len(self._last) if is_last else len(self.x)

    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            self.attention.cancel()
            return
        kept = torch.tensor(rows)
        self.x = self.x[kept.to(self.x.device)]
        self._kept = kept if self._kept is None else self._kept[kept]
        self._chunks = [self._chunks[row] for row in rows]
        self._lay_out()

    def send(self, layer: int, qkv: torch.Tensor) -> None:
        """Apply norm and rotation to query and key in `qkv`, [tokens, heads + 2 groups, size], and send the host's rows
        to the host.
        """
        self._qkv, self._arriving = qkv, []
        if self._own is not None:
            self._model.attention[layer].put(qkv[self._own.at], self._own.layout)
        for part in (self._long, self._ones):
            if part is not None:
                self._model.turned[layer].turn(qkv[part.at], part.layout)
                self._arriving.append((part, qkv[part.at].to(_CPU, non_blocking=qkv.is_cuda)))

    def hand_over(self, layer: int, host: HostAttention) -> None:
        """Put what has arrived at the host into its cache, and submit the attention of its rows to its thread."""
        attention = self._model.host_attention[layer]
        for part, qkv in self._arriving:
            attention.put(qkv, part.stored)
            if part is self._ones:
                self.attention, self._kept = host.submit(attention, qkv, part.stored), None
        self._arriving = []

    def attend(self, layer: int) -> None:
        """Compute attention on the accelerator."""
        self._mixed = []
        if self._own is not None:
            self._mixed.append(self._model.attention[layer].attend(self._qkv[self._own.at], self._own.layout))
        if self._long is not None:
            attention = self._model.host_attention[layer]
            self._mixed.append(attention.attend_elsewhere(self._qkv[self._long.at], self._long.stored))
        del self._qkv

    def behind(self, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the attention. Returns it, [tokens, heads * size], and `x`. In the last layer, they have only the
        tokens whose logits are wanted, in the order of the chunks.
        """
        mixed = self._mixed
        if self._ones is not None:
            found = self.attention.result()
            found = found if self._kept is None else found[self._kept]
            mixed = [*mixed, found.to(self.x.device, non_blocking=True)]
        self._mixed = []
        attended = joined(mixed)
        return (attended[self._last], self.x[self._last]) if is_last else (attended, self.x)


@dataclass(frozen=True, slots=True)
class _Part:
    """The chunks of one kind in a batch. `at`: where their tokens lie in the batch."""

    layout: StepLayout  # on the accelerator
    stored: StepLayout  # on the device that holds the cache
    at: slice

    @classmethod
    def of_chunks(cls, model: CausalModel, chunks: Sequence[Chunk], start: int, stored: Place) -> Self:
        place, block_size = model.place, model.cache.block_size
        layout = StepLayout.of_chunks(chunks, place, block_size)
        layout.spare = 0  # other parts may follow
        return cls(
            layout,
            layout if place.device == stored.device else StepLayout.of_chunks(chunks, stored, block_size),
            slice(start, start + layout.tokens),
        )


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the parts. A single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
