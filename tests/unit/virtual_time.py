"""The event loop whose clock jumps, which the benchmarks use too."""

from __future__ import annotations

from benchmarks.virtual_time import run

__all__ = ["run"]
