"""Non-negative least squares. Pure."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt


def non_negative(columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares without negative coefficients. Tries every subset of columns, so use it only for a few."""
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    columns = columns / scale
    best, least = np.zeros(columns.shape[1]), float("inf")
    for count in range(1, columns.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(columns.shape[1]), count)):
            found, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)
            error = float(np.square(columns[:, chosen] @ found - wanted).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(columns.shape[1]), error
                best[chosen] = found
    return np.asarray(best / scale, np.float64)
