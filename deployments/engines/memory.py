"""Three settings of the process's memory.

- malloc keeps freed memory, because the next pass needs as much. Every page that is returned and taken again costs a
  page fault; these took a quarter of a batch's time.
- While a large model is loaded, malloc returns freed memory. Otherwise temporary tensors would leave holes between the
  lasting ones, more than half as large as the weights.
- oneDNN keeps prepared operations only for the latest shapes.
"""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger("ray.serve")

# malloc.h of the GNU C library
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; the largest accepted value
_KEEP_BYTES = 2**30
_GIVE_BACK_BYTES = 2**18

# The most prepared operations to keep: in oneDNN for the process, in torch's layer above it for each thread and kind.
# By default each keeps 1,024 of some 0.4 MB, and limiting only one keeps them alive in the other. A pass uses six over
# and over, and preparing one takes 0.3 ms.
_PREPARED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "16"}


def keep_freed_memory() -> None:
    """Have malloc keep freed memory, up to a limit. Does nothing if the C library has no such setting."""
    _set_malloc(_LARGEST_MMAP_THRESHOLD, _KEEP_BYTES)


def give_back_freed_memory() -> None:
    """Have malloc return larger freed pieces at once. Does nothing if the C library has no such setting."""
    _set_malloc(_GIVE_BACK_BYTES, _GIVE_BACK_BYTES)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        logger.info("this C library has no mallopt: how it keeps freed memory is not changed")
        return
    mallopt(_MMAP_THRESHOLD, mmap_threshold)
    mallopt(_TRIM_THRESHOLD, trim_threshold)


def bound_prepared_operations() -> None:
    """Have oneDNN keep few operations for past shapes. Call it before torch's first product. The user's values stay."""
    for name, most in _PREPARED.items():
        os.environ.setdefault(name, most)
