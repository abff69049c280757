"""Several models under one URL: their settings, and which of them a request or a call is for."""

from unittest import mock

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest

from deployments.errors import SettingsError
from deployments.serving.metrics import OfModel
from deployments.settings import Settings
from serve_app.api_keys import ApiKeys
from serve_app.config.models import Args, ByModel
from serve_app.embedding.grpc_calls import TeiCalls
from serve_app.embedding.models_api import ModelsApi
from serve_app.proto.tei_pb2 import EmbedRequest
from serve_app.web.errors import error_shape
from tests.kit import grpc_caller
from tests.kit.asgi_client import call, get, post
from tests.kit.fake_router import FakeRouter

EMULATED = {"engine": "emulated", "emulated": {"alpha_s": 0.1, "beta_s": 0.2}}
A, B = {"model": {"id": "org/a", "name": "a"}}, {"model": {"id": "b"}}


# --- settings ---------------------------------------------------------------------------------------------------------


def test_an_entry_replaces_what_is_said_of_all():
    args = Args(
        {"cpu": {"engine": "torch"}, "limits": {"max_body_bytes": 9}, "models": [A, {**B, "cpu": {"cores": 2}}]}
    )
    assert args.several
    a, b = args.models["a"], args.models["b"]
    assert (a.cpu.engine, b.cpu.engine, b.cpu.cores) == ("torch", "torch", 2)
    assert a.limits.max_body_bytes == b.limits.max_body_bytes == 9
    assert Args({**A, "cpu": {"engine": "torch"}}).models == {
        "a": a.model_copy(update={"limits": Settings.parse(A).limits})
    }


def config(raw):
    """Two models' with this `user_config`."""
    return Args({"models": [A, B]}).router_configs(raw, {"a": ("cpu",), "b": ("cpu",)})


def dotted(raw):
    return Args({"models": [{"model": {"id": "v1.5"}}]}).router_configs(raw)


BAD_ARGS = [
    ({}, "args.model: missing"),
    ({**A, "models": [B]}, "args.model: args.models is set too; set only one of them"),
    ({"models": []}, "args.models: should be"),
    ({"models": A}, "args.models: should be a valid list, not a dict"),
    ({"models": [A, {"name": "b"}]}, "args.models[1].name: there is no such setting"),
    ({"models": [A, {**B, "limits": {}}]}, "args.models[1].limits: there is no such setting"),
    ({"models": [A, {"model": {"id": "x", "name": "a"}}]}, "args: two models are called a; give one of them"),
    ({"models": [A, {**B, "cpu": EMULATED}]}, "args.models[1]: accelerator.engine and cpu.engine: emulated and"),
    ({"models": [A, {**B, "accelerator": EMULATED, "cpu": EMULATED}]}, "args.models: emulated and real engines"),
    ({"models": [A], "slo_s": 1}, "args.slo_s: there is no such setting"),
]
BAD_CONFIGS = [
    (None, "user_config: missing"),
    ([], "user_config: should be a mapping"),
    ({}, "user_config.slo_s: missing"),
    ({"slo": 1}, "user_config.slo: there is no such setting"),
    ({"slo_s": 1, "cpu": {"queue_depth": 3}}, "user_config.cpu: belongs to one model: put it under user_config.mod"),
    ({"slo_s": 1, "models": []}, "user_config.models: should be a mapping"),
    ({"slo_s": 1, "models": {"a": 3}}, "user_config.models.a: should be a mapping"),
    ({"slo_s": 1, "models": {"c": {}}}, "user_config.models.c: no such model; this application has 'a' and 'b'"),
    ({"slo_s": 1, "models": {"b": {"slo_s": 0}}}, "user_config.models.b.slo_s: should be greater than 0"),
    ({"slo_s": 31}, "user_config.slo_s: a batch may take as long, 31 s, and batch_timeout_s takes a replica for hung"),
    ({"slo_s": 1, "models": {"b": {"slo_s": 31}}}, "user_config.models.b.slo_s: a batch may take as long, 31 s"),
    ({"slo_s": 1, "models": {"b": {"queue": 0}}}, "user_config.models.b.queue: there is no such setting"),
    (
        {"slo_s": 1, "bulk": {"max_waiting": 2047}},
        "user_config.bulk.max_waiting: 2047 is less than limits.max_inputs_per_request (2048), so the largest",
    ),
    (
        {"slo_s": 1, "admission": "depth", "models": {"a": {"cpu": {"queue_depth": 1}}}},
        "user_config.models.b.cpu.queue_depth: missing: admission: depth requires one for the cpu pool",
    ),
]


@pytest.mark.parametrize(
    ("read", "raw", "sentence"),
    [
        *((Args, *row) for row in BAD_ARGS),
        *((config, *row) for row in BAD_CONFIGS),
        (dotted, {"slo_s": 1, "models": {"v1.5": {"cpu": {"queue_depth": -1}}}}, "user_config.models.v1.5.cpu.queue_d"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(read, raw, sentence):
    with pytest.raises(SettingsError) as caught:
        read(raw)
    assert str(caught.value).startswith(sentence)


def test_aliases_and_any_name_are_of_one_model():
    called = [{"model": {"id": "a", "aliases": ["x", "a"]}}, {"model": {"id": "b", "name": "any", "aliases": ["y"]}}]
    found = Args({"models": called}).by_model({"a": 1, "b": 2})
    assert found.names == ("a", "x", "b", "y")
    assert [found.named(name) for name in ("a", "x", "b", "y", "nobody")] == [1, 1, 2, 2, 2]
    assert found.each(str).named("x") == "1"
    for other, problem in (
        ({"aliases": ["x"]}, "two models are called x"),
        ({"name": "any"}, "only one model can answer"),
    ):
        with pytest.raises(SettingsError, match=problem):
            Args({"models": [*called, {"model": {"id": "c", **other}}]})


def test_a_config_for_all_and_for_each():
    args = Args({"models": [A, B]})
    found = args.router_configs(
        {"slo_s": 1, "bulk": {"share": 0.2}, "models": {"b": {"slo_s": 2, "cpu": {"queue_depth": 3}}}}
    )
    assert [found[name].slo_s for name in ("a", "b")] == [1, 2]
    assert [found[name].pool("cpu").queue_depth for name in ("a", "b")] == [None, 3]
    assert found["a"].bulk.share == found["b"].bulk.share == 0.2
    assert Args(A).router_configs({"slo_s": 3, "cpu": {"queue_depth": 3}})["a"].slo_s == 3


# --- which model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def routers():
    made = (FakeRouter(name="a"), FakeRouter(name="org/b", dimension=5), FakeRouter("reranker", name="ranks"))
    return ByModel({router.card.name: router for router in made})


def asked(routers):
    """The names of the models that were asked, one for each time."""
    return [router.card.name for router in routers for _ in router.asked]


TEXT = {"inputs": "x"}
RANKED = {"query": "q", "documents": ["d"]}


@pytest.mark.parametrize(
    ("path", "payload", "answers"),
    [
        ("/v1/embeddings", {"input": "x"}, "a"),
        ("/v1/embeddings", {"input": "x", "model": None}, "a"),
        ("/v1/embeddings", {"input": "x", "model": "org/b"}, "org/b"),
        ("/embeddings", {"input": "x", "model": "a"}, "a"),
        ("/embed", {**TEXT, "model": "org/b"}, "org/b"),
        ("/", {**TEXT, "model": "org/b"}, "org/b"),
        ("/models/org/b/embed", TEXT, "org/b"),
        ("/models/org/b/", TEXT, "org/b"),
        ("/models/org/b/v1/embeddings", {"input": "x", "model": "org/b"}, "org/b"),
        ("/models/ranks", {"query": "q", "texts": ["d"]}, "ranks"),
        ("/rerank", {"query": "q", "texts": ["d"]}, "ranks"),  # the first that has the route
        ("/v2/rerank", RANKED, "ranks"),
        ("/tokenize", {**TEXT, "model": "ranks"}, "ranks"),
        ("/tokenize", TEXT, "a"),
    ],
)
def test_which_model_answers(routers, path, payload, answers):
    reply = post(ModelsApi(routers), path, payload, root="/x")
    assert reply.status == 200, reply.body
    assert asked(routers) == [answers]
    if "/v" in path:
        assert reply.json["model"] == answers


@pytest.mark.parametrize(
    ("path", "payload", "status"),
    [
        ("/v1/embeddings", {"input": "x", "model": "nobody"}, 404),
        ("/embed", {**TEXT, "model": "nobody"}, 404),
        ("/v2/rerank", {**RANKED, "model": "nobody"}, 404),
        ("/models/nobody/embed", TEXT, 404),
        ("/v1/embeddings", {"input": "x", "model": "ranks"}, 400),  # of another kind
        ("/embed", {**TEXT, "model": "ranks"}, 424),
        ("/models/a/v1/embeddings", {"input": "x", "model": "org/b"}, 404),  # the prefix counts
        ("/embed", b"{", 422),
        ("/embed", b"[]", 422),
        ("/embed", b"", 422),
        ("/embed", {**TEXT, "model": 3, "pad": "x" * 1000}, 413),
        ("/v1/embeddings", {"input": "x", "model": 3}, 400),
        ("/decode", {"ids": [1], "model": {}}, 422),
        ("/nowhere", TEXT, 404),
        ("/models/a/nowhere", TEXT, 404),
        ("/info", TEXT, 405),
    ],
)
def test_what_is_refused_in_the_routes_own_shape(routers, path, payload, status):
    reply = post(ModelsApi(routers), path, payload)
    assert reply.status == status, reply.body
    error = reply.json if path == "/v2/rerank" else reply.json["error"]  # Cohere's
    message = error if isinstance(error, str) else error["message"]
    route = path.removeprefix("/models/nobody").removeprefix("/models/a")
    assert isinstance(error, str) == (error_shape(route) == "tei")
    if "nobody" in path + str(payload):
        assert message == UNKNOWN
    assert asked(routers) == []


def test_a_method_that_no_model_has_for_a_path_of_one(routers):
    reply = get(ModelsApi(routers), "/rerank")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


def test_ollama_is_told_of_all_models_that_embed(routers):
    api = ModelsApi(routers)
    for path in ("/api/tags", "/api/ps"):
        assert [one["name"] for one in get(api, path).json["models"]] == ["a", "org/b"]
    assert post(api, "/api/embed", {"model": "org/b:latest", "input": "x"}).json["model"] == "org/b"
    for word in ("model", "name"):
        assert post(api, "/api/show", {word: "org/b"}).status == 200


def test_all_models_are_told_of(routers, monkeypatch):
    monkeypatch.setattr("serve_app.embedding.api.describe", lambda router: {"model_id": router.card.name, "more": 1})
    api = ModelsApi(routers)
    names = ["a", "org/b", "ranks"]
    assert [model["id"] for model in get(api, "/v1/models").json["data"]] == names
    assert get(api, "/v1/models/org/b").json["id"] == "org/b"
    assert get(api, "/v1/models/nobody").status == 404
    info = get(api, "/info").json
    assert (info["model_id"], info["more"]) == ("a", 1)
    assert info["models"] == {name: {"model_id": name, "more": 1} for name in names}
    assert call(api, "HEAD", "/v1/models").body == b""
    assert get(api, "/ping").status == 200


def test_health_is_good_while_one_model_answers(routers):
    api, (a, *others) = ModelsApi(routers), routers
    well = {"status": "ok"}
    assert get(api, "/health").json == {**well, "models": {"a": well, "org/b": well, "ranks": well}}
    a.can_answer, a.live_pools = False, {"cpu": False}
    reply = get(api, "/health")
    assert (reply.status, reply.json["status"], reply.json["missing"]) == (200, "degraded", ["cpu"])
    guarded = get(ModelsApi(routers, ApiKeys(["k"])), "/health").json
    assert guarded == {"status": "degraded", "missing": ["cpu"]}
    assert reply.json["models"] == {"a": {"status": "unavailable", "missing": ["cpu"]}, "org/b": well, "ranks": well}
    assert [get(api, f"/models/{name}/health").status for name in routers.names] == [503, 200, 200]
    for router in others:
        router.can_answer = False
    assert get(api, "/health").status == 503


def test_keys_come_before_names(routers):
    api = ModelsApi(routers, ApiKeys(["sk-one"]))
    for path in ("/models/nobody/embed", "/models/a/embed", "/v1/embeddings", "/models/a/health", "/v1/models/nobody"):
        assert post(api, path, {"model": "nobody"}).status == 401
    assert (get(api, "/health").status, get(api, "/health").body) == (200, b'{"status":"ok"}')
    shown = [(b"authorization", b"Bearer sk-one")]
    assert post(api, "/models/a/embed", TEXT, headers=shown).status == 200


def test_the_document_is_of_all_models(routers):
    api = ModelsApi(routers)
    found = get(api, "/openapi.json", root="/x").json
    assert found["servers"] == [{"url": "/x"}]
    assert {"/embed", "/v1/embeddings", "/rerank", "/v2/rerank"} <= set(found["paths"])
    assert "/embed_sparse" not in found["paths"]
    bodies = [one["post"] for one in found["paths"].values() if "post" in one]
    assert all("404" in one["responses"] for one in bodies)  # a body may name a model that is not there
    schemas = found["components"]["schemas"]
    names = ["a", "org/b", "ranks", None]
    for kind in ("OpenAIRequest", "EmbedRequest", "RerankRequest", "CohereRerankRequest", "TokenizeRequest"):
        assert schemas[kind]["properties"]["model"]["enum"] == names
    assert schemas["EmbedRequest"]["properties"]["dimensions"]["anyOf"][0]["maximum"] == 5
    alone = get(api, "/models/ranks/openapi.json", root="/x").json
    assert alone["servers"] == [{"url": "/x/models/ranks"}]
    assert "/embed" not in alone["paths"]
    assert "model" not in alone["components"]["schemas"]["RerankRequest"]["properties"]


# --- gRPC -------------------------------------------------------------------------------------------------------------


UNKNOWN = "there is no model 'nobody' here; this server serves 'a', 'org/b' and 'ranks'"


@pytest.mark.parametrize(
    ("metadata", "keys", "code", "answers"),
    [
        ([], None, None, ["a"]),
        ([("model", "a")], None, None, ["a"]),
        ([("model", "org/b")], None, None, ["org/b"]),
        ([("model", "nobody")], None, "NOT_FOUND", []),
        ([("model", "nobody")], ApiKeys(["k"]), "UNAUTHENTICATED", []),
    ],
)
def test_metadata_name_the_model(routers, metadata, keys, code, answers):
    """A call without is for the first of the kind: here the reranker comes before."""
    kinds_last_first = sorted(routers, key=lambda router: router.card.kind, reverse=True)
    routers = ByModel({router.card.name: router for router in kinds_last_first})
    calls = TeiCalls(routers, keys)
    _, context = grpc_caller.answer(calls, "Embed", EmbedRequest(inputs="x"), *metadata)
    assert (context.code and context.code.name, asked(routers)) == (code, answers)


def test_the_health_check_is_of_one_or_of_all(routers):
    calls, (a, *others) = TeiCalls(routers, None), routers

    def check(*model):
        metadata = [("model", name) for name in model]
        told, context = grpc_caller.answer(calls, "Check", HealthCheckRequest(), *metadata)
        return context.code.name if context.code else told.status

    a.can_answer = False
    assert (check(), check("a"), check("org/b"), check("nobody")) == (1, 2, 1, "NOT_FOUND")
    for router in others:
        router.can_answer = False
    assert check() == 2


def test_metrics_name_the_model():
    made = mock.Mock()
    told = OfModel(made, "m")
    told.Counter("c", "", ("pool",))
    told.Gauge("g", "")
    new, tagged = mock.call, mock.call().set_default_tags({"model": "m"})
    assert made.Counter.mock_calls == [new("c", "", ("pool", "model")), tagged]
    assert made.Gauge.mock_calls == [new("g", "", ("model",)), tagged]


@pytest.mark.parametrize("prefix", ["", "/models/a", "/models/org/b"])
def test_without_a_key_a_prefix_changes_neither_the_shape_nor_what_is_open(routers, prefix):
    api = ModelsApi(routers, ApiKeys(["sk-one"]))
    openai, tei = post(api, f"{prefix}/v1/embeddings", {"input": "x"}), post(api, f"{prefix}/embed", TEXT)
    assert (openai.status, openai.json["error"]["code"]) == (401, "invalid_api_key")
    assert (tei.status, tei.json["error_type"]) == (401, "Unauthorized")
    assert [get(api, f"{prefix}{path}").status for path in ("/health", "/ping", "/info")] == [200, 200, 401]
    assert get(api, "/models/nobody/health").status == 401
