"""What the CPU adds to the accelerator (Tables I and II), and what a core brings in each place. Pure."""

from __future__ import annotations

from calibration.report.report_model import CalibrationReport
from calibration.report.tables import DASH, Sheet
from deployments.hardware.device_detector import CPU


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


def core_worth(report: CalibrationReport) -> dict[str, float | None]:
    """Queries per second that one core answers in each place; at a Router, with one query per request. None: the report
    lacks the figures.
    """
    pool, request_s, of_pool = report.pools.get(CPU), report.router_request_s, None
    if pool and pool.curve and pool.cores and (depth := pool.depth or pool.estimate):
        of_pool = depth / max(1e-9, pool.curve.latency_s(depth, report.settings.shape)) / pool.cores
    return {"cpu_pool": of_pool, "router": 1 / request_s if request_s else None}


def router_cores(report: CalibrationReport) -> float | None:
    """Cores that Routers need for all that the pools answer at their depths. None if the report does not tell."""
    if not report.router_request_s:
        return None
    rate, shape = 0.0, report.settings.shape
    for pool in report.pools.values():
        if pool.curve and pool.depth:
            rate += pool.replicas * pool.depth / max(1e-9, pool.curve.latency_s(pool.depth, shape))
    return rate * report.router_request_s or None


def core_worth_sheet(report: CalibrationReport) -> Sheet | None:
    worth = core_worth(report)
    shown = [DASH if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" for rate in worth.values()]
    rows = list(zip(("in the CPU pool, at its depth", "in a Router, at least"), shown, strict=True))
    notes = [
        "The Router's figure comes from its CPU time during the streams. It includes background work, but not HAProxy."
    ]
    if cores := router_cores(report):
        notes.append(f"Routers need {cores:.2g} cores for all that the pools answer at their depths.")
    if worth["cpu_pool"] and worth["router"] and worth["router"] > worth["cpu_pool"]:
        notes.append("While Routers are short of that, a core is worth more to them: lower cpu.cores.")
    return (
        Sheet("What a core brings", ["one core", "queries/s"], rows, "\n".join(notes)) if any(worth.values()) else None
    )
