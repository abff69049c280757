"""A Router's connection to a replica that generates, and the generations that it follows there. Pure asyncio.

Tokens come with each step, whether somebody reads them or not. Of each generation so many wait here. A reader that
falls further behind has its generation called off: it takes neither memory here nor a place at the replica.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

from deployments.errors import EngineFailed, TimedOut
from deployments.generation.frames import GenerationOffer, GenerationOffers, NewToken, RefusedOffer, TokenReport
from deployments.serving.wire import Peer


class Streaming:
    """One generation at one replica.

    `outcome`: a future that is None once it is admitted, or says how it was refused; it raises ReplicaLost or
    EngineFailed. `tokens` gives what has come since. `on_token` hears of each token as its frame comes.
    """

    def __init__(self, number: int, most_unread: int, on_token: Callable[[NewToken], None]) -> None:
        self.number = number
        self.outcome: asyncio.Future[RefusedOffer | None] = asyncio.get_running_loop().create_future()
        self._most_unread, self._on_token = most_unread, on_token
        self._unread: list[NewToken] = []
        self._problem: Exception | None = None
        self._heard = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        return self._problem is not None

    async def tokens(self) -> list[NewToken]:
        """All that came since the last call, at least one. Raises EngineFailed, ReplicaLost or TimedOut."""
        while not self._unread:
            if self._problem is not None:
                raise self._problem
            self._heard.clear()
            await self._heard.wait()
        unread, self._unread = self._unread, []
        return unread

    def admit(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(None)

    def refuse(self, refused: RefusedOffer) -> None:
        if not self.outcome.done():
            self.outcome.set_result(refused)

    def add(self, token: NewToken) -> None:
        if self._problem is not None:
            return
        self._on_token(token)
        self._unread.append(token)
        if len(self._unread) > self._most_unread:
            self._unread.clear()
            self.fail(
                TimedOut(
                    f"the answer was read too slowly: more than {self._most_unread} tokens waited for their reader; "
                    "please read on while it is streamed"
                )
            )
        self._heard.set()

    def fail(self, problem: Exception) -> None:
        """What came before can still be read."""
        self._problem = self._problem or problem
        self._heard.set()
        if not self.outcome.done():
            self.outcome.set_exception(problem)
            self.outcome.exception()  # seen, if nobody waits for it


class TokenChannel(Peer):
    """A Router's end. All that one turn of the event loop sends goes in one frame.

    It calls `on_report` with each report, before what the report says of generations is passed on to them. It calls
    `on_lost` when the connection ends, with the generations that have not.
    """

    def __init__(self, on_report: Callable[[TokenReport], None], on_lost: Callable[[list[Streaming]], None]) -> None:
        super().__init__()
        self._on_report, self._on_lost = on_report, on_lost
        self._numbers = 0
        self._out = GenerationOffers()
        self._loop = asyncio.get_running_loop()
        self.streams: dict[int, Streaming] = {}
        self._open: dict[int, set[int]] = {}  # of each, the answers that have not ended
        self.frames = 0  # sent, and in the making

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def offer(self, offer: GenerationOffer, most_unread: int, on_token: Callable[[NewToken], None]) -> Streaming:
        """Send it, with a number of its own."""
        self._numbers += 1
        self._outgoing().offers.append(offer._replace(number=self._numbers))
        streaming = self.streams[self._numbers] = Streaming(self._numbers, most_unread, on_token)
        self._open[self._numbers] = set(range(offer.answers))
        return streaming

    def call_off(self, streaming: Streaming) -> None:
        """Nobody waits for it any more. Does nothing to one that has ended."""
        if self.streams.get(streaming.number) is streaming:  # not of a connection before this one
            self._forget(streaming.number)
            self._outgoing().called_off.append(streaming.number)

    def stop(self, streaming: Streaming, answer: int) -> None:
        """Nobody wants more of that answer."""
        if self.streams.get(streaming.number) is streaming:
            self._outgoing().stopped.append((streaming.number, answer))
            self._end_answer(streaming.number, answer)

    def configure(self, settings: dict[str, object]) -> None:
        self._outgoing().settings = settings

    def ask(self) -> None:
        """Ask the replica to report its state at once."""
        self._outgoing().asks = True

    def close(self) -> None:
        self.transport.close()

    def frame_received(self, frame: bytes) -> None:
        self.hear(TokenReport.decode(frame))

    def hear(self, report: TokenReport) -> None:
        self._on_report(report)
        for refused in report.refused:
            if (streaming := self._forget(refused.number)) is not None:
                streaming.refuse(refused)
        for number in report.admitted:
            if (streaming := self.streams.get(number)) is not None:
                streaming.admit()
        for token in report.tokens:
            if (streaming := self.streams.get(token.number)) is not None:
                self._add(streaming, token)
        for number, problem in report.failed:
            if (streaming := self._forget(number)) is not None:
                streaming.fail(EngineFailed(problem))

    def _add(self, streaming: Streaming, token: NewToken) -> None:
        streaming.add(token)
        if streaming.has_failed:
            self.call_off(streaming)
        elif token.finish is not None:
            self._end_answer(token.number, token.answer)

    def connection_lost(self, _: Exception | None) -> None:
        left, self.streams = list(self.streams.values()), {}
        self._on_lost(left)

    def _end_answer(self, number: int, answer: int) -> None:
        self._open[number].discard(answer)
        if not self._open[number]:
            self._forget(number)

    def _forget(self, number: int) -> Streaming | None:
        self._open.pop(number, None)
        return self.streams.pop(number, None)

    def _outgoing(self) -> GenerationOffers:
        if not self._out:
            self.frames += 1
            self._loop.call_soon(self._flush, context=contextvars.Context())
        return self._out

    def _flush(self) -> None:
        out, self._out = self._out, GenerationOffers()
        if not self.transport.is_closing():
            self.transport.writelines(out.encode())
