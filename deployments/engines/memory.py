"""Freed memory stays with the process, as the next pass will want as much: each page handed back and taken anew is a
fault, and those took a quarter of the time of a batch.
"""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger("ray.serve")

# malloc.h of the GNU C library
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; the most that it takes
_KEEP_BYTES = 2**30


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to a bound. Does nothing where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        logger.info("this C library has no mallopt: buffers are taken anew for every batch")
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
