"""Limits: what one run and one pass may hold, when an idle device starts and what it admits, which queries are
deferrable. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deployments.admission.predictor import LinePredictor
from deployments.embedding.scheduler.cost_model import QUERY_TOKENS, CostModel
from deployments.embedding.scheduler.state import Policy

_DEFERRABLE = 2.0  # SLOs: a query that allows more waits behind the others
# Of `bulk_share`: reserved in every run for deferrable and for bulk queries, however many others wait.
_SURE_DEFERRABLE, _SURE_BULK = 0.2, 0.1
# Length of a run under steady overload, as a share of the SLO: with answers pass by pass, and at the end of the run.
_PASS_RUN, _WHOLE_RUN = 0.85, 0.6
_BETWEEN_BETAS = 9.0  # betas of deferrable work in a run while urgent queries come, which makes beta a tenth of it
_PAUSE_SHARE = 0.03  # of beta, for each waiting query, up to _PAUSE_QUERIES of them
_PAUSE_QUERIES = 3  # a lone query hardly waits; several at once are a burst, and a longer wait saves a beta
_LONGEST_SHARE = 0.5  # of beta: the longest time that a stream of arrivals holds back an idle device
_SHORTEST_PAUSE_S = 0.001  # about three arrivals of one burst over HTTP
_LARGEST_PAUSE_SHARE = 0.1  # of beta: limits the pause where beta is so small that _SHORTEST_PAUSE_S would matter


@dataclass(slots=True)
class Pacing:
    """How long an idle device waits for a burst to arrive, because a burst that is cut in two pays beta twice.

    It waits `pause_s` per waiting query (at most three) after the last arrival, and at most `longest_s` after the
    first.
    """

    pause_s: float
    longest_s: float

    @classmethod
    def of_beta(cls, beta_s: float) -> Pacing:
        """The pacing of a device whose runs each take `beta_s` besides the cost of their queries."""
        pause_s = min(max(_PAUSE_SHARE * beta_s, _SHORTEST_PAUSE_S), _LARGEST_PAUSE_SHARE * beta_s)
        return cls(pause_s, _LONGEST_SHARE * beta_s)

    def start_at(self, waiting: int, *, first: float, last: float) -> float:
        """When the device should start. `first` and `last`: when the first and last waiting query arrived, on any
        clock.
        """
        return min(last + self.pause_s * min(waiting, _PAUSE_QUERIES), first + self.longest_s)


def is_deferrable(rule: str, slo_s: float, allowed_s: float) -> bool:
    """Whether a query that allows `allowed_s` waits behind those with early deadlines."""
    return rule == "deadline" and allowed_s > _DEFERRABLE * slo_s


def idle_room(predictor: LinePredictor, pacing: Pacing, left_s: float, run_work: float) -> float:
    """The most work with `left_s` to its deadline that an idle device admits, if a run holds at most `run_work`. Below
    0: none. Replicas and Routers both decide by it.
    """
    return min(run_work, predictor.work_in(predictor.fill_s(left_s) - pacing.pause_s))


@dataclass(slots=True)
class Limits:
    """The policy and the cost model in force, and limits derived from them, in planned device seconds.

    All parts of a scheduler share one object. After setting one of the first four fields, or after the predictor has
    learned, call `refresh`.
    """

    model: CostModel
    policy: Policy
    micro_batch_tokens: int
    predictor: LinePredictor
    run_work: float = field(init=False)  # the most work that one run may hold
    # Deferrable and bulk work for which every run has room, however many others wait.
    deferrable_part: float = field(init=False)
    bulk_part: float = field(init=False)
    between_work: float = field(init=False)  # the most deferrable work in a run while urgent queries come
    most_bulk: float = field(init=False)  # the most bulk work that waits here
    pass_work: float = field(init=False)  # work of one pass
    pacing: Pacing = field(init=False)
    capacity_rho: float = field(init=False)  # work per second under steady overload, about

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Recompute the derived fields."""
        policy, alpha_s, predictor = self.policy, self.model.alpha_s, self.predictor
        self.run_work = self.run_within(policy.slo_s)
        self.deferrable_part = _SURE_DEFERRABLE * policy.bulk_share * self.run_work
        self.between_work = _BETWEEN_BETAS * max(self.model.beta_s, predictor.intercept_s / predictor.slope)
        self.bulk_part = min(_SURE_BULK * policy.bulk_share * self.run_work, self.between_work)
        bulk = predictor.work_in(predictor.fill_s(policy.bulk_share * policy.slo_s))
        self.most_bulk = max(self.bulk_part, bulk, alpha_s)
        self.pass_work = alpha_s * self.micro_batch_tokens / QUERY_TOKENS
        self.pacing = Pacing.of_beta(self.model.beta_s)
        usual_s = (_PASS_RUN if self.micro_batch_tokens else _WHOLE_RUN) * policy.slo_s
        work = min(max(0.0, predictor.work_in(usual_s)), self.run_work)  # a depth may bound it
        self.capacity_rho = work / predictor.seconds(work) if work else 0.0

    def run_within(self, slo_s: float) -> float:
        """The most work that a run may hold to end within `slo_s` of its start."""
        allowed = self.predictor.work_in(self.predictor.fill_s(slo_s))
        if self.policy.depth is not None:
            allowed = min(allowed, self.policy.depth * self.model.alpha_s)
        return max(0.0, allowed)

    def is_slow(self, work: float) -> bool:
        """Whether a run of that work takes longer than the cost model says."""
        return self.predictor.seconds(work) > self.model.beta_s + work

    def idle_room(self, left_s: float) -> float:
        """The most work with `left_s` to its deadline that an idle device admits. Below 0: none."""
        return idle_room(self.predictor, self.pacing, left_s, self.run_work)
