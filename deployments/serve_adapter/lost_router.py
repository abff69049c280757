"""Has Serve's own proxy answer 502, a status that no Router uses, if the Router that it asked has died.

By default the proxy answers a bare 500, as for a bug in an application. HAProxy decides by the status alone whether to
send a request to another Router (`RAY_SERVE_HAPROXY_RETRY_ON`), and a request on which a Router fails must not run
twice.
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
_BODY = {"type": "http.response.body", "body": b"the Router died before it had answered; please try again in a second"}


class TellsLostRouter:
    """Answers if `app` has returned without an answer. An exception, which is a bug in the proxy, passes through."""

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
    """Serve calls this before an HTTP server starts: in its proxies, and in Routers, which answer for themselves."""
    from ray.serve import get_replica_context
    from ray.serve.exceptions import RayServeException

    try:
        get_replica_context()
    except RayServeException:
        return [Middleware(TellsLostRouter)]
    return []
