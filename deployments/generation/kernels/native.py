"""C functions that were built at installation, and torch's own threads to run them on. Imports torch."""

from __future__ import annotations

import contextlib
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
    """The library built from `name`.c beside this file. None if it was not built; torch computes instead."""
    try:
        found = ctypes.CDLL(str(Path(__file__).with_name(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")))
    except OSError as error:
        logger.info("%s: using torch, because the C kernel was not built at installation (%s)", name, error)
        return None
    logger.info("%s: in C", name)
    return found


@functools.cache
def forms(name: str) -> list[str]:
    """The forms of the function `name`_FORM that this processor runs, best first. Empty if it was not built."""
    found = library(name)
    if found is None:
        return []
    function = getattr(found, f"{name}_forms")
    function.restype = ctypes.c_char_p
    names: bytes = function()
    return names.decode().split()


@functools.cache
def function(name: str, form: str) -> Any:
    """The C function in that form, one of `forms(name)`."""
    return getattr(library(name), f"{name}_{form}")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialized tensor on the CPU. On Linux a large one uses pages of 2 MiB, which makes reading it sequentially
    faster.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE
    return whole[first : first + size].view(dtype).view(shape)


@functools.cache
def on_threads() -> Callable[[Any, Any, int], object]:
    """A callable that runs a C function with one argument on a number of threads. They are those of torch's own OpenMP,
    so that there are never more threads than cores. Without GNU OpenMP in torch, it runs on the caller's thread only.
    """
    try:
        linked = ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")  # and the libraries it links
        parallel = linked.GOMP_parallel
    except (AttributeError, OSError):
        return lambda run, argument, _: run(argument)
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return lambda run, argument, threads: parallel(run, argument, threads, 0)
