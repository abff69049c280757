"""What the CPU adds, as a share of the accelerator (Tables I and II). Pure."""

from __future__ import annotations


def gain(accelerator: float, cpu: float) -> float | None:
    """C_cpu / C_acc, the improvement of Tables I and II; by Section III-B also the most the average throughput gains.

    None where the accelerator takes nothing: then there is nothing to improve on.
    """
    return cpu / accelerator if accelerator else None


def saved_share(gain: float) -> float:
    """Share of the cost that is saved where an instance does `gain` times more: gain / (1 + gain).

    On the peak (Eq. 6) that is C_cpu / (C_cpu + C_acc), as Section III-B has it. On the average (Eq. 5) the paper
    prints the gain C_cpu / C_acc itself as the largest decrement of cost, 22.3 % where it is 18.6 %: an instance that
    does 1.229 times the work makes 1 - 1/1.229 of the instances needless, no more.
    """
    return gain / (1.0 + gain)
