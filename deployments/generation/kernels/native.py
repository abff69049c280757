"""Functions in C that were built at the installation, and torch's own threads to call them on. Imports torch."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import mmap
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("ray.serve")

_HUGE = 2**21  # bytes
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the enum dtype of vectors.h


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """Built of `name`.c beside this file; None, and torch computes instead, where that was not built."""
    try:
        found = ctypes.CDLL(str(Path(__file__).with_name(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")))
    except OSError as error:
        logger.info("%s: using torch, because the C kernel was not built at installation (%s)", name, error)
        return None
    logger.info("%s: in C", name)
    return found


@functools.cache
def forms(name: str) -> list[str]:
    """Of the functions `name`_FORM those that this processor runs, the best first; none where it was not built."""
    found = library(name)
    if found is None:
        return []
    function = getattr(found, f"{name}_forms")
    function.restype = ctypes.c_char_p
    names: bytes = function()
    return names.decode().split()


@functools.cache
def function(name: str, form: str) -> Any:
    """`form` is one of `forms(name)`."""
    return getattr(library(name), f"{name}_{form}")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU, of whatever numbers. A large one lies in pages of 2 MiB where Linux has such: what is read
    from its first byte to its last comes quicker so.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + size].view(dtype).view(shape)


@functools.cache
def on_threads() -> Callable[[Any, Any, int], object]:
    """Calls a C function with one argument on so many threads: those of torch's own OpenMP, so that there are no more
    threads than cores. On the caller's alone where torch has another kind.
    """
    try:
        linked = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")  # and what that is linked with
        parallel = linked.GOMP_parallel
    except (AttributeError, OSError):
        return lambda run, argument, _: run(argument)
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return lambda run, argument, threads: parallel(run, argument, threads, 0)
