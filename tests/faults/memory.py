"""Memory of processes over time: is it flat? Pure, but for the picture."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

SETTLED_S = 600.0  # a process is young until then, and may grow
JUDGED_S = 1200.0  # so long it must be watched after that: a shorter line says nothing
MOST_AN_HOUR = 0.01
KEPT_OF_EACH = 64 * 2**10  # bytes that Ray keeps, in each process that lives on, of one of its processes that died
_ENDED_S = 30.0  # without a sample until the run's end: it has died


@dataclass(slots=True)
class Life:
    """One process. `samples`: (seconds since the run began, bytes resident)."""

    role: str
    pid: int
    samples: list[tuple[float, int]] = field(default_factory=list)


def settled(life: Life) -> Sequence[tuple[float, int]]:
    """The samples after its first ten minutes."""
    return [sample for sample in life.samples if sample[0] - life.samples[0][0] >= SETTLED_S]


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Growth an hour, as a share of the mean, by Theil and Sen: the median of the slopes between all pairs."""
    at, size = np.array(samples, dtype=float).T
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((size[second] - size[first]) / (at[second] - at[first])) * 3600 / np.mean(size))


def judged(life: Life) -> float | None:
    """Its slope, if it was watched for long enough."""
    samples = settled(life)
    return slope(samples) if samples and samples[-1][0] - samples[0][0] >= JUDGED_S else None


def deaths_an_hour(lives: Sequence[Life]) -> float:
    """Of Ray's processes."""
    ends = max((life.samples[-1][0] for life in lives), default=0.0)
    dead = sum(life.role != "haproxy" and life.samples[-1][0] < ends - _ENDED_S for life in lives)
    return dead / max(ends, 1.0) * 3600


def growing(lives: Sequence[Life]) -> list[str]:
    """A sentence on each process that grows by more than time, and the deaths of others, allow."""
    kept = KEPT_OF_EACH * deaths_an_hour(lives)
    found = []
    for life in lives:
        grows, size = judged(life), np.mean([size for _, size in life.samples])
        if grows is not None and grows > MOST_AN_HOUR + kept / size:
            found.append(f"{life.role} ({life.pid}) grows by {100 * grows:.1f} % an hour")
    return found


HEAD = ("process", "lives", "longest, min", "MiB at first", "MiB at last", "% an hour")


def rows_of(lives: Sequence[Life]) -> list[tuple[str, ...]]:
    """One row a role, of the life that was longest."""
    by_role: dict[str, list[Life]] = {}
    for life in lives:
        by_role.setdefault(life.role, []).append(life)
    rows = []
    for role, some in sorted(by_role.items()):
        longest = max(some, key=lambda life: life.samples[-1][0] - life.samples[0][0])
        (began, first), (ended, last) = longest.samples[0], longest.samples[-1]
        grows = judged(longest)
        rows.append((
            role, str(len(some)), f"{(ended - began) / 60:.1f}", f"{first / 2**20:.0f}", f"{last / 2**20:.0f}",
            "-" if grows is None else f"{100 * grows:+.2f}",
        ))  # fmt: skip
    return rows


def picture(lives: Sequence[Life], faults_at: Sequence[float]) -> Figure:
    """Resident MiB of each process over minutes, one panel a role; a grey line at each fault (seconds)."""
    roles = sorted({life.role for life in lives})
    figure = Figure(figsize=(9.0, 1.3 * len(roles) + 0.6), dpi=120, layout="constrained")
    rows = figure.subplots(len(roles), 1, sharex=True, squeeze=False)[:, 0]
    for axes, role in zip(rows, roles, strict=True):
        for at in faults_at:
            axes.axvline(at / 60, color="#dddddd", linewidth=0.6)
        for life in lives:
            if life.role == role:
                at, size = zip(*life.samples, strict=True)
                axes.plot([s / 60 for s in at], [b / 2**20 for b in size], color="#0072B2", linewidth=1.0)
        axes.set_ylim(bottom=0)
        axes.set_title(role, loc="left", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("minutes")
    rows[0].figure.supylabel("resident memory, MiB", fontsize=8)
    return figure


def role_of(name: str, command: list[str]) -> str | None:
    """Of a process by its name and command; None of one that comes and goes."""
    if name in {"raylet", "gcs_server", "haproxy"}:
        return name
    title = " ".join(command)
    if found := re.match(r"ray::(?:ServeReplica:\w+:)?(\w+)", title):
        return None if found[1] == "IDLE" else found[1]
    found = re.search(r"dashboard/(dashboard|agent)\.py|(log_monitor)\.py|runtime_env/agent/(main)\.py", title)
    return found and (found[1] or found[2] or "runtime_env_agent")
