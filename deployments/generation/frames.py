"""What travels between a Router and a replica that generates: frames as `embedding.frames` has them. Pure.

A Router sends `GenerationOffers`: prompts with the seconds until their first token is due (never clock times), and
what it calls off. A replica sends a `TokenReport`: its state, what became of offers, and the tokens of one step, those
of all the answers that this Router waits for in one frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from deployments.admission.fair_share import Tenant
from deployments.generation.request import Finish
from deployments.generation.scheduler.hybrid.host_cache import HostState
from deployments.generation.scheduler.state import StepState
from deployments.generation.text.sampling import Picked, Sampling
from deployments.models.tokenizer import TokenIds
from deployments.serving.frames import frame_of, head_of, plain_tenant, tenant_of

_FINISHES: tuple[Finish | None, ...] = (None, "stop", "length")  # by their numbers in a frame
_COLUMNS = 4  # of a token: offer, answer, id, finish
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_SILENT = StepState(0.0, 0.0, 0.0, 0, 0, 0, 0, 0, (), 1.0, 0.0, (0, 0))  # until it is sent


class GenerationOffer(NamedTuple):
    """One generation, offered to one replica.

    - `number`: the offer's, on its connection; `TokenChannel.offer` sets it.
    - `left_s`: seconds until its first token is due.
    - `ids`: of the prompt, int32 [tokens].
    - `end_tokens`: any of these ends an answer; empty: none does.
    - `tpot_s`: the pace that is promised; None: none is.
    - The others are as in `asked.Asked`.
    """

    number: int
    left_s: float
    ids: TokenIds
    most_tokens: int
    sampling: Sampling
    answers: int = 1
    logprobs: int | None = None
    end_tokens: tuple[int, ...] = ()
    tpot_s: float | None = None
    bulk: bool = False
    tenant: Tenant | None = None


@dataclass(slots=True)
class GenerationOffers:
    """One frame of a Router. `called_off`: numbers of offers that nobody waits for. `stopped`: (offer, answer) of
    single answers that have ended at the Router. `settings`: see `GenerationPool.configure`. `asks`: the replica should
    report its state at once.
    """

    offers: list[GenerationOffer] = field(default_factory=list)
    called_off: list[int] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)
    settings: dict[str, Any] | None = None
    asks: bool = False

    def __bool__(self) -> bool:
        return bool(self.offers or self.called_off or self.stopped or self.settings or self.asks)

    def encode(self) -> list[bytes]:
        """As the buffers of one frame."""
        heads = [
            [
                offer.number,
                round(offer.left_s, 6),
                len(offer.ids),
                offer.most_tokens,
                [offer.sampling.temperature, offer.sampling.top_k, offer.sampling.top_p, offer.sampling.seed],
                offer.answers,
                offer.logprobs,
                offer.end_tokens,
                offer.tpot_s,
                offer.bulk,
                plain_tenant(offer.tenant),
            ]
            for offer in self.offers
        ]
        head = [heads, self.called_off, self.stopped, self.settings, self.asks]
        return frame_of(head, [offer.ids.astype(np.int32, copy=False).tobytes() for offer in self.offers])

    @classmethod
    def decode(cls, frame: bytes) -> GenerationOffers:
        """Raises ValueError, TypeError or struct.error where it is not what it says."""
        head, start = head_of(frame)
        heads, called_off, stopped, settings, asks = head
        ids = np.frombuffer(frame, np.int32, offset=start)
        lengths = [one[2] for one in heads]
        ends = list(accumulate(lengths))
        if heads and (min(lengths) < 1 or ends[-1] != len(ids)):
            raise ValueError("its lengths do not add up")  # one prompt's tokens would be another's
        offers = []
        for (number, left_s, length, most, sampling, answers, logprobs, end_tokens, *pace), end in zip(
            heads, ends, strict=True
        ):
            tpot_s, bulk, tenant = pace
            own = (number, left_s, ids[end - length : end], most, Sampling(*sampling), answers, logprobs)
            offers.append(GenerationOffer(*own, tuple(end_tokens), tpot_s, bulk, tenant_of(tenant)))
        return cls(offers, called_off, [(number, answer) for number, answer in stopped], settings, asks)


class NewToken(NamedTuple):
    """One token of an answer of offer `number`; `finish`: it is the answer's last one, and why."""

    number: int
    answer: int
    picked: Picked
    finish: Finish | None = None


class RefusedOffer(NamedTuple):
    """`never`: an idle device would miss the promise, too. A prompt of `longest` tokens would not. `opens_s`: else, the
    seconds until it would be admitted. `why`, in words, where it is not for want of room.
    """

    number: int
    never: bool = False
    longest: int = 0
    opens_s: float = 0.0
    why: str = ""


@dataclass(slots=True)
class TokenReport:
    """One frame of a replica to one Router. `seen`: how many frames of this Router the replica has read. `failed`:
    (offer, the sentence for the client). `routers`: that are connected.
    """

    state: StepState = _SILENT
    seen: int = 0
    refused: list[RefusedOffer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    tokens: list[NewToken] = field(default_factory=list)
    routers: int = 1

    def encode(self) -> list[list[bytes]]:
        """As the buffers of frames, which are one: a step has few tokens."""
        columns = np.empty((len(self.tokens), _COLUMNS), np.int32)
        logprobs = []
        for index, (number, answer, picked, finish) in enumerate(self.tokens):
            columns[index] = number, answer, picked.id, _FINISHES.index(finish)
            if picked.logprob is not None:
                others = [(token, max(logprob, _LEAST_LOGPROB)) for token, logprob in picked.alternatives]
                logprobs.append((index, max(picked.logprob, _LEAST_LOGPROB), others))
        refused = [tuple(one) for one in self.refused]
        state = [*self.state[:-1], self.state.host and tuple(self.state.host)]
        head = [state, self.seen, self.routers, refused, self.admitted, self.failed, logprobs]
        return [frame_of(head, [columns.tobytes()])]

    @classmethod
    def decode(cls, frame: bytes) -> TokenReport:
        """Raises ValueError, TypeError, LookupError or struct.error where it is not what it says."""
        head, start = head_of(frame)
        state, seen, routers, refused, admitted, failed, logprobs = head
        if state[0] is None:  # JSON has no infinity: it is closed
            state[0] = math.inf
        if state[-1] is not None:
            state[-1] = HostState(*state[-1])
        columns = np.frombuffer(frame, np.int32, offset=start).reshape(-1, _COLUMNS)
        known = {index: (logprob, _pairs(others)) for index, logprob, others in logprobs}
        tokens = [
            NewToken(number, answer, Picked(token, *known.get(index, ())), _FINISHES[finish])
            for index, (number, answer, token, finish) in enumerate(columns.tolist())
        ]
        return cls(StepState(*state), seen, [RefusedOffer(*one) for one in refused], admitted, failed, tokens, routers)


def _pairs(others: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((token, logprob) for token, logprob in others)
