"""How the papers choose what a host computes in a step, beside windve's `HybridPlanner`. Pure.

All of them have windve's scheduler around them: its cache, moves, prompts and promises. Only the choice of a step
differs, so a comparison shows what the choice is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.generation.overlap import alone_s, largest_ratio, pipelined_s
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.hybrid.planner import HostRow, HybridPlan, HybridPlanner
from deployments.generation.scheduler.state import ACCELERATOR, PIPELINED
from deployments.generation.scheduler.step_time import StepLoad, StepTime

_THRESHOLD = 8  # host rows for each of the accelerator's (APEX, Section 4.2)


class NeoPlanner(HybridPlanner):
    """NEO (arXiv:2411.01142, Section 3.2): two batches or none, by tokens per second, prompts counted by their tokens.
    No row parks.
    """

    def choose(self, load: StepLoad, rows: Sequence[HostRow], *, parked: int = 0, **_: Any) -> HybridPlan:
        """Promises, and what `HybridPlanner` has for them, do not count."""
        alone = self._alone(load)
        plan = self._of_two(load, rows, alone)
        return plan if plan is not None and plan.rate > alone.rate else alone

    def _alone(self, load: StepLoad) -> HybridPlan:
        seconds, worth = self._seconds(load), load.rows + load.prompt_tokens
        return HybridPlan(ACCELERATOR, seconds, worth / seconds, worth, seconds, seconds)

    def _of_two(self, load: StepLoad, rows: Sequence[HostRow], alone: HybridPlan) -> HybridPlan | None:
        """The plan with two batches; None if no row takes part."""
        found = self.two_batches(load, rows)
        tokens = len(found.first) + len(found.second)
        if not tokens:
            return None
        host_s = (found.host0_s + found.host1_s) / self.slow
        rate = (alone.worth + tokens) / found.seconds
        times = (found.seconds, rate, alone.worth, alone.alone_s, found.accelerator_s)
        return HybridPlan(PIPELINED, *times, found.first, found.second, host_s=host_s)


class ApexPlanner(NeoPlanner):
    """APEX (arXiv:2506.03296, Algorithm 1): two batches where the inequality holds, else rows park. A step with prompts
    gives the host `T_gl with them + T_gl + T_ga with them`, but is divided by the time of one without, as printed.
    """

    def choose(self, load: StepLoad, rows: Sequence[HostRow], *, parked: int = 0, **_: Any) -> HybridPlan:
        alone = self._alone(load)
        if not rows and not parked:
            return alone
        if load == StepLoad() or self._pays(load, rows):
            return self._of_two(load, rows, alone) or alone
        return self._parked(load, rows if self._are_enough(load, rows) else (), parked, alone.worth) or alone

    def _pays(self, load: StepLoad, rows: Sequence[HostRow]) -> bool:
        """Inequality (6), or Algorithm 1's with prompts."""
        decodes = StepLoad(load.rows, load.kv_tokens)
        t_gl, t_ga = self.step.linear_s(decodes), self.step.attention_s(decodes)
        if not rows or not t_ga:
            return bool(rows)
        tokens = sum(row.tokens for row in rows) / len(rows)
        n_g, n_c = load.rows / t_ga, 1 / (self.slow * self.host.seconds(1, tokens))
        if not load.prompt_tokens:
            return n_g / n_c < largest_ratio(t_gl, t_ga)
        overlap_s = self.step.linear_s(load) + t_gl + self.step.attention_s(load)
        both = n_g * t_ga + n_c * overlap_s
        return both / pipelined_s(t_gl, t_ga) > n_g * t_ga / alone_s(t_gl, t_ga)

    def _are_enough(self, load: StepLoad, rows: Sequence[HostRow]) -> bool:
        return True


class ThresholdPlanner(ApexPlanner):
    """With APEX's threshold: without eight host rows for each of the accelerator's, none parks."""

    def _are_enough(self, load: StepLoad, rows: Sequence[HostRow]) -> bool:
        return len(rows) >= _THRESHOLD * load.rows


@dataclass(slots=True, eq=False)
class PlannedCache(HostCache):
    """A host's cache whose steps this planner plans."""

    of: Callable[..., HybridPlanner] = HybridPlanner

    def planner(self, step: StepTime, new_prompts: float = 0.0) -> HybridPlanner:
        return self.of(step, self.time, self.relative_factor, new_prompts)
