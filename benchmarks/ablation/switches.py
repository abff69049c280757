"""A switch for each rule: what it replaces in the product to take the rule away, and which lines the rule costs.

A rule's lines are those of its functions, classes and modules (`code`), and all other lines of the product that match
`words`. A switch that names what is not there any more fails, so a rule that is deleted loses its row.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

from benchmarks.kit.serving import ROOT
from deployments.admission import fair_share, least_squares, predictor, probe, starvation
from deployments.admission.predictor import Predictor
from deployments.embedding import placer, router, run_loop
from deployments.embedding.link import Channel, Link
from deployments.embedding.placer import Placer
from deployments.embedding.retries import Placement
from deployments.embedding.scheduler import cost_model, current_run, limits
from deployments.embedding.scheduler.admission import Admission
from deployments.embedding.scheduler.demand import Demand
from deployments.embedding.scheduler.scheduler import Scheduler
from deployments.embedding.scheduler.state import ReplicaState
from deployments.embedding.view import View
from deployments.serving import ejections

Change = tuple[Any, str, Any]  # an object, the name of its attribute, the value in its place
LEARNING = ("zoo", "faults")
ADMISSION = ("zoo", "streams", "bursts", "returning")
LONG = ("streams", "returning", "tenants", "classes")
RETRIES = ("split", "faults")
ALL = ("zoo", "streams", "bursts", "returning", "tenants", "classes", "split", "faults", "router")


@dataclass(frozen=True, slots=True)
class Rule:
    """`without`: what happens instead. `groups`: the scenes that it can change. `elsewhere`: what another measurement
    or test shows.
    """

    name: str
    without: str
    changes: Callable[[], Sequence[Change]] = tuple
    code: Sequence[Any] = ()
    words: str = ""
    groups: Sequence[str] = ALL
    elsewhere: str = ""

    @contextmanager
    def off(self) -> Iterator[None]:
        with ExitStack() as changed:
            for what, attribute, value in self.changes():
                changed.enter_context(patch.object(what, attribute, value))
            yield

    @property
    def lines(self) -> int:
        """Lines of the product, without blank ones."""
        spans = dict[str, set[int]]()
        for one in self.code:
            lines, first = ([], 0) if isinstance(one, ModuleType) else inspect.getsourcelines(_plain(one))
            file = inspect.getsourcefile(_plain(one))
            assert file is not None
            count = len(lines) or len(_product()[file])
            spans.setdefault(file, set()).update(range(max(0, first - 1), max(0, first - 1) + count))
        found = 0
        for file, text in _product().items():
            mine = spans.get(file, set())
            for number, line in enumerate(text):
                found += bool(line.strip()) and (number in mine or bool(self.words and re.search(self.words, line)))
        return found


def _plain(one: Any) -> Any:
    return one.fget if isinstance(one, property) else one


@cache
def _product() -> Mapping[str, Sequence[str]]:
    files = [path for folder in ("deployments", "serve_app") for path in (ROOT / folder).rglob("*.py")]
    kept = (path for path in files if "generation" not in path.parts)
    return {str(path): path.read_text(encoding="utf-8").splitlines() for path in kept}


def _module(name: str) -> ModuleType:
    return import_module(f"deployments.{name}")


# --- what stands in a rule's place ------------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _publish_with(change: Callable[[Any], None]) -> Change:
    publish = Predictor._publish

    def changed(self: Any) -> None:
        publish(self)
        change(self)

    return Predictor, "_publish", changed


def _fixed_margin(self: Any) -> None:
    self.margin = 0.05


def _no_lines(self: Any) -> None:
    self._trusted_work = math.inf


def _as_planned(self: Any, now: float) -> tuple[float, float]:
    """`CurrentRun.outlook` that learns nothing from a run that is overdue."""
    return 1.0, max(self._rest_s - (now - self.since), 0.0) if self.unanswered else 0.0


def _without_rho() -> Sequence[Change]:
    whole, opening = Admission._room, Admission._opening

    def room(self: Any, now: float, left_s: float, outlook: Any, run_s: float, rho: float) -> float:
        return whole(self, now, left_s, outlook, run_s, 0.0 * rho)

    def opens(self: Any, now: float, outlook: Any, room: float, rho: float) -> Any:
        return opening(self, now, outlook, room, 0.0 * rho)

    return (Admission, "_room", room), (Admission, "_opening", opens)


def _without_tenants() -> Sequence[Change]:
    offered, note = Demand.offered, Channel.note_refused

    def nameless(self: Any, *given: Any, tenant: Any, **more: Any) -> None:
        offered(self, *given, tenant=None, **more)

    def refused(self: Any, work_s: float, tenant: Any = None, lengths: Sequence[int] = ()) -> None:
        note(self, work_s, None, lengths)

    return (Demand, "offered", nameless), (Channel, "note_refused", refused)


def _without_sizes() -> Sequence[Change]:
    note = Channel.note_refused

    def refused(self: Any, work_s: float, tenant: Any = None, lengths: Sequence[int] = ()) -> None:
        note(self, work_s, tenant, ())

    return ((Channel, "note_refused", refused),)


def _whole_room(_: Any, __: Any, room: float, *___: Any) -> float:
    return room


def _only_parts(self: Any, account: Any, room: float, next_work: float, until_s: float, cost: float) -> float:
    """`Demand.shared_room` that keeps the expected work and bounds no part of a run."""
    return room - float(self.shares.kept_s(account, until_s))


def _without_jitter() -> Sequence[Change]:
    busy = Placer.busy

    def same_for_all(self: Any, request: Any) -> Any:
        with patch.object(self, "draw", lambda: 0.5):
            return busy(self, request)

    return ((Placer, "busy", same_for_all),)


async def _waits(self: Any, part: Any) -> list[int]:
    self.avoided.append(part.link)
    return []


async def _gives_up(self: Any, indices: Any, error: Any) -> list[int]:
    raise error


def _unless_ejected(self: Any, now: float, _: Any) -> bool:
    return not self.outlier.is_ejected(now)


def _told_opening(self: Any, now: float, ask: Any) -> bool:
    return bool(self.opens_s(now, ask.tenant) <= 0)


def _never(*_: Any, **__: Any) -> bool:
    return False


_ZERO = property(lambda _: 0.0)

RULES = (
    # Learning
    Rule("learning", "the model as calibrated, a margin of 5 %",
         lambda: ((Predictor, "ended", _nothing), (cost_model.CostFit, "ended", lambda _, model, *__: model)),
         (Predictor, predictor._LargeRun, cost_model.CostFit, least_squares),
         groups=(*LEARNING, "streams")),
    Rule("costs by length, refitted", "as calibrated",
         lambda: ((cost_model.CostFit, "ended", lambda _, model, *__: model),), (cost_model.CostFit, least_squares),
         r"_fit\b|CostFit", groups=LEARNING),
    Rule("margin that adapts", "5 %", lambda: (_publish_with(_fixed_margin),), (Predictor._adapt,),
         r"_conformal|_unchanged\b|_covered\b|_GAIN|_AIM\b|_FEW|_excess_s|_deviation\b|_DEVIATION|_weighed|_HOPELESS",
         groups=(*LEARNING, "streams")),
    Rule("slow spell", "a run that took longer changes only the line", lambda: ((predictor, "_SPELL", math.inf),), (),
         r"_spell|_SPELL|_SLOWEST|slow spell", groups=LEARNING),
    Rule("lines for large runs", "one line for all", lambda: (_publish_with(_no_lines),),
         (predictor._LargeRun, Predictor._remember), r"_lines\b|_trusted|_TRUSTED|_large\b|_LARGE|_largest|_REMEMBERED",
         groups=LEARNING),
    Rule("jitter of short runs", "a run's noise is a share of it",
         lambda: ((predictor, "_JITTER", 0.0), (predictor, "_MOST_JITTER", 0.0)), (), r"jitter|_JITTER",
         groups=LEARNING, elsewhere="without it bursts on busy cores get 0.73 to 0.82 of the goodput (test_zoo)"),
    Rule("outliers in a row", "the line follows as ever", lambda: ((predictor, "_CHANGED", 10**9),),
         (Predictor._count_outlier,), r"_outliers|_CHANGED|has_changed|_TOGETHER|_WIDEN", groups=LEARNING),
    Rule("an overdue run", "takes as long as predicted", lambda: ((current_run.CurrentRun, "outlook", _as_planned),),
         (current_run.CurrentRun.outlook,), r"_passes_by_s|_OVERDUE_SHARE|_JITTERS|_LEAST_OVERDUE", groups=LEARNING),
    Rule("probe of an idle device", "a device that refuses everything stays as it is",
         lambda: ((Admission, "_may_probe", _never),), (probe, Admission._may_probe),
         r"is_probe|IdleProbe|_probe\b|back_off", groups=LEARNING),
    # Admission and order
    Rule("work that arrives before a run (rho)", "one early query may open the next run", _without_rho, (),
         r"\brho\b|_RHO_S|_rho_at", groups=ADMISSION),
    Rule("no spare pass behind a short run", "each query needs one",
         lambda: ((Admission, "_needs_no_spare_pass", _never),),
         (Admission._needs_no_spare_pass, Admission._has_tight, Admission.admitted),
         r"_tight_due\b|_SHORT_RUN|_BURST_LEFT|_needs_no_spare|_has_tight", groups=ADMISSION),
    Rule("pacing", "an idle device starts at once",
         lambda: ((limits.Pacing, "of_beta", classmethod(lambda cls, _: cls(0.0, 0.0))),), (limits.Pacing,),
         r"pacing|Pacing|_pause_s\b", groups=ALL),
    Rule("a class that may wait (deferrable)", "all are urgent", lambda: (
         (run_loop, "is_deferrable", _never), (router, "is_deferrable", _never)),
         (limits.is_deferrable, Admission._deferrable_room, Admission.deferrable_limits,
          Admission.promote), "deferrable", ("classes",)),
    Rule("a fifth kept for deferrable", "no part of a run", lambda: ((limits, "_SURE_DEFERRABLE", 0.0),), (),
         r"_SURE_DEFERRABLE|deferrable_part", ("streams", "classes")),
    Rule("a tenth kept for bulk", "no part of a run", lambda: ((limits, "_SURE_BULK", 0.0),), (),
         r"_SURE_BULK|bulk_part", ("streams", "classes", "split")),
    Rule("at most nine betas of deferrable work", "any amount", lambda: ((limits, "_BETWEEN_BETAS", math.inf),), (),
         r"_BETWEEN_BETAS|between_work|has_urgent", ("streams", "classes", "split"),
         "p99 beside bulk on quick devices at most 1.2 times that alone instead of 25 (test_scheduler_worlds)"),
    Rule("promote", "an idle device refuses what has no deferrable room",
         lambda: ((Admission, "promote", _nothing),), (Admission.promote,), r"\bpromote\b",
         ("streams", "classes")),
    Rule("reserve for long queries", "room is for whoever fits", lambda: ((Demand, "reserve", _ZERO),),
         (starvation, Demand.refused, Demand.reserve, Demand.prefers, Link._count_time),
         r"reserve|refused_sizes|long_queries|LongRequests|UsualTime|_count_time|_usual\b", LONG),
    Rule("usual time (of that reserve)", "early deadlines count as well",
         lambda: ((starvation.UsualTime, "count", _never),), (starvation.UsualTime, Link._count_time),
         r"UsualTime|_count_time|_usual\b|_TIGHT|is_tight", LONG,
         elsewhere="long queries that allow 0.85 of the SLO: without it 0.76 of the goodput (test_scheduler_worlds)"),
    Rule("sizes that Routers refused (of it)", "replicas know only what they refuse", _without_sizes, (Demand.refused,),
         r"refused_sizes|is_tight", LONG),
    # Tenants
    Rule("fair shares", "keys without names", _without_tenants, (fair_share, Demand.shared_room, Demand._shared_run),
         r"\bshares?\.|Shares|over_share|under_share|\baccount\b", ("streams", "tenants", "classes")),
    Rule("room kept between tenants", "only the order of the accounts", lambda: ((Demand, "shared_room", _whole_room),),
         (Demand.shared_room, Demand._shared_run, fair_share.Shares.kept_s, fair_share.Shares.expected_s),
         r"shared_room|_shared_run|kept_s|expected_s|max_batch_fraction|_LEAST_RUN|_SPARE|others_waiting_s",
         ("tenants",)),
    Rule("shorter runs beside a small tenant", "kept room bounds no run",
         lambda: ((Demand, "shared_room", _only_parts),), (Demand._shared_run,),
         r"_shared_run|max_batch_fraction|_LEAST_RUN|others_waiting_s", ("tenants",)),
    # Placing and retries
    Rule("early refusal, before tokenizing", "tokenized first", lambda: ((Placer, "is_full", _never),),
         (Placer.is_full, Placer.busy_everywhere), r"\bis_full\b|busy_everywhere|_estimated_lengths",
         ("streams", "bursts", "tenants", "router"),
         "without it MiniLM on two cores is late with 2 to 4 % at 2.5 times its capacity (2a6f633)"),
    Rule("replicas without room are not asked", "each is asked", lambda: ((View, "has_room", _unless_ejected),),
         (View.has_room, View._lost_room, ReplicaState.room_after), r"has_room\b|_lost_room|opens_cost|room_grows",
         ALL[1:]),
    Rule("room by a query's size", "a replica is open or not", lambda: ((View, "has_room", _told_opening),),
         (View.has_room, View._lost_room, ReplicaState.room_after), r"_lost_room|opens_cost|room_grows",
         ("streams", "bursts", "returning", "tenants", "router")),
    Rule("refused work is told to replicas", "they know only what they refuse",
         lambda: ((Link, "refuse_here", _nothing),), (Link.refuse_here, Channel.note_refused),
         r"refuse_here|note_refused|refused_s\b|refused_sizes", LONG),
    Rule("Retry-After: jitter of an SLO", "all are told the same", _without_jitter, (), r"\bdraw\b",
         ("bursts", "returning")),
    Rule("split requests are held back", "a run begins without the rest",
         lambda: ((Scheduler, "hold", _nothing), (Scheduler, "_hold_s", _ZERO)),
         (Scheduler.hold, Scheduler.release, Scheduler._held_s, Scheduler._hold_s, Link.confirm, Channel.confirm),
         r"_held\b|\.hold\(|\.release\(|confirmed|\.confirm\(|_HOLD_SLO|_hold_s|_held_s", (*RETRIES, "classes")),
    Rule("lost queries are offered again", "they fail", lambda: ((Placement, "_lost", _gives_up),),
         (Placement._lost,), r"\bTRIES\b|_NEWS_S|\.again\b", RETRIES),
    Rule("hedges: queries of a hung replica go elsewhere", "they wait", lambda: ((Placement, "_hedge", _waits),),
         (placer.Hedges, Placement._hedge), r"\bhedges?\b|Hedges", RETRIES),
    Rule("hung replicas are noticed", "only those that end", lambda: ((Link, "_give_up", _nothing),),
         (Link._give_up, Link._watch, Link._note_progress, Link._hangs_at), r"overdue|Overdue|\.hang\(|hangs\b|_HANGS",
         RETRIES),
    Rule("ejection", "a replica that fails is asked as before",
         lambda: ((ejections.Ejections, "note_failed", _nothing),), (ejections,), r"eject|Eject|outlier|Outlier",
         RETRIES),
    # Not in virtual time
    Rule("502 for a Router that died (lost_router)", "500, which HAProxy does not retry",
         code=(_module("serve_adapter.lost_router"),), words="lost_router", groups=(),
         elsewhere="without it HAProxy retries every 500, so that an input that breaks an engine runs on four Routers"),
)  # fmt: skip
