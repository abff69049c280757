"""For whom an overloaded device keeps room: long prompts, and tenants without their share. Pure.

A generation is admitted only if the generations for which room is kept would still be admitted beside it. These are
hypothetical: they resemble what was offered lately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.admission.fair_share import Account, Shares
from deployments.admission.starvation import LongRequests
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepPolicy

_AVERAGED = 0.05  # weight of the latest generation in the means
_SPARE = 2  # generations of tenants under their share for which room is kept besides the expected ones
_MOST_KEPT = 8  # the most generations for which room is kept at once


@dataclass(slots=True)
class KeptRoom:
    """Remembers what was offered and admitted."""

    _prompt: float = 0.0  # mean tokens of a prompt
    _cached: float = 0.0  # mean tokens of it that the cache held
    _most: float = 0.0  # mean of the most tokens of an answer
    _cost_s: float = 0.0  # mean planned device seconds
    _longest_under_share: float = 0.0  # tokens of the longest recent prompt of tenants under their share
    _shares: Shares = field(default_factory=Shares)
    _long: LongRequests = field(default_factory=LongRequests)

    def offered(self, generation: Generation) -> None:
        """Note an offer that gets a promise if there is room: not bulk, and not more than an idle device can serve."""
        weight = _AVERAGED if self._prompt else 1.0
        self._prompt += weight * (generation.prompt_tokens - self._prompt)
        self._cached += weight * (generation.cached - self._cached)
        self._most += weight * (generation.most_tokens - self._most)

    def account(self, now: float, generation: Generation) -> Account | None:
        """Its tenant's account. None without a tenant, and for bulk."""
        if generation.tenant is None or generation.bulk:
            return None
        return self._shares.account(now, generation.tenant)

    def typical(self, now: float, policy: StepPolicy, prompt_tokens: float = 0.0) -> Generation:
        """A generation as long as the mean of those offered, or with a prompt of `prompt_tokens` tokens."""
        prompt, most = (max(1, round(tokens)) for tokens in (prompt_tokens or self._prompt, self._most))
        cached = 0 if prompt_tokens else min(prompt - 1, round(self._cached))
        return Generation(prompt, most, now + policy.ttft_s, policy.tpot_s, cached=cached)

    def beside(
        self,
        now: float,
        generation: Generation,
        policy: StepPolicy,
        account: Account | None = None,
        *,
        waits: bool,
        rests: bool,
    ) -> list[Generation]:
        """The generations for which room is kept beside this one: a long prompt, while long ones are refused too often;
        and what tenants without their share are expected to request (`fair_share`), with the longest prompt of tenants
        under their share first. `waits`: prompts are waiting; `rests`: the device is idle.
        """
        longest = others = 0
        if waits and not self._long.is_long(generation.prompt_tokens):
            longest = round(self._long.reserve)
        if account is not None and self._shares.has_level and not rests:
            if not account.is_over_share:
                return []
            others = math.ceil(self._shares.expected_s(account, policy.ttft_s) / self._cost_s)
            if self._shares.has_under_share:
                others += _SPARE
                longest = max(longest, round(self._longest_under_share))
        prompts = [longest] * (longest > 0) + [0] * (min(_MOST_KEPT, others) - (longest > 0))
        return [self.typical(now, policy, tokens) for tokens in prompts]

    def decided(
        self,
        now: float,
        generation: Generation,
        account: Account | None,
        cost_s: float,
        may_be_helped: Callable[[], bool],
        *,
        admitted: bool,
    ) -> None:
        """Note a decision. `cost_s`: planned device seconds. `may_be_helped`: whether an idle device needs clearly less
        time than the prompt has. Room is not kept for other prompts, because that would cost the others too much.
        """
        tokens = generation.prompt_tokens
        self._cost_s += (_AVERAGED if self._cost_s else 1.0) * (cost_s - self._cost_s)
        is_under_share = account is not None and not account.is_over_share and self._shares.has_level
        if account is not None:
            account.count(cost_s, cost_s if admitted else 0.0)
        if (is_under_share or self._long.is_long(tokens)) and not admitted and not may_be_helped():
            return
        if is_under_share:
            self._longest_under_share = max(float(tokens), (1 - _AVERAGED) * self._longest_under_share)
        self._long.offered(now, tokens, refused=not admitted)
