"""Picks the next token by a request's sampling options. Pure.

As in OpenAI's API, transformers and vLLM, in this order:

1. The rules of `logit_rules` change a copy of the logits.
2. A `temperature` of 0 picks the likeliest token. Any other divides the logits.
3. `min_p` leaves out tokens whose probability is below this share of the likeliest one's.
4. `top_k` keeps so many of the likeliest tokens. Of them, `top_p` keeps the fewest whose probabilities add up to it.

`kernels.draw_kernel` and `engine.device_sampling` draw the same tokens faster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

LIKELIEST = 1024  # tokens that are sorted at first: a tenth of the time of sorting 150,000

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperature` >= 0; `top_k`: 0 means all; `top_p` in (0, 1]; `seed`: the same seed gives the same answer in any
    batch; `logit_bias`: what is added to the logits of (token, number); `grammar`: see `text.grammar`, empty for none.
    The others are as in `logit_rules`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""

    @property
    def below(self) -> float:
        """The least logit that `min_p` keeps, minus the largest logit; -inf: it keeps all."""
        return self.temperature * math.log(self.min_p) if self.min_p and self.temperature else -math.inf


class LogitRule(Protocol):
    """A rule of one answer that changes logits before a token is drawn. It may keep a state."""

    def alter(self, logits: Numbers, drawn: Sequence[int]) -> None:
        """Change logits, float32 [vocabulary], in place. `drawn`: the answer's tokens so far."""
        ...


class Sampler:
    """The sampler of one answer, with its own random numbers. `last`: the last token that was drawn, int32 [1]; the
    next step may read it before the loop has seen it. `ended`: no further token is wanted. `alters`: it has rules that
    change logits, so it draws on the host.
    """

    def __init__(
        self,
        sampling: Sampling,
        number: int = 0,
        end_tokens: Collection[int] = (),
        rules: Iterable[LogitRule] = (),
    ) -> None:
        """`number`: the answer's number, if a request asks for several. `rules`: its own, used in their order."""
        self.asked = sampling
        self._rules = tuple(rules)
        self._drawn: list[int] = []  # kept only for the rules
        self.alters = bool(self._rules)
        self.last = np.zeros(1, np.int32)  # 0 is a token of any vocabulary
        self.ended = False
        self._end_tokens = frozenset(end_tokens)
        self._random = np.random.default_rng(None if sampling.seed is None else [sampling.seed % 2**64, number])

    def pick(self, logits: Numbers) -> int | None:
        """The next token. `logits`: float32 [vocabulary]. None if its rules leave none."""
        logits = self.altered(logits)
        if self.alters and not np.isfinite(logits.max()):
            return None
        if self.asked.temperature == 0:
            return int(logits.argmax())
        tokens, shares = candidates(logits, self.asked)
        upto = np.cumsum(shares)
        found = np.searchsorted(upto, self.random() * upto[-1], side="right")
        return int(tokens[min(int(found), len(tokens) - 1)])

    def altered(self, logits: Numbers) -> Numbers:
        """The logits as its rules change them: a copy, unless it has none."""
        if self.alters:
            logits = logits.copy()
            for rule in self._rules:
                rule.alter(logits, self._drawn)
        return logits

    def drew(self, token: int | None) -> None:
        """Note the next token. None: there is none, and the answer ends."""
        if token is not None:
            self.last[0] = token
            if self.alters:
                self._drawn.append(token)
        if token is None or self.ends_with(token):
            self.ended = True

    def ends_with(self, token: int) -> bool:
        """Whether it is an end token, which ends the answer and has no text."""
        return token in self._end_tokens

    def random(self) -> float:
        """Its next random number, in [0, 1). Each token uses one, unless the temperature is 0."""
        return self._random.random()


class RowSamplers(NamedTuple):
    """The `samplers` of all answers that continue from a row of logits. `logprobs`: how many alternatives to report for
    each token; None: not even the token's own logprob.
    """

    samplers: Sequence[Sampler]
    logprobs: int | None

    @property
    def alters(self) -> bool:
        """Whether some of them change logits."""
        return any(sampler.alters for sampler in self.samplers)

    def end(self) -> None:
        """End all of them."""
        for sampler in self.samplers:
            sampler.ended = True


@dataclass(frozen=True, slots=True)
class Picked:
    """A picked token. `logprob`: the natural logarithm of its probability, before all sampling options
    (`log_shares`). `alternatives`: (token, logprob) of the likeliest tokens, sorted.
    """

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


def pick(logits: Numbers, row: RowSamplers) -> list[Picked] | None:
    """Pick one token for each sampler. None if the logits, float32 [vocabulary], are not finite, or if rules leave no
    token.
    """
    if not np.isfinite(logits.max()):
        return None
    tokens = [token for sampler in row.samplers if (token := sampler.pick(logits)) is not None]
    if len(tokens) < len(row.samplers):
        return None
    if row.logprobs is None:
        return [Picked(token) for token in tokens]
    known = log_shares(logits)
    best = _likeliest(logits, row.logprobs)
    others = tuple(zip(best.tolist(), known[best].tolist(), strict=True))
    return [Picked(token, float(known[token]), others) for token in tokens]


def candidates(logits: Numbers, asked: Sampling) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The tokens that may come, and their unnormalized probabilities: sorted by probability if `top_k` or `top_p`
    limits them, else the vocabulary in its order.
    """
    with np.errstate(over="ignore"):  # a temperature near 0: all but the likeliest become -inf
        if asked.min_p:
            logits = np.where(logits < logits.max() + np.float32(asked.below), np.float32(-np.inf), logits)
        shares = np.exp((logits.astype(np.float64) - logits.max()) / asked.temperature)
    most = asked.top_k if 0 < asked.top_k < len(shares) else len(shares)
    if asked.top_p >= 1:
        found = _likeliest(logits, most) if most < len(shares) else np.arange(most)
        return found, shares[found]
    wanted = asked.top_p * (shares.sum() if most == len(shares) else np.partition(shares, -most)[-most:].sum())
    for count in (min(most, LIKELIEST), most):
        found = _likeliest(logits, count)
        reached = np.cumsum(shares[found]) >= wanted
        if reached.any():
            found = found[: reached.argmax() + 1]
            break
    return found, shares[found]


def log_shares(logits: Numbers) -> Numbers:
    """The logarithm of each token's probability, without sampling options, float32 [vocabulary]."""
    shifted = logits - logits.max()
    found: Numbers = shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)
    return found


def _likeliest(logits: Numbers, count: int) -> npt.NDArray[np.intp]:
    """The `count` likeliest tokens, or all, sorted. Equal ones keep the vocabulary's order."""
    if count == 0:
        return np.zeros(0, np.intp)
    least = np.partition(logits, -count)[-count] if count < len(logits) else -np.inf
    above = np.flatnonzero(logits > least)
    some = np.sort(np.concatenate([above, np.flatnonzero(logits == least)[: max(0, count - len(above))]]))
    return some[np.argsort(-logits[some], kind="stable")]
