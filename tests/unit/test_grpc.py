"""gRPC without a server: the wire's names and numbers, messages, statuses, and answers in order."""

import asyncio
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2

from deployments import errors
from deployments.errors import Busy, EmptyInput, InvalidInput, Unavailable, WindveError
from deployments.models.tokenizer import Token
from deployments.placement.request import Embedded
from deployments.settings import Settings
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.grpc_answers import embed_response, info_response
from serve_app.grpc_api import GrpcApi
from serve_app.grpc_calls import in_order, set_status
from serve_app.grpc_services import METHODS, add_to_server, reader
from serve_app.proto import tei_pb2
from tests.kit import tei_wire
from tests.kit.asked import asked_of
from tests.kit.virtual_time import run

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
    tei_pb2.DESCRIPTOR.CopyToProto(ours)
    theirs = tei_wire.file_descriptor()

    def shape(file):
        messages = {
            message.name: [(f.number, f.name, f.type, f.label, f.type_name, f.proto3_optional) for f in message.field]
            for message in file.message_type
        }
        return messages, {enum.name: [(v.number, v.name) for v in enum.value] for enum in file.enum_type}

    assert file_names(ours) == file_names(theirs)
    assert shape(ours) == shape(theirs)


def file_names(file):
    return {message.name for message in file.message_type}


def test_calls_are_tei_s():
    ours = {
        f"{service.name}/{method.name}": (
            *(method.input_type.name, method.output_type.name),
            *(method.client_streaming, method.server_streaming),
        )
        for service in tei_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    theirs = {call: (*kinds, False, False) for call, kinds in tei_wire.UNARY.items()}
    theirs |= {call: (*kinds, True, True) for call, kinds in tei_wire.STREAMS.items()}
    assert ours == theirs | {call: (*kinds, True, False) for call, kinds in tei_wire.COLLECTED.items()}


def test_each_call_has_a_method_that_takes_serve_s_context():
    api = GrpcApi(FakeRouter())
    for name in METHODS:
        assert "grpc_context" in inspect.signature(getattr(api, name)).parameters, name


def test_services_are_added_with_all_calls():
    added = {}

    class Server:
        def add_generic_rpc_handlers(self, handlers):
            for handler in handlers:
                added.update(handler._method_handlers)

    add_to_server(SimpleNamespace(**dict.fromkeys(METHODS)), Server())
    calls = {f"/tei.v1.{call}" for call in (*tei_wire.UNARY, *tei_wire.STREAMS, *tei_wire.COLLECTED)}
    assert set(added) == calls | {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    collected, watch = added["/tei.v1.Rerank/RerankStream"], added["/grpc.health.v1.Health/Watch"]
    assert (collected.request_streaming, collected.response_streaming) == (True, False)
    assert (watch.request_streaming, watch.response_streaming) == (False, True)


def test_grpc_s_own_retries_come_back_when_they_are_told():
    """The client would wait for a minute by itself; it is told 20 ms, and its second try is answered."""
    tries = []

    async def embed(request, context):
        tries.append(request.inputs)
        if len(tries) == 1:
            set_status(context, Busy("busy", retry_after_s=0.02))
            return Empty()
        return tei_pb2.EmbedResponse(embeddings=[1])

    policy = {"maxAttempts": 2, "initialBackoff": "60s", "maxBackoff": "60s", "backoffMultiplier": 1,
              "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}  # fmt: skip
    config = {"methodConfig": [{"name": [{"service": "tei.v1.Embed"}], "retryPolicy": policy}]}

    def ask(port):
        with tei_wire.connected(port, [("grpc.service_config", json.dumps(config))]) as client:
            return client.call("Embed/Embed", inputs="a").embeddings

    async def main():
        server = grpc.aio.server()
        add_to_server(SimpleNamespace(**dict.fromkeys(METHODS, embed)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await asyncio.to_thread(ask, port)
        finally:
            await server.stop(None)

    assert list(asyncio.run(main())) == [1]
    assert tries == ["a", "a"]


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x01\xff"])  # garbage, cut short, not UTF-8
def test_bytes_that_are_no_message_are_an_error_as_a_value(raw):
    read = reader(tei_pb2.EmbedRequest)(raw)
    assert isinstance(read, InvalidInput)
    assert f"these {len(raw)} bytes are not a tei.v1.EmbedRequest" in str(read)


# --- statuses ---------------------------------------------------------------------------------------------------------


class Context:
    """Serve's context, as far as it is used."""

    def __init__(self, *metadata):
        self.metadata = list(metadata)
        self.code = self.details = None
        self.trailing = {}

    def invocation_metadata(self):
        return self.metadata

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def trailing_metadata(self):
        return list(self.trailing.items())

    def set_trailing_metadata(self, metadata):
        self.trailing = dict(metadata)


STATUSES = {
    "WindveError": "INTERNAL",
    "SettingsError": "INTERNAL",
    "InvalidInput": "INVALID_ARGUMENT",
    "EmptyInput": "INVALID_ARGUMENT",
    "UnknownModel": "NOT_FOUND",
    "BodyTooLarge": "INVALID_ARGUMENT",
    "ContextExceeded": "INVALID_ARGUMENT",
    "Unauthorized": "UNAUTHENTICATED",
    "Forbidden": "PERMISSION_DENIED",
    "WrongKind": "FAILED_PRECONDITION",
    "Busy": "RESOURCE_EXHAUSTED",
    "OverShare": "RESOURCE_EXHAUSTED",
    "OverQuota": "RESOURCE_EXHAUSTED",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "EngineFailed": "FAILED_PRECONDITION",
    "Unavailable": "UNAVAILABLE",
    "ReplicaLost": "UNAVAILABLE",
    "TimedOut": "DEADLINE_EXCEEDED",
}


def test_each_error_has_its_status_and_the_tree_says_so():
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert {name: kind.grpc_status for name, kind in kinds.items()} == STATUSES
    for name, kind in kinds.items():
        assert grpc.StatusCode[kind.grpc_status]
        line = next((line for line in errors.__doc__.splitlines() if f"─ {name} " in line), "")
        assert not line or "refuses to start" in line or f"{kind.status}  {kind.grpc_status}" in line


def status_of(error):
    context = Context()
    set_status(context, error)
    return context


def test_busy_says_when_to_come_back_to_people_and_to_grpc_itself():
    context = status_of(Busy("busy: come back", retry_after_s=0.0123))
    assert (context.code, context.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy: come back")
    assert context.trailing == {"retry-after-ms": "13", "grpc-retry-pushback-ms": "13"}


def test_unavailable_says_when_to_come_back_and_a_bad_input_does_not():
    assert status_of(Unavailable("no pool")).trailing["retry-after-ms"] == "1000"
    assert status_of(InvalidInput("bad")).trailing == {}


def test_a_status_fits_into_headers_whatever_is_quoted_in_it():
    details = status_of(InvalidInput("there is no prompt named " + "é" * 100_000)).details
    assert len(details.encode()) <= 2000
    assert set(details.removeprefix("there is no prompt named ")) == {"é"}


# --- calls ------------------------------------------------------------------------------------------------------------


def embedded(vector, norm=2.0):
    return Embedded([vector], [norm], ("cpu",), tokens=3, characters=5, tokenization_s=1e-4, queue_s=0.25,
                    compute_s=0.5, total_s=0.7501)  # fmt: skip


class FakeRouter:
    """Answers with one vector, and remembers what it was asked."""

    def __init__(self, **args):
        self.settings = Settings.parse({"model": {"id": "x"}, "limits": {"max_body_bytes": 100}, **args})
        self.card = SimpleNamespace(name="x", kinds=("embedding",), dimension=384)
        self.vector = np.random.default_rng(0).standard_normal(384).astype(np.float32)
        self.capacity, self.can_answer = 4, True
        self.live_pools = {"accelerator": True, "cpu": True}
        self.asked = []
        self.problem = None

    async def embed(self, queries, wanted):
        self.asked.append((list(queries), asked_of(wanted)))
        if self.problem:
            raise self.problem
        return embedded(self.vector)

    async def tokenize(self, texts, **asked):
        self.asked.append((list(texts), asked))
        return [[Token(101, "[CLS]", True, None, None), Token(7, "a", False, 0, 1)]]

    async def decode(self, ids, **asked):
        self.asked.append((list(ids), asked))
        return ["text"]


def answer(router, call, request, context=None, keys=None):
    context = context or Context()
    return asyncio.run(getattr(GrpcApi(router, keys), call)(request, grpc_context=context)), context


def test_embed_hands_on_what_was_asked():
    router = FakeRouter()
    context = Context(("user-agent", "grpc"), ("trace-bin", b"\xff"), ("x-windve-priority", "bulk"),
                      ("x-request-timeout-ms", "1500"))  # fmt: skip
    request = tei_pb2.EmbedRequest(inputs="a", truncate=True, truncation_direction=1, prompt_name="query")
    done, context = answer(router, "Embed", request, context)
    usual = {"truncate": True, "truncation_direction": "left", "prompt_name": "query"}
    assert router.asked == [(["a"], {**usual, "bulk": True, "timeout_s": 1.5})]
    assert context.code is None
    assert context.trailing == {"x-windve-pool": "cpu"}
    assert np.array_equal(np.array(done.embeddings, np.float32), router.vector)


def test_embed_asks_for_nothing_that_was_not_asked():
    router = FakeRouter()
    answer(router, "Embed", tei_pb2.EmbedRequest(inputs="a"))
    assert router.asked == [(["a"], {"truncate": False})]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"inputs": ""}, "inputs is an empty string"),
        ({"inputs": "a" * 101}, "the message is larger than this server takes (100 bytes)"),
        ({"inputs": "a", "dimensions": 0}, "dimensions must be a whole number from 1 to 384"),
        ({"inputs": "a", "dimensions": 385}, "dimensions must be a whole number from 1 to 384"),
        ({"inputs": "a", "truncation_direction": 7}, "truncation_direction must be 0 (right) or 1 (left), not 7"),
    ],
)
def test_bad_messages_are_invalid_argument_and_reach_no_queue(fields, sentence):
    router = FakeRouter()
    done, context = answer(router, "Embed", tei_pb2.EmbedRequest(**fields))
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in context.details
    assert (router.asked, done.SerializeToString()) == ([], b"")


def test_what_the_reader_refused_is_invalid_argument():
    for call in ("Embed", "Info", "Tokenize", "Decode"):
        _, context = answer(FakeRouter(), call, InvalidInput("these 3 bytes are not a message"))
        assert (context.code, context.details) == (grpc.StatusCode.INVALID_ARGUMENT, "these 3 bytes are not a message")


def test_keys_are_asked_for_everywhere_but_of_the_health_check():
    keys = ApiKeys(["good"])
    request = tei_pb2.EmbedRequest(inputs="a")
    for metadata, code in [
        ([], grpc.StatusCode.UNAUTHENTICATED),
        ([("authorization", "Bearer bad")], grpc.StatusCode.UNAUTHENTICATED),
        ([("authorization", "Bearer good")], None),
    ]:
        assert answer(FakeRouter(), "Embed", request, Context(*metadata), keys)[1].code == code
    for call in ("Info", "Tokenize", "Decode"):
        assert answer(FakeRouter(), call, request, keys=keys)[1].code == grpc.StatusCode.UNAUTHENTICATED
    _, context = answer(FakeRouter(), "Check", health_pb2.HealthCheckRequest(), keys=keys)
    assert context.code is None


def test_the_router_is_told_whose_key_it_was():
    router, keys = FakeRouter(), ApiKeys([ApiKey("good", "search", 3.0)])
    answer(router, "Embed", tei_pb2.EmbedRequest(inputs="a"), Context(("authorization", "Bearer good")), keys)
    assert router.asked[0][1]["client"].tenant == ("search", 3.0)


def test_health_follows_the_pools():
    router = FakeRouter()
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", "tei.v1.Embed", "tei.v1.Info", "tei.v1.Tokenize"):
        assert answer(router, "Check", health_pb2.HealthCheckRequest(service=service))[0].status == serving
    _, context = answer(router, "Check", health_pb2.HealthCheckRequest(service="other"))
    assert context.code == grpc.StatusCode.NOT_FOUND
    for pool in ("accelerator", "cpu"):
        assert answer(router, "Check", health_pb2.HealthCheckRequest(service=f"windve.{pool}"))[0].status == serving
    router.live_pools = {"accelerator": False}
    for service, status in (("accelerator", not_serving), ("cpu", not_serving)):  # the other is not there at all
        told = answer(router, "Check", health_pb2.HealthCheckRequest(service=f"windve.{service}"))[0]
        assert told.status == status
    rerank = health_pb2.HealthCheckRequest(service="tei.v1.Rerank")  # not for a model of this kind
    assert answer(router, "Check", rerank)[0].status == not_serving
    router.can_answer = False
    for service in ("", "tei.v1.Embed"):
        assert answer(router, "Check", health_pb2.HealthCheckRequest(service=service))[0].status == not_serving
    for service in ("tei.v1.Info", "tei.v1.Tokenize"):  # they need no replica
        assert answer(router, "Check", health_pb2.HealthCheckRequest(service=service))[0].status == serving


def test_tokens_and_texts():
    router = FakeRouter()
    done, _ = answer(router, "Tokenize", tei_pb2.EncodeRequest(inputs="a", add_special_tokens=True))
    first, second = done.tokens
    assert (first.id, first.text, first.special, first.HasField("start")) == (101, "[CLS]", True, False)
    assert (second.id, second.text, second.special, second.start, second.stop) == (7, "a", False, 0, 1)
    assert second.HasField("start")
    done, _ = answer(router, "Decode", tei_pb2.DecodeRequest(ids=[1, 2]))
    assert done.text == "text"
    assert router.asked == [
        (["a"], {"special_tokens": True, "prompt_name": None}),
        ([[1, 2]], {"skip_special_tokens": False}),
    ]


@pytest.mark.parametrize("dimension", [1, 31, 32, 384, 1024, 4096])  # the size before the floats takes 1 to 3 bytes
def test_vectors_are_on_the_wire_bit_for_bit(dimension):
    bits = np.random.default_rng(1).integers(0, 2**32, dimension, dtype=np.uint32)
    vector = bits.view(np.float32)
    vector[~np.isfinite(vector)] = np.float32(1e-45)  # the smallest there is
    done = embed_response(embedded(vector), tei_pb2.EmbedRequest())
    theirs = tei_wire.CLASSES["EmbedResponse"].FromString(done.SerializeToString())
    assert np.array(theirs.embeddings, np.float32).tobytes() == vector.tobytes()
    assert (theirs.metadata.compute_chars, theirs.metadata.compute_tokens) == (5, 3)
    assert (theirs.metadata.total_time_ns, theirs.metadata.tokenization_time_ns) == (750_100_000, 100_000)
    assert (theirs.metadata.queue_time_ns, theirs.metadata.inference_time_ns) == (250_000_000, 500_000_000)


def test_normalize_and_dimensions_are_as_over_http():
    vector = np.full(4, 0.5, np.float32)
    done = replace(embedded(vector), norms=[3.0])
    shapes = [
        ({}, [0.5] * 4),
        ({"normalize": True}, [0.5] * 4),
        ({"normalize": False}, [1.5] * 4),
        ({"dimensions": 1}, [1.0]),
        ({"dimensions": 1, "normalize": False}, [1.5]),
    ]
    for fields, numbers in shapes:
        assert list(embed_response(done, tei_pb2.EmbedRequest(**fields)).embeddings) == pytest.approx(numbers)


# --- streams ----------------------------------------------------------------------------------------------------------


async def incoming(requests, read=None):
    for request in requests:
        if read is not None:
            read.append(request)
        yield request
        await asyncio.sleep(0)


def test_answers_come_in_order_and_no_more_than_a_window_is_read():
    read, most = [], 0

    async def reply(request):
        nonlocal most
        most = max(most, len(read) - len(done))
        await asyncio.sleep(1 + (7 - request) % 3)  # some later ones are ready first
        return request * 10

    done = []

    async def main():
        async for message in in_order(incoming(range(20), read), reply, 3):
            done.append(message)  # noqa: PERF401 - the reply looks at it

    run(main())
    assert done == [number * 10 for number in range(20)]
    assert most <= 4  # three are worked on, and one is read ahead


def test_the_first_error_ends_a_stream_and_what_is_left_is_called_off():
    cancelled = []

    async def reply(request):
        if request == 2:
            raise EmptyInput("empty")
        try:
            await asyncio.sleep(request if request < 2 else 100)
        except asyncio.CancelledError:
            cancelled.append(request)
            raise
        return request

    done = []

    async def main():
        async for message in in_order(incoming(range(50)), reply, 5):
            done.append(message)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(EmptyInput):
        run(main())
    assert done == [0, 1]
    assert cancelled
    assert cancelled == [3, 4, 5, 6][: len(cancelled)]


def test_a_client_that_goes_takes_its_queries_along():
    cancelled = []

    async def reply(request):
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(request)
            raise

    async def main():
        async def use():
            async for _ in in_order(incoming(range(50)), reply, 5):
                pass

        using = asyncio.create_task(use())
        await asyncio.sleep(1)
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)

    run(main())
    assert sorted(cancelled) == [0, 1, 2, 3, 4]


def stream(router, requests, *metadata):
    context, done = Context(*metadata), []

    async def main():
        async for message in GrpcApi(router).EmbedStream(incoming(requests), grpc_context=context):
            done.append(message)  # noqa: PERF401 - what came before an error counts

    try:
        run(main())
    except WindveError as error:
        return done, context, error
    return done, context, None


def test_a_stream_s_queries_are_bulk_unless_it_says_otherwise():
    requests = [tei_pb2.EmbedRequest(inputs=text) for text in "abc"]
    for metadata, bulk in [((), True), ((("x-windve-priority", "normal"),), False)]:
        router = FakeRouter()
        done, _, error = stream(router, requests, *metadata)
        assert (len(done), error) == (3, None)
        assert [(queries, asked.get("bulk", False)) for queries, asked in router.asked] == [
            ([text], bulk) for text in "abc"
        ]


def test_a_stream_s_bad_request_is_its_status():
    requests = [tei_pb2.EmbedRequest(inputs="a"), tei_pb2.EmbedRequest(), tei_pb2.EmbedRequest(inputs="b")]
    done, context, error = stream(FakeRouter(), requests)
    assert len(done) == 1
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, EmptyInput)  # Serve asks for it


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
