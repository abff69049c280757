"""Generation over a real gRPC server that hands calls on as Serve does, to a Router that generates at once."""

import asyncio
import contextlib
import dataclasses
import time
from socket import gethostname
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve.grpc_util import RayServegRPCContext

from deployments.errors import Busy, ReplicaLost
from deployments.serve_adapter.grpc_handlers import TIME_LEFT
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.generation.answers import TokenNames
from serve_app.generation.api import CompletionsApi
from serve_app.generation.generation_services import GENERATE, add_to_server
from serve_app.generation.grpc_calls import GenerationCalls
from serve_app.observe.observer import Observer
from serve_app.proto.generation_pb2 import Chat, ChatMessage, GenerateRequest, GenerateResponse, TokenIds, Usage
from tests.kit.asgi_client import post
from tests.kit.generating import ANSWER, Generating, settings_of
from tests.kit.grpc_caller import answer
from tests.kit.observed import observed

PROMPT = "Where does the overflow go?"
STATUS = grpc.StatusCode


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    router = Generating(tmp_path_factory.mktemp("generating") / "model")
    router.config = SimpleNamespace(ttft_s=1000.0)
    router.settings = SimpleNamespace(limits=settings_of().limits, emulated=True)
    with contextlib.closing(CompletionsApi(router, settings_of())) as api:
        yield router, api


@pytest.fixture
def world(made):
    made[0].reset()
    return made[0]


@pytest.fixture
def api(made):
    return made[1]


def as_serve(calls, *, proxy):
    """What Serve puts in the place of a servicer. `proxy`: its own, else a Router that HAProxy asks."""

    async def generate(request, context):
        told = RayServegRPCContext(context)
        async for message in calls.Generate(request, grpc_context=told):
            if proxy:
                told._set_on_grpc_context(context)
            yield message.SerializeToString()
        if not proxy:
            told._set_on_grpc_context(context)
        if not context.code():
            context.set_code(STATUS.OK)

    return generate


class Client:
    """`ask` is one call: its messages, and how it ended."""

    def __init__(self, world, asking, proxy):
        self.world, self.asking, self.proxy, self.keys = world, asking, proxy, None
        self.observer, self.written = observed()

    @contextlib.asynccontextmanager
    async def served(self):
        calls = GenerationCalls(self.world, self.asking, TokenNames(self.world.tokenizer), self.keys, self.observer)
        handler = as_serve(calls, proxy=self.proxy)
        server = gRPCGenericServer(lambda **_: handler)
        add_to_server(SimpleNamespace(Generate=None, Check=None, Watch=None), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.unary_stream(
                f"/{GENERATE}",
                request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
                response_deserializer=GenerateResponse.FromString,
            )
        await server.stop(None)

    def ask(self, request, *metadata, timeout=None):
        async def run():
            async with self.served() as generate:
                call = generate(request, metadata=list(metadata), timeout=timeout)
                messages = []
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for message in call:
                        messages.append(message)  # noqa: PERF401 - what came before an error counts
                return SimpleNamespace(
                    messages=messages,
                    text="".join(message.text for message in messages if not message.answer),
                    status=(await call.code(), await call.details()),
                    told={
                        key: value
                        for key, value in await call.trailing_metadata()
                        if key not in {"x-request-id", "x-windve-space"}
                    },
                )

        return asyncio.run(run())


@pytest.fixture(params=[False, True], ids=["router", "proxy"])
def client(request, world, api):
    return Client(world, api.asking, request.param)


def test_a_prompt_is_answered_by_a_stream_with_its_usage_at_the_end(client, world):
    world.cached = 5
    reply = client.ask(GenerateRequest(prompt=PROMPT))
    (asked,) = world.asked
    assert asked.ids.tolist() == world.tokenizer.encode(PROMPT).ids
    tokens = len(world.answer(0, asked))
    assert (reply.text, reply.status) == (ANSWER, (STATUS.OK, ""))
    assert [one.finish_reason for one in reply.messages if one.finish_reason] == ["stop"]
    usage = Usage(prompt_tokens=len(asked.ids), completion_tokens=tokens, cached_tokens=5)
    assert reply.messages[-1] == GenerateResponse(usage=usage)
    assert not any(one.HasField("usage") or one.tokens for one in reply.messages[:-1])
    assert reply.told == {"x-windve-emulated": "true"}
    (line,) = client.written.lines
    sizes = {"tokens": len(asked.ids), "answer_tokens": tokens}
    assert line.items() >= {"route": GENERATE, "error": None, **sizes}.items()
    assert world.open == 0


KWARGS = Struct()
KWARGS.update({"enable_thinking": False})
TURNS = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
SHARED = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -4, "n": 2, "stop": ["a", "b"]}


@pytest.mark.parametrize(
    ("request_", "path", "body"),
    [
        (GenerateRequest(ids=TokenIds(ids=[5])), "/v1/completions", {"prompt": [5]}),
        (
            GenerateRequest(ids=TokenIds(ids=[5, 6]), logprobs=2, ignore_eos=True, model="gpt-4o", **SHARED),
            "/v1/completions",
            {"prompt": [5, 6], "logprobs": 2, "ignore_eos": True, **SHARED},
        ),
        (
            GenerateRequest(chat=Chat(messages=[ChatMessage(**turn) for turn in TURNS], chat_template_kwargs=KWARGS)),
            "/v1/chat/completions",
            {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        (GenerateRequest(prompt=PROMPT, n=2), "/v1/completions", {"prompt": PROMPT, "n": 2}),
    ],
    ids=["least", "most", "chat", "prompt"],
)
def test_a_call_asks_and_answers_as_its_route(client, world, api, request_, path, body):
    headers = [("x-windve-priority", "bulk"), ("x-request-timeout-ms", "1500")]
    reply = client.ask(request_, *headers)
    sent = [(name.encode(), value.encode()) for name, value in headers]
    choices = post(api, path, body, headers=sent).json["choices"]
    over_grpc, over_http = (
        {**dataclasses.asdict(asked), "ids": asked.ids.tolist(), "received": None, "tokenizing_s": 0, "record": None}
        for asked in world.asked
    )
    assert over_grpc == over_http
    assert [one.get("text") or one["message"]["content"] for one in choices] == [
        "".join(message.text for message in reply.messages if message.answer == number)
        for number in range(len(choices))
    ]
    finished = [(one.answer, one.finish_reason) for one in reply.messages if one.finish_reason]
    assert sorted(finished) == [(one["index"], one["finish_reason"]) for one in choices]


def test_logprobs_name_tokens_and_their_alternatives(client, world):
    reply = client.ask(GenerateRequest(prompt=PROMPT, logprobs=2, max_tokens=20))
    tokens = [token for message in reply.messages for token in message.tokens]
    assert [token.id for token in tokens] == world.answer(0, world.asked[0])
    assert b"".join(token.utf8 for token in tokens).decode(errors="ignore").startswith(ANSWER[:20])
    assert {token.logprob for token in tokens} == {-0.5}
    assert [one.logprob for one in tokens[0].alternatives] == [-0.5, -1.5]


NO_JSON = Struct(fields={"a": {"number_value": float("inf")}})


@pytest.mark.parametrize(
    ("request_", "status", "sentence"),
    [
        (b"\xff\xff", STATUS.INVALID_ARGUMENT, "these 2 bytes are not a windve.v1.GenerateRequest"),
        (GenerateRequest(), STATUS.INVALID_ARGUMENT, "the request has no input; send a prompt, ids or a chat"),
        (GenerateRequest(prompt="x" * 6000), STATUS.INVALID_ARGUMENT, "more bytes than this server accepts (5000)"),
        (GenerateRequest(prompt="a", top_p=float("nan")), STATUS.INVALID_ARGUMENT, "top_p must be a number above 0"),
        (GenerateRequest(prompt="a", model="b"), STATUS.NOT_FOUND, "b"),
        (GenerateRequest(chat=Chat()), STATUS.INVALID_ARGUMENT, "messages is an empty list"),
        (
            GenerateRequest(chat=Chat(messages=[ChatMessage(**TURNS[0])], chat_template_kwargs=NO_JSON)),
            *(STATUS.INVALID_ARGUMENT, "chat_template_kwargs is not JSON"),
        ),
    ],
)
def test_what_must_change_is_said_in_a_sentence(client, world, request_, status, sentence):
    reply = client.ask(request_)
    assert (reply.status[0], reply.messages, world.asked) == (status, [], [])
    assert sentence in reply.status[1]


def test_who_is_not_admitted_hears_when_to_come_back(client, world):
    """test_grpc.py has each error's status."""
    world.refuses = Busy("x", retry_after_s=0.25)
    reply = client.ask(GenerateRequest(prompt=PROMPT))
    assert (reply.status, reply.messages) == ((STATUS.RESOURCE_EXHAUSTED, "x"), [])
    assert reply.told["retry-after-ms"] == reply.told["grpc-retry-pushback-ms"] == "250"
    assert [line["error"] for line in client.written.lines] == ["busy"]


def test_an_error_in_the_middle_comes_behind_what_was_said(client, world):
    world.breaks = (5, ReplicaLost("x"))
    reply = client.ask(GenerateRequest(prompt=PROMPT))
    assert reply.status == (STATUS.UNAVAILABLE, "x")
    assert reply.text
    assert ANSWER.startswith(reply.text)
    assert world.open == 0


def test_keys(client, world):
    client.keys = ApiKeys([ApiKey("secret", "search")])
    assert client.ask(GenerateRequest(prompt=PROMPT)).status[0] == STATUS.UNAUTHENTICATED
    assert client.ask(GenerateRequest(prompt=PROMPT), ("authorization", "Bearer secret")).text == ANSWER
    assert world.asked[0].client.tenant.name == "search"
    assert [line["tenant"] for line in client.written.lines] == [None, "search"]


@pytest.mark.parametrize(
    ("timeout", "metadata", "least", "most"),
    [
        (3000, [], None, None),  # more than is promised; gRPC rounds what it sends up
        (600, [], 300, 601),
        (600, [("x-request-timeout-ms", "700")], 0.7, 0.7),
        (600, [("x-request-timeout-ms", "900000")], 300, 601),
        (None, [(TIME_LEFT, "5")], None, None),  # a client's own word for it is none
    ],
)
def test_the_calls_deadline_is_one_for_the_first_token(client, world, timeout, metadata, least, most):
    client.ask(GenerateRequest(prompt=PROMPT), *metadata, timeout=timeout)
    found = world.asked[0].timeout_s
    assert found is None if least is None else least <= found <= most


@pytest.mark.parametrize("timeout", [None, 600])
def test_what_waited_for_the_router_has_so_much_less_time(client, world, timeout):
    """By `x-request-start`, which HAProxy sets. gRPC's own deadline is what is left when the Router reads the call."""
    began, start = time.monotonic(), time.time() - 100
    client.ask(
        GenerateRequest(prompt=PROMPT), ("x-request-start", f"t={start * 1e6:.0f} {gethostname()}"), timeout=timeout
    )
    (wanted,) = world.asked
    assert -101 < wanted.received - began < -95
    assert wanted.timeout_s == (timeout and pytest.approx(700, abs=30))


@pytest.mark.real_time
@pytest.mark.parametrize("by", ["cancelling", "its deadline"])
async def test_a_call_that_ends_early_frees_its_place(client, world, by):
    world.pace_s = 0.05
    async with client.served() as generate:
        timeout = 2 if by == "its deadline" else None
        call = generate(GenerateRequest(prompt=PROMPT, ignore_eos=True, max_tokens=300), timeout=timeout)
        await call.read()
        assert world.open == 1
        if by == "cancelling":
            call.cancel()
        await client.written.news.wait()
        assert (world.open, world.tokens < 300) == (0, True)
    assert [line["error"] for line in client.written.lines] == ["cancelled"]


@pytest.mark.parametrize(
    ("live_pools", "serving"),
    [
        ({"accelerator": True, "cpu": True}, {"", "windve.v1.Generation", "windve.accelerator", "windve.cpu"}),
        ({"accelerator": False, "cpu": True}, {"", "windve.v1.Generation", "windve.cpu"}),
        ({"accelerator": False}, set()),
    ],
)
def test_health_follows_the_pools_and_needs_no_key(world, api, live_pools, serving):
    keys = ApiKeys([ApiKey("secret", "search")])
    calls = GenerationCalls(world, api.asking, TokenNames(world.tokenizer), keys, Observer())

    def check(service, *metadata):
        told, context = answer(calls, "Check", HealthCheckRequest(service=service), *metadata)
        return context.code or HealthCheckResponse.ServingStatus.Name(told.status)

    world.live_pools = live_pools
    for service in ("", "windve.v1.Generation", "windve.accelerator", "windve.cpu"):
        assert check(service) == ("SERVING" if service in serving else "NOT_SERVING")
    assert check("tei.v1.Embed") == check("", ("model", "b")) == STATUS.NOT_FOUND
    assert check("", ("model", "gpt-4o")) == check("")
