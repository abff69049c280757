"""The routes over a Router that answers, or raises, at once: dispatch, error shapes, keys."""

import asyncio
import json
import types
from types import MappingProxyType

import numpy as np
import pytest

from deployments.errors import (
    Busy,
    DeadlineExceeded,
    EmptyInput,
    EngineFailed,
    Forbidden,
    InvalidInput,
    OverQuota,
    OverShare,
    ReplicaLost,
    TimedOut,
    Unavailable,
    WindveError,
)
from deployments.models.model_files import ModelCard
from deployments.placement.request import Embedded
from deployments.queueing.shares import Tenant
from deployments.settings import Settings
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.http_api import HttpApi
from tests.kit.asked import asked_of

CARD = ModelCard("m", None, None, "bert", 4, 100, 16, "mean", True, False, False, 1, 1, {"query": "q: "}, None)
VECTORS = np.array([[0.6, 0.8, 0, 0], [0.8, 0.6, 0, 0]], np.float32)


class FakeRouter:
    settings = Settings.parse({"model": {"id": "m"}, "limits": {"max_body_bytes": 1000, "max_inputs_per_request": 3}})
    card = CARD
    started = 5.0
    can_answer = True
    live_pools = MappingProxyType({"accelerator": True, "cpu": True})

    def __init__(self, error=None):
        self.error, self.asked = error, None

    async def embed(self, queries, wanted):
        self.asked = (list(queries), asked_of(wanted))
        if self.error is not None:
            raise self.error
        return Embedded(VECTORS[: len(queries)], [2.0] * len(queries), ("cpu",), 7, 3, 0.001, 0.002, 0.003, 0.0064)


def call(api, method, path, body=b"", headers=(), root=""):
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": root + path, "root_path": root, "headers": list(headers)}
    asyncio.run(api(scope, receive, send))
    start, end = sent
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return types.SimpleNamespace(status=start["status"], headers=told, body=end["body"])


def post(api, path, payload, **more):
    return call(api, "POST", path, json.dumps(payload).encode(), **more)


@pytest.mark.parametrize("root", ["", "/prefix"])
def test_what_a_route_asks_of_the_router_and_answers(root):
    router = FakeRouter()
    headers = [(b"x-request-timeout-ms", b"1500"), (b"x-windve-priority", b"bulk")]
    payload = {"inputs": ["a", "b"], "truncate": True, "truncation_direction": "Left", "prompt_name": "query"}
    reply = post(HttpApi(router), "/embed", payload, headers=headers, root=root)
    asked = {
        "truncate": True,
        "truncation_direction": "left",
        "prompt_name": "query",
        "bulk": True,
        "timeout_s": 1.5,
    }
    assert router.asked == (["a", "b"], asked)
    assert np.allclose(json.loads(reply.body), VECTORS)
    assert reply.headers["content-length"] == str(len(reply.body))
    assert [reply.headers[f"x-{name}-time"] for name in ("tokenization", "queue", "inference", "total")] == [
        *("1", "2", "3", "6"),
    ]
    assert (reply.headers["x-windve-pool"], reply.headers["x-compute-tokens"]) == ("cpu", "7")


def test_similarity_is_of_unit_vectors():
    reply = post(HttpApi(FakeRouter()), "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}})
    assert json.loads(reply.body) == pytest.approx([0.96])


ERRORS = [
    (InvalidInput("x", param="input"), 400, "invalid_input", 422, "Validation"),
    (EmptyInput("x", param="input"), 400, "empty_input", 400, "Empty"),
    (Forbidden("x"), 403, "forbidden", 403, "Forbidden"),
    (Busy("x", retry_after_s=0.25), 429, "busy", 429, "Overloaded"),
    (OverShare("x", retry_after_s=0.25), 429, "over_share", 429, "Overloaded"),
    (OverQuota("x", retry_after_s=0.25), 429, "over_quota", 429, "Overloaded"),
    (EngineFailed("x"), 500, "engine_failed", 424, "Backend"),
    (Unavailable("x"), 503, "unavailable", 503, "Unhealthy"),
    (ReplicaLost("x"), 503, "replica_lost", 503, "Unhealthy"),
    (TimedOut("x"), 503, "timed_out", 503, "Unhealthy"),
    (DeadlineExceeded("x"), 504, "deadline_exceeded", 504, "Timeout"),
    (WindveError("x"), 500, "internal_error", 424, "Backend"),
]


@pytest.mark.parametrize(("error", "status", "code", "tei_status", "kind"), ERRORS, ids=lambda one: type(one).__name__)
def test_each_error_in_each_shape(error, status, code, tei_status, kind):
    api = HttpApi(FakeRouter(error))
    openai, tei = post(api, "/v1/embeddings", {"input": "a"}), post(api, "/embed", {"inputs": "a"})
    told = json.loads(openai.body)["error"]
    assert (openai.status, told["code"], told["param"], told["message"]) == (status, code, error.param, "x")
    assert told["type"] == (
        "rate_limit_error" if status == 429 else f"{'server' if status > 499 else 'invalid_request'}_error"
    )
    assert (tei.status, json.loads(tei.body)) == (tei_status, {"error": "x", "error_type": kind})
    for reply in (openai, tei):
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers.get("retry-after") == ("1" if status in {429, 503} else None)
        assert reply.headers.get("retry-after-ms") == ("250" if status == 429 else None)


@pytest.mark.parametrize(
    ("method", "path", "status", "allow", "sentence"),
    [
        ("GET", "/nowhere", 404, None, "there is no route /nowhere; see /docs"),
        ("GET", "/metrics", 404, None, "Prometheus metrics are Ray's"),
        ("POST", "/embed/", 404, None, "there is no route /embed/"),
        ("GET", "/embed", 405, "POST", "GET is not for /embed, only POST"),
        ("GET", "/", 405, "POST", "GET is not for /, only POST"),
        ("POST", "/info", 405, "GET, HEAD", "POST is not for /info, only GET and HEAD"),
        ("DELETE", "/v1/models/m", 405, "GET, HEAD", "DELETE is not for /v1/models/m"),
        ("BREW", "/ping", 405, "GET, HEAD", "BREW is not for /ping"),
    ],
)
def test_other_paths_and_methods(method, path, status, allow, sentence):
    reply = call(HttpApi(FakeRouter()), method, path)
    assert (reply.status, reply.headers.get("allow")) == (status, allow)
    error = json.loads(reply.body)["error"]
    assert sentence in (error["message"] if path.startswith("/v1/") else error)


def test_head_is_get_without_a_body():
    api = HttpApi(FakeRouter())
    got, head = (call(api, method, "/v1/models/m") for method in ("GET", "HEAD"))
    assert json.loads(got.body) == {"id": "m", "object": "model", "created": 5, "owned_by": "windve"}
    assert (head.status, head.body, head.headers) == (200, b"", got.headers)
    assert call(api, "HEAD", "/ping").status == 200


def api_called(**names):
    """The routes of a model with these names."""
    router = FakeRouter()
    router.settings = Settings.parse({"model": {"id": "hub/m", **names}})
    return HttpApi(router)


def test_a_model_with_other_names():
    api = api_called(name="m", aliases=["text-embedding-3-small", "m"])
    assert [model["id"] for model in json.loads(call(api, "GET", "/v1/models").body)["data"]] == [
        *("m", "text-embedding-3-small"),
    ]
    assert json.loads(call(api, "GET", "/v1/models/text-embedding-3-small").body)["id"] == "text-embedding-3-small"
    reply = post(api, "/v1/embeddings", {"input": "a", "model": "text-embedding-3-small"})
    assert (reply.status, json.loads(reply.body)["model"]) == (200, "m")
    assert post(api, "/v1/embeddings", {"input": "a", "model": "hub/m"}).status == 404
    fields = json.loads(call(api, "GET", "/openapi.json").body)["components"]["schemas"]["OpenAIRequest"]["properties"]
    assert fields["model"]["enum"] == ["m", "text-embedding-3-small", None]


def test_a_model_that_goes_by_any_name():
    api = api_called(name="any")
    assert post(api, "/v1/embeddings", {"input": "a", "model": "whatever"}).status == 200
    assert call(api, "GET", "/v1/models/whatever").status == 200
    fields = json.loads(call(api, "GET", "/openapi.json").body)["components"]["schemas"]["OpenAIRequest"]["properties"]
    assert "enum" not in fields["model"]


def test_too_large_a_body():
    api = HttpApi(FakeRouter())
    told = call(api, "POST", "/embed", headers=[(b"content-length", b"1001")])
    came = call(api, "POST", "/v1/embeddings", b"x" * 1001)
    assert (told.status, json.loads(told.body)["error_type"]) == (413, "Validation")
    assert (came.status, json.loads(came.body)["error"]["code"]) == (413, "body_too_large")


def test_health_follows_the_pools():
    router = FakeRouter()
    reply = call(HttpApi(router), "GET", "/health")
    assert (reply.status, json.loads(reply.body)) == (200, {"status": "ok"})
    router.live_pools = {"accelerator": False, "cpu": True}
    reply = call(HttpApi(router), "GET", "/health")
    assert (reply.status, json.loads(reply.body)) == (200, {"status": "degraded", "missing": ["accelerator"]})
    router.can_answer = False
    reply = call(HttpApi(router), "GET", "/health")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


def test_keys_are_wanted_before_anything_else():
    router = FakeRouter()
    api = HttpApi(router, ApiKeys(["sk-one"]))
    for path in ("/embed", "/", "/nowhere", "/v1/embeddings", "/docs", "/openapi.json", "/info"):
        for method in ("GET", "POST", "OPTIONS"):
            reply = call(api, method, path, b"{}")
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert router.asked is None
    assert post(api, "/embed", {"inputs": "a"}, headers=[(b"authorization", b"Bearer sk-one")]).status == 200
    assert post(api, "/embed", {"inputs": "a"}, headers=[(b"authorization", b"Bearer \xff\xfe")]).status == 401
    assert [call(api, "GET", path).status for path in ("/health", "/ping")] == [200, 200]


def test_the_router_is_told_whose_key_it_was():
    router = FakeRouter()
    api = HttpApi(router, ApiKeys([ApiKey("sk-one", "search", 3.0), ApiKey("sk-two")]))
    for key, tenant in (("sk-one", Tenant("search", 3.0)), ("sk-two", Tenant("unnamed"))):
        post(api, "/embed", {"inputs": "a"}, headers=[(b"authorization", f"Bearer {key}".encode())])
        assert router.asked[1]["client"].tenant == tenant


def test_the_document_is_of_this_service():
    bare, guarded = (
        json.loads(call(HttpApi(FakeRouter(), keys), "GET", "/openapi.json", root="/prefix", headers=headers).body)
        for keys, headers in ((None, ()), (ApiKeys(["k"]), [(b"authorization", b"Bearer k")]))
    )
    schema = bare["paths"]["/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/EmbedRequest"}
    fields = bare["components"]["schemas"]["EmbedRequest"]["properties"]
    assert fields["dimensions"]["anyOf"][0]["maximum"] == 4
    assert fields["prompt_name"]["enum"] == ["query", "", None]
    assert bare["servers"] == [{"url": "/prefix"}]
    assert "security" not in bare
    assert guarded["security"] == [{"key": []}]
    known = set(HttpApi(FakeRouter())._routes)
    documented = {(method.upper(), path) for path, methods in bare["paths"].items() for method in methods}
    assert known - documented == {("GET", "/docs"), ("GET", "/openapi.json")}
    assert documented - known == {("GET", "/v1/models/{id}")}


def test_the_server_may_start_and_end_it():
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message["type"])

    asyncio.run(HttpApi(FakeRouter())({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
