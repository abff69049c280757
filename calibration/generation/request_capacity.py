"""Finds how many requests of a mix a service can admit per second, with the real schedulers in virtual time. Pure.

Devices take exactly the time that their step time predicts. Requests arrive as a Poisson stream.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime

_SPREAD = 0.9  # standard deviation of the logarithm of lengths
_ADMITTED = 0.99  # share of the requests that is admitted at the capacity
_FEWEST, _MOST = 200, 500  # requests in a stream
_LIVES = 3  # a stream lasts at least this many times a mean answer
_EXACT = 0.05  # relative precision of the capacity
_STEP = 1.5  # factor between rates while the capacity is not yet bracketed
_GUESSED_ROWS = 16  # answers that share a step, in the first guess
_CUT = 0.5  # of the longest prompt: longer ones are admitted only on an idle device, so they say little of the capacity


class Arrival(NamedTuple):
    """A request: its arrival, in seconds after the first, and the tokens of its prompt and answer."""

    at: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests whose prompts and answers have log-normal lengths with these means. Prompts have at most half of
    `longest_prompt`, and both together at most the model's `context`.
    """

    prompt_tokens: int
    answer_tokens: int
    longest_prompt: int
    context: int

    def arrivals(self, rate: float, seconds: float, seed: int, *, together: int = 1) -> list[Arrival]:
        """A Poisson stream of `rate` requests per second, in bursts of `together`."""
        draw = random.Random(seed)  # noqa: S311 - not a secret; seeded, so that a run can be repeated
        count = max(1, round(rate * seconds / together))
        moments = accumulate(draw.expovariate(rate / together) for _ in range(count))
        return [Arrival(at, *self._lengths(draw)) for at in moments for _ in range(together)]

    def _lengths(self, draw: random.Random) -> tuple[int, int]:
        prompt, answer = (
            round(draw.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD))
            for mean in (self.prompt_tokens, self.answer_tokens)
        )
        prompt = max(1, min(prompt, int(_CUT * self.longest_prompt), self.context - 1))
        return prompt, min(max(1, answer), self.context - prompt)


class SimulatedReplica(NamedTuple):
    """A replica of an application that generates."""

    time: StepTime
    blocks: int
    max_num_batched_tokens: int
    block_size: int = BLOCK

    def schedule(self, policy: StepPolicy) -> StepScheduler:
        policy = StepPolicy(policy.ttft_s, policy.tpot_s, self.max_num_batched_tokens, policy.bulk_share)
        return StepScheduler(self.time, policy, self.blocks, Learning(calibrated=True), block_size=self.block_size)


@dataclass(slots=True, eq=False)
class _Device:
    schedule: StepScheduler
    ends: float = math.inf  # when the running step ends

    def start(self, now: float) -> None:
        runs = bool(self.schedule.next_step(now))
        self.schedule.copies()
        self.ends = now + self.schedule.planned_s if runs else math.inf

    def end(self) -> None:
        now = self.ends
        self.schedule.ended(now, self.schedule.planned_s)
        self.start(now)


def refused(replicas: Sequence[SimulatedReplica], policy: StepPolicy, arrivals: Sequence[Arrival], most: float) -> int:
    """How many of these arrivals are refused, in virtual time. Stops counting above `most`."""
    devices = [_Device(one.schedule(policy)) for one in replicas]
    count = 0
    for at, prompt_tokens, answer_tokens in arrivals:
        while (first := min(devices, key=lambda one: one.ends)).ends <= at:
            first.end()
        generation = Generation(prompt_tokens, answer_tokens, at + policy.ttft_s, policy.tpot_s)
        taker = next((one for one in devices if one.schedule.offer(at, generation).admitted), None)
        if taker is None:
            count += 1
            if count > most:
                break
        elif math.isinf(taker.ends):
            taker.start(at)
    return count


def longest_prompt(replicas: Sequence[SimulatedReplica], policy: StepPolicy) -> int:
    """The most prompt tokens with which the first token arrives in time on an idle device; 0 if there are none."""
    left_s = policy.ttft_s / (1 + Learning(calibrated=True).margin)
    return max(one.schedule(policy).admission.longest_prompt(left_s) for one in replicas)


def capacity(replicas: Sequence[SimulatedReplica], policy: StepPolicy, mix: Mix, seed: int) -> float:
    """The requests per second of which 99 % are admitted; 0 if hardly any are. `replicas`: in the order in which they
    are asked.
    """

    def holds(rate: float) -> bool:
        seconds = max(_FEWEST / rate, min(_MOST / rate, _LIVES * mix.answer_tokens * policy.tpot_s))
        arrivals = mix.arrivals(rate, seconds, seed)
        most = (1 - _ADMITTED) * len(arrivals)
        return refused(replicas, policy, arrivals, most) <= most

    return _largest(holds, sum(_guess(one.time, mix) for one in replicas))


def _guess(time: StepTime, mix: Mix) -> float:
    """A first guess of the requests per second, from the time that one takes beside others."""
    tokens = mix.prompt_tokens + mix.answer_tokens / 2
    step_s = time.seconds(StepLoad(_GUESSED_ROWS, _GUESSED_ROWS * tokens))
    prompt_s = time.seconds(StepLoad().with_chunk(0, mix.prompt_tokens)) - time.beta_s
    return 1 / max(1e-6, prompt_s + mix.answer_tokens * step_s / _GUESSED_ROWS)


def _largest(holds: Callable[[float], bool], first: float) -> float:
    """The largest value that holds, to `_EXACT`, from `first`/1000 (0 if that does not hold) to 1000 `first` (if that
    holds, a stream is too short to fill the device).
    """
    low, high, rate = 0.0, math.inf, first
    while high > (1 + _EXACT) * low and first / 1000 < rate < 1000 * first:
        low, high = (rate, high) if holds(rate) else (low, rate)
        rate = _STEP * low if math.isinf(high) else high / _STEP if not low else math.sqrt(low * high)
    return low
