"""What became of a request, and whether a promise was broken by it. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BROKEN = "broken"  # in place of a status: the connection ended without an answer
SILENT = "silent"  # nothing came within the client's own, very long time
BUSY, UNAVAILABLE, TOO_LATE = 429, 503, 504
HTTP, GRPC = "http", "grpc"  # how a client reaches the service
BACK_OFF_S = 1.0  # of a gRPC client that was refused, before it connects anew: its calls fail meanwhile
LARGE = "over 64 KiB, OpenAI"  # the kind that HAProxy cannot send to another Router
BEGUN, REFUSED = "its answer had begun", "refused by HTTP/2"  # of a gRPC call that broke: no Router may answer it anew


@dataclass(frozen=True, slots=True)
class Ended:
    """A request and its end. Moments are seconds of one monotonic clock.

    `right`: of an answer 200, whether it is the reference's. `come_back`: it says when to try again.
    """

    kind: str
    via: str
    sent_at: float
    ended_at: float
    status: int | str
    right: bool = False
    come_back: bool = False
    own_time: bool = False  # it brought a deadline of its own
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the service, and what its clients must put up with.

    `breaks`: the ways, the kinds of request, or the details whose connections may break, from the fault until the
    service is whole. `silences`: replicas live and answer nothing, so that what they have is late.
    """

    name: str
    breaks: frozenset[str] = frozenset()
    silences: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """One fault, from load to quiet. `healed_at`: nothing more was done to the service from then on. `whole_s`: from
    there until all replicas were there again; None: they never were.
    """

    fault: Fault
    injected_at: float
    healed_at: float
    ended: Sequence[Ended]
    whole_s: float | None
    problems: Sequence[str] = ()  # what was found beside the requests: something still in flight


def broken_promise(ended: Ended, phase: Phase) -> str | None:
    """What the service did wrong to this request."""
    if ended.status == 200:
        return None if ended.right else "a wrong answer"
    in_its_time = _in_its_time(ended, phase)
    excused = bool(phase.fault.breaks & {ended.via, ended.kind, ended.detail}) and in_its_time
    if ended.status == UNAVAILABLE and ended.via == GRPC and excused:
        return None  # by Serve's own proxy, which does not say when
    if ended.status in {BUSY, UNAVAILABLE}:
        return None if ended.come_back else f"{ended.status} without the time to come back"
    if ended.status == TOO_LATE and (ended.own_time or (phase.fault.silences and in_its_time)):
        return None
    if ended.status in {BROKEN, SILENT} and excused:
        return None
    return f"{ended.status} ({ended.detail})" if ended.detail else str(ended.status)


def _in_its_time(ended: Ended, phase: Phase) -> bool:
    """It was in flight between the fault and the moment when the service was whole again."""
    whole_at = float("inf") if phase.whole_s is None else phase.healed_at + phase.whole_s
    own_s = BACK_OFF_S if ended.via == GRPC else 0.0
    return ended.ended_at >= phase.injected_at and ended.sent_at <= whole_at + own_s


def problems_of(phase: Phase) -> list[str]:
    """Each promise broken in this phase, as a sentence with how often."""
    wrong = Counter(
        f"{ended.kind} by {ended.via}: {problem}" for ended in phase.ended if (problem := broken_promise(ended, phase))
    )
    found = [f"{phase.fault.name}: {times} x {what}" for what, times in sorted(wrong.items())]
    if phase.whole_s is None:
        found.append(f"{phase.fault.name}: the service did not become whole again")
    return found + [f"{phase.fault.name}: {problem}" for problem in phase.problems]


def longest_gap_s(phase: Phase) -> float:
    """The longest time from the fault to the end of load in which no request got a right answer, seconds."""
    moments = sorted(ended.ended_at for ended in phase.ended if ended.right and ended.ended_at >= phase.injected_at)
    return max((b - a for a, b in zip([phase.injected_at, *moments], moments, strict=False)), default=0.0)


HEAD = ("fault", "times", "requests", "right", "429", "503", "504", "broken", "wrong", "gap, s", "whole, s")


def rows_of(phases: Iterable[Phase]) -> list[tuple[str, ...]]:
    """One row a fault, in the order in which they came first. `wrong`: ends that break a promise. `gap`: the longest
    time without a right answer. `whole`: until every replica was back. Both of the worst phase.
    """
    by_fault: dict[str, list[Phase]] = {}
    for phase in phases:
        by_fault.setdefault(phase.fault.name, []).append(phase)
    return [_row(name, some) for name, some in by_fault.items()]


def _row(name: str, phases: Sequence[Phase]) -> tuple[str, ...]:
    ended = [one for phase in phases for one in phase.ended]
    count: Mapping[int | str, int] = Counter(one.status for one in ended)
    wrong = sum(broken_promise(one, phase) is not None for phase in phases for one in phase.ended)
    whole = [phase.whole_s for phase in phases]
    return (
        name,
        str(len(phases)),
        str(len(ended)),
        str(sum(one.right for one in ended)),
        *(str(count.get(status, 0)) for status in (BUSY, UNAVAILABLE, TOO_LATE, BROKEN)),
        str(wrong),
        f"{max(longest_gap_s(phase) for phase in phases):.1f}",
        "never" if None in whole else f"{max(seconds for seconds in whole if seconds is not None):.1f}",
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def summary(phases: Sequence[Phase]) -> str:
    """One line on all phases."""
    ended = [one for phase in phases for one in phase.ended]
    answered = [one.ended_at - one.sent_at for one in ended if one.right]
    median = f", half of them within {statistics.median(answered):.2f} s" if answered else ""
    return f"{len(phases)} faults, {len(ended)} requests, {len(answered)} answered right{median}"
