"""gRPC without a server: the wire's names and numbers, messages, statuses, and answers in order."""

import asyncio
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.virtual_time import virtual
from deployments import errors
from deployments.admission.fair_share import Tenant
from deployments.errors import Busy, EmptyInput, InvalidInput, Unavailable
from deployments.models.text_pairs import Pair
from deployments.serve_adapter.grpc_handlers import reader
from serve_app import rpc as grpc_service
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.embedding import grpc_calls, requests
from serve_app.embedding.api import HttpApi
from serve_app.embedding.grpc_answers import embed_response, info_response, tokens_response
from serve_app.grpc_services import METHODS, add_to_server
from serve_app.proto.generation_pb2 import DESCRIPTOR as GENERATION
from serve_app.proto.tei_pb2 import (
    DESCRIPTOR,
    DecodeRequest,
    EmbedRequest,
    EmbedResponse,
    PredictPairRequest,
    PredictRequest,
    RerankRequest,
    RerankStreamRequest,
)
from serve_app.rpc import in_order, set_status
from tests.kit import tei_wire
from tests.kit.asgi_client import post
from tests.kit.fake_router import SPACE, FakeRouter, embedded
from tests.kit.grpc_caller import Context, answer, incoming, stream, tei_calls

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_what_make_proto_makes(tmp_path):
    outs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    protos = [f"serve_app/proto/{name}.proto" for name in ("tei", "generation")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outs, *protos], cwd=ROOT, check=True)
    for name in ("tei_pb2.py", "tei_pb2.pyi", "generation_pb2.py", "generation_pb2.pyi"):
        made, kept = (folder / "serve_app" / "proto" / name for folder in (tmp_path, ROOT))
        assert made.read_text() == kept.read_text(), f"{name} is not what its .proto says: make proto"


def test_messages_have_tei_s_names_numbers_and_types():
    ours = descriptor_pb2.FileDescriptorProto()
    DESCRIPTOR.CopyToProto(ours)
    theirs = tei_wire.file_descriptor()

    def shape(file):
        messages = {
            message.name: [(f.number, f.name, f.type, f.label, f.type_name, f.proto3_optional) for f in message.field]
            for message in file.message_type
        }
        return messages, {enum.name: [(v.number, v.name) for v in enum.value] for enum in file.enum_type}

    assert shape(ours) == shape(theirs)


def test_calls_are_tei_s():
    ours = {
        f"{service.name}/{method.name}": (
            *(method.input_type.name, method.output_type.name),
            *(method.client_streaming, method.server_streaming),
        )
        for service in DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    theirs = {call: (*kinds, False, False) for call, kinds in tei_wire.UNARY.items()}
    theirs |= {call: (*kinds, True, True) for call, kinds in tei_wire.STREAMS.items()}
    assert ours == theirs | {call: (*kinds, True, False) for call, kinds in tei_wire.COLLECTED.items()}


def test_haproxy_stamps_all_calls_of_the_model_that_have_one_message():
    script = (ROOT / "deployments/serve_adapter/haproxy.sh").read_text(encoding="utf-8")
    (stamped,) = re.findall(r"^single='path_end ([^']+)'", script, re.MULTILINE)
    services = [*DESCRIPTOR.services_by_name.values(), *GENERATION.services_by_name.values()]
    single = {call.name for service in services for call in service.methods if not call.client_streaming}
    assert {name.removeprefix("/") for name in stamped.split()} == single - {"Info", "Tokenize", "Decode"}


def test_services_are_added_with_all_calls_and_each_has_a_method():
    api, added = tei_calls(FakeRouter()), {}
    for name in METHODS:
        assert "grpc_context" in inspect.signature(getattr(api, name)).parameters, name
    server = SimpleNamespace(
        add_generic_rpc_handlers=lambda handlers: [added.update(one._method_handlers) for one in handlers]
    )
    add_to_server(SimpleNamespace(**dict.fromkeys(METHODS)), server)
    calls = {f"/tei.v1.{call}" for call in (*tei_wire.UNARY, *tei_wire.STREAMS, *tei_wire.COLLECTED)}
    assert set(added) == calls | {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    collected, watch = added["/tei.v1.Rerank/RerankStream"], added["/grpc.health.v1.Health/Watch"]
    assert (collected.request_streaming, collected.response_streaming) == (True, False)
    assert (watch.request_streaming, watch.response_streaming) == (False, True)


@pytest.mark.real_time
async def test_grpc_s_own_retries_come_back_when_they_are_told():
    """The client would wait for a minute by itself; it is told 20 ms, and its second try is answered."""
    tries = []

    async def embed(request, context):
        tries.append(request.inputs)
        if len(tries) == 1:
            set_status(context, Busy("busy", retry_after_s=0.02))
            return Empty()
        return EmbedResponse(embeddings=[1])

    policy = {"maxAttempts": 2, "initialBackoff": "60s", "maxBackoff": "60s", "backoffMultiplier": 1,
              "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}  # fmt: skip
    config = {"methodConfig": [{"name": [{"service": "tei.v1.Embed"}], "retryPolicy": policy}]}

    def ask(port):
        with tei_wire.connected(port, [("grpc.service_config", json.dumps(config))]) as client:
            return client.call("Embed/Embed", inputs="a").embeddings

    server = grpc.aio.server()
    add_to_server(SimpleNamespace(**dict.fromkeys(METHODS, embed)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert list(await asyncio.to_thread(ask, port)) == [1]
    finally:
        await server.stop(None)
    assert tries == ["a", "a"]


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x01\xff"])  # garbage, cut short, not UTF-8
def test_bytes_that_are_no_message_are_an_error_as_a_value(raw):
    read = reader(EmbedRequest)(raw)
    assert isinstance(read, InvalidInput)
    assert f"these {len(raw)} bytes are not a tei.v1.EmbedRequest" in str(read)


# --- statuses ---------------------------------------------------------------------------------------------------------


def test_each_error_has_the_statuses_that_the_tree_says():
    tree = re.findall(r"─ (\w+) +(\d+)  ([A-Z_]+)", errors.__doc__)
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    found = {(name, str(kind.status), kind.grpc_status) for name, kind in kinds.items()}
    assert found == {*tree, ("WindveError", "500", "INTERNAL"), ("SettingsError", "500", "INTERNAL")}
    assert all(grpc.StatusCode[kind.grpc_status] for kind in kinds.values())


def status_of(error):
    context = Context()
    set_status(context, error)
    return context


@pytest.mark.parametrize(
    ("error", "status", "retry_ms"),
    [
        (Busy("x", retry_after_s=0.0123), grpc.StatusCode.RESOURCE_EXHAUSTED, "13"),
        (Unavailable("x"), grpc.StatusCode.UNAVAILABLE, "1000"),
        (InvalidInput("x"), grpc.StatusCode.INVALID_ARGUMENT, None),
    ],
)
def test_a_status_says_when_to_come_back_to_people_and_to_grpc_itself(error, status, retry_ms):
    context = status_of(error)
    assert (context.code, context.details) == (status, "x")
    assert context.trailing == dict.fromkeys(["retry-after-ms", "grpc-retry-pushback-ms"] if retry_ms else [], retry_ms)


def test_a_status_fits_into_headers_whatever_is_quoted_in_it():
    details = status_of(InvalidInput("there is no prompt named " + "é" * 100_000)).details
    assert len(details.encode()) <= 2000
    assert set(details.removeprefix("there is no prompt named ")) == {"é"}


# --- calls ------------------------------------------------------------------------------------------------------------


TEXT = {"inputs": "a", "truncate": True}
RANKED = {"query": "q", "texts": ["a", "b", ""], "truncate": False}
CALLS = [  # the model's kind, the call, HTTP's route to the same, and the fields of both
    ("embedding", "Embed", "/embed", {**TEXT, "prompt_name": "query"}),
    ("embedding", "Embed", "/embed", {**TEXT, "truncate": False}),
    ("embedding", "Embed", "/embed", {**TEXT, "normalize": True, "dimensions": 1}),
    ("embedding", "Embed", "/embed", {**TEXT, "normalize": False}),
    ("embedding", "Embed", "/embed", {**TEXT, "normalize": False, "dimensions": 1}),
    ("embedding", "EmbedAll", "/embed_all", {**TEXT, "prompt_name": "query"}),
    ("sparse", "EmbedSparse", "/embed_sparse", {**TEXT, "prompt_name": "query"}),
    ("classifier", "Predict", "/predict", {**TEXT, "raw_scores": False}),
    ("classifier", "Predict", "/predict", {**TEXT, "raw_scores": True}),
    ("reranker", "PredictPair", "/predict", {**TEXT, "inputs": ["a"]}),
    ("reranker", "PredictPair", "/predict", {**TEXT, "inputs": ["a", "b"]}),
    ("reranker", "Rerank", "/rerank", {**RANKED, "raw_scores": False, "return_text": False}),
    ("reranker", "Rerank", "/rerank", {**RANKED, "raw_scores": True, "return_text": True}),
    ("embedding", "Tokenize", "/tokenize", {"inputs": "a", "add_special_tokens": True, "prompt_name": "query"}),
    ("embedding", "Decode", "/decode", {"ids": [1, 2], "skip_special_tokens": False}),
]
AS_JSON = {  # a call's answer as its route's
    "Embed": lambda told: [told["embeddings"]],
    "EmbedAll": lambda told: [[row["embeddings"] for row in told["token_embeddings"]]],
    "EmbedSparse": lambda told: [told["sparse_embeddings"]],
    "Predict": lambda told: told["predictions"],
    "PredictPair": lambda told: told["predictions"],
    "Rerank": lambda told: told["ranks"],
    "Tokenize": lambda told: [[{"start": None, "stop": None, **token} for token in told["tokens"]]],
    "Decode": lambda told: [told["text"]],
}


def numbers(content):
    """With all floats as float32, which messages hold."""
    return json.loads(json.dumps(content), parse_float=np.float32)


@pytest.mark.parametrize(("kind", "call", "path", "fields"), CALLS)
def test_each_call_asks_and_answers_as_its_route(kind, call, path, fields):
    service = METHODS[call].split("/")[0].split(".")[-1]
    takes = DESCRIPTOR.services_by_name[service].methods_by_name[call].input_type._concrete_class
    side, left = ({"truncation_direction": 1}, {"truncation_direction": "left"}) if "truncate" in fields else ({}, {})
    headers = [("x-windve-priority", "bulk"), ("x-request-timeout-ms", "1500")]
    over_grpc, over_http = FakeRouter(kind), FakeRouter(kind)
    told, context = answer(tei_calls(over_grpc), call, takes(**fields, **side), *headers, ("trace-bin", b"\xff"))
    sent = [(name.encode(), value.encode()) for name, value in headers]
    reply = post(HttpApi(over_http), path, {**fields, **left}, headers=sent)
    assert over_grpc.asked == over_http.asked
    plain = MessageToDict(told, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    assert numbers(AS_JSON[call](plain)) == numbers(reply.json)
    assert (context.code, context.trailing.get("x-windve-pool")) == (None, reply.headers.get("x-windve-pool"))
    if call != "Rerank":
        streamed, context, error = stream(tei_calls(FakeRouter(kind)), f"{call}Stream", [takes(**fields)] * 3)
        assert (streamed, context.code, error) == ([told] * 3, None, None)


@pytest.mark.parametrize(
    ("kind", "call", "request_", "sentence"),
    [
        ("embedding", "Embed", EmbedRequest(), "inputs is an empty string"),
        ("embedding", "Embed", EmbedRequest(inputs="a" * 1001), "the message has more bytes than this server"),
        ("embedding", "Embed", EmbedRequest(inputs="a", dimensions=0), "dimensions must be a whole number from 1 to 4"),
        ("embedding", "Embed", EmbedRequest(inputs="a", dimensions=5), "dimensions must be a whole number from 1 to 4"),
        ("embedding", "Embed", EmbedRequest(inputs="a", truncation_direction=7), "truncation_direction must be 0 (ri"),
        ("reranker", "Rerank", RerankRequest(query="q"), "texts is an empty list"),
        ("reranker", "Rerank", RerankRequest(query="q", texts=["x"] * 4), "texts has 4 items and this server accepts"),
        ("reranker", "Predict", PredictRequest(), "inputs is an empty string"),
        ("reranker", "PredictPair", PredictPairRequest(), "inputs is an empty list"),
        ("reranker", "PredictPair", PredictPairRequest(inputs=["a"] * 3), "inputs is a list of 3 strings"),
        *(
            ("embedding", call, InvalidInput("these 3 bytes are no message"), "these 3 bytes are no message")
            for call in ("Embed", "Info", "Tokenize", "Decode")
        ),
    ],
)
def test_bad_messages_are_invalid_argument_and_reach_no_queue(kind, call, request_, sentence):
    router = FakeRouter(kind)
    done, context = answer(tei_calls(router), call, request_)
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert context.details.startswith(sentence)
    assert (router.asked, done) == ([], Empty())


def test_keys_are_asked_for_everywhere_but_of_the_health_check():
    router = FakeRouter()
    api = tei_calls(router, ApiKeys([ApiKey("good", "search", 3.0)]))
    request = EmbedRequest(inputs="a")
    for metadata in ((), [("authorization", "Bearer bad")]):
        for call in ("Embed", "Info", "Tokenize", "Decode"):
            assert answer(api, call, request, *metadata)[1].code == grpc.StatusCode.UNAUTHENTICATED
    assert answer(api, "Check", HealthCheckRequest())[1].code is None
    assert router.asked == []
    assert answer(api, "Embed", request, ("authorization", "Bearer good"))[1].code is None
    assert router.asked[0][1]["client"].tenant == Tenant("search", 3.0)


# --- health -----------------------------------------------------------------------------------------------------------

OF_ALL, EMBED, RERANK, INFO, TOKENIZE, ACCELERATOR, CPU = (
    *("", "tei.v1.Embed", "tei.v1.Rerank", "tei.v1.Info", "tei.v1.Tokenize"),
    *("windve.accelerator", "windve.cpu"),
)


@pytest.mark.parametrize(
    ("can_answer", "pools", "serving"),
    [
        (True, {"accelerator": True, "cpu": True}, {OF_ALL, EMBED, INFO, TOKENIZE, ACCELERATOR, CPU}),
        (True, {"accelerator": False, "cpu": True}, {OF_ALL, EMBED, INFO, TOKENIZE, CPU}),
        (False, {"accelerator": False}, {INFO, TOKENIZE}),  # they need no replica; there is no other pool
    ],
)
def test_health_follows_the_pools(can_answer, pools, serving):
    router = FakeRouter()
    router.can_answer, router.live_pools = can_answer, pools
    for service in (OF_ALL, EMBED, RERANK, INFO, TOKENIZE, ACCELERATOR, CPU):  # RERANK: for models of another kind
        told, _ = answer(tei_calls(router), "Check", HealthCheckRequest(service=service))
        assert told == HealthCheckResponse(status="SERVING" if service in serving else "NOT_SERVING")
    _, context = answer(tei_calls(router), "Check", HealthCheckRequest(service="other"))
    assert context.code == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("service", "changes", "told"),
    [
        ("", [True, False, True, None], ["SERVING", "NOT_SERVING", "SERVING", "NOT_SERVING"]),
        ("other", [True, None], ["SERVICE_UNKNOWN", "NOT_SERVING"]),
    ],
)
async def test_the_watch_tells_changes_and_ends_with_the_router(service, changes, told, monkeypatch):
    """One of `changes` happens every 0.6 s: whether the Router can answer; None: Serve stops it."""
    router, stops, found = FakeRouter(), [], []
    monkeypatch.setattr(grpc_service, "is_stopping", lambda: bool(stops))

    async def change():
        for now in changes:
            await asyncio.sleep(0.6)
            router.can_answer = bool(now)
            stops.extend([] if now is not None else [True])

    changing = asyncio.create_task(change())
    async for message in tei_calls(router).Watch(HealthCheckRequest(service=service), grpc_context=Context()):
        found.append(HealthCheckResponse.ServingStatus.Name(message.status))  # noqa: PERF401 - as they come
    await changing
    assert found == told


def test_nothing_stops_outside_of_serve():
    from deployments.serve_adapter.replica_process import is_stopping

    assert is_stopping() is False


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 31, 32, 384, 1024, 4096])  # the size before the floats takes 1 to 3 bytes
def test_vectors_are_on_the_wire_bit_for_bit(dimension):
    bits = np.random.default_rng(1).integers(0, 2**32, dimension, dtype=np.uint32)
    vector = bits.view(np.float32)
    vector[~np.isfinite(vector)] = np.float32(1e-45)  # the smallest there is
    done = embed_response(embedded([vector]), requests.EmbedRequest(inputs="a"), None)
    theirs = tei_wire.CLASSES["EmbedResponse"].FromString(done.SerializeToString())
    assert np.array(theirs.embeddings, np.float32).tobytes() == vector.tobytes()
    assert (theirs.metadata.compute_chars, theirs.metadata.compute_tokens) == (3, 7)
    assert (theirs.metadata.total_time_ns, theirs.metadata.tokenization_time_ns) == (6_400_000, 1_000_000)
    assert (theirs.metadata.queue_time_ns, theirs.metadata.inference_time_ns) == (2_000_000, 3_000_000)
    done = tokens_response(embedded([np.stack([vector, -vector])]))
    theirs = tei_wire.CLASSES["EmbedAllResponse"].FromString(done.SerializeToString())
    assert np.array([row.embeddings for row in theirs.token_embeddings], np.float32).tobytes() == (
        vector.tobytes() + (-vector).tobytes()
    )


@pytest.mark.parametrize(
    ("model_type", "number"),
    [
        ({"embedding": {"pooling": "mean"}}, 0),
        ({"embedding": {"pooling": "splade"}}, 0),
        ({"classifier": {"id2label": {"0": "no", "1": "yes"}}}, 1),
        ({"reranker": {"id2label": {"0": "LABEL_0"}}}, 2),
    ],
)
def test_info_says_the_kind_of_the_model_by_tei_s_number(model_type, number):
    info = dict.fromkeys(
        ["max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_client_batch_size"], 1
    )
    words = {"version": "0", "model_id": "m", "tokenization_workers": 1, "model_sha": None, "model_dtype": "float32"}
    assert info_response({**info, **words, "model_type": model_type}).model_type == number


# --- streams ----------------------------------------------------------------------------------------------------------


@given(
    delays=st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0]), max_size=12),
    bad=st.sampled_from([99, 99, 0, 2, 5]),
    goes_s=st.sampled_from([99.0, 99.0, 0.5, 2.5]),
    most=st.integers(1, 5),
)
@virtual
async def test_answers_come_in_order_until_the_first_error_or_a_hang_up_and_no_query_is_left(delays, bad, goes_s, most):
    read, done, asked = [], [], set()

    async def reply(request):
        asked.add(request)
        assert len(asked) <= most
        assert len(read) <= len(done) + most + 1  # one is read ahead
        try:
            await asyncio.sleep(delays[request])
            if request == bad:
                raise EmptyInput("empty")
            return request
        finally:
            asked.remove(request)

    ends, now = None, asyncio.get_running_loop().time
    hangs_up = now() + goes_s
    try:
        async with asyncio.timeout_at(hangs_up):
            async for one in in_order(incoming(range(len(delays)), read), reply, most):
                done.append(one)  # noqa: PERF401 - what came before an error counts
    except (EmptyInput, TimeoutError) as error:
        ends = type(error)
    assert (asked, now() <= hangs_up + 1e-6) == (set(), True)  # each turn of the virtual loop takes a nanosecond
    assert done == [*range(len(done))]
    assert ends is TimeoutError or len(done) == min(bad, len(delays))
    assert (ends is EmptyInput) <= (bad < len(delays))


@pytest.mark.parametrize(("metadata", "bulk"), [((), True), ([("x-windve-priority", "normal")], False)])
def test_a_stream_s_queries_are_bulk_unless_it_says_otherwise(metadata, bulk):
    router = FakeRouter()
    done, _, error = stream(tei_calls(router), "EmbedStream", [EmbedRequest(inputs=text) for text in "abc"], *metadata)
    assert (len(done), error) == (3, None)
    assert router.asked == [([text], {"truncate": False, **({"bulk": True} if bulk else {})}) for text in "abc"]


@pytest.mark.parametrize(("most", "code"), [(3, None), (2, grpc.StatusCode.INVALID_ARGUMENT)])
def test_token_ids_are_counted_before_they_are_read(monkeypatch, most, code):
    monkeypatch.setattr(grpc_calls, "MOST_VALUES", most)
    _, context = answer(tei_calls(FakeRouter()), "Decode", DecodeRequest(ids=[1, 2, 3]))
    assert context.code == code
    assert code is None or context.details == "ids has 3 token ids, this server accepts 2; send fewer"


def test_a_stream_s_bad_request_is_its_status():
    requests = [EmbedRequest(inputs="a"), EmbedRequest(), EmbedRequest(inputs="b")]
    done, context, error = stream(tei_calls(FakeRouter()), "EmbedStream", requests)
    assert len(done) == 1
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, EmptyInput)  # Serve asks for it


def rank(router, requests):
    return answer(tei_calls(router), "RerankStream", incoming(requests))


class ByLength(FakeRouter):
    """Longer texts rank higher."""

    async def embed(self, request):
        await super().embed(request)
        return embedded([np.array([len(query.second)], np.float32) for query in request.queries])


def test_a_stream_of_texts_to_rerank_has_one_answer():
    router = ByLength("reranker")
    requests = [
        RerankStreamRequest(query="q", text="x", raw_scores=True, return_text=True),
        RerankStreamRequest(query="p", text="longer"),  # the first says how the answer is
    ]
    told, context = rank(router, requests)
    assert [(rank.index, rank.text, rank.score) for rank in told.ranks] == [(1, "longer", 6), (0, "x", 1)]
    assert (told.metadata.compute_tokens, told.metadata.compute_chars) == (14, 6)
    assert [queries for queries, _ in router.asked] == [[Pair("q", "x")], [Pair("p", "longer")]]
    assert [asked["bulk"] for _, asked in router.asked] == [True, True]
    assert context.trailing == {"x-windve-pool": "cpu", "x-windve-space": SPACE}


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([], "the stream contains no text"),
        ([RerankStreamRequest(query="q", text="x" * 200)] * 9, "more bytes than this server accepts (1000)"),
    ],
)
def test_a_bad_stream_of_texts(requests, sentence):
    told, context = rank(FakeRouter("reranker"), requests)
    assert (type(told), context.code) == (Empty, grpc.StatusCode.INVALID_ARGUMENT)
    assert sentence in context.details
