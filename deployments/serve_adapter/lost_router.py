"""What Serve's own proxy answers where the Router that it asked died: 502, a status that no Router has.

By itself the proxy answers as where an application has a defect: a bare 500. HAProxy goes by the status alone when it
sends a request to another Router (`RAY_SERVE_HAPROXY_RETRY_ON`), and what a Router itself fails at must run once.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATUS = 502
_HEAD = {
    "type": "http.response.start",
    "status": STATUS,
    "headers": [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"1")],
}
_BODY = {
    "type": "http.response.body",
    "body": b"the Router died before it had answered; please try again in a second",
}


class TellsLostRouter:
    """Answers where `app` has returned without an answer. An exception stays one: that is a defect of the proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = scope["type"] != "http"

        async def follow(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        await self._app(scope, receive, follow)
        if not answered:
            await send(_HEAD)
            await send(_BODY)


def middlewares() -> list[Middleware]:
    """Called by Serve where an HTTP server starts: in its proxies, and in each Router, which answers for itself."""
    from ray.serve import get_replica_context
    from ray.serve.exceptions import RayServeException

    try:
        get_replica_context()
    except RayServeException:
        return [Middleware(TellsLostRouter)]
    return []
