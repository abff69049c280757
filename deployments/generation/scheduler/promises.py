"""Says which part of a promise a device cannot keep, even idle, and what it could keep instead. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from deployments.generation.scheduler.composer import LEAST_CHUNKS
from deployments.generation.scheduler.forecast import NO_HOST, Forecast, HostShare, Prediction, Prompt
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepLoad, StepTime

_SPARE = 1.1  # times what would just do: for the safety margin
_FINER = 1.02  # between two values of `ttft_s` that are tried


class Shortfall(NamedTuple):
    """A setting that promises too much. `is_total`: no answer of two tokens can be in time."""

    is_total: bool
    key: str
    problem: str

    @property
    def sentence(self) -> str:
        return f"{self.key}: {self.problem}"


def longest_step_s(model: StepTime, slow: float, policy: StepPolicy) -> float:
    """Seconds of the longest step that the composer makes of prompts alone."""
    return max(policy.longest_step_s, (1 + LEAST_CHUNKS) * slow * model.beta_s)


def alone(model: StepTime, slow: float, policy: StepPolicy, prompt: Prompt, host: HostShare = NO_HOST) -> Prediction:
    """The prediction for a prompt on an idle device that is `slow` times as slow as `model`."""
    longest_s = longest_step_s(model, slow, policy)
    return Forecast(model, slow, 0.0, longest_s, [], [prompt], host, most_tokens=policy.max_num_batched_tokens).look()


@lru_cache
def shortfall(model: StepTime, policy: StepPolicy, default_tokens: int, context: int) -> Shortfall | None:
    """The setting that an idle device with this step time cannot keep: for any answer; else for prompts or texts of
    `default_tokens`, or, for `tpot_s`, of the model's whole `context`.
    """
    usual, found = max(2, min(default_tokens, context)), []
    firsts_s = {tokens: _first_s(model, policy, tokens) for tokens in (1, usual)}
    paces_s = {tokens: model.seconds(StepLoad().with_row(tokens)) for tokens in (2, usual, context)}
    for key, promised_s, kinds in (("ttft_s", policy.ttft_s, firsts_s), ("tpot_s", policy.tpot_s, paces_s)):
        missed = {tokens: seconds for tokens, seconds in kinds.items() if seconds > promised_s}
        if not missed:
            continue
        if is_total := min(kinds) in missed:
            problem = f"{promised_s:g} s holds for no answer: a step takes {paces_s[2]:.2g} s here, or longer"
        else:
            what = "a prompt" if kinds is firsts_s else "a text"
            problem = f"{promised_s:g} s does not hold for {what} of {min(missed):,} tokens here, or longer ones"
        would = {_upwards(_SPARE * seconds): tokens for tokens, seconds in missed.items()}
        values = (f"{value} s for {tokens:,} tokens" for value, tokens in would.items() if tokens >= usual)
        found.append(Shortfall(is_total, key, f"{problem}; set {' or '.join(values)}"))
    return max(found, key=lambda one: one.is_total, default=None)


def _first_s(model: StepTime, policy: StepPolicy, tokens: int) -> float:
    """The shortest `ttft_s`, from the promised one, that holds for a prompt of `tokens` tokens."""
    ttft_s = policy.ttft_s
    while True:
        tried = StepPolicy(ttft_s, policy.tpot_s, policy.max_num_batched_tokens)
        if alone(model, 1.0, tried, Prompt(ttft_s, tokens, tokens**2 / 2, tokens, 1, 1, None)).kept:
            return ttft_s
        ttft_s *= _FINER


def _upwards(seconds: float) -> str:
    """Rounded up to two digits."""
    digits = 10.0 ** (1 - int(f"{seconds:e}".split("e")[1]))
    return f"{-(-seconds * digits // 1) / digits:g}"
