"""Three settings of the process's memory.

- malloc keeps freed memory, because the next pass needs as much. Each page that is given back and taken again is a page
  fault; those took a quarter of a batch's time.
- While a large model is loaded malloc gives freed memory back: between the tensors that stay, those that do not would
  leave holes of more than half of the weights.
- oneDNN keeps the operations that it has prepared for the latest shapes only.
"""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger("ray.serve")

# malloc.h of the GNU C library
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; the most that it takes
_KEEP_BYTES = 2**30
_GIVE_BACK_BYTES = 2**18

# Most prepared operations that are kept: by oneDNN for the process, by torch's layer over it for each thread and kind.
# Both keep 1,024 by themselves, at some 0.4 MB each; bounding one alone leaves them alive in the other. A pass uses six
# again and again, and to prepare one anew takes 0.3 ms.
_PREPARED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "16"}


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to a bound. Does nothing where the C library has no such setting."""
    _set_malloc(_LARGEST_MMAP_THRESHOLD, _KEEP_BYTES)


def give_back_freed_memory() -> None:
    """Have malloc give back at once what is freed in pieces of some size. Does nothing as above."""
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
    """Have oneDNN keep few operations for shapes gone by. Before torch's first product; what the user has set stays."""
    for name, most in _PREPARED.items():
        os.environ.setdefault(name, most)
