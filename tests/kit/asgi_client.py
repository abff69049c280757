"""Calls an ASGI application as a server would, without a server."""

import asyncio
import json
from dataclasses import dataclass


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


async def ask(api, method, path, payload=b"", *, headers=(), root="", leaves=None, takes=None):
    """Send a request. `payload`: bytes, or an object to send as JSON. `leaves`: an event that is set when the client
    disconnects. `takes`: awaited with each message of the answer. Returns None if there was no answer.
    """
    sent = []
    content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    bodies = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if bodies:
            return bodies.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if takes is not None:
            await takes(message)

    scope = {"type": "http", "method": method, "path": root + path, "root_path": root, "headers": list(headers)}
    await api(scope, receive, send)
    if not sent:
        return None
    start, *parts = sent
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], told, b"".join(part["body"] for part in parts))


def call(api, method, path, payload=b"", **more):
    return asyncio.run(ask(api, method, path, payload, **more))


def post(api, path, payload, **more):
    return call(api, "POST", path, payload, **more)


def get(api, path, **more):
    return call(api, "GET", path, **more)
