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
from deployments.generation.kernels.decode_kernel import DecodeRows
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk

# Numbers of rows to which products are padded, since oneDNN prepares a new kernel for each number; above 32, multiples.
_ROWS = (1, 2, 4, 8, 16, 24, 32)


@dataclass(slots=True, kw_only=True)
class StepLayout(Layout):
    """Where the chunks lie in a step's packed tokens. All tensors of this class are int64."""

    chunks: Sequence[Chunk]
    slots: torch.Tensor  # [2, tokens]: each token's block of the cache, and its position in the block
    tables: torch.Tensor  # [chunks, most blocks]: for each chunk, the blocks that hold it and all tokens before it
    last: torch.Tensor  # the rows whose next token is wanted
    decoding: DecodeRows

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], place: Place) -> Self:
        lengths = np.array([len(chunk.ids) for chunk in chunks], np.int32)
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = int(bounds[-1])
        tables = np.zeros((len(chunks), max(blocks_of(chunk.end) for chunk in chunks)), np.int64)
        for table, chunk in zip(tables, chunks, strict=True):
            table[: blocks_of(chunk.end)] = chunk.table[: blocks_of(chunk.end)]
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        slots = np.stack([
            np.concatenate([table[at // BLOCK] for table, at in zip(tables, positions, strict=True)]),
            np.concatenate([at % BLOCK for at in positions]),
        ])  # fmt: skip
        last = np.array([bounds[number + 1] - 1 for number, chunk in enumerate(chunks) if chunk.wanted], np.int64)
        together = sent(np.concatenate([slots.ravel(), tables.ravel(), last]), place.device)  # in one copy
        on_device = torch.split(together, [slots.size, tables.size, len(last)])
        return cls(
            place=place,
            queries=len(chunks),
            longest=max(chunk.end for chunk in chunks),
            ragged=True,
            tokens=tokens,
            spare=_rows(tokens) - tokens if place.device.type == "cpu" else 0,
            bounds=sent(bounds, place.device),
            lengths=lengths.tolist(),
            _starts=bounds,
            chunks=chunks,
            slots=on_device[0].view(slots.shape),
            tables=on_device[1].view(tables.shape),
            last=on_device[2],
            decoding=DecodeRows.of_chunks(chunks, bounds[:-1]),
        )

    def firsts(self, table: torch.Tensor) -> torch.Tensor:
        return torch.cat([table[chunk.start : chunk.end] for chunk in self.chunks])

    def only(self, rows: torch.Tensor) -> None:
        spare = _rows(len(rows)) - len(rows) if self.place.device.type == "cpu" else 0
        self.wanted = functional.pad(rows, (0, spare))


def sent(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The numbers on the device, without waiting for it on CUDA. torch reuses pinned memory only after the copy."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _rows(tokens: int) -> int:
    return next((rows for rows in _ROWS if rows >= tokens), -(-tokens // _ROWS[-1]) * _ROWS[-1])
