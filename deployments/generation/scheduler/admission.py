"""Which generations a device that generates admits: those that it can serve in time beside all that it has promised.
Pure.

The first token of a generation comes by `due`. The tokens of each answer come at its pace: the n-th at
`first_at + (n - 1) tpot_s` or before, however many there will be. So an answer that was quick has slack, and one that
was slow has none. A generation is admitted if

    all promises hold        with it (`forecast`), taking each answer to become as long as it may
    its blocks will be free  by what has been learned of the lengths of answers (`block_manager`)

and if beside it those would still be admitted that would starve otherwise (`reserve`): a long prompt, and tenants
that have not had their share. It is on the accelerator if its blocks are free there, else on the host, if there is one.

Bulk generations have no pace and no deadline. They are admitted while they take at most `bulk_share` of the blocks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from operator import attrgetter

from deployments.admission.fair_share import Account
from deployments.admission.probe import IdleProbe
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.forecast import Forecast, Pace, Prediction, Prompt
from deployments.generation.scheduler.hybrid.strategy import HostStrategy
from deployments.generation.scheduler.kept_room import KeptRoom
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepState
from deployments.generation.scheduler.step_queue import StepQueue

_AVERAGED = 0.05  # of the way to the latest one: the mean gap
_HELPED = 0.7  # of the time to its first token: who needs more of an idle device gets no help


@dataclass(slots=True, eq=False)
class StepAdmission:
    """Decides on generations that are offered. `mean_gap_s`: between the ends of two generations."""

    queue: StepQueue
    host_strategy: HostStrategy
    reserve: KeptRoom = field(default_factory=KeptRoom)
    probe: IdleProbe = field(default_factory=IdleProbe)
    mean_gap_s: float = 0.0
    _last_end: float = 0.0  # of a generation, or when the device has begun to work since
    _refused_full: int = 0
    _refused_never: int = 0

    def decide(self, now: float, generation: Generation) -> Prediction | None:
        """What admitting it is like, and it is to be `on_host` or not. None: it is refused, and knows `opens_s`."""
        queue = self.queue
        if self.never(generation, generation.due - now):
            generation.never = True
            self._refused_never += 1
            return None
        if not generation.bulk:
            self.reserve.offered(generation)
        account = self.reserve.account(now, generation)
        kept = self._kept_beside(now, generation, account)
        fits = self._choose_cache(generation, kept)
        queue.crowded |= generation.on_host or not fits
        prediction = self._predicted(now, generation, kept) if fits else None
        admitted = prediction is not None and (generation.bulk or prediction.kept or self._is_probe(now))
        generation.on_host &= admitted
        if not generation.bulk:
            helped = partial(self._helped, now, generation)
            self.reserve.decided(now, generation, account, self._cost_s(generation), helped, admitted=admitted)
        if not admitted:
            self._refused_full += 1
            generation.opens_s = self._opens_s(now, generation, prediction)
            return None
        if queue.is_idle:
            self._last_end = now  # what comes between ends counts from here
        return prediction

    def ended(self, now: float) -> None:
        """A generation has ended."""
        self.mean_gap_s += _AVERAGED * (now - self._last_end - self.mean_gap_s)
        self._last_end = now

    def never(self, generation: Generation, left_s: float) -> bool:
        """An idle device, as quick as it is known to be, would not have its first token in `left_s`, or not keep its
        pace; or its answers do not fit into the whole cache.
        """
        policy = self.queue.policy
        share = policy.bulk_share if generation.bulk else 1.0
        if generation.most_blocks > share * self._largest_cache or generation.answers > policy.max_num_batched_tokens:
            return True
        return not generation.bulk and not self._alone(generation, left_s, min(1.0, self.queue.learning.slowdown)).kept

    @property
    def _largest_cache(self) -> int:
        return max(cache.block_count for cache in self.queue.caches)

    def longest_prompt(self, left_s: float) -> int:
        """Tokens of the longest prompt whose first token comes in `left_s` on an idle device; 0: none does."""
        from_tokens, to_tokens = 0, self._largest_cache * BLOCK + 1
        while to_tokens - from_tokens > 1:
            middle = (from_tokens + to_tokens) // 2
            fits = not self.never(Generation(middle, 1, left_s), left_s)
            from_tokens, to_tokens = (middle, to_tokens) if fits else (from_tokens, middle)
        return from_tokens

    def state(self, now: float) -> StepState:
        """What the device is like now."""
        queue, learning = self.queue, self.queue.learning
        typical = self.reserve.typical(now, queue.policy)
        kept = self._kept_beside(now, typical)
        fits = self._choose_cache(typical, kept)
        prediction = self._predicted(now, typical, kept)
        first_s = float(prediction.first_s[0])
        prompt_token_s = learning.slowdown * queue.model.prompt_token_s
        opens_s = 0.0 if prediction.kept and fits else self._opens_s(now, typical, prediction)
        return StepState(
            opens_s, max(0.0, first_s - prompt_token_s * typical.prompt_tokens), prompt_token_s,
            max(0, queue.block_count - queue.room.reserved), queue.block_count, len(queue.running), len(queue.waiting),
            queue.steps, astuple(queue.model), learning.slowdown, learning.margin,
            (self._refused_full, self._refused_never), self.host_strategy.state(queue),
        )  # fmt: skip

    # --- room ---------------------------------------------------------------------------------------------------------

    def _kept_beside(self, now: float, generation: Generation, account: Account | None = None) -> list[Generation]:
        waits, rests = bool(self.queue.waiting), self.queue.is_idle
        return self.reserve.beside(now, generation, self.queue.policy, account, waits=waits, rests=rests)

    def _choose_cache(self, generation: Generation, kept: Sequence[Generation]) -> bool:
        """Put it on the accelerator if its blocks will be free there, else on the host, if there is one. False: they
        will be free in none. What room is `kept` for will be on the accelerator.
        """
        queue, policy = self.queue, self.queue.policy
        rows = len(queue.running) + sum(one.answers for one in queue.waiting) + generation.answers
        for on_host, cache in zip((False, True), queue.caches, strict=False):
            generation.on_host = on_host
            if rows <= policy.max_num_batched_tokens and cache.fits(
                generation, () if on_host else kept, policy.bulk_share
            ):
                return True
        return False

    def _opens_s(self, now: float, generation: Generation, prediction: Prediction | None) -> float:
        """Until this one, which is refused, would be admitted: one generation ends before, or as many as hold the
        blocks that are missing, and the first token is in time.
        """
        queue, reserved = self.queue, self.queue.room.reserved
        late_s = 0.0 if prediction is None else float(prediction.first_s[0]) - (generation.due - now)
        missing = min(generation.most_blocks, generation.most_blocks - (queue.block_count - reserved))
        each = max(1, reserved // max(1, len(queue.running) + len(queue.waiting)))
        return max(late_s, math.ceil(max(1, missing) / each) * self.mean_gap_s, queue.model.beta_s)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _alone(self, generation: Generation, left_s: float, slow: float) -> Prediction:
        """On an idle device, `slow` times as slow as its model."""
        prompts = [_prompt(generation, left_s)]
        return self._forecast(slow, 0.0, [], prompts).look()

    def _forecast(self, slow: float, free_s: float, paces: Sequence[Pace], prompts: Sequence[Prompt]) -> Forecast:
        model, policy = self.queue.model, self.queue.policy
        most_tokens = policy.max_num_batched_tokens
        return Forecast(model, slow, free_s, policy.longest_step_s, paces, prompts, most_tokens=most_tokens)

    def _helped(self, now: float, generation: Generation) -> bool:
        """Its prompt leaves an idle device some of the time that it has."""
        return self._alone(generation, _HELPED * (generation.due - now), self._slow).kept

    @property
    def _slow(self) -> float:
        """How many times as long as planned several steps may take."""
        return self.queue.learning.slowdown * (1 + self.queue.learning.margin)

    def _is_probe(self, now: float) -> bool:
        """An idle device tries now and then whether it is still as slow, or scatters as much, as it did. What it tries
        is in time on a device as quick as planned: else it is refused for good (`never`).
        """
        queue = self.queue
        if not queue.is_idle or now - queue.since < self.probe.after_s(queue.policy.ttft_s):
            return False
        self.probe.back_off()
        return True

    def _cost_s(self, generation: Generation) -> float:
        """Planned device seconds of it, beside others."""
        prompt, model, lengths = generation.prompt_tokens, self.queue.model, self.queue.room.lengths
        token_s = model.beta_s / max(1, len(self.queue.running)) + model.kv_token_s * prompt
        answers_s = generation.answers * lengths.mean(generation.most_tokens) * token_s
        return model.prompt_token_s * prompt + model.pair_s * prompt**2 / 2 + answers_s

    def _predicted(self, now: float, generation: Generation, kept: Sequence[Generation]) -> Prediction:
        """With it among the others, and with those that room is `kept` for."""
        queue = self.queue
        waiting = [one for one in queue.waiting if not one.bulk]
        for one in (generation, *kept):
            insort(waiting, one, key=attrgetter("order"))
        prompts = [_prompt(one, one.due - now) for one in waiting]
        left = [prompt for prompt in prompts if prompt.tokens]
        forecast = self._forecast(self._slow, queue.until_free(now), self._paces(now), left)
        for share in self.host_strategy.shares(queue, generation):
            prediction = replace(forecast, host=share).look()
            if prediction.kept:
                break
        at = waiting.index(generation) - sum(not prompt.tokens for prompt in prompts[: waiting.index(generation)])
        return Prediction(prediction.first_s[at:], prediction.kept)

    def _paces(self, now: float) -> list[Pace]:
        """Of the rows that run, and of those whose prompt the running step ends."""
        queue, found = self.queue, []
        for row in queue.running:
            generation, pace_s, left = row.generation, row.generation.pace_s, row.left - row.coming
            if generation.bulk or left <= 0:
                continue
            assert generation.first_at is not None
            last_s = generation.first_at + (row.picked + row.coming - 1) * (pace_s or 0) - now
            found.append(Pace.of(last_s, pace_s, left, row.length + row.coming, on_host=generation.on_host))
        for generation in queue.waiting:
            if not generation.bulk and generation.prompt_left == 0:
                found += _prompt(generation, 0.0).paces(queue.until_free(now))
        return found


def _prompt(generation: Generation, due_s: float) -> Prompt:
    tokens, whole = generation.prompt_left, generation.prompt_tokens
    answers = generation.answers, generation.most_tokens, generation.pace_s, generation.on_host
    return Prompt(due_s, tokens, tokens * (whole - tokens + tokens / 2), whole, *answers)
