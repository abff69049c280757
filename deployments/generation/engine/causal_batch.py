"""One batch of a step that is computed half a layer at a time: its tensors between two halves. Imports torch."""

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
from deployments.generation.scheduler.step import Chunk

_CPU = torch.device("cpu")


class CausalBatch:
    """`hybrid_steps.Batch`. `x`, [tokens, width], has the tokens of three kinds of chunks, one kind behind the other:
    `_own` of the accelerator's cache; `_long`, chunks of several tokens whose cache the host has, but whose attention
    the accelerator computes; `_ones`, host rows: one token each, whose attention the host computes.
    """

    attention: Future[torch.Tensor]  # of `_ones`, in the layer that was begun: [rows, heads * size]
    _qkv: torch.Tensor  # in that layer, [tokens, heads + 2 groups, size]
    _arriving: list[tuple[_Part, torch.Tensor]]  # of it, what the host gets

    def __init__(self, model: CausalModel, chunks: Sequence[Chunk]) -> None:
        self._model, self._chunks = model, list(chunks)
        self._kept: torch.Tensor | None = None  # rows of `attention` that are still wanted, if not all
        self._mixed: list[torch.Tensor] = []  # [tokens, heads * size], of the first two
        self._own: _Part | None
        self._long: _Part | None
        self._ones: _Part | None
        self._lay_out()
        self.x = torch.cat([model.embed(part.layout.chunks, part.layout) for part in self._parts])

    def _lay_out(self) -> None:
        kinds: tuple[list[Chunk], ...] = ([], [], [])
        for chunk in self._chunks:
            kinds[0 if not chunk.on_host else 2 if len(chunk.ids) == 1 else 1].append(chunk)
        place = self._model.place
        on_host = Place(_CPU, place.dtype)
        found, end, lasts = [], 0, {}
        for chunks, stored in zip(kinds, (place, on_host, on_host), strict=True):
            found.append(_Part.of_chunks(chunks, end, place, stored) if chunks else None)
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
        """How many there are behind that layer."""
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
        """Turn query and key of [tokens, heads + 2 groups, size]; those of the host's rows are sent to it."""
        self._qkv, self._arriving = qkv, []
        if self._own is not None:
            self._model.attention[layer].put(qkv[self._own.at], self._own.layout)
        for part in (self._long, self._ones):
            if part is not None:
                self._model.turned[layer].turn(qkv[part.at], part.layout)
                self._arriving.append((part, qkv[part.at].to(_CPU, non_blocking=qkv.is_cuda)))

    def hand_over(self, layer: int, host: HostAttention) -> None:
        """What has arrived at the host is put into its cache; the attention of its rows goes to its thread."""
        attention = self._model.host_attention[layer]
        for part, qkv in self._arriving:
            attention.put(qkv, part.stored)
            if part is self._ones:
                self.attention, self._kept = host.submit(attention, qkv, part.stored), None
        self._arriving = []

    def attend(self, layer: int) -> None:
        """On the accelerator."""
        self._mixed = []
        if self._own is not None:
            self._mixed.append(self._model.attention[layer].attend(self._qkv[self._own.at], self._own.layout))
        if self._long is not None:
            attention = self._model.host_attention[layer]
            self._mixed.append(attention.attend_elsewhere(self._qkv[self._long.at], self._long.stored))
        del self._qkv

    def behind(self, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention, [tokens, heads * size], which is waited for, and `x`. In the last layer only those of the
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
    """The chunks of one kind in a batch; `at`: where their tokens are in it."""

    layout: StepLayout  # at the accelerator
    stored: StepLayout  # where the cache is
    at: slice

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], start: int, place: Place, stored: Place) -> Self:
        layout = StepLayout.of_chunks(chunks, place)
        layout.spare = 0  # others may follow
        return cls(
            layout,
            layout if place.device == stored.device else StepLayout.of_chunks(chunks, stored),
            slice(start, start + layout.tokens),
        )


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
