"""Ingress deployments that answer by themselves: the cost of HTTP and Serve without any embedding.

Plain ASGI, as light as possible, with the same Ray, proxy and options as windve's Router.
"""

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Receive, Scope, Send

TINY = b"{}"
_DIMENSION = 384


class Answer:
    """An ASGI application that reads each request, waits `wait_s`, and always answers the same bytes."""

    def __init__(self, answer: bytes, wait_s: float) -> None:
        self._answer, self._wait_s = answer, wait_s
        self._headers = ((b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        headers = list(self._headers)  # Serve adds its own to the list
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._answer})


class Floor:
    """The ingress, in place of windve's Router."""

    def __init__(self, answer: bytes, wait_s: float) -> None:
        self._answer, self._wait_s = answer, wait_s

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Answer(self._answer, self._wait_s)


def build(args: dict[str, Any]) -> Application:
    """Serve calls this with the config's `args`: `answer` (`tiny` or `vector`) and `wait_s`, the delay."""
    floor = serve.deployment(name="Floor", max_ongoing_requests=1_000_000, ray_actor_options={"num_cpus": 0.1})
    answer = TINY if args["answer"] == "tiny" else vector_bytes()
    application: Application = floor(serve.ingress()(Floor)).bind(answer, args["wait_s"])
    return application


def vector_bytes() -> bytes:
    """The answer of windve to one query of OpenAI's client: a unit vector of 384 numbers, in base64."""
    vector = np.random.default_rng(0).standard_normal(_DIMENSION)
    unit = (vector / np.linalg.norm(vector)).astype(np.float32)
    return orjson.dumps(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": base64.b64encode(unit.tobytes()).decode()}],
            "model": "emulated",
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
        }
    )
