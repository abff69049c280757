"""A replica's queue of frames from Routers.

Settings and offers are handled in the order of the frames, a few milliseconds at a time. While hundreds of generations
wait, deciding on an offer takes long, and steps and reports must go on in between.
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

_READS_S = 0.005  # how long it reads at a time


@dataclass(slots=True, eq=False)
class ReceivedFrame:
    """A Router's frame that is not completely handled. `at`: when it came, on the replica's clock. `undecided`: its
    offers without a decision; None until it is first read.
    """

    session: GenerationSession
    frame: GenerationOffers
    at: float
    undecided: deque[GenerationOffer] | None = None


class OfferInbox:
    """A replica's inbox. The step loop decides on the offers. It is truthy while it has frames."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._received: deque[ReceivedFrame] = deque()

    def __bool__(self) -> bool:
        return bool(self._received)

    def receive(self, session: GenerationSession, frame: GenerationOffers, now: float) -> None:
        """Queue a frame. Undecided offers that it calls off are skipped from now on."""
        session.called_off.update(frame.called_off)
        self._received.append(ReceivedFrame(session, frame, now))
        if len(self._received) == 1:  # otherwise `_read` will get to it
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
        """Handle a frame. Returns False if time was up before its end."""
        session, frame = received.session, received.frame
        if received.undecided is None:
            received.undecided = deque(frame.offers)
            if frame.settings is not None:
                self._loop.configure(session, frame.settings)
        while received.undecided:
            offer = received.undecided.popleft()
            if offer.number not in session.called_off:  # otherwise nobody waits for a decision
                self._loop.take(session, offer, received.at)
            if received.undecided and time.perf_counter() > ends:
                return False
        session.called_off.difference_update(frame.called_off)
        session.seen += 1
        return True
