"""The layout of a step: its packed chunks, and where their keys and values lie in the cache. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from deployments.engines.packed.layout import Layout
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.decode_sizes import DecodeSize
from deployments.generation.kernels.decode_kernel import DecodeRows
from deployments.generation.scheduler.block_pool import blocks_of
from deployments.generation.scheduler.work import Chunk

# Numbers of rows to which torch's products are padded: oneDNN prepares a new kernel for each. Above 32, multiples.
_ROWS = (1, 2, 4, 8, 16, 24, 32)


@dataclass(slots=True, kw_only=True)
class StepLayout(Layout):
    """Where the chunks lie in a step's packed tokens. All tensors of this class are int64."""

    chunks: Sequence[Chunk]
    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]: each token's position in its sequence
    ends: torch.Tensor  # [chunks]: how many tokens a chunk's sequence has with it
    slots: torch.Tensor  # [2, tokens]: each token's block of the cache, and its position in the block
    tables: torch.Tensor  # [chunks, most blocks]: for each chunk, the blocks that hold it and all tokens before it
    last: torch.Tensor  # the rows whose logits are needed (`Chunk.first_row`)
    decoding: DecodeRows
    is_padded: bool  # whether there are spare rows

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], place: Place, block_size: int, *, padded: bool = False) -> Self:
        """`padded`: add spare rows, for torch's products on a CPU."""
        lengths = np.array([len(chunk.ids) for chunk in chunks], np.int32)
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = int(bounds[-1])
        counts = [blocks_of(chunk.end, block_size) for chunk in chunks]
        tables = np.zeros((len(chunks), max(counts)), np.int64)
        for table, chunk, count in zip(tables, chunks, counts, strict=True):
            table[:count] = chunk.table[:count]
        ids = np.concatenate([chunk.ids for chunk in chunks])
        ends = [chunk.end for chunk in chunks]
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        blocks = tables[np.repeat(np.arange(len(chunks)), lengths), positions // block_size]
        slots = np.concatenate([blocks, positions % block_size])
        rows = zip(chunks, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        last = np.concatenate([np.arange(start + chunk.first_row, end, dtype=np.int64) for chunk, start, end in rows])
        parts = (ids, positions, ends, slots, tables.ravel(), last, bounds)
        together = sent(np.concatenate(parts, dtype=np.int64), place.device)  # in one copy
        on_device = torch.split(together, [len(part) for part in parts])
        return cls(
            place=place,
            queries=len(chunks),
            longest=max(ends),
            ragged=True,
            tokens=tokens,
            spare=_spare(tokens) if padded else 0,
            bounds=on_device[6].int(),
            lengths=lengths.tolist(),
            _starts=bounds,
            chunks=chunks,
            ids=on_device[0],
            positions=on_device[1],
            ends=on_device[2],
            slots=on_device[3].view(2, tokens),
            tables=on_device[4].view(tables.shape),
            last=on_device[5],
            decoding=DecodeRows.of_chunks(chunks, bounds[:-1]),
            is_padded=padded,
        )

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """The index of each chunk's first token in the step."""
        return self._starts[:-1]

    def firsts(self, table: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, self.positions)

    def only(self, rows: torch.Tensor) -> None:
        self.wanted = functional.pad(rows, (0, _spare(len(rows)) if self.is_padded else 0))


@dataclass(slots=True, kw_only=True)
class FixedStep(StepLayout):
    """The layout of all steps of a size, of one token for each row, whose next ones are wanted. They differ only in
    what the step's inputs hold.
    """

    held: list[torch.Tensor]  # tables that a graph reads, and that must not be freed before it

    @classmethod
    def of_size(cls, size: DecodeSize, inputs: torch.Tensor, place: Place, held: list[torch.Tensor]) -> Self:
        """`inputs`: int64 on the device, see `DecodeSize.fill`."""
        ids, positions, flat = torch.split(inputs, list(size.parts))
        tables, rows = flat.view(size.rows, size.blocks), torch.arange(size.rows + 1, device=place.device)
        blocks = tables.gather(1, (positions // size.block_size)[:, None])[:, 0]
        return cls(
            place=place, queries=size.rows, longest=size.blocks * size.block_size, ragged=True, tokens=size.rows,
            spare=0, bounds=rows.int(), lengths=[1] * size.rows, _starts=np.empty(0, np.int32), chunks=(), ids=ids,
            positions=positions, ends=positions + 1, slots=torch.stack([blocks, positions % size.block_size]),
            tables=tables, last=rows[:-1], decoding=DecodeRows.of_chunks((), np.empty(0, np.int32)), held=held,
            is_padded=False,
        )  # fmt: skip

    def firsts(self, table: torch.Tensor) -> torch.Tensor:
        self.held.append(table)
        return table.index_select(0, self.positions)


def sent(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The numbers on the device, without waiting for it on CUDA. torch reuses pinned memory only after the copy."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _spare(rows: int) -> int:
    """How many rows to add to so many."""
    return next((count for count in _ROWS if count >= rows), -(-rows // _ROWS[-1]) * _ROWS[-1]) - rows
