"""Norms and rotations of a step's rows between two products on a CPU, by `decode_rows.c` if it was built at
installation. Imports torch.
"""

from __future__ import annotations

import ctypes

import torch

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.layers import Layer, RmsNorm
from deployments.engines.packed.tensors import Place
from deployments.generation.kernels import native

_NAME = "decode_rows"
_LANES = 16  # as in the C file
_SHARE = 16
_DTYPES = (torch.float32, torch.bfloat16)


class _Norm(ctypes.Structure):
    """`struct norm` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_stride", "dtype", "next")),
        ("eps", ctypes.c_float),
    )


class _Turn(ctypes.Structure):
    """`struct turn` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "angles", "weight", "keys", "values", "slots")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "groups", "size", "block_size", "dtype", "next")),
        ("eps", ctypes.c_float),
    )


class NormKernel:
    """A norm, [rows, width] -> [rows, width], that rounds only its result."""

    def __init__(self, norm: RmsNorm) -> None:
        self._run, self._weight, self._eps = native.function(_NAME, "norm"), norm.weight.float(), norm.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        pointers = (x.data_ptr(), self._weight.data_ptr(), y.data_ptr())
        work = _Norm(*pointers, *x.shape, x.stride(0), native.DTYPES[x.dtype], 0, self._eps)
        _on_threads(self._run, work, len(x))
        return y


class TurnKernel:
    """Applies norm and rotation to query and key, and puts key and value into a layer's cache, in one pass."""

    def __init__(self, heads: HeadLayout, norm: RmsNorm | None) -> None:
        self._run, self._heads = native.function(_NAME, "turn"), heads
        self._weight = None if norm is None else norm.weight.float().contiguous()
        self._eps = 0.0 if norm is None else norm.eps

    def turn(
        self, qkv: torch.Tensor, angles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Change `qkv`, [tokens + spare, heads + 2 groups, size], in place, and fill the cache. `angles`:
        [tokens + spare, size]; `slots`: the tokens' blocks and their positions in the blocks, [2, tokens].
        """
        tensors = (qkv, angles, self._weight, keys, values, slots)
        heads, tokens = self._heads, slots.shape[1]
        work = _Turn(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(tokens, heads.heads, heads.groups, heads.size, keys.shape[2]),
            *(native.DTYPES[qkv.dtype], 0, self._eps),
        )
        _on_threads(self._run, work, tokens)


def kernel_norm(norm: RmsNorm) -> Layer:
    """The norm as a kernel, or `norm` itself if torch has to compute it."""
    weight = norm.weight
    usable = weight.device.type == "cpu" and weight.dtype in _DTYPES and not weight.shape[-1] % _LANES
    return NormKernel(norm) if usable and native.library(_NAME) else norm


def turn_kernel(heads: HeadLayout, norm: RmsNorm | None, place: Place) -> TurnKernel | None:
    """The kernel. None if torch's own operations have to be used."""
    usable = place.device.type == "cpu" and place.dtype in _DTYPES and not heads.size % (2 * _LANES)
    return TurnKernel(heads, norm) if usable and native.library(_NAME) else None


def _on_threads(run: ctypes._NamedFuncPointer, work: ctypes.Structure, rows: int) -> None:
    """Run a kernel. Few rows run on the caller's thread, because waking others would take longer."""
    threads = min(torch.get_num_threads(), rows // (4 * _SHARE))
    if threads > 1:
        native.on_threads()(run, ctypes.byref(work), threads)
    else:
        run(ctypes.byref(work))
