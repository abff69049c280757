"""Forecasts whether a device can keep all its promises: first tokens of waiting prompts, and paces of answers. Pure.

It is the demand test of earliest-deadline-first scheduling (Baruah, Mok, Rosier: Preemptively scheduling hard-real-time
sporadic tasks on one processor, RTSS 1990): everything is in time if, for each deadline t, the work due by t takes no
longer than t.

Each step gives each running answer a token. So the work until t is

    n(t) steps      as many as the answer that needs most steps by t, and enough to hold the prompts: a step computes
                    at most `most_tokens`. They hold B answers, which read K tokens. K grows by B with each step, and
                    falls when an answer has all the tokens that it may get.
    prompts         those whose first token is due by t, and those ahead of the answer whose token is due at t. Their
                    chunks go into these steps. All others can wait.

An answer whose prompt still waits takes part from the step after its predicted first token. Nobody knows in advance
when an answer ends, so each is assumed to reach its maximum.

Prompts on the host copy the keys and values of their own tokens, and in each further step those of all tokens before.
The prompts due by t are assumed to share its steps: each is in as many as corresponds to its tokens.

Answers on the host (`HostShare`) are assumed to be in each step, too. The host computes their attention beside the
accelerator, so the work until t takes as long as the slower of the two. With two batches, each step reads the weights
twice. `StepAdmission` tries one batch and then two, and uses the first that keeps all promises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deployments.generation.scheduler.step_time import StepTime

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.intp]

_ROUNDS = 6  # iterations to find when the work is done; enough unless the device is near its limit
_TINY = 1e-9


class Pace(NamedTuple):
    """An answer that gets `left` more tokens: the next is due in `due_s` and reads `length` tokens, and each further
    one is due `pace_s` later. `after` steps and `prompts` prompts, including its own, come before it. `host`: 1 if the
    host computes its attention, else 0.
    """

    due_s: float
    pace_s: float
    left: float
    length: float
    after: float = 0.0
    prompts: int = 0
    host: int = 0

    @classmethod
    def of(cls, last_s: float, pace_s: float | None, left: float, length: float, *, on_host: bool = False) -> Pace:
        """An answer whose next token is due `pace_s` after `last_s`, or never if `pace_s` is None."""
        due_s, pace_s = (math.inf, 1.0) if pace_s is None else (last_s + pace_s, pace_s)
        return cls(due_s, pace_s, left, length, host=int(on_host))


class Prompt(NamedTuple):
    """A waiting prompt of `length` tokens: its first token is due in `due_s`, and `tokens` and `pairs` are left to
    compute (`StepLoad`). Each of its `answers` gets at most `most_tokens` tokens at `pace_s`; None: no pace.
    """

    due_s: float
    tokens: float
    pairs: float
    length: float
    answers: int
    most_tokens: int
    pace_s: float | None
    on_host: bool = False

    def paces(self, first_s: float) -> list[Pace]:
        """The paces of its answers, if their first tokens come in `first_s`."""
        pace = Pace.of(first_s, self.pace_s, self.most_tokens - 1, self.length + 1, on_host=self.on_host)
        return [pace] * self.answers if pace.left else []


class HostShare(NamedTuple):
    """The time that answers on the host need of steps, beside the accelerator's work (`HostCache.shares`): `row_s`
    seconds per token, and `kv_token_s` per token that it reads. `twice`: with such answers, a step reads the weights
    twice. `copy_token_s`: of the accelerator, per token of a prompt that it copies.
    """

    row_s: float
    kv_token_s: float
    twice: bool
    copy_token_s: float = 0.0


NO_HOST = HostShare(0.0, 0.0, twice=False)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a device that is free in `free_s`. Its steps take `slow` times as long as `model` says. They
    should take at most `longest_s`, and compute at most `most_tokens`, including rows. They read at most `most_read`
    tokens of the accelerator's cache. `prompts` are sorted by `due_s`. All times are seconds from now.
    """

    model: StepTime
    slow: float
    free_s: float
    longest_s: float
    paces: Sequence[Pace]
    prompts: Sequence[Prompt]
    host: HostShare = NO_HOST
    most_tokens: float = math.inf
    most_read: float = math.inf

    def look(self) -> Prediction:
        """Predict first tokens, and whether all promises hold."""
        running = _Steps(self, self.paces)
        firsts, _ = running.firsts()
        joined = _Steps(self, [*self.paces, *self._later(firsts, running)])
        later, sure = joined.firsts(firsts)  # more answers make no first token earlier
        kept = joined.keeps_firsts(later, sure=sure) and joined.keeps_paces(later)
        return Prediction(np.maximum(firsts, later), kept)

    def _later(self, firsts: Numbers, running: _Steps) -> list[Pace]:
        """The answers of the waiting prompts."""
        after = running.steps_by(firsts) + 1
        return [
            pace._replace(after=after[number], prompts=number + 1)
            for number, prompt in enumerate(self.prompts)
            for pace in prompt.paces(firsts[number])
        ]


class Prediction(NamedTuple):
    """`first_s`: seconds until each prompt's first token, float64 [prompts]. `kept`: all promises hold."""

    first_s: Numbers
    kept: bool


class _Steps:
    """The steps that these answers need, and the work in them. In shapes, m is any number of times at once."""

    def __init__(self, forecast: Forecast, paces: Sequence[Pace]) -> None:
        self._of = forecast
        columns = np.array(paces, np.float64).reshape(-1, len(Pace._fields)).T
        self._due, self._pace, self._left, self._length, self._after, self._ahead, self._host = columns
        self._beta_s = forecast.model.beta_s * (1 + (forecast.host.twice and bool(self._host.any())))
        self._firsts_due = np.array([prompt.due_s for prompt in forecast.prompts], np.float64)
        self._upto = np.arange(1, len(forecast.prompts) + 1)[:, None]
        self._tokens = np.cumsum([0.0, *(prompt.tokens for prompt in forecast.prompts)])
        self._pairs = np.cumsum([0.0, *(prompt.pairs for prompt in forecast.prompts)])
        # Of the first prompts, those on the host: all their tokens, half of those left, and how many precede the mean
        # token of any prompt.
        hosts = [(one.length, one.tokens / 2, one.pairs) if one.on_host else (0.0,) * 3 for one in forecast.prompts]
        self._least, self._own, pairs = np.cumsum([(0.0,) * 3, *hosts], axis=0).T
        self._before = pairs / np.maximum(1.0, self._tokens)
        # [prompts]: the fewest steps that hold so many prompts, beside the answers that run before each first token.
        room = np.maximum(1.0, forecast.most_tokens - np.count_nonzero(self._ahead < self._upto, axis=1))
        self._fewest = np.maximum(1.0, np.ceil(np.cumsum(np.diff(self._tokens) / room) - _TINY))

    def steps_by(self, at_s: Numbers, prompts: Counts | float = math.inf) -> Numbers:
        """n(t) for the times `at_s` [m]; returns [m]. Counts only answers that come before the last of the first
        `prompts` [m, 1] prompts, since the others have no token earlier. Steps take at most `longest_s`, which sets a
        minimum.
        """
        tokens = at_s[:, None] - self._due  # in place from here on: the array is large
        tokens /= self._pace
        tokens += 1 + _TINY
        np.floor(tokens, out=tokens)
        counts = (tokens > 0) & (self._ahead < prompts)
        steps = np.minimum(tokens, self._left, out=tokens)
        steps += self._after
        np.copyto(steps, 0.0, where=~counts)
        fewest = np.floor(np.maximum(at_s - self._of.free_s, 0.0) / self._of.longest_s)
        return np.asarray(np.maximum(steps.max(axis=1, initial=0.0), fewest))

    def ends_s(self, steps: Numbers, prompts: Counts, most_chunks: Numbers | None = None) -> Numbers:
        """When `steps` [m, 1] steps are done that also compute the first `prompts` [m, k] prompts; returns [m, k].
        Prompts are in all of these steps, or in the first `most_chunks` [m, k].
        """
        model = self._of.model
        tokens = np.clip(steps - self._after, 0.0, self._left)  # [m, answers]
        read = tokens - 1
        read /= 2
        read += self._length
        read *= tokens
        here = 1 - self._host
        # The answers with the most tokens are assumed to be the first `knee` rows of each step.
        below = above = tokens.sum(axis=1, keepdims=True)
        if (others := tokens.shape[1] - model.knee) > 0:
            below = above - np.partition(tokens, others - 1, axis=1)[:, :others].sum(axis=1, keepdims=True)
        above = above - below
        spare = steps * model.knee - below  # prompt tokens that cost nothing
        read_here = np.minimum((read @ here)[:, None], steps * self._of.most_read)
        rows_s = steps * self._beta_s + model.row_s * above + model.kv_token_s * read_here
        prompts_s = model.prompt_token_s * np.maximum(self._tokens[prompts] - spare, 0.0)
        planned_s = rows_s + prompts_s + model.pair_s * self._pairs[prompts]
        if self._of.host.copy_token_s and self._least[-1]:
            chunks = steps if most_chunks is None else np.minimum(steps, most_chunks)
            copied = np.maximum(self._least[prompts], chunks * self._before[prompts] + self._own[prompts])
            planned_s += self._of.host.copy_token_s * copied
        host_s = self._of.host.row_s * (tokens @ self._host) + self._of.host.kv_token_s * (read @ self._host)
        planned_s = np.maximum(planned_s, host_s[:, None])
        return np.asarray(self._of.free_s + self._of.slow * planned_s)

    def firsts(self, earliest_s: Numbers | float = 0.0) -> tuple[Numbers, bool]:
        """When each prompt's first token comes, [prompts], not before `earliest_s`; and whether that is certain. If
        not, it may come later.
        """
        at_s = np.maximum(self.ends_s(self._fewest[:, None], self._upto)[:, 0], earliest_s)
        for _ in range(_ROUNDS):
            later_s = np.maximum(at_s, self._first_by(at_s))
            if (later_s <= at_s + _TINY).all():
                return at_s, True
            at_s = later_s
        return at_s, False

    def keeps_firsts(self, firsts: Numbers, *, sure: bool) -> bool:
        """Whether each first token comes by its deadline: at some time before it, all work due by that time is done,
        and also the step that completes the prompt. `firsts` is the first such time if `sure`, else a lower bound.
        """
        due = self._firsts_due + _TINY
        if (firsts > due).any():
            return False
        return sure or bool((self._first_by(due) <= due).all())

    def _first_by(self, at_s: Numbers) -> Numbers:
        """When each prompt's first token comes, [prompts], if answers first get the tokens due by `at_s` [prompts]."""
        return self.ends_s(self._steps_to_firsts(at_s)[:, None], self._upto)[:, 0]

    def _steps_to_firsts(self, at_s: Numbers) -> Numbers:
        """Steps up to each first token, likewise. The one that completes the prompt holds all answers, too."""
        return np.maximum(self.steps_by(at_s, self._upto) + 1, self._fewest)

    def keeps_paces(self, firsts: Numbers) -> bool:
        """Whether each answer's tokens are in time, with first tokens at `firsts` [prompts]. It suffices to check steps
        at which an answer starts or ends: between two of them, deadlines are a concave function of the step, and the
        work until the step is a convex one.
        """
        last = self._after + self._left
        steps = np.unique(np.concatenate([self._after + 1, last]))[:, None]
        takes_part = (steps > self._after) & (steps <= last)
        due = np.where(takes_part, self._due + (steps - 1 - self._after) * self._pace, np.inf)  # [m, answers]
        prompts = np.maximum(np.searchsorted(self._firsts_due, due, side="right"), self._ahead.astype(np.intp))
        prompts = np.where(takes_part, prompts, 0)
        most_chunks = np.append(0.0, self._steps_to_firsts(firsts))[prompts]
        return bool((self.ends_s(steps, prompts, most_chunks) <= due + _TINY).all())
