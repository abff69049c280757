"""The frames that Routers sent a replica and that it has not read to their end.

Settings and offers are read in the order of the frames, a few milliseconds at a time: an offer takes long to decide on
while hundreds wait, and steps and reports go on between.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.generation.frames import GenerationOffer, GenerationOffers
from deployments.generation.step import GenerationSession

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop

logger = logging.getLogger("ray.serve")

_READS_S = 0.005  # at a time


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
