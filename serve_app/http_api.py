"""The routes: OpenAI's and TEI's for embeddings, and what a server tells of itself. All end in `Router.embed`."""

from __future__ import annotations

import base64
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments import trial
from deployments.errors import (
    BodyTooLarge,
    Busy,
    DeadlineExceeded,
    EmptyInput,
    Forbidden,
    InvalidInput,
    Unauthorized,
    Unavailable,
    WindveError,
)
from deployments.router import Embedded, Router
from deployments.trial import Trial
from serve_app import openapi
from serve_app.api_keys import ApiKeys
from serve_app.requests import Rules, parse_openai, parse_tei, parse_timeout

VERSION = importlib.metadata.version("windve")
_JSON = "application/json"
_PRIORITY = b"x-windve-priority"
_TRIAL = trial.HEADER.encode()
_TIMEOUT = b"x-request-timeout-ms"
_OPENAI_PREFIX = "/v1/"
_WITHOUT_KEY = frozenset({"/health", "/ping"})  # what a load balancer asks

_CONTENT_TYPE = (b"content-type", _JSON.encode())

Vector = npt.NDArray[np.float32]
Headers = list[tuple[bytes, bytes]]


class HttpApi:
    """The ASGI application of one Router replica.

    FastAPI documents all routes and answers the rare ones. The ones that carry queries are dispatched before it: its
    layers, which these handlers do not use, cost about as much as all else that the Router does for a query.
    """

    def __init__(self, router: Router, api_keys: ApiKeys | None = None) -> None:
        self._router = router
        self._api_keys = api_keys
        limits = router.settings.limits
        self._max_body_bytes = limits.max_body_bytes
        self._rules = Rules(router.card.name, router.card.dimension, limits.max_inputs_per_request)
        self._headers = [(b"x-windve-emulated", b"true")] if router.settings.emulated else []
        self._hot = {
            "/v1/embeddings": self.openai_embeddings,
            "/embeddings": self.openai_embeddings,
            "/embed": self.tei_embed,
            "/": self.tei_embed,
        }
        self._api = self._document()

    def _document(self) -> FastAPI:
        api = FastAPI(title="windve", version=VERSION, summary="Embeddings: accelerator first, CPU for the overflow.")
        for path, handler in self._hot.items():
            api.post(path, **(openapi.OPENAI if handler == self.openai_embeddings else openapi.TEI))(_answered_before)
        api.get("/v1/models", **openapi.MODELS)(self.models)
        api.get("/info", **openapi.INFO)(self.info)
        api.get("/health", **openapi.HEALTH)(self.health)
        api.get("/ping", **openapi.PING)(self.ping)
        api.add_exception_handler(WindveError, _on_error)
        api.add_exception_handler(HTTPException, _on_http_exception)
        return api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
            return
        path = _path(scope)
        handler = self._hot.get(path) if scope["method"] == "POST" else None
        try:
            if self._api_keys is not None and path not in _WITHOUT_KEY:
                self._api_keys.check(_header(scope["headers"], b"authorization"))
            if handler is None:
                await self._api(scope, receive, send)
                return
            headers, body = await handler(scope["headers"], receive)
        except WindveError as error:
            await (await _on_error(Request(scope), error))(scope, receive, send)
            return
        headers += ((b"content-length", b"%d" % len(body)), _CONTENT_TYPE, *self._headers)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def openai_embeddings(self, headers: Headers, receive: Receive) -> tuple[Headers, bytes]:
        asked = parse_openai(await _body(headers, receive, self._max_body_bytes), self._rules)
        done = await self._router.embed(asked.queries, truncate=asked.truncate, **_admission(headers))
        vectors = shape_vectors(done, unit=self._router.card.normalize, dimensions=asked.dimensions)
        encode = _base64 if asked.encoding_format == "base64" else np.ascontiguousarray
        answer = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self._rules.model,
            "usage": {"prompt_tokens": done.tokens, "total_tokens": done.tokens},
        }
        return _timing(done), _dumps(answer)

    async def tei_embed(self, headers: Headers, receive: Receive) -> tuple[Headers, bytes]:
        asked = parse_tei(await _body(headers, receive, self._max_body_bytes), self._rules)
        done = await self._router.embed(asked.queries, truncate=asked.truncate, **_admission(headers))
        vectors = shape_vectors(done, unit=asked.normalize, dimensions=asked.dimensions)
        return _timing(done), _dumps([np.ascontiguousarray(vector) for vector in vectors])

    async def models(self) -> Response:
        created = int(self._router.started)
        model = {"id": self._rules.model, "object": "model", "created": created, "owned_by": "windve"}
        return _json({"object": "list", "data": [model]})

    async def info(self) -> Response:
        await self._router.take_census()
        return _json(describe(self._router))

    async def health(self) -> Response:
        if not self._router.can_answer:
            raise Unavailable("no pool can answer now: no live replica with a queue depth above 0")
        return Response()

    async def ping(self) -> Response:
        return Response()


def _path(scope: Scope) -> str:
    """The path below the application's route prefix (ASGI puts the prefix into root_path)."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path or "/"


def shape_vectors(done: Embedded, *, unit: bool, dimensions: int | None) -> Sequence[Vector]:
    """Unit vectors or the model's own lengths; cut to the first `dimensions` numbers (and made unit again)."""
    vectors = done.vectors
    if not unit:
        vectors = [vector * np.float32(norm) for vector, norm in zip(vectors, done.norms, strict=True)]
    if dimensions is None:
        return vectors
    cut = [vector[:dimensions] for vector in vectors]
    return [vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12)) for vector in cut] if unit else cut


def describe(router: Router) -> dict[str, Any]:
    """`/info`: TEI's fields, and what is particular to windve under `windve`."""
    card, limits, config = router.card, router.settings.limits, router.config
    pools = router.describe_pools()
    members = [member for pool in pools.values() for member in pool["replicas"].values()]
    return {
        "model_id": card.name,
        "model_sha": card.revision,
        "model_dtype": members[0]["dtype"] if members else None,
        "served_model_name": card.name,
        "model_type": {"embedding": {"pooling": card.pooling}},
        "max_concurrent_requests": router.capacity,
        "max_input_length": card.max_tokens,
        "max_batch_tokens": router.settings.accelerator.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": limits.max_inputs_per_request,
        "auto_truncate": limits.auto_truncate,
        "tokenization_workers": 1,
        "version": VERSION,
        "windve": {
            "emulated": router.settings.emulated,
            "heterogeneous": router.topology.heterogeneous,
            "topology": router.topology.reason,
            "slo_s": config.slo_s if config else None,
            "dimension": card.dimension,
            "normalize": card.normalize,
            "parameters": card.parameters,
            "router": router.replica,
            "busy_answers": router.refused,
            "config_problem": router.config_problem,
            "calibration": config.calibration.model_dump() if config and config.calibration else None,
            "trial_depths": router.trial_depths,
            "pools": pools,
        },
    }


async def _answered_before(request: Request) -> Response:
    """Documents a route that `HttpApi` answers itself."""
    raise AssertionError(request.url)


async def _body(headers: Headers, receive: Receive, largest: int) -> bytes:
    """The request's body, refused as soon as it is known to be larger than `largest` bytes."""
    problem = f"the body is larger than this server takes ({largest} bytes); send fewer texts at once"
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > largest:
            raise BodyTooLarge(problem)
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidInput("the connection closed before the body had come")  # nobody reads it
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > largest:
            raise BodyTooLarge(problem)
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _header(headers: Headers, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), None)


def _admission(headers: Headers) -> dict[str, Any]:
    """What the request asks for beyond what is usual: as bulk, by the depths of a trial, within a time."""
    asked: dict[str, Any] = {}
    for name, value in headers:
        if name == _PRIORITY:
            if value not in {b"bulk", b"normal"}:
                given = value.decode("latin-1")
                raise InvalidInput(f"the header {_PRIORITY.decode()} may be 'bulk' or 'normal', not '{given}'")
            asked["bulk"] = value == b"bulk"
        elif name == _TRIAL:
            asked["trial"] = Trial.parse(value.decode("latin-1"))
        elif name == _TIMEOUT:
            asked["timeout_s"] = parse_timeout(value)
    return asked


def _timing(done: Embedded) -> Headers:
    """Which pool answered, and TEI's headers: milliseconds, whole."""
    total = _ms(done.total_s)
    return [
        (b"x-windve-pool", ",".join(done.pools).encode()),
        (b"x-compute-time", total),
        (b"x-compute-characters", b"%d" % done.characters),
        (b"x-compute-tokens", b"%d" % done.tokens),
        (b"x-total-time", total),
        (b"x-tokenization-time", _ms(done.tokenization_s)),
        (b"x-queue-time", _ms(done.queue_s)),
        (b"x-inference-time", _ms(done.compute_s)),
    ]


def _ms(seconds: float) -> bytes:
    return b"%d" % round(seconds * 1000)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_dumps(content), status, dict(headers or {}), media_type=_JSON)


def _dumps(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")


# --- errors: OpenAI's shape on its routes, TEI's on all others -------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WindveError)
    headers = {}
    if isinstance(error, Busy):
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unavailable):
        headers["retry-after"] = "1"
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if is_openai(_path(request.scope)):
        return _json(_openai_error(error.status, error.message, error.code, error.param), error.status, headers)
    status, kind = _tei_status(error)
    return _json({"error": error.message, "error_type": kind}, status, headers)


def is_openai(path: str) -> bool:
    return path.startswith(_OPENAI_PREFIX) or path == "/embeddings"


# TEI's own numbers: an empty input is 400, another bad one 422, a failed engine 424. The first that fits counts.
_TEI_STATUS: tuple[tuple[type[WindveError], int, str], ...] = (
    (EmptyInput, 400, "Empty"),
    (BodyTooLarge, 413, "Validation"),
    (InvalidInput, 422, "Validation"),
    (Unauthorized, 401, "Unauthorized"),
    (Forbidden, 403, "Forbidden"),
    (Busy, 429, "Overloaded"),
    (DeadlineExceeded, 504, "Timeout"),
    (Unavailable, 503, "Unhealthy"),
    (WindveError, 424, "Backend"),
)


def _tei_status(error: WindveError) -> tuple[int, str]:
    return next((status, kind) for fits, status, kind in _TEI_STATUS if isinstance(error, fits))


def _openai_error(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown path (404) and a wrong method (405)."""
    assert isinstance(error, HTTPException)
    path, method = _path(request.scope), request.method
    if error.status_code == 405:
        message = f"{method} is not for {path}; see /docs for the routes and their methods"
    elif error.status_code == 404:
        message = f"there is no route {path}; see /docs for those there are"
    else:
        message = str(error.detail)
    headers = dict(error.headers or {})
    if is_openai(path):
        return _json(_openai_error(error.status_code, message, "wrong_route", None), error.status_code, headers)
    return _json({"error": message, "error_type": "Validation"}, error.status_code, headers)
