"""Whether the CPU pool pays beside the accelerator (`cpu_overflow: auto`). Pure.

The paper's Xeon adds a fifth to what its V100 answers within an SLO of 1 s. Beside an H200, a host's CPU adds less than
a hundredth, and takes the cores from Routers. So a pool that adds little gets no queries. Its processes stay, idle: if
the accelerator is lost, they answer at once.
"""

from __future__ import annotations

from typing import NamedTuple

LEAST_SHARE = 0.05  # less is hard to tell from how much the accelerator's own time varies
_DIFFERENT = 1.25  # a choice stands until the share is this factor beyond the limit: learned figures vary by less


class Speed(NamedTuple):
    """A pool: the latency model of its replicas, in s, and how many answer. `alpha_s` is 0 until it is known."""

    alpha_s: float
    beta_s: float
    replicas: int

    def concurrency(self, slo_s: float) -> float:
        """How many queries of 75 tokens it answers within the SLO if all come at once (the paper's Eq. 12)."""
        return self.replicas * max(0.0, slo_s - self.beta_s) / self.alpha_s


def added_share(accelerator: Speed, cpu: Speed, slo_s: float) -> float | None:
    """What the CPU pool adds, as a share of what the accelerator does alone. None: that is not known yet, or the
    accelerator answers nothing.
    """
    if not (accelerator.alpha_s > 0 and cpu.alpha_s > 0):
        return None
    alone = accelerator.concurrency(slo_s)
    return cpu.concurrency(slo_s) / alone if alone > 0 and cpu.replicas else None


def is_left_out(share: float | None, *, before: bool) -> bool:
    """Whether the CPU pool gets no queries. `before`: the choice so far. Without a share the CPU pool serves."""
    if share is None:
        return False
    return share < (LEAST_SHARE * _DIFFERENT if before else LEAST_SHARE / _DIFFERENT)
