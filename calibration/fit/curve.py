"""Eq. 12, `latency = alpha * concurrency + beta`, and the depth that it allows (Eq. 7-11). Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["burst", "steady"]
"""burst: queries arrive all at once, alpha*C + beta. steady: queries arrive at any time, so a query may wait for a
running batch and then run in the next one, alpha*C + 2*beta.
"""
_NEARLY = 1e-9  # rounding: (2.0 - 0.2) / 0.1 must give 18 queries
_FLAT_S = 1e-9  # seconds per query; a smaller slope counts as 0


@dataclass(frozen=True, slots=True)
class Curve:
    """`alpha_s`: extra seconds per query in flight. `beta_s`: seconds that any batch takes. Both >= 0."""

    alpha_s: float
    beta_s: float

    @property
    def rises(self) -> bool:
        """Whether the latency grows with concurrency. A flat line gives no depth."""
        return self.alpha_s > _FLAT_S

    def latency_s(self, concurrency: float, shape: Shape = "burst") -> float:
        """Seconds until the slowest of `concurrency` queries is answered."""
        return self.alpha_s * concurrency + _runs(shape) * self.beta_s

    def unrounded_depth(self, slo_s: float, shape: Shape = "burst") -> float:
        """Eq. 12 solved for C: the concurrency at which the latency equals `slo_s`; 0 if beta alone is longer. Raises
        ValueError if the latency does not grow.
        """
        if self.alpha_s <= 0:
            raise ValueError("a latency that does not rise has no depth")
        return max(0.0, (slo_s - _runs(shape) * self.beta_s) / self.alpha_s)

    def depth(self, slo_s: float, shape: Shape = "burst", most: int | None = None) -> int:
        """Eq. 7-10: the most queries in flight on one replica, up to `most`, that are all answered within `slo_s`; 0 if
        not even one is (Eq. 11). Raises ValueError if the latency does not grow and there is no `most`.
        """
        if most is None:
            return floor(self.unrounded_depth(slo_s, shape))
        if not self.rises:
            return most if self.latency_s(1, shape) <= slo_s else 0
        return floor(min(float(most), self.unrounded_depth(slo_s, shape)))


def floor(value: float) -> int:
    """`math.floor`, but a value just below a whole number counts as that number."""
    return math.floor(value + _NEARLY * max(1.0, abs(value)))


def ceil(value: float) -> int:
    """`math.ceil`, but a value just above a whole number counts as that number."""
    return math.ceil(value - _NEARLY * max(1.0, abs(value)))


def _runs(shape: Shape) -> int:
    """How many batches the slowest query waits for, its own included."""
    return 2 if shape == "steady" else 1
