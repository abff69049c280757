"""The frames that Routers sent a replica and that it has not read to their end, and whose generations these are.

Settings and offers are read in the order of the frames, a few milliseconds at a time: an offer takes long to decide on
while hundreds wait, and steps and reports go on between.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deployments.generation.frames import GenerationOffer, GenerationOffers
from deployments.generation.request import Finish
from deployments.generation.scheduler.sequences import ScheduledChunk
from deployments.generation.scheduler.step import Chunk
from deployments.generation.text.sampling import RowSamplers, Sampler
from deployments.models.tokenizer import TokenIds
from deployments.serving.sessions import RouterSession

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop

logger = logging.getLogger("ray.serve")

_READS_S = 0.005  # at a time


@dataclass(slots=True, eq=False)
class Answer:
    """One answer of a generation. `tokens`: that Routers were told. `stopped`: nobody wants more of it."""

    number: int
    sampler: Sampler
    tokens: int = 0
    stopped: bool = False


@dataclass(slots=True, eq=False)
class OfferedGeneration:
    """A generation that a Router offered, and where its tokens go. `gone`: nobody waits for it any more."""

    session: GenerationSession
    offer: GenerationOffer
    answers: list[Answer]
    gone: bool = False

    def ids(self, chunk: ScheduledChunk) -> np.ndarray:
        """int32 [tokens] of a chunk: of the prompt, or the last token of an answer, which may not be known yet."""
        prompt: TokenIds = self.offer.ids
        if chunk.start < len(prompt):
            return prompt[chunk.start : chunk.start + chunk.tokens]
        return self.answers[chunk.row.number].sampler.last

    def drawn_from(self, chunk: ScheduledChunk) -> Sequence[Answer]:
        """Those that get a token of it: at the end of the prompt all."""
        return (
            self.answers if chunk.start < len(self.offer.ids) else self.answers[chunk.row.number : chunk.row.number + 1]
        )

    def take(self, answer: Answer, token: int) -> Finish | None:
        """One token more of this answer; why it has ended, if it has."""
        answer.tokens += 1
        if answer.sampler.ends_with(token):
            return "stop"
        return "length" if answer.tokens == self.offer.most_tokens else None


def chunk_of(chunk: ScheduledChunk) -> Chunk:
    """What a scheduled chunk asks of the engine."""
    generation = chunk.row.generation
    offered: OfferedGeneration = generation.item
    return Chunk(offered.ids(chunk), chunk.start, tuple(chunk.row.table), chunk.wanted, generation.on_host)


def samplers_of(chunk: ScheduledChunk) -> RowSamplers:
    """Who draws of a chunk: at the end of a prompt, one token for each answer."""
    offered: OfferedGeneration = chunk.row.generation.item
    return RowSamplers([answer.sampler for answer in offered.drawn_from(chunk)], offered.offer.logprobs)


@dataclass(slots=True, eq=False)
class GenerationSession(RouterSession):
    """`admitted` has the generation of each offer."""

    called_off: set[int] = field(default_factory=set)  # numbers of offers, by frames that have not been read
    gone: bool = False  # nobody reads its frames any more


@dataclass(slots=True, eq=False)
class ReceivedFrame:
    """A Router's frame that is not read to its end. `at`: when it came, on the replica's clock. `undecided`: its offers
    that are neither admitted nor refused; None before the first look.
    """

    session: GenerationSession
    frame: GenerationOffers
    at: float
    undecided: deque[GenerationOffer] | None = None


class OfferInbox:
    """One replica's; the step loop decides on what it reads. It is true while it has frames."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._received: deque[ReceivedFrame] = deque()

    def __bool__(self) -> bool:
        return bool(self._received)

    def receive(self, session: GenerationSession, frame: GenerationOffers, now: float) -> None:
        """A frame has come; what it calls off is left out of what is read from now on."""
        session.called_off.update(frame.called_off)
        self._received.append(ReceivedFrame(session, frame, now))
        if len(self._received) == 1:  # else `_read` will come to it
            self._read()

    def _read(self) -> None:
        ends = time.perf_counter() + _READS_S
        while self._received:
            received = self._received[0]
            try:
                done = received.session.gone or self._read_frame(received, ends)
            except Exception:
                logger.exception("a Router's frame cannot be read: its connection is closed")
                self._loop.hang_up(received.session)
                done = True
            if done:
                self._received.popleft()
            if time.perf_counter() > ends:
                break
        if self._received:
            asyncio.get_running_loop().call_soon(self._read, context=contextvars.Context())
        self._loop.have_read()

    def _read_frame(self, received: ReceivedFrame, ends: float) -> bool:
        """True where it is read to its end; False where time was up before."""
        session, frame = received.session, received.frame
        if received.undecided is None:
            received.undecided = deque(frame.offers)
            if frame.settings is not None:
                self._loop.configure(session, frame.settings)
        while received.undecided:
            offer = received.undecided.popleft()
            if offer.number not in session.called_off:  # else nobody waits for a decision
                self._loop.take(session, offer, received.at)
            if received.undecided and time.perf_counter() > ends:
                return False
        session.called_off.difference_update(frame.called_off)
        session.seen += 1
        return True
