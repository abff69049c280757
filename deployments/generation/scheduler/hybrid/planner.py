"""Decides for one step which host rows take part, and how. Pure.

The accelerator computes a step's linear layers, and the attention to its own cache. The host computes the attention of
its *host rows*. Times are seconds, summed over all layers, from `StepTime` and `HostTime`:

    T_l0, T_l1    linear layers of the first batch (prompts, the accelerator's rows, some host rows) and of the second
                  (other host rows)
    T_ga0         attention on the accelerator, all in the first batch
    T_ca0, T_ca1  attention on the host, for the host rows of each batch

The time T of a step has one of these forms:

    alone         T = T_l0 + T_ga0: no host row takes part
    one batch     T = T_l0 + max(T_ga0, T_ca0): host rows hide behind the accelerator's attention
    two batches   T = max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0): while the host computes one batch's attention, the
                  accelerator computes the other batch. It reads the weights twice (NEO, arXiv:2411.01142, Section 3.2)
    parked        T as with one batch, which here has only rows with a pace: a bulk row joins a later step when its
                  attention is done. The accelerator never waits for it. A token takes at least one step per layer
                  (APEX, arXiv:2506.03296, Section 3.3)

Host rows take part only as far as the accelerator does not wait for the host (NEO's two inequalities): T_ca1 <= T_l0
and T_ca0 <= T_l1 + T_ga0; with one batch only the second, without T_l1. Of all plans, the one with the most urgent rows
wins, and among equals the one with the most tokens per second. The accelerator's own work, prompts included, counts as
`worth` tokens: as many as its rows alone would get in the time of this work.

Whether bulk rows park or wait for two batches is decided by the yield of many steps (`steady`), not of one: a row that
parks holds its blocks for as many steps as there are layers. Admission goes by it, too (`HostCache.shares`).

`overlap` has APEX's equations for a whole device, which a calibration shows. They plan no step.

NEO's fifth step, which drops prompts bound for the host while the inequalities hold, is left out: prompts have
deadlines, and those without one are computed behind all others anyway. Taken literally, it would drop every prompt
while the host is idle, so that the host would never get any.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deployments.generation.scheduler.state import ACCELERATOR, ASYNCHRONOUS, MODES, PIPELINED
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime

_LEAST_S = 1e-9  # the least time of a step, since a model may say 0
_USED = 0.9  # the usable share of the host's time: answers do not fill two batches without gaps
_BESIDE = 0.85  # of the host's time in a step in which the accelerator waits for it: parked rows come unevenly


class HostRow(NamedTuple):
    """A row that could take part. `tokens`: how many it reads; `urgent`: it is due soon; `bulk`: it may park."""

    tokens: int
    urgent: bool = False
    bulk: bool = False


class HybridPlan(NamedTuple):
    """The plan of a step.

    - `mode`: one of `MODES`.
    - `seconds`: T; `alone_s`: T without host rows.
    - `worth`: how many tokens the accelerator's own work counts as; `rate`: tokens per second, including host rows'.
    - `first`, `second`, `parking`: indices of host rows in the given sequence.
    - `accelerator_s`: T_l0 + T_l1 + T_ga0.
    - `host_s`: T_ca0 + T_ca1 by `HostTime`, without the host's slowdown.
    """

    mode: str
    seconds: float
    rate: float
    worth: float
    alone_s: float
    accelerator_s: float
    first: Sequence[int] = ()
    second: Sequence[int] = ()
    parking: Sequence[int] = ()
    host_s: float = 0.0


class _Batches(NamedTuple):
    """T_l0, T_l1, T_ga0, T_ca0, T_ca1, and the host rows in each batch."""

    linear0_s: float
    linear1_s: float
    attention0_s: float
    host0_s: float
    host1_s: float
    first: Sequence[int]
    second: Sequence[int]

    @property
    def accelerator_s(self) -> float:
        return max(_LEAST_S, self.linear0_s + self.linear1_s + self.attention0_s)

    @property
    def seconds(self) -> float:
        """T with two batches, or with one if the second is empty."""
        found = max(self.linear0_s, self.host1_s) + max(self.linear1_s + self.attention0_s, self.host0_s)
        return max(_LEAST_S, found)


@dataclass(frozen=True, slots=True)
class HybridPlanner:
    """Plans steps. `slow`: the factor by which the host's attention is slower than `host` says, relative to steps,
    which take as long as `step` says. `new_prompts`: prompt tokens to compute for each token of an answer, since an
    answer that ends makes room for a new one.
    """

    step: StepTime
    host: HostTime
    slow: float = 1.0
    new_prompts: float = 0.0

    def choose(
        self,
        load: StepLoad,
        rows: Sequence[HostRow],
        *,
        within_s: float = math.inf,
        parked: int = 0,
        modes: Collection[str] = MODES,
        joins: bool = False,
    ) -> HybridPlan:
        """The best plan for a step with this `load` on the accelerator and these host rows, sorted by when they are
        due. `parked` more rows are parked already. The plan with the most urgent rows wins, and among equals the one
        with the most tokens per second.

        The accelerator alone is always a plan. Other plans must be of one of the `modes` and, if the accelerator has
        work of its own, take at most `within_s`. Only bulk rows park. `joins`: parked rows must be able to join, which
        they cannot in a pipelined step.
        """
        alone_s = self._seconds(load)
        worth = alone_s / self._token_s(load) if load != StepLoad() else 0.0
        plans = [HybridPlan(ASYNCHRONOUS if parked else ACCELERATOR, alone_s, worth / alone_s, worth, alone_s, alone_s)]
        if rows and PIPELINED in modes and not joins:
            for found in (self.one_batch(load, rows), self.two_batches(load, rows)):
                tokens = len(found.first) + len(found.second)
                host_s = (found.host0_s + found.host1_s) / self.slow
                if not tokens:
                    continue
                rate = (worth + tokens) / found.seconds
                times = (found.seconds, rate, worth, alone_s, found.accelerator_s)
                plans.append(HybridPlan(PIPELINED, *times, found.first, found.second, host_s=host_s))
        if ASYNCHRONOUS in modes and load != StepLoad():
            parks = any(row.bulk for row in rows) and (PIPELINED not in modes or self._parking_pays(load, rows, parked))
            if plan := self._parked(load, rows, parked, worth, parks=parks):
                plans.append(plan)
        if load != StepLoad():
            plans = [plan for plan in plans if plan.seconds <= max(within_s, alone_s)]
        return max(plans, key=lambda plan: (sum(rows[at].urgent for at in (*plan.first, *plan.second)), plan.rate))

    def _parking_pays(self, load: StepLoad, rows: Sequence[HostRow], parked: int) -> bool:
        """Whether these rows yield more by parking than in two batches, in which parked rows cannot take part."""
        count, tokens = len(rows) + parked, sum(row.tokens for row in rows) / max(1, len(rows))
        parking, _ = self.steady(load, count / self.host.layers, tokens, whole=True)
        return parking >= self.steady(load, count, tokens, whole=True, twice=True)[0]

    def steady(
        self,
        load: StepLoad,
        most: float,
        tokens: float,
        *,
        whole: bool,
        twice: bool = False,
        within_s: float = math.inf,
    ) -> tuple[float, float]:
        """The average yield of many steps, in which a new prompt follows each answer that ends. Returns the tokens per
        second, and the share of the time in which the host may work.

        The accelerator's rows are those of `load`. Up to `most` host rows, which read `tokens` tokens each, take part,
        as far as a step takes at most `within_s`. The host may work during the `whole` step, else only during the
        accelerator's attention. `twice`: with two batches.

        Without the new prompts, an emulated A10G seemed to leave the host twice the time. Too many host rows were
        admitted, became urgent, and took second batches that did not pay: 0.87 of the accelerator's tokens alone.
        """
        step, each_s = self.step, self.slow * self.host.seconds(1, tokens)
        prompt_s = self.new_prompts * step.prompt_token_s  # a host row's, in each step
        attention_s = step.attention_s(StepLoad(load.rows, load.kv_tokens))

        def seconds(fits: float) -> float:
            every = StepLoad(load.rows, prompt_tokens=self.new_prompts * (load.rows + fits))
            return max(_LEAST_S, step.linear_s(every) + twice * step.beta_s + attention_s)

        alone_s = seconds(0)
        host_s, each_s = _USED * (alone_s if whole else attention_s), each_s - whole * _USED * prompt_s
        most = min(most, host_s / each_s) if each_s > 0 else most
        most = min(most, (within_s - alone_s) / prompt_s) if prompt_s else most * (alone_s <= within_s)
        fits = max(0.0, most)
        return (load.rows + fits) / seconds(fits), _USED if whole else host_s / seconds(fits)

    def _seconds(self, load: StepLoad) -> float:
        return max(_LEAST_S, self.step.seconds(load))

    def _token_s(self, load: StepLoad) -> float:
        """The accelerator's seconds per token of its own rows."""
        return self._seconds(StepLoad(load.rows, load.kv_tokens)) / max(1.0, load.rows)

    def one_batch(self, load: StepLoad, rows: Sequence[HostRow]) -> _Batches:
        """The rows whose attention hides behind the accelerator's, T_ca0 <= T_ga0, and the first row if urgent."""
        attention_s, host_s, first = self.step.attention_s(load), 0.0, []
        for number, (tokens, urgent, _) in enumerate(rows):
            cost_s = self.slow * self.host.seconds(1, tokens)
            if (urgent and not number) or host_s + cost_s <= attention_s:
                first.append(number)
                host_s += cost_s
        linear_s = self.step.linear_s(load._replace(rows=load.rows + len(first)))
        return _Batches(linear_s, 0.0, attention_s, host_s, 0.0, first, ())

    def two_batches(self, load: StepLoad, rows: Sequence[HostRow]) -> _Batches:
        """NEO's fourth step: each row goes into the batch with more room by the two inequalities, or into none. The
        first row always takes part if it is urgent, and so do the first two if the accelerator has no work of its own.

        Further urgent rows have no such privilege. The host is busy all the time, so making the accelerator wait for it
        gains nothing: the accelerator's rows would be delayed, and the host's rows would all come due together from
        then on.
        """
        step, knee, row_s = self.step, self.step.knee, self.step.row_s
        each_s, token_s = self.slow * self.host.row_s, self.slow * self.host.kv_token_s
        idle = load == StepLoad()
        linear0_s, linear1_s = 0.0 if idle else step.linear_s(load), 0.0
        count0, prompt_tokens, prompt_s = load.rows, load.prompt_tokens, step.prompt_token_s
        attention_s = step.attention_s(load)
        host0_s = host1_s = 0.0
        first: list[int] = []
        second: list[int] = []
        least_s = each_s + token_s * min((row.tokens for row in rows), default=0)
        for number, (tokens, urgent, _) in enumerate(rows):
            cost_s = each_s + token_s * tokens
            room0_s, room1_s = linear1_s + attention_s - host0_s, linear0_s - host1_s
            if (urgent and not number) or (idle and number < 2):
                pass
            elif cost_s > room0_s and cost_s > room1_s:
                if least_s > room0_s and least_s > room1_s:
                    break  # no other row fits either
                continue
            if room1_s >= room0_s and not (idle and not number):
                linear1_s = (linear1_s or step.beta_s) + (row_s if len(second) >= knee else 0.0)
                host1_s += cost_s
                second.append(number)
            else:
                linear0_s = linear0_s or step.beta_s
                if count0 >= knee:
                    linear0_s += row_s
                elif prompt_tokens >= knee - count0:
                    linear0_s += prompt_s  # the row displaces a prompt token that was free
                count0 += 1
                host0_s += cost_s
                first.append(number)
        return _Batches(linear0_s, linear1_s, attention_s, host0_s, host1_s, first, second)

    def _parked(
        self, load: StepLoad, rows: Sequence[HostRow], parked: int, worth: float, *, parks: bool = True
    ) -> HybridPlan | None:
        """The plan that parks bulk rows: as many as arrive in a step, so that parked rows spread over the layers and
        the host is always busy, as far as nobody waits for it. Each passes one layer per step, if the host keeps up.
        """
        bulk = [number for number, row in enumerate(rows) if row.bulk and parks]
        if not bulk and not parked:
            return None
        paced = [number for number, row in enumerate(rows) if not row.bulk]
        found = self.one_batch(load, [rows[number] for number in paced])
        tokens = sum(rows[number].tokens for number in bulk) / len(bulk) if bulk else 1.0
        each_s = self.slow * self.host.seconds(1, tokens)
        host_s = max(0.0, _BESIDE * found.seconds - found.host0_s) if found.first else found.seconds
        most = host_s / each_s if each_s else math.inf
        arrive = min(most, (parked + len(bulk)) / self.host.layers)
        most = min(arrive, max(0.0, self.host.layers * most - parked)) if found.first else arrive
        first = [paced[number] for number in found.first]
        linear_s = self.step.linear_s(load._replace(rows=load.rows + len(first) + arrive))
        found = found._replace(linear0_s=linear_s)
        rate = (worth + len(first) + arrive) / found.seconds
        times = (found.seconds, rate, worth, self._seconds(load), found.accelerator_s)
        return HybridPlan(ASYNCHRONOUS, *times, first, parking=bulk[: math.ceil(most)])
