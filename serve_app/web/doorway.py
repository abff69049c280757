"""Counts the HTTP requests at this Router for its door (`deployments/admission/door.py`)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.serve_adapter.visits import Source, Visits
from serve_app.observe.observer import START

_BUSY = 429


class Doorway:
    """An ASGI application that counts the requests of `app`, and delays refusals. A request that waits for the rest of
    its body costs the Router nothing.
    """

    def __init__(self, app: ASGIApp, visits: Visits) -> None:
        self._app, self._visits = app, visits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_more, source = False, _source(scope)

        async def receive_part() -> Message:
            nonlocal has_more
            if has_more:
                with self._visits.wait():
                    message = await receive()
            else:  # the first part is there already, and after the last one only the end of the connection comes
                message = await receive()
            has_more = message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == _BUSY:
                await self._visits.hold(source)
            await send(message)

        with self._visits.visit(source):
            await self._app(scope, receive_part, send_part)


def _source(scope: Scope) -> Source:
    """HTTP, and the HAProxy that sent it."""
    start = next((value for name, value in scope["headers"] if name == START), b"")
    return "http", start.partition(b" ")[2]
