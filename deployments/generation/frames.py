"""The frames between a Router and a generating replica, in the format of `serving.frames`. Pure.

A Router sends `GenerationOffers`: prompts with the seconds until their first token is due (never clock times), and what
it calls off. A replica sends a `GenerationReport`: its state, its decisions on offers, and the tokens of one step, for
all of this Router's answers in one frame.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from deployments.admission.fair_share import Tenant
from deployments.generation.request import Finish
from deployments.generation.scheduler.state import HostState, StepState
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked, Sampling
from deployments.serving.frames import Head, encode_head, frame_of, head_of, known

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class GenerationOffer(Head):
    """One generation, offered to one replica.

    - `number`: identifies the offer on its connection. `GenerationChannel.offer` sets it.
    - `left_s`: seconds until its first token is due.
    - `ids`: the prompt's token ids, int32 [tokens]. The head holds how many there are.
    - `end_tokens`: tokens that end an answer; may be empty.
    - `tpot_s`: the promised pace; None: no promise.
    - The others are as in `request.WantedGeneration`.
    """

    number: int
    left_s: float
    ids: Any
    most_tokens: int
    sampling: Sampling
    answers: int = 1
    logprobs: int | None = None
    end_tokens: tuple[int, ...] = ()
    tpot_s: float | None = None
    bulk: bool = False
    tenant: Tenant | None = None
    cache_scope: bytes | None = None
    may_shorten: bool = False
    prompt_logprobs: int | None = None


class GenerationOffers(Head):
    """A Router's frame.

    - `called_off`: numbers of offers that nobody waits for any more.
    - `stopped`: (offer, answer) of single answers that the Router has ended.
    - `settings`: see `GenerationRouterConfig.policy`.
    - `asks`: the replica should report its state at once.
    """

    offers: list[GenerationOffer] = msgspec.field(default_factory=list)
    called_off: list[int] = msgspec.field(default_factory=list)
    stopped: list[tuple[int, int]] = msgspec.field(default_factory=list)
    settings: dict[str, Any] | None = None
    asks: bool = False

    def __bool__(self) -> bool:
        return bool(self.offers or self.called_off or self.stopped or self.settings is not None or self.asks)

    def encode(self) -> list[bytes]:
        """The buffers of one frame."""
        return frame_of(encode_head(self), [offer.ids.astype(np.int32, copy=False).tobytes() for offer in self.offers])

    @classmethod
    def decode(cls, frame: bytes) -> GenerationOffers:
        """Decode a frame. Raises ValueError, TypeError or struct.error if it is malformed."""
        head, start = head_of(frame)
        found = _OFFERS.decode(head)
        ids = np.frombuffer(frame, np.int32, offset=start)
        first = 0
        for offer in found.offers:
            if offer.ids < 1:
                raise ValueError("a prompt without tokens: its lengths do not add up")
            end = first + offer.ids
            offer.ids, first = ids[first:end], end
        if first != len(ids):
            raise ValueError("its lengths do not add up")  # prompts would get each other's tokens
        return found


class NewToken(Head):
    """A token of an answer of offer `number`. `finish`: why the answer ends with this token, if it does."""

    number: int
    answer: int
    picked: Picked
    finish: Finish | None = None


class ScoredPrompt(Head):
    """The scores of consecutive tokens of offer `number`'s prompt, after its first `start` + 1. `ids`, `logprobs` and
    `ranks`: the bytes of the arrays of `PromptScores`.
    """

    number: int
    start: int
    ids: bytes
    logprobs: bytes
    ranks: bytes

    @classmethod
    def of(cls, number: int, start: int, scores: PromptScores) -> ScoredPrompt:
        logprobs = np.maximum(scores.logprobs, np.float32(_LEAST_LOGPROB))
        return cls(number, start, scores.ids.tobytes(), logprobs.tobytes(), scores.ranks.tobytes())

    @property
    def scores(self) -> PromptScores:
        """Raises ValueError if the arrays' lengths do not add up."""
        return PromptScores.of_bytes(self.ids, self.logprobs, self.ranks)


class RefusedOffer(Head):
    """A refusal of offer `number`.

    - `never`: even an idle device would miss the promise. `longest`: the longest prompt for which it would not.
    - `opens_s`: otherwise, the seconds until the offer would be admitted.
    - `why`: the reason in words, if it is not lack of room.
    """

    number: int
    never: bool = False
    longest: int = 0
    opens_s: float = 0.0
    why: str = ""


class GenerationReport(Head):
    """A replica's frame to one Router. `seen`: how many frames of this Router the replica had read. `admitted`: numbers
    of offers. `failed`, `broken`, `suspect`: see `Failures`. `routers`: how many are connected. `cached`: (offer,
    tokens that the cache held) for prompts of which it held some. `scored`: see `GenerationOffer.prompt_logprobs`.
    """

    state: Any = None  # StepState, from when the report is sent
    seen: int = 0
    refused: list[RefusedOffer] = msgspec.field(default_factory=list)
    admitted: list[int] = msgspec.field(default_factory=list)
    failed: list[tuple[int, str]] = msgspec.field(default_factory=list)
    tokens: list[NewToken] = msgspec.field(default_factory=list)
    routers: int = 1
    broken: list[int] = msgspec.field(default_factory=list)
    suspect: list[int] = msgspec.field(default_factory=list)
    cached: list[tuple[int, int]] = msgspec.field(default_factory=list)
    scored: list[ScoredPrompt] = msgspec.field(default_factory=list)

    def encode(self) -> list[list[bytes]]:
        """The buffers of its frames. There is always one frame, because a step has few tokens."""
        self.tokens = [token if token.picked.logprob is None else _finite(token) for token in self.tokens]
        return [frame_of(encode_head(self), [])]

    @classmethod
    def decode(cls, frame: bytes) -> GenerationReport:
        """Decode a frame. Raises ValueError, TypeError, LookupError or struct.error if it is malformed."""
        head, _ = head_of(frame)
        report = _REPORT.decode(head)
        state = known(StepState, report.state)
        report.state = state if state.host is None else state._replace(host=known(HostState, state.host))
        return report


def _finite(token: NewToken) -> NewToken:
    """The token with finite logprobs, because clients get them as JSON."""
    picked = token.picked
    assert picked.logprob is not None
    others = tuple((other, max(logprob, _LEAST_LOGPROB)) for other, logprob in picked.alternatives)
    found = Picked(picked.id, max(picked.logprob, _LEAST_LOGPROB), others)
    return NewToken(token.number, token.answer, found, token.finish)


_OFFERS, _REPORT = msgspec.msgpack.Decoder(GenerationOffers), msgspec.msgpack.Decoder(GenerationReport)
