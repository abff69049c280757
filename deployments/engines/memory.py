"""Two settings of the process's memory.

- malloc keeps freed memory, because the next pass needs as much. Each page that is given back and taken again is a page
  fault; those took a quarter of a batch's time.
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

# Most prepared operations that are kept: by oneDNN for the process, by torch's layer over it for each thread and kind.
# Both keep 1,024 by themselves, at some 0.4 MB each; bounding one alone leaves them alive in the other. A pass uses six
# again and again, and to prepare one anew takes 0.3 ms.
_PREPARED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "16"}


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to a bound. Does nothing where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        logger.info("this C library has no mallopt: buffers are taken anew for every batch")
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)


def bound_prepared_operations() -> None:
    """Have oneDNN keep few operations for shapes gone by. Before torch's first product; what the user has set stays."""
    for name, most in _PREPARED.items():
        os.environ.setdefault(name, most)
