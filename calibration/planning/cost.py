"""Computes what a deployment costs, what the CPU saves (Section III), and why (Section IV-B.3). Pure arithmetic.

A query is one text. An instance is all replicas of all pools that serve together. Its capacity is the number of queries
that it may have in flight. The paper writes T both for an instance's throughput (Eq. 5) and for the longest allowed
latency (Eq. 7-11); here they are `throughput` (queries/s) and `slo_s`. Costs have the currency and the period of the
given price.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from calibration.fit.curve import Curve, Shape, ceil
from calibration.report.worth import gain, saved_share

SLO_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """One kind of device in an instance: `replicas`, each with the calibrated `depth` and the fitted `curve`."""

    curve: Curve
    depth: int
    replicas: int = 1

    @property
    def capacity(self) -> int:
        """Queries in flight on all replicas: C of Eq. 6."""
        return self.depth * self.replicas

    def throughput(self, shape: Shape = "burst") -> float:
        """Queries/s at full queues, T of Eq. 5: depth over latency, summed over the replicas."""
        return self.capacity / self.curve.latency_s(self.depth, shape) if self.depth else 0.0


# Section III: what it costs


@dataclass(frozen=True, slots=True)
class Deployment:
    """Whole instances, the devices in them, and their price."""

    instances: int
    devices: int
    cost: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """A demand met by the accelerators alone, and by the same kind of instances with the CPU's help. `each_...`: what
    one instance does. `saved_share`: of whole devices. `saved_share_limit`: its limit for a large demand, where
    rounding up to whole instances no longer matters.
    """

    each_alone: float
    each_together: float
    alone: Deployment
    together: Deployment
    saved_share_limit: float

    @property
    def saved(self) -> Deployment:
        """The devices that the CPU's help saves."""
        both = zip(astuple(self.alone), astuple(self.together), strict=True)
        return Deployment(*(alone - together for alone, together in both))

    @property
    def saved_share(self) -> float:
        return self.saved.devices / self.alone.devices


def queries_per_window(slo_s: float, processing_s: float) -> int:
    """Eq. 4: how many other queries are processed while one waits as long as it may, `slo_s - processing_s`.

    Our reading: `processing_s` is the average time that an instance is busy per query, 1/T, so that n + 1 queries
    finish within the SLO at the throughput T of Eq. 5. The paper calls it the average processing time and does not
    relate it to T; with the latency of a full batch instead, n would count batches. The result is rounded up, so the
    last of the n may still be running when the wait ends. It is 0 if one query alone takes longer than the SLO.
    """
    return max(0, ceil((slo_s - processing_s) / processing_s))


def deployment(demand: float, each: float, devices_per_instance: int, price: float) -> Deployment:
    """Eq. 5 and 6: Cost = demand / each * D * P, with `demand / each` rounded up to whole instances.

    Eq. 5 deploys for the average: `demand` is N in queries/s, `each` an instance's throughput T in queries/s. Eq. 6
    deploys for the peak: `demand` is N_peak in queries at once, `each` an instance's capacity C. The paper does not
    round the quotients, but devices are sold whole.
    """
    instances = max(1, ceil(demand / each))
    return Deployment(instances, instances * devices_per_instance, instances * devices_per_instance * price)


def size(demand: float, alone: float, added: float, devices_per_instance: int, price: float) -> Sizing:
    """Eq. 5 or 6 twice: for instances that do `alone` each, and for the same with `added` by their servers' CPUs.

    The CPUs are there anyway, so they cost nothing extra (Section III-A).
    """
    together = alone + added
    bought = [deployment(demand, each, devices_per_instance, price) for each in (alone, together)]
    return Sizing(alone, together, bought[0], bought[1], saved_share(added / alone))


# Section IV-B.3: what the gain depends on


@dataclass(frozen=True, slots=True)
class Bound:
    """Eq. 19 for one instance: `limit` is alpha_acc / alpha_cpu, `measured` is C_cpu / C_acc by the calibrated depths.

    Both count all replicas. `premise`: whether Eq. 15 holds, beta_cpu > beta_acc; only then is `limit` a bound. Depths
    verified on the device may still exceed it if they are off the fitted line, as the paper's own do (22 / 96 = 0.229
    against 0.21).
    """

    limit: float
    measured: float
    premise: bool

    @property
    def below(self) -> bool:
        return self.measured < self.limit


def gain_bound(accelerator: PoolCapacity, cpu: PoolCapacity) -> Bound:
    """Eq. 19. Needs an accelerator that takes queries and a CPU whose latency rises."""
    per_replica = accelerator.curve.alpha_s / cpu.curve.alpha_s
    return Bound(
        limit=per_replica * cpu.replicas / accelerator.replicas,
        measured=cpu.capacity / accelerator.capacity,
        premise=cpu.curve.beta_s > accelerator.curve.beta_s,
    )


@dataclass(frozen=True, slots=True)
class SloRow:
    """How many queries at once each pool of an instance answers within `slo_s`, by the curves; None: no pool."""

    slo_s: float
    accelerator: int | None
    cpu: int | None
    gain: float | None


def slo_effect(
    accelerator: PoolCapacity | None, cpu: PoolCapacity | None, slos_s: Iterable[float], shape: Shape
) -> list[SloRow]:
    """Eq. 23: a looser SLO gives the CPU a larger share, as long as beta_cpu > beta_acc (Eq. 15).

    This is strictly true of the curves. The gain of a row may differ from theirs by up to one query of either pool,
    because queries are whole.
    """

    def row(slo_s: float) -> SloRow:
        pools = (accelerator, cpu)
        first, second = (None if pool is None else pool.curve.depth(slo_s, shape) * pool.replicas for pool in pools)
        return SloRow(slo_s, first, second, None if first is None or second is None else gain(first, second))

    return [row(slo_s) for slo_s in slos_s]
