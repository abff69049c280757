"""Attention of prompts on a CPU, by `prompt_attention.c` if it was built at installation. Imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.kernels import native
from deployments.generation.scheduler.work import Chunk

_NAME = "prompt_attention"
_SIZES = 16  # a head's size is a multiple of it
_PAIRED, _PAIRED_SIZES = {"amx", "avx512bf16"}, 32  # forms for bfloat16 alone, and the sizes of their heads
_MOST, _PANEL = 512, 32  # a tile's queries that share keys: what a core's caches hold; a multiple of those at once
_SHARES = 4  # tiles per thread, so that all threads end at about the same time


class _Prompts(ctypes.Structure):
    """`struct prompts` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "mixed", "tiles", "tables")),
        *((name, ctypes.c_int64) for name in ("query_stride", "table_stride", "count", "groups", "heads", "size")),
        *((name, ctypes.c_int64) for name in ("block_size", "dtype", "most", "next", "failed")),
    )


class PromptTiles(NamedTuple):
    """The chunks of several tokens in a step, in tiles, those with the most work first."""

    tiles: npt.NDArray[np.int64]  # [tiles, 4]: see the C file
    tables: torch.Tensor  # int64 [chunks, most blocks]


class PromptKernel:
    """One form of the kernel, for one model's heads."""

    def __init__(self, form: str, heads: HeadLayout) -> None:
        """`form` is one of `forms` for these heads and their dtype."""
        self._run, self._heads = native.function(_NAME, form), heads

    def tiles(self, chunks: Sequence[Chunk], starts: npt.NDArray[np.int32], tables: torch.Tensor) -> PromptTiles:
        """`starts`: the index of each chunk's first token in the step. `tables`: see `PromptTiles`."""
        groups, shared = self._heads.groups, self._heads.heads // self._heads.groups
        tokens = sum(len(chunk.ids) for chunk in chunks if len(chunk.ids) > 1)
        rows = tokens * shared * groups // (_SHARES * torch.get_num_threads())
        most = max(1, min(_MOST, max(1, rows // _PANEL) * _PANEL) // shared)
        found = [
            (start + first, min(most, len(chunk.ids) - first), chunk.start + first, row)
            for row, (chunk, start) in enumerate(zip(chunks, starts.tolist(), strict=True))
            if len(chunk.ids) > 1
            for first in range(0, len(chunk.ids), most)
        ]
        found.sort(key=lambda tile: -tile[1] * (tile[1] + 2 * tile[2]))
        return PromptTiles(np.array(found, np.int64), tables)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PromptTiles, mixed: torch.Tensor
    ) -> None:
        """Like `DecodeKernel.attend`, for the tokens of these tiles. Raises MemoryError."""
        tiles, tables = rows
        heads = self._heads
        q = q if q.stride()[1:] == (heads.size, 1) else q.contiguous()
        pointers = (q.data_ptr(), keys.data_ptr(), values.data_ptr(), mixed.data_ptr(), tiles.ctypes.data)
        shape = (len(tiles), heads.groups, heads.heads // heads.groups, heads.size)
        strides = (q.stride(0), tables.stride(0))
        rest = (keys.shape[2], native.DTYPES[q.dtype], int(tiles[:, 1].max()))
        work = _Prompts(*pointers, tables.data_ptr(), *strides, *shape, *rest)
        native.on_threads()(self._run, ctypes.byref(work), min(torch.get_num_threads(), shape[0] * shape[1]))
        if work.failed:
            raise MemoryError("not enough memory for attention: give the replica more, or its cache fewer blocks")


def forms(heads: HeadLayout, dtype: torch.dtype) -> list[str]:
    """The forms that this processor runs for these heads, best first. Empty: use torch's operations."""
    if dtype not in native.DTYPES or heads.size % _SIZES:
        return []
    pairs = dtype == torch.bfloat16 and not heads.size % _PAIRED_SIZES
    return [form for form in native.forms(_NAME) if pairs or form not in _PAIRED]


def prompt_kernel(heads: HeadLayout, place: Place) -> PromptKernel | None:
    """The best form on a CPU. None elsewhere, or if there is none."""
    found = forms(heads, place.dtype) if place.device.type == "cpu" else []
    return PromptKernel(found[0], heads) if found else None
