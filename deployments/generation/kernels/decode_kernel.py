"""Attention of a step's chunks of one token on a CPU, by `decode_attention.c` if it was built at installation. Imports
torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.kernels import native
from deployments.generation.scheduler.work import Chunk

_NAME = "decode_attention"
_SIZES = 16  # a head's size is a multiple of it
_LEAST = 512  # tokens of a sequence's parts, so that adding them up costs little
_PIECE = 128  # as in the C file
_SHARES = 4  # parts per thread, so that all threads end at about the same time


class _Attention(ctypes.Structure):
    """`struct attention` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "mixed", "tokens", "lengths", "tables")),
        *((name, ctypes.c_int64) for name in ("query_stride", "table_stride", "sequences", "groups", "heads", "size")),
        *((name, ctypes.c_void_p) for name in ("parts", "partial", "done")),
        *((name, ctypes.c_int64) for name in ("share", "block_size", "dtype", "next", "failed")),
    )


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The chunks of one token in a step, the longest rows first. All arrays are int64."""

    tokens: npt.NDArray[np.int64]  # [rows], their indices among the step's tokens
    lengths: npt.NDArray[np.int64]  # [rows], including this token
    tables: npt.NDArray[np.int64]  # [rows, most blocks]

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], starts: npt.NDArray[np.int32]) -> DecodeRows:
        """`starts`: the index of each chunk's first token in the step."""
        found = [(chunk, start) for chunk, start in zip(chunks, starts.tolist(), strict=True) if len(chunk.ids) == 1]
        found.sort(key=lambda one: -one[0].end)
        tables = np.zeros((len(found), max((len(chunk.table) for chunk, _ in found), default=0)), np.int64)
        for row, (chunk, _) in zip(tables, found, strict=True):
            row[: len(chunk.table)] = chunk.table
        return cls(np.array([at for _, at in found], np.int64), np.array([of.end for of, _ in found], np.int64), tables)


class DecodeKernel:
    """One form of the kernel, for one model's heads."""

    def __init__(self, form: str, heads: HeadLayout) -> None:
        """`form` is one of `forms()`."""
        self._run, self._heads = native.function(_NAME, form), heads

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: DecodeRows, mixed: torch.Tensor
    ) -> None:
        """Write the rows' tokens of `mixed`, [tokens, heads * size], from q, [tokens, heads, size] with the scale in
        it, and one layer's keys and values, [blocks, groups, block_size, size]. All are of one dtype. Raises
        MemoryError.
        """
        heads, threads = self._heads, torch.get_num_threads()
        shared = heads.heads // heads.groups
        share = _share(rows.lengths, heads.groups, threads)
        parts = np.concatenate([[0], np.cumsum(-(-rows.lengths // share))])
        partial = np.empty((parts[-1], heads.groups, shared * (heads.size + 2)), np.float32)
        done = np.zeros((len(rows.tokens), heads.groups), np.int64)
        q = q if q.stride()[1:] == (heads.size, 1) else q.contiguous()
        tensors = (tensor.data_ptr() for tensor in (q, keys, values, mixed))
        arrays = (array.ctypes.data for array in (rows.tokens, rows.lengths, rows.tables))
        shape = (q.stride(0), rows.tables.shape[1], len(rows.tokens), heads.groups, shared, heads.size)
        split = (array.ctypes.data for array in (parts, partial, done))
        work = _Attention(*tensors, *arrays, *shape, *split, share, keys.shape[2], native.DTYPES[q.dtype])
        native.on_threads()(self._run, ctypes.byref(work), min(threads, int(parts[-1]) * heads.groups))
        if work.failed:
            raise MemoryError("not enough memory for attention: give the replica more, or its cache fewer blocks")


def _share(lengths: npt.NDArray[np.int64], groups: int, threads: int) -> int:
    """The tokens of each part into which longer sequences are split, so that there is work for all threads."""
    return -(-max(_LEAST, int(lengths.sum()) * groups // (_SHARES * threads)) // _PIECE) * _PIECE


def forms() -> list[str]:
    """The forms that this processor runs, best first. Empty if the kernel was not built."""
    return native.forms(_NAME)


def decode_kernel(heads: HeadLayout, place: Place) -> DecodeKernel | None:
    """The kernel. None on other devices, for other sizes and dtypes, or if it was not built: use torch's operations."""
    if place.device.type != "cpu" or place.dtype not in native.DTYPES or heads.size % _SIZES:
        return None
    return DecodeKernel(forms()[0], heads) if forms() else None
