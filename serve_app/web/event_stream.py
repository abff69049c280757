"""Server-sent events to a client that may be slow, silent or gone.

https://html.spec.whatwg.org/multipage/server-sent-events.html, as OpenAI's clients read it: `data:` lines, `[DONE]` at
the end, an error as the last event. A line that begins with a colon is a comment, and keeps a connection alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deployments.errors import TimedOut, WindveError
from serve_app.web.asgi import ClientGone, ResponseStream, Write, dumps
from serve_app.web.errors import Headers, openai_error

logger = logging.getLogger("ray.serve")

EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each event on
]
DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_TOO_SLOW = "the answer was read too slowly: too much of it waited; please read on while it is streamed"


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """- `sse_keepalive_s`: a pause so long gets a comment line.
    - `slow_s`: a reader that takes nothing for so long is cut off.
    - `most_waiting`: so is one for which more events wait.
    """

    sse_keepalive_s: float = 15.0
    slow_s: float = 10.0
    most_waiting: int = 4096


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % dumps(content)


class EventStream(ResponseStream):
    """One answer. Events are read as they come and sent as the client takes them, all that wait at once."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]], bounds: StreamBounds
    ) -> None:
        """`events`: whole ones. `close`: is called at the stream's end, whatever ends it."""
        self._events, self._close, self._bounds = events, close, bounds
        self._waiting: list[bytes] = []
        self._wake = asyncio.Event()
        self._writing: asyncio.Timeout | None = None

    async def run(self, gone: asyncio.Task[None], write: Write) -> WindveError | None:
        reading = asyncio.create_task(self._read())
        for task in (reading, gone):
            task.add_done_callback(self._look)
        try:
            while not (reading.done() and not self._waiting):
                await self._next()
                if gone.done():
                    raise ClientGone
                body = b"".join(self._waiting) or (b"" if reading.done() else _PING)
                self._waiting.clear()
                if body:
                    await self._write(body, write)
            return reading.result()
        finally:
            gone.remove_done_callback(self._look)
            reading.cancel()
            await asyncio.wait([reading])
            await self.close()

    async def close(self) -> None:
        await self._events.aclose()
        await self._close()

    def _look(self, _: asyncio.Task[Any]) -> None:
        self._wake.set()

    async def _next(self) -> None:
        """Until there is something to do, or the pause is long."""
        if not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._bounds.sse_keepalive_s):
                    await self._wake.wait()
        self._wake.clear()

    async def _write(self, body: bytes, write: Write) -> None:
        try:
            async with asyncio.timeout(self._bounds.slow_s) as self._writing:
                await write(body)
        except TimeoutError:
            raise ClientGone("it reads too slowly") from None
        finally:
            self._writing = None

    async def _read(self) -> WindveError | None:
        try:
            async for one in self._events:
                if len(self._waiting) >= self._bounds.most_waiting and self._writing is not None:
                    if not self._writing.expired():
                        self._writing.reschedule(asyncio.get_running_loop().time())  # no longer
                    return self._broken_by(TimedOut(_TOO_SLOW))  # for one who takes what was sent just now
                self._waiting.append(one)
                self._wake.set()
        except WindveError as error:
            return self._broken_by(error)
        except Exception:
            logger.exception("a stream broke off")
            return self._broken_by(WindveError("the answer broke off by an error of the server; its log says more"))
        return None

    def _broken_by(self, error: WindveError) -> WindveError:
        self._waiting.append(event(openai_error(error)))
        return error
