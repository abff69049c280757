"""The calibration's report: `report.json` for programs, `report.html` with pictures for people, and tables for the
terminal. It renders a `CalibrationReport`; None is shown as a dash.
"""

from __future__ import annotations

import math

from calibration.report import plots
from calibration.report.page import Pictures, Shown, number, seconds, text
from calibration.report.report_model import CalibrationReport, LatenciesReport, PoolReport
from calibration.report.tables import DASH, POOLS, Sheet, percent
from calibration.report.worth import saved_share
from deployments.hardware.device_detector import ACCELERATOR, CPU

_QUANTILES = ("p50, s", "p99, s", "slowest, s")


def shown(report: CalibrationReport) -> Shown:
    """The depths, the gain, the verification and the verdict."""
    sheets = (_depths(report), _gain(report), _verification(report), _streams(report))
    return Shown(report, verdict(report), (*sheets, _cost(report), _curves(report)), lambda: _pictures(report))


def _pictures(report: CalibrationReport) -> Pictures:
    slo_s, pools = report.settings.slo_s, _pools(report)
    against = f", against the SLO of {slo_s:g} s"
    pictures = {
        f"fit-{name}.png": (f"Latency over concurrency, {POOLS[name]}{against}", plots.fit(report, name))
        for name in pools
    }
    verified = [burst for burst in report.bursts if burst.stage == "verify"]
    # Earlier bursts belong to attempts at larger depths, which did not hold.
    bursts = [burst.latencies_s for burst in verified if burst.depths == verified[-1].depths]
    taken = {POOLS[name]: [latency for burst in bursts for latency in burst.get(name, ())] for name in pools}
    if any(taken.values()):
        words = "latency of a query, as its client saw it (s)"
        picture = plots.seen(f"Verification: {len(bursts)} bursts at the final depths", [(words, slo_s, taken)])
        pictures["verification.png"] = (f"Latencies in the verification{against}", picture)
    return pictures


def verdict(report: CalibrationReport) -> str:
    if report.is_refused:
        return f"refused: {text(report.reason)}"
    slo, pools = f"at an SLO of {report.settings.slo_s:g} s", _pools(report)
    if report.outcome == "estimated":
        estimates = " + ".join(f"{POOLS[name]} {number(pool.estimate)}" for name, pool in pools.items())
        return f"estimated, not proven: {estimates} {slo}"
    open_pools = [name for name in pools if report.capacity(name)] or list(pools)[:1]
    depths = " + ".join(f"{POOLS[name]} {_depth(pools[name])}" for name in open_pools) + f" {slo}"
    if len(open_pools) == 2:
        gain = report.capacity(CPU) / report.capacity(ACCELERATOR)
        return f"{depths}: {percent(gain, '+.1f')} concurrency on the same hardware"
    reason = report.cpu_overflow.reason
    if ACCELERATOR in open_pools:
        return f"{depths}, without the CPU" + (f": {text(reason)}" if reason else "")
    return depths


def _pools(report: CalibrationReport) -> dict[str, PoolReport]:
    """The pools, the preferred one first."""
    return {name: report.pools[name] for name in POOLS if name in report.pools}


def _depth(pool: PoolReport) -> str:
    """The depth, with the number of replicas if there are several."""
    depth = number(pool.depth)
    return depth if pool.replicas == 1 else f"{pool.replicas} x {depth}"


def _depths(report: CalibrationReport) -> Sheet | None:
    """Table III: the estimate and the depth that was verified, beside the paper's stress test."""
    pools = _pools(report)
    if all(pool.estimate is None for pool in pools.values()):
        return None
    columns = ["queue depth", *(f"{POOLS[name]}: {pool.devices_in_words}" for name, pool in pools.items())]
    rows = [
        ["stress test", *(number(pool.stress_depth) for pool in pools.values())],
        ["estimate", *(number(pool.estimate) for pool in pools.values())],
        ["verified", *(number(pool.depth) for pool in pools.values())],
    ]
    if report.way is not None:
        rows.append(["the way, ms", *(f"{1000 * report.way.beta_s:.3g}" for _ in pools)])
    several = any(pool.replicas > 1 for pool in pools.values())
    title = f"Queue depths at {report.settings.slo_s:g} s" + (", per replica" if several else "")
    return Sheet(title, columns, rows, styles={2: "bold"})


def _gain(report: CalibrationReport) -> Sheet | None:
    """Table I, and the savings by Section III-B; None if only one pool is used."""
    alone, added = report.capacity(ACCELERATOR), report.capacity(CPU)
    if report.is_refused or not alone or not added:
        return None
    rows = [
        ["accelerator only, queries at once", f"{alone}"],
        ["with the CPU, queries at once", f"{alone} + {added}"],
        ["concurrency improvement", percent(added / alone, "+.1f")],
        ["hardware saved at peak load, up to (Eq. 6)", percent(saved_share(added / alone))],
        ["throughput gained at average load, up to (Eq. 5)", percent(added / alone, "+.1f")],
    ]
    return Sheet("What the CPU adds on the same hardware", ["", ""], rows, styles={2: "bold"})


def _verification(report: CalibrationReport) -> Sheet | None:
    seen = report.verification
    if seen is None:
        return None
    rows = [
        [POOLS[name], f"{pool.admitted}", f"{pool.late}", *_quantiles(pool)]
        for name, pool in ((name, seen.pools[name]) for name in POOLS if name in seen.pools)
    ]
    share = f"{math.floor(1000 * seen.share + 1e-6) / 10:.1f} %"
    caption = (
        f"{seen.bursts} bursts, {seen.admitted + seen.busy} queries: {seen.admitted - seen.late} of {seen.admitted} "
        f"admitted within the SLO ({share}), {seen.busy} refused"
    )
    return Sheet("Verification", ["pool", "admitted", "late", *_QUANTILES], rows, caption)


def _streams(report: CalibrationReport) -> Sheet | None:
    """The streams that were proved."""
    if not report.streams:
        return None
    rows = [
        [one.name, f"{one.rate:.3g}", f"{one.admitted}", f"{one.late}", f"{one.busy}", *_quantiles(one)]
        for one in report.streams
    ]
    columns = ["", "offered/s", "admitted", "late", "refused", *_QUANTILES]
    return Sheet("Streams, admitted by predicted finish", columns, rows)


def _quantiles(taken: LatenciesReport) -> list[str]:
    """The cells of the `_QUANTILES` columns."""
    return [seconds(taken.p50_s), seconds(taken.p99_s), seconds(taken.slowest_s)]


def _cost(report: CalibrationReport) -> Sheet | None:
    """The cost of a query at the measured lengths."""
    costs = {name: pool.cost for name, pool in _pools(report).items() if pool.cost is not None}
    if not costs:
        return None
    rows = [
        [f"{found[0][0]}", *(f"{1000 * seconds:.4g}" for _, seconds in found)]
        for found in zip(*(cost.by_tokens for cost in costs.values()), strict=True)
    ]
    formulas = (
        f"{POOLS[name]}: {cost.query_s:.4g} + {cost.token_s:.4g} n + {cost.token2_s:.4g} n^2 s"
        for name, cost in costs.items()
    )
    columns = ["tokens n", *(f"{POOLS[name]}, ms" for name in costs)]
    return Sheet("Cost of a query by its length", columns, rows, "; ".join(formulas))


def _curves(report: CalibrationReport) -> Sheet | None:
    """The measurements and the fit (Eq. 12), one column per pool."""
    pools = _pools(report)
    if not pools:
        return None
    columns = [_curve(pool) for pool in pools.values()]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return Sheet("Devices and curves", ["pool", *(POOLS[name] for name in pools)], rows, facts=True)


def _curve(pool: PoolReport) -> dict[str, str]:
    outliers = sum(sample.outlier for sample in pool.samples)
    return {
        "devices": ", ".join(map(text, pool.devices)) or DASH,
        "engine": text(pool.engine),
        "dtype": text(pool.dtype),
        "replicas": number(pool.replicas),
        "cores": text(pool.cores),
        "alpha, s per query": number(pool.alpha_s, ".5g"),
        "beta, s": number(pool.beta_s, ".4g"),
        "R2": number(pool.r2, ".5f"),
        "noise": percent(pool.noise),
        "samples, of them outliers": f"{len(pool.samples)}, {outliers}",
        "queries sent": number(pool.queries),
    }
