"""Computes what a deployment costs, what the CPU saves (Section III), and why (Section IV-B.3). Pure arithmetic.

A query is one text. An instance is all replicas of all pools that serve together. Its capacity is the number of queries
that it may have in flight. The paper writes T both for an instance's throughput (Eq. 5) and for the longest allowed
latency (Eq. 7-11); here they are `throughput` (queries/s) and `slo_s`. Costs have the currency and the period of the
given price.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from calibration.fit.curve import Curve, Shape, ceil
from calibration.report.gain import gain, saved_share

SLO_FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
CORE_FACTORS = (0.5, 1.0, 1.5, 2.0, 4.0)
PARALLEL_SHARE = 0.95  # an assumption, not a measurement


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

    def capacity_at(self, slo_s: float, shape: Shape) -> int:
        """Queries in flight on all replicas that meet `slo_s` according to the curve, regardless of the calibrated
        depth.
        """
        return self.curve.depth(slo_s, shape) * self.replicas

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
    """A demand met by the accelerators alone, and by the same kind of instances with the CPU's help.

    `saved_share`: the saved share of whole devices. `saved_share_limit`: its limit for a large demand, where rounding
    up to whole instances no longer matters.
    """

    demand: float
    each_alone: float
    each_together: float
    alone: Deployment
    together: Deployment
    saved_share_limit: float

    @property
    def saved(self) -> Deployment:
        """The devices that the CPU's help saves."""
        alone, together = self.alone, self.together
        return Deployment(
            alone.instances - together.instances, alone.devices - together.devices, alone.cost - together.cost
        )

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
    return Sizing(
        demand,
        alone,
        alone + added,
        deployment(demand, alone, devices_per_instance, price),
        deployment(demand, alone + added, devices_per_instance, price),
        saved_share(added / alone),
    )


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
    unrounded_gain: float | None


def slo_effect(
    accelerator: PoolCapacity | None, cpu: PoolCapacity | None, slos_s: Iterable[float], shape: Shape
) -> list[SloRow]:
    """Eq. 23: a looser SLO gives the CPU a larger share, as long as beta_cpu > beta_acc (Eq. 15).

    This is strictly true of `unrounded_gain`, C_cpu / C_acc of the curves. The gain of a row may differ from it by up
    to one query of either pool, because queries are whole.
    """
    pools = {name: pool for name, pool in (("accelerator", accelerator), ("cpu", cpu)) if pool is not None}

    def row(slo_s: float) -> SloRow:
        counts = {name: pool.capacity_at(slo_s, shape) for name, pool in pools.items()}
        first, second = counts.get("accelerator"), counts.get("cpu")
        if first is None or second is None:
            return SloRow(slo_s, first, second, None, None)
        exact = [pool.curve.unrounded_depth(slo_s, shape) * pool.replicas for pool in pools.values()]
        return SloRow(slo_s, first, second, gain(first, second), gain(*exact))

    return [row(slo_s) for slo_s in slos_s]


# Figure 6: what more cores would do. A model, not a measurement


@dataclass(frozen=True, slots=True)
class CoresRow:
    """An extrapolation to `factor` times the CPU's cores, `cores` per replica where the count is known.

    `depth` is in queries at once on all CPU replicas.
    """

    factor: float
    cores: int | None
    curve: Curve
    depth: int
    gain: float | None


@dataclass(frozen=True, slots=True)
class Cores:
    """The extrapolation to other numbers of CPU cores, and the fewest cores with which the CPU can take a query at all.

    `least_factor`: relative to the measured cores; None if no number of cores is enough. `least_cores` is also None if
    the measured number of cores is unknown.
    """

    least_factor: float | None
    least_cores: int | None
    rows: Sequence[CoresRow]


def slowdown(factor: float) -> float:
    """Amdahl's law: the time on `factor` times the cores, relative to the time now."""
    return (1.0 - PARALLEL_SHARE) + PARALLEL_SHARE / factor


def cores_effect(
    cpu: PoolCapacity, accelerator_capacity: int | None, *, slo_s: float, shape: Shape, cores: int | None
) -> Cores:
    """Figure 6 by a model: alpha and beta of the CPU both follow `slowdown`. Nothing here was measured.

    It assumes PARALLEL_SHARE for both, although beta is mostly loading the model (Eq. 13), which memory bandwidth
    bounds regardless of the cores. So it is too optimistic for large factors (the paper found a point beyond which
    cores add nothing), and also for small ones (see `least_factor`). `cores`: of one replica; if known, factors are
    rounded to whole cores. `accelerator_capacity`: what the gain is relative to.
    """
    rows: dict[float, CoresRow] = {}
    for asked in CORE_FACTORS:
        count = None if cores is None else max(1, round(cores * asked))
        factor = asked if cores is None or count is None else count / cores
        curve = cpu.curve.times(slowdown(factor))
        depth = curve.depth(slo_s, shape) * cpu.replicas
        gained = None if accelerator_capacity is None else gain(accelerator_capacity, depth)
        rows[factor] = CoresRow(factor, count, curve, depth, gained)
    least = least_factor(cpu.curve, slo_s, shape)
    fewest = None if cores is None or least is None else max(1, ceil(cores * least))
    return Cores(least, fewest, list(rows.values()))


def least_factor(curve: Curve, slo_s: float, shape: Shape) -> float | None:
    """The fewest cores, relative to those measured, with which the CPU answers one query within `slo_s` (Eq. 11).

    Solves `slowdown(factor) * latency(1) = slo_s`; None if the serial part alone takes longer. By this model, the
    paper's 48 Xeon cores could be reduced to 19 at 1 s and to 10 at 2 s, but Figure 6 found no gain below 44 and 36.
    Below the measured number of cores, this is the best case.
    """
    room = slo_s / curve.latency_s(1, shape) - (1.0 - PARALLEL_SHARE)
    return PARALLEL_SHARE / room if room > 0 else None
