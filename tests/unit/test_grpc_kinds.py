"""gRPC's calls to rerankers, classifiers and sparse models, the vectors of tokens, and the watch of the health."""

import asyncio
from types import MappingProxyType

import grpc
import numpy as np
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from test_grpc import Context, incoming
from test_kind_routes import FakeRouter as RouterOfAKind

from deployments.models.pairs import Pair
from deployments.placement.request import Embedded
from serve_app import grpc_health
from serve_app.grpc_api import GrpcApi
from serve_app.proto import tei_pb2
from tests.kit.asked import asked_of
from tests.kit.virtual_time import run

TOKENS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


class Router(RouterOfAKind):
    capacity, can_answer = 4, True
    live_pools = MappingProxyType({"accelerator": True})

    def __init__(self, kind, scores=None):
        super().__init__(kind)
        self.scores, self.all_asked = scores, []

    async def embed(self, queries, wanted):
        self.all_asked.append((list(queries), asked_of(wanted)))
        if wanted.outputs == ("tokens",):
            return Embedded([TOKENS], [1.0], ("cpu",), 5, 3, 0.001, 0.002, 0.003, 0.0064)
        if self.scores is None:
            return await super().embed(queries, wanted)
        rows = [np.array([self.scores[query.second]], np.float32) for query in queries]
        return Embedded(rows, [1.0] * len(rows), ("cpu",), 7, 3, 0.001, 0.002, 0.003, 0.0064)


def answer(router, call, request):
    context = Context()
    return asyncio.run(getattr(GrpcApi(router), call)(request, grpc_context=context)), context


def streamed(router, call, requests):
    async def main():
        return [message async for message in getattr(GrpcApi(router), call)(incoming(requests), grpc_context=Context())]

    return run(main())


def test_predict_gives_labels_the_likeliest_first():
    router = Router("classifier")
    told, context = answer(router, "Predict", tei_pb2.PredictRequest(inputs="a", raw_scores=True, truncate=True))
    assert [(one.label, one.score) for one in told.predictions] == [("good", 3), ("bad", 1), ("so so", -2)]
    assert router.all_asked == [(["a"], {"kinds": ("reranker", "classifier"), "truncate": True})]
    assert context.trailing == {"x-windve-pool": "cpu"}
    assert told.metadata.compute_tokens == 7
    (streamed_one,) = streamed(router, "PredictStream", [tei_pb2.PredictRequest(inputs="a")])
    assert sum(one.score for one in streamed_one.predictions) == pytest.approx(1)
    assert router.all_asked[-1][1]["bulk"] is True


@pytest.mark.parametrize(("inputs", "query"), [(["a"], "a"), (["a", "b"], Pair("a", "b"))])
def test_predict_of_a_pair(inputs, query):
    router = Router("reranker")
    told, _ = answer(router, "PredictPair", tei_pb2.PredictPairRequest(inputs=inputs, raw_scores=True))
    assert router.all_asked[0][0] == [query]
    assert [(one.label, one.score) for one in told.predictions] == [("LABEL_0", -1.5)]
    assert len(streamed(router, "PredictPairStream", [tei_pb2.PredictPairRequest(inputs=inputs)] * 3)) == 3


def test_sparse_weights():
    told, _ = answer(Router("sparse"), "EmbedSparse", tei_pb2.EmbedSparseRequest(inputs="a"))
    assert [(one.index, one.value) for one in told.sparse_embeddings] == [(1, pytest.approx(0.1)), (3, 2)]
    assert len(streamed(Router("sparse"), "EmbedSparseStream", [tei_pb2.EmbedSparseRequest(inputs="a")] * 2)) == 2


def test_the_vector_of_each_token_bit_for_bit():
    router = Router("embedding")
    told, _ = answer(router, "EmbedAll", tei_pb2.EmbedAllRequest(inputs="a"))
    rows = np.array([list(row.embeddings) for row in told.token_embeddings], np.float32)
    assert rows.tobytes() == TOKENS.tobytes()
    assert router.all_asked == [(["a"], {"outputs": ("tokens",), "truncate": False})]
    assert len(streamed(router, "EmbedAllStream", [tei_pb2.EmbedAllRequest(inputs="a")] * 2)) == 2


def test_rerank_gives_the_best_first():
    router = Router("reranker", {"x": -1, "y": 2, "": 0})
    request = tei_pb2.RerankRequest(query="q", texts=["x", "y", ""], raw_scores=True, return_text=True)
    told, _ = answer(router, "Rerank", request)
    assert [(rank.index, rank.text, rank.score) for rank in told.ranks] == [(1, "y", 2), (2, "", 0), (0, "x", -1)]
    assert router.all_asked[0][0] == [Pair("q", "x"), Pair("q", "y"), Pair("q", "")]
    told, _ = answer(router, "Rerank", tei_pb2.RerankRequest(query="q", texts=["x"]))
    assert not told.ranks[0].HasField("text")
    assert told.ranks[0].score == pytest.approx(1 / (1 + np.e))


def collect(router, requests):
    context = Context()

    async def main():
        return await GrpcApi(router).RerankStream(incoming(requests), grpc_context=context)

    return run(main()), context


def test_a_stream_of_texts_to_rerank_has_one_answer():
    router = Router("reranker", {"x": -1, "y": 2})
    requests = [
        tei_pb2.RerankStreamRequest(query="q", text="x", raw_scores=True, return_text=True),
        tei_pb2.RerankStreamRequest(query="q", text="y"),  # the first says how the answer is
    ]
    told, context = collect(router, requests)
    assert [(rank.index, rank.text, rank.score) for rank in told.ranks] == [(1, "y", 2), (0, "x", -1)]
    assert (told.metadata.compute_tokens, told.metadata.compute_chars) == (14, 6)
    assert [asked["bulk"] for _, asked in router.all_asked] == [True, True]
    assert context.trailing == {"x-windve-pool": "cpu"}


@pytest.mark.parametrize(
    ("call", "request_", "sentence"),
    [
        ("Rerank", tei_pb2.RerankRequest(query="q"), "texts is an empty list"),
        ("Rerank", tei_pb2.RerankRequest(query="q", texts=["x"] * 4), "texts has 4 items and this server takes 3"),
        ("Predict", tei_pb2.PredictRequest(), "inputs is an empty string"),
        (
            "PredictPair",
            tei_pb2.PredictPairRequest(),
            "inputs is a list of 0 strings; send a text, or the",
        ),
        ("PredictPair", tei_pb2.PredictPairRequest(inputs=["a"] * 3), "inputs is a list of 3 strings"),
        ("Predict", tei_pb2.PredictRequest(inputs="a", truncation_direction=7), "truncation_direction must be 0"),
    ],
)
def test_bad_messages(call, request_, sentence):
    router = Router("reranker", {"x": 0})
    _, context = answer(router, call, request_)
    assert (context.code, router.all_asked) == (grpc.StatusCode.INVALID_ARGUMENT, [])
    assert context.details.startswith(sentence)


def test_a_bad_stream_of_texts():
    told, context = collect(Router("reranker", {}), [])
    assert (type(told), context.code) == (Empty, grpc.StatusCode.INVALID_ARGUMENT)
    assert "the stream holds no text" in context.details
    router = Router("reranker", {"x": 0})
    router.settings = router.settings.model_copy(
        update={"limits": router.settings.limits.model_copy(update={"max_body_bytes": 20})}
    )
    _, context = collect(router, [tei_pb2.RerankStreamRequest(query="q", text="x")] * 9)
    assert "larger than this server takes (20 bytes)" in context.details


def watch(router, request, changes, monkeypatch):
    """What a watch tells, where every 0.6 s one of `changes` happens; None: Serve stops the Router."""
    told, left = [], list(changes)
    monkeypatch.setattr(grpc_health, "is_stopping", lambda: router.stops)
    router.stops = False

    async def main():
        async def change():
            while left:
                await asyncio.sleep(0.6)
                now = left.pop(0)
                router.stops, router.can_answer = now is None, bool(now)

        changing = asyncio.create_task(change())
        async for message in GrpcApi(router).Watch(request, grpc_context=Context()):
            told.append(HealthCheckResponse.ServingStatus.Name(message.status))  # noqa: PERF401
        await changing

    run(main())
    return told


def test_the_watch_tells_changes_and_ends_with_the_router(monkeypatch):
    told = watch(Router("reranker"), HealthCheckRequest(), [True, False, True, None], monkeypatch)
    assert told == ["SERVING", "NOT_SERVING", "SERVING", "NOT_SERVING"]
    told = watch(Router("reranker"), HealthCheckRequest(service="other"), [True, None], monkeypatch)
    assert told == ["SERVICE_UNKNOWN", "NOT_SERVING"]


def test_nothing_stops_outside_of_serve():
    from deployments.serve_adapter.stopping import is_stopping

    assert is_stopping() is False
