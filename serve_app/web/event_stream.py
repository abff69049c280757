"""Server-sent events to a client that may be slow or disconnect.

https://html.spec.whatwg.org/multipage/server-sent-events.html, as OpenAI's clients read it: `data:` lines, `[DONE]` at
the end, an error as the last event. A line that begins with a colon is a comment; it keeps the connection alive.
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
    (b"x-accel-buffering", b"no"),  # nginx then forwards each event at once
]
DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_TOO_SLOW = "the client read the answer too slowly and too much of it was waiting; read it as it is streamed"


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """- `sse_keepalive_s`: after a pause of this length, a comment line is sent.
    - `slow_s`: a client that reads nothing for this long is disconnected.
    - `most_waiting`: a client that has more unread events is disconnected.
    """

    sse_keepalive_s: float = 15.0
    slow_s: float = 10.0
    most_waiting: int = 4096


def event(content: Any) -> bytes:
    return b"data: %b\n\n" % dumps(content)


class EventStream(ResponseStream):
    """One streamed answer. Events are collected as they arrive; each write sends all that wait."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]], bounds: StreamBounds
    ) -> None:
        """`events`: complete events. `close`: called when the stream ends, for whatever reason."""
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
        """Wait for events or an end, but no longer than the keepalive interval."""
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
            raise ClientGone("the client reads too slowly") from None
        finally:
            self._writing = None

    async def _read(self) -> WindveError | None:
        try:
            async for one in self._events:
                if len(self._waiting) >= self._bounds.most_waiting and self._writing is not None:
                    if not self._writing.expired():
                        self._writing.reschedule(asyncio.get_running_loop().time())  # expires now
                    return self._broken_by(TimedOut(_TOO_SLOW))  # reaches a client that reads again just in time
                self._waiting.append(one)
                self._wake.set()
        except WindveError as error:
            return self._broken_by(error)
        except Exception:
            logger.exception("a stream broke off")
            return self._broken_by(WindveError("the answer broke off because of a server error; see the server's log"))
        return None

    def _broken_by(self, error: WindveError) -> WindveError:
        self._waiting.append(event(openai_error(error)))
        return error
