"""Admission: a device admits a generation if it can serve it in time and keep all promises made before. Pure.

The promise is that a generation's first token comes by `due`, and the n-th token of each answer by
`first_at + (n - 1) tpot_s`, however many there will be. So an answer that was fast has slack, and one that was slow has
none. A generation is admitted if

    all promises hold        with it (`forecast`), assuming that each answer reaches its maximum
    its blocks will be free  by the learned lengths of answers (`block_manager`)

and if others that would otherwise starve (`reserve`) would still be admitted beside it: a long prompt, and tenants
without their share. It goes to the accelerator's cache if its blocks will be free there, else to the host's, if any.

Bulk generations have no pace and no deadline. They are admitted while they take at most `bulk_share` of the blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import NamedTuple

from deployments.admission.fair_share import Account
from deployments.admission.probe import IdleProbe
from deployments.generation.scheduler.forecast import NO_HOST, Forecast, Pace, Prediction, Prompt
from deployments.generation.scheduler.host_part import shares
from deployments.generation.scheduler.kept_room import KeptRoom
from deployments.generation.scheduler.promises import alone, longest_step_s
from deployments.generation.scheduler.queue import StepQueue
from deployments.generation.scheduler.sequences import Generation, Row
from deployments.generation.scheduler.state import StepState

_AVERAGED = 0.05  # weight of the latest gap in the mean gap
_HELPED = 0.7  # of the time to its first token: no room is kept for a prompt that needs more of an idle device


class Decision(NamedTuple):
    """A decision on a generation. `crowds`: it found no room on the accelerator.

    - If it is admitted: `on_host`, whether it goes to the host's cache, and the predicted seconds to its first token.
    - If not: `never`, even an idle device would be late; else `opens_s`, seconds until it would be admitted.
    """

    admitted: bool
    crowds: bool = False
    on_host: bool = False
    first_s: float = math.inf
    never: bool = False
    opens_s: float = 0.0


@dataclass(slots=True, eq=False)
class StepAdmission:
    """Decides on offered generations. `mean_gap_s`: the mean time between the ends of two generations."""

    queue: StepQueue
    reserve: KeptRoom = field(default_factory=KeptRoom)
    probe: IdleProbe = field(default_factory=IdleProbe)
    mean_gap_s: float = 0.0
    _last_end: float = 0.0  # when a generation last ended, or when an idle device last began to work
    _refused_full: int = 0
    _refused_never: int = 0

    def decide(self, now: float, generation: Generation) -> Decision:
        """Decide on a generation, and in which cache it would be."""
        queue = self.queue
        generation.cached = queue.room.count_cached(generation)
        if self.never(generation, generation.due - now):
            self._refused_never += 1
            return Decision(admitted=False, never=True)
        if not generation.bulk:
            self.reserve.offered(generation)
        account = self.reserve.account(now, generation)
        kept = self._kept_beside(now, generation, account)
        on_host = self._cache_for(generation, kept)
        prediction, admitted, first_s = None, False, math.inf
        if on_host:
            generation.cached = 0
        if on_host is not None:
            prediction = self._predicted(now, replace(generation, on_host=on_host), kept)
            first_s = float(prediction.first_s[0])
            admitted = generation.bulk or prediction.kept or self._is_probe(now)
        if not generation.bulk:
            helped = partial(self._helped, now, generation)
            self.reserve.decided(now, generation, account, self._cost_s(generation), helped, admitted=admitted)
        crowds = on_host is not False
        if not admitted:
            self._refused_full += 1
            return Decision(admitted=False, crowds=crowds, opens_s=self._opens_s(now, generation, prediction))
        if queue.is_idle:
            self._last_end = now  # the next gap counts from here
        return Decision(admitted=True, crowds=crowds, on_host=bool(on_host), first_s=first_s)

    def ended(self, now: float) -> None:
        """Note that a generation has ended."""
        self.mean_gap_s += _AVERAGED * (now - self._last_end - self.mean_gap_s)
        self._last_end = now

    def never(self, generation: Generation, left_s: float) -> bool:
        """Whether even an idle device, at its best known speed, would miss its first token in `left_s` or its pace; or
        whether its answers do not fit into the whole cache.
        """
        queue, policy = self.queue, self.queue.policy
        share = policy.bulk_share if generation.bulk else 1.0
        blocks = generation.most_blocks(queue.block_size)
        if blocks > share * self._largest_cache or generation.answers > policy.max_num_batched_tokens:
            return True
        return not generation.bulk and not self._alone(generation, left_s, min(1.0, queue.learning.slowdown)).kept

    @property
    def _largest_cache(self) -> int:
        return max(cache.block_count for cache in self.queue.caches)

    def longest_prompt(self, left_s: float) -> int:
        """Tokens of the longest prompt whose first token comes within `left_s` on an idle device. 0: none does."""
        most = self._largest_cache * self.queue.block_size
        return _largest(most, lambda tokens: not self.never(Generation(tokens, 1, left_s), left_s))

    def shorten(self, generation: Generation, left_s: float) -> None:
        """Lower its most tokens to what an idle device surely can promise, if it can promise any."""
        slow = min(1.0, self.queue.learning.slowdown) * (1 + self.queue.learning.margin)

        def fits(most: int) -> bool:
            one = replace(generation, most_tokens=most)
            return not self.never(one, left_s) and (one.bulk or self._alone(one, left_s, slow).kept)

        if not fits(generation.most_tokens):
            generation.most_tokens = _largest(generation.most_tokens, fits) or generation.most_tokens

    def state(self, now: float) -> StepState:
        """The state that is reported to Routers."""
        queue, learning = self.queue, self.queue.learning
        typical = self.reserve.typical(now, queue.policy)
        kept = self._kept_beside(now, typical)
        on_host = self._cache_for(typical, kept)
        if on_host:
            typical.on_host, typical.cached = True, 0
        prediction = self._predicted(now, typical, kept)
        first_s = float(prediction.first_s[0])
        prompt_token_s = learning.slowdown * queue.model.prompt_token_s
        opens_s = 0.0 if prediction.kept and on_host is not None else self._opens_s(now, typical, prediction)
        host = None if queue.host is None else queue.host.state(sum(row.generation.on_host for row in queue.running))
        return StepState(
            opens_s, max(0.0, first_s - prompt_token_s * typical.prompt_left), prompt_token_s,
            max(0, queue.block_count - queue.room.reserved), queue.block_count, len(queue.running), len(queue.waiting),
            queue.steps, astuple(queue.model), learning.slowdown, learning.margin,
            (self._refused_full, self._refused_never), host,
        )  # fmt: skip

    # --- room ---------------------------------------------------------------------------------------------------------

    def _kept_beside(self, now: float, generation: Generation, account: Account | None = None) -> list[Generation]:
        waits, rests = bool(self.queue.waiting), self.queue.is_idle
        return self.reserve.beside(now, generation, self.queue.policy, account, waits=waits, rests=rests)

    def _cache_for(self, generation: Generation, kept: Sequence[Generation]) -> bool | None:
        """False: the accelerator's cache, if its blocks will be free there; else True, the host's, if there is one;
        None: neither has room. Generations for which room is `kept` would be on the accelerator.
        """
        queue, policy = self.queue, self.queue.policy
        rows = len(queue.running) + len(queue.preempted) + generation.answers
        rows += sum(one.answers for one in queue.waiting)
        for on_host, cache in zip((False, True), queue.caches, strict=False):
            beside = () if on_host else kept
            if rows <= policy.max_num_batched_tokens and cache.fits(generation, beside, policy.bulk_share):
                return on_host
        return None

    def _opens_s(self, now: float, generation: Generation, prediction: Prediction | None) -> float:
        """Seconds until a refused generation would be admitted: its first token is then in time, and as many
        generations have ended as hold the missing blocks, at least one.
        """
        queue, reserved = self.queue, self.queue.room.reserved
        late_s = 0.0 if prediction is None else float(prediction.first_s[0]) - (generation.due - now)
        most = generation.most_blocks(queue.block_size)
        missing = min(most, most - (queue.block_count - reserved))
        each = max(1, reserved // max(1, len(queue.running) + len(queue.waiting)))
        return max(late_s, math.ceil(max(1, missing) / each) * self.mean_gap_s, queue.model.beta_s)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _alone(self, generation: Generation, left_s: float, slow: float) -> Prediction:
        """The prediction for an idle device that is `slow` times as slow as its model. What is too large for the
        accelerator's cache is on the host.
        """
        queue, prompt, host = self.queue, _prompt(generation, left_s), NO_HOST
        if queue.host is not None and generation.most_blocks(queue.block_size) > queue.block_count:
            prompt, host = prompt._replace(on_host=True), host._replace(copy_token_s=queue.host.time.copy_token_s)
        return alone(queue.model, slow, queue.policy, prompt, host)

    def _forecast(self, slow: float, free_s: float, paces: Sequence[Pace], prompts: Sequence[Prompt]) -> Forecast:
        model, policy = self.queue.model, self.queue.policy
        most_tokens = policy.max_num_batched_tokens
        longest_s = longest_step_s(model, slow, policy)
        return Forecast(model, slow, free_s, longest_s, paces, prompts, most_tokens=most_tokens)

    def _helped(self, now: float, generation: Generation) -> bool:
        """Whether its prompt needs clearly less time on an idle device than it has."""
        return self._alone(generation, _HELPED * (generation.due - now), self._slow).kept

    @property
    def _slow(self) -> float:
        """How many times as long as planned several consecutive steps may take."""
        return self.queue.learning.slowdown * (1 + self.queue.learning.margin)

    def _is_probe(self, now: float) -> bool:
        """Whether an idle device admits this as a probe, to learn whether it is still slow or erratic. At planned speed
        a probe is in time; otherwise `never` has refused it.
        """
        queue = self.queue
        if not queue.is_idle or now - queue.since < self.probe.after_s(queue.policy.ttft_s):
            return False
        self.probe.back_off()
        return True

    def _cost_s(self, generation: Generation) -> float:
        """Planned device seconds of it. It shares the fixed time of steps with other rows."""
        prompt, model, lengths = _prompt(generation, 0.0), self.queue.model, self.queue.room.lengths
        token_s = model.beta_s / max(1, len(self.queue.running)) + model.kv_token_s * prompt.length
        answers_s = generation.answers * lengths.mean(generation.most_tokens) * token_s
        return model.prompt_token_s * prompt.tokens + model.pair_s * prompt.pairs + answers_s

    def _predicted(self, now: float, generation: Generation, kept: Sequence[Generation]) -> Prediction:
        """The prediction with it, and with those for which room is `kept`, among the others."""
        queue = self.queue
        own, *others = (_prompt(one, one.due - now) for one in (generation, *kept))
        waiting = [_chunks(row, now) for row in queue.uncomputed if not row.generation.bulk]
        prompts = [*(prompt for prompt in waiting if prompt.tokens), own, *others]
        prompts.sort(key=lambda one: (one is own and generation.bulk, one.due_s))
        forecast = self._forecast(self._slow, queue.until_free(now), self._paces(now), prompts)
        likely = queue.room.likely_blocks(kept if generation.on_host or generation.bulk else (generation, *kept))
        forecast = replace(forecast, most_read=likely * queue.block_size)
        for share in shares(queue, generation):
            prediction = replace(forecast, host=share).look()
            if prediction.kept:
                break
        at = next(number for number, one in enumerate(prompts) if one is own)
        return Prediction(prediction.first_s[at:], prediction.kept)

    def _paces(self, now: float) -> list[Pace]:
        """The paces of running rows, and of rows whose prompt the current step completes."""
        queue, found = self.queue, []
        completed = (row for row in queue.preempted if row.computed + row.coming == row.length)
        for row, comes in [*((row, row.coming) for row in queue.running), *((row, 1) for row in completed)]:
            generation, pace_s, left = row.generation, row.generation.pace_s, row.left - comes
            if generation.bulk or left <= 0:
                continue
            assert generation.first_at is not None
            last_s = generation.first_at + (row.picked + comes - 1) * (pace_s or 0) - now
            found.append(Pace.of(last_s, pace_s, left, row.length + comes, on_host=generation.on_host))
        for generation in queue.waiting:
            if not generation.bulk and generation.prompt_left == 0:
                found += _prompt(generation, 0.0).paces(queue.until_free(now))
        return found


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, if all below it do. 0: none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _prompt(generation: Generation, due_s: float) -> Prompt:
    tokens, whole = generation.prompt_left, generation.prompt_tokens
    answers = generation.answers, generation.most_tokens, generation.pace_s, generation.on_host
    return Prompt(due_s, tokens, tokens * (whole - tokens + tokens / 2), whole, *answers)


def _chunks(row: Row, now: float) -> Prompt:
    """What is left to compute of a prompt, or of a row that lost its blocks."""
    generation, (_, due) = row.generation, row.order
    if generation.first_at is None:
        return _prompt(generation, due - now)
    whole = row.length
    tokens = whole - row.computed - row.coming
    pairs = tokens * (whole - tokens + tokens / 2)
    return Prompt(due - now, tokens, pairs, whole, 1, row.left, generation.pace_s, generation.on_host)
