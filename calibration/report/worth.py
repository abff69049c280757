"""What the CPU adds to the accelerator (Tables I and II). Pure."""

from __future__ import annotations


def gain(accelerator: float, cpu: float) -> float | None:
    """C_cpu / C_acc: the improvement in Tables I and II, and by Section III-B the largest gain in average throughput.

    None if the accelerator takes no queries.
    """
    return cpu / accelerator if accelerator else None


def saved_share(gain: float) -> float:
    """The share of the cost that is saved if an instance does (1 + gain) times the work: gain / (1 + gain).

    For the peak (Eq. 6) this is C_cpu / (C_cpu + C_acc), as in Section III-B. For the average (Eq. 5) the paper prints
    the gain C_cpu / C_acc itself as the largest decrement of cost, 22.3 % instead of 18.6 %. But an instance that does
    1.229 times the work saves only 1 - 1/1.229 of the instances.
    """
    return gain / (1.0 + gain)
