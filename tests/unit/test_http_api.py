"""The routes over a Router that answers, or raises, at once: dispatch, error shapes, keys."""

import asyncio
import base64
import re

import numpy as np
import pytest

from deployments.admission.fair_share import Tenant
from deployments.errors import (
    Busy,
    DeadlineExceeded,
    Defect,
    EmptyInput,
    EngineFailed,
    InvalidInput,
    OverQuota,
    OverShare,
    ReplicaLost,
    TimedOut,
    Unavailable,
    WindveError,
)
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.embedding.api import HttpApi
from serve_app.web.asgi import Asgi, ResponseStream
from tests.kit.asgi_client import call, get, post
from tests.kit.fake_router import SPACE, VECTORS, FakeRouter


@pytest.mark.parametrize("root", ["", "/prefix"])
def test_what_a_route_asks_of_the_router_and_answers(root):
    router = FakeRouter()
    headers = [(b"x-request-timeout-ms", b"1500"), (b"x-windve-priority", b"bulk")]
    payload = {"inputs": ["a", "b"], "truncate": True, "truncation_direction": "Left", "prompt_name": "query"}
    reply = post(HttpApi(router), "/embed", payload, headers=headers, root=root)
    options = {"truncate": True, "truncation_direction": "left", "prompt_name": "query"}
    assert router.asked == [(["a", "b"], {**options, "bulk": True, "timeout_s": 1.5})]
    assert np.allclose(reply.json, VECTORS)
    assert reply.headers["content-length"] == str(len(reply.body))
    times = [reply.headers[f"x-{name}-time"] for name in ("tokenization", "queue", "inference", "total")]
    assert times == ["1", "2", "3", "6"]
    assert (reply.headers["x-windve-pool"], reply.headers["x-compute-tokens"]) == ("cpu", "7")


def test_every_answer_names_its_space_and_no_other_is_computed():
    router = FakeRouter()
    api = HttpApi(router)
    assert post(api, "/embed", {"inputs": "a"}, headers=[(b"x-windve-expect-space", SPACE.encode())]).status == 200
    for path in ("/embed", "/v1/embeddings"):
        reply = post(api, path, b"not even JSON", headers=[(b"x-windve-expect-space", b"c0ffee")])
        assert reply.status == 409
        assert SPACE in str(reply.json)
        assert "'c0ffee'" in str(reply.json)
    assert len(router.asked) == 1
    assert post(api, "/embed", {"inputs": "a"}).headers["x-windve-space"] == SPACE
    assert get(api, "/v1/models").headers["x-windve-space"] == SPACE


def test_what_is_refused_before_its_queries_are_known_is_counted_too():
    router = FakeRouter()
    api = HttpApi(router)
    for payload in (b"{", {"inputs": []}, {"inputs": "x" * 1000}, {"inputs": "x"}):
        post(api, "/embed", payload)
    get(api, "/nowhere")
    assert router.invalid == ["InvalidInput", "EmptyInput", "BodyTooLarge"]


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/v2/embed", "/rerank"])
def test_a_compressed_body_is_refused_as_such(path):
    kind = "reranker" if path == "/rerank" else "embedding"
    reply = post(HttpApi(FakeRouter(kind)), path, b"\x1f\x8b\x08", headers=[(b"content-encoding", b"gzip")])
    assert reply.status == 415
    assert "the body is compressed (gzip), which this server does not support; send it uncompressed" in str(reply.json)
    plain = post(HttpApi(FakeRouter()), "/embed", {"inputs": "a"}, headers=[(b"content-encoding", b"identity")])
    assert plain.status == 200


def test_similarity_is_of_unit_vectors():
    reply = post(HttpApi(FakeRouter()), "/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}})
    assert reply.json == pytest.approx([0.96])


ERRORS = [
    (InvalidInput("x", param="input"), 400, "invalid_input", 422, "Validation"),
    (EmptyInput("x", param="input"), 400, "empty_input", 400, "Empty"),
    (Busy("x", retry_after_s=0.25), 429, "busy", 429, "Overloaded"),
    (OverShare("x", retry_after_s=0.25), 429, "over_share", 429, "Overloaded"),
    (OverQuota("x", retry_after_s=0.25), 429, "over_quota", 429, "Overloaded"),
    (EngineFailed("x"), 500, "engine_failed", 424, "Backend"),
    (Unavailable("x"), 503, "unavailable", 503, "Unhealthy"),
    (ReplicaLost("x"), 503, "replica_lost", 503, "Unhealthy"),
    (TimedOut("x"), 503, "timed_out", 503, "Unhealthy"),
    (DeadlineExceeded("x"), 504, "deadline_exceeded", 504, "Timeout"),
    (Defect("x"), 500, "internal_error", 500, "Backend"),
    (WindveError("x"), 500, "internal_error", 424, "Backend"),
]


@pytest.mark.parametrize(("error", "status", "code", "tei_status", "kind"), ERRORS, ids=lambda one: type(one).__name__)
def test_each_error_in_each_shape(error, status, code, tei_status, kind):
    api = HttpApi(FakeRouter(error=error))
    openai, tei = post(api, "/v1/embeddings", {"input": "a"}), post(api, "/embed", {"inputs": "a"})
    told = openai.json["error"]
    assert (openai.status, told["code"], told["param"], told["message"]) == (status, code, error.param, "x")
    assert told["type"] == (
        "rate_limit_error" if status == 429 else f"{'server' if status > 499 else 'invalid_request'}_error"
    )
    assert (tei.status, tei.json) == (tei_status, {"error": "x", "error_type": kind})
    for reply in (openai, tei):
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers.get("retry-after") == ("1" if status in {429, 503} else None)
        assert reply.headers.get("retry-after-ms") == ("250" if status == 429 else None)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_a_defect_is_answered_and_then_left_to_serve(path):
    """Else Serve's own proxy could not tell it from a Router that died, and would have it repeated."""
    sent = []

    async def takes(message):
        sent.append(message)

    with pytest.raises(ZeroDivisionError):
        post(HttpApi(FakeRouter(error=ZeroDivisionError())), path, {"input": "a", "inputs": "a"}, takes=takes)
    start, body = sent
    assert start["status"] == 500
    assert b"because of a defect of its own" in body["body"]


def test_a_stream_that_a_defect_breaks_off_has_one_beginning():
    class Breaking(ResponseStream):
        async def run(self, gone, write):
            await write(b"data: ")
            raise ZeroDivisionError

        async def close(self):
            pass

    class Api(Asgi):
        async def answer(self, request):
            return [], Breaking()

    sent = []

    async def takes(message):
        sent.append(message["type"])

    with pytest.raises(ZeroDivisionError):
        get(Api(None, None, emulated=False), "/v1/completions", takes=takes)
    assert sent == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize(
    ("method", "path", "status", "allow", "sentence"),
    [
        ("GET", "/nowhere", 404, None, "there is no route /nowhere; see /docs"),
        ("GET", "/metrics", 404, None, "Ray exports the Prometheus metrics"),
        ("POST", "/embed/", 404, None, "there is no route /embed/"),
        ("GET", "/embed", 405, "POST", "/embed does not accept GET; use POST"),
        ("PUT", "/", 405, "POST, GET, HEAD", "/ does not accept PUT; use POST or GET or HEAD"),
        ("POST", "/info", 405, "GET, HEAD", "/info does not accept POST; use GET or HEAD"),
        ("DELETE", "/v1/models/m", 405, "GET, HEAD", "/v1/models/m does not accept DELETE"),
        ("BREW", "/ping", 405, "GET, HEAD", "/ping does not accept BREW"),
    ],
)
def test_other_paths_and_methods(method, path, status, allow, sentence):
    reply = call(HttpApi(FakeRouter()), method, path)
    assert (reply.status, reply.headers.get("allow")) == (status, allow)
    error = reply.json["error"]
    assert sentence in (error["message"] if path.startswith("/v1/") else error)


def test_head_is_get_without_a_body():
    api = HttpApi(FakeRouter())
    got, head = (call(api, method, "/v1/models/m") for method in ("GET", "HEAD"))
    assert got.json == {"id": "m", "object": "model", "created": 5, "owned_by": "windve", "root": "m"}
    assert (head.status, head.body, head.headers) == (200, b"", got.headers)
    assert call(api, "HEAD", "/ping").status == 200


def openai_model_field(api):
    """The field `model` of OpenAI's request in the API's document."""
    schemas = get(api, "/openapi.json").json["components"]["schemas"]
    return schemas["OpenAIRequest"]["properties"]["model"]


def test_a_model_with_other_names():
    api = HttpApi(FakeRouter(model={"id": "hub/m", "name": "m", "aliases": ["text-embedding-3-small", "m"]}))
    assert [model["id"] for model in get(api, "/v1/models").json["data"]] == ["m", "text-embedding-3-small"]
    assert get(api, "/v1/models/text-embedding-3-small").json["id"] == "text-embedding-3-small"
    reply = post(api, "/v1/embeddings", {"input": "a", "model": "text-embedding-3-small"})
    assert (reply.status, reply.json["model"]) == (200, "m")
    assert post(api, "/v1/embeddings", {"input": "a", "model": "hub/m"}).status == 404
    assert openai_model_field(api)["enum"] == ["m", "text-embedding-3-small", None]


def test_a_model_that_goes_by_any_name():
    api = HttpApi(FakeRouter(model={"id": "hub/m", "name": "any"}))
    assert post(api, "/v1/embeddings", {"input": "a", "model": "whatever"}).status == 200
    assert get(api, "/v1/models/whatever").status == 200
    assert "enum" not in openai_model_field(api)


def test_too_large_a_body():
    api = HttpApi(FakeRouter())
    told = call(api, "POST", "/embed", headers=[(b"content-length", b"1001")])
    came = call(api, "POST", "/v1/embeddings", b"x" * 1001)
    assert (told.status, told.json["error_type"]) == (413, "Validation")
    assert (came.status, came.json["error"]["code"]) == (413, "body_too_large")


def test_health_follows_the_pools():
    router = FakeRouter()
    reply = get(HttpApi(router), "/health")
    assert (reply.status, reply.json) == (200, {"status": "ok"})
    router.live_pools = {"accelerator": False, "cpu": True}
    reply = get(HttpApi(router), "/health")
    assert (reply.status, reply.json) == (200, {"status": "degraded", "missing": ["accelerator"]})
    router.can_answer = False
    reply = get(HttpApi(router), "/health")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


def test_keys_are_wanted_before_anything_else():
    router = FakeRouter()
    api = HttpApi(router, ApiKeys(["sk-one"]))
    for path in ("/embed", "/burst", "/nowhere", "/v1/embeddings", "/docs", "/openapi.json", "/info"):
        for method in ("GET", "POST", "OPTIONS"):
            reply = call(api, method, path, b"{}")
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert router.asked == []
    assert post(api, "/embed", {"inputs": "a"}, headers=[(b"authorization", b"Bearer sk-one")]).status == 200
    assert post(api, "/embed", {"inputs": "a"}, headers=[(b"authorization", b"Bearer \xff\xfe")]).status == 401
    assert [get(api, path).status for path in ("/health", "/ping")] == [200, 200]


def test_the_router_is_told_whose_key_it_was():
    router = FakeRouter()
    api = HttpApi(router, ApiKeys([ApiKey("sk-one", "search", 3.0), ApiKey("sk-two")]))
    for key, tenant in (("sk-one", Tenant("search", 3.0)), ("sk-two", Tenant("unnamed"))):
        post(api, "/embed", {"inputs": "a"}, headers=[(b"authorization", f"Bearer {key}".encode())])
        assert router.asked[-1][1]["client"].tenant == tenant


def test_the_document_is_of_this_service():
    bare, guarded = (
        get(HttpApi(FakeRouter(), keys), "/openapi.json", root="/prefix", headers=headers).json
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
    assert known - documented == {("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json")}
    assert documented - known == {("GET", "/v1/models/{id}")}


def test_the_docs_page_needs_no_internet():
    reply = get(HttpApi(FakeRouter()), "/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = reply.body.decode()
    assert re.search(r"url: *'openapi\.json'", page)
    assert re.search(r'"validatorUrl": *null', page)
    style, icon, script = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert icon == "data:,"
    for found, kind, words in ((style, "text/css", b".swagger-ui"), (script, "text/javascript", b"SwaggerUIBundle")):
        prefix = f"data:{kind};charset=utf-8;base64,"
        assert found.startswith(prefix)
        assert words in base64.b64decode(found.removeprefix(prefix))


def test_the_server_may_start_and_end_it():
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent = []

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message["type"])

    asyncio.run(HttpApi(FakeRouter())({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
