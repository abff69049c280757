"""The access log: which requests get a line, what it says, and that it never says what a client wrote."""

import asyncio
import json
import logging
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.embedding.config import RouterConfig
from deployments.embedding.request import Request
from deployments.errors import Busy, DeadlineExceeded, EngineFailed, InvalidInput, Unauthorized, Unavailable
from deployments.serve_adapter.replica_process import access_log_handler
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.embedding.api import HttpApi
from serve_app.embedding.facts import EmbeddingFacts
from serve_app.embedding.routes import ALL_ROUTES, routes_of
from serve_app.observe.access_log import LineWriter, is_wanted
from serve_app.observe.facts import EndedRequest, TracedRequest
from serve_app.proto.tei_pb2 import EmbedRequest, EncodeRequest, PredictRequest
from tests.kit.asgi_client import ask
from tests.kit.fake_router import SPACE, FakeRouter
from tests.kit.grpc_caller import Context, answer, incoming, stream, tei_calls
from tests.kit.observed import observed
from tests.kit.router_world import Replica, World

MARKER = "Zaubertrank-4711"
LEVELS = ("off", "slow", "errors", "all")


async def test_nothing_is_traced_until_a_config_asks():
    observer, written = observed("off")
    assert not observer.on
    observer.begin = None  # not called
    assert (await ask(HttpApi(FakeRouter(), None, observer), "POST", "/embed", {"inputs": "a"})).status == 200
    assert written.lines == []


def test_off_may_be_written_as_yaml_reads_it():
    assert RouterConfig.parse({"slo_s": 1.0, "access_log": False}).access_log == "off"


def traced(*, allowed_s=None, late=None):
    """Of a request with this deadline; or of a generation, whose route says whether it was late."""
    made = TracedRequest("id", None, 0.0, 0.0)
    if late is not None:
        made.facts = SimpleNamespace(is_late=lambda actual_s, slo_s: late)
    if allowed_s is not None:
        made.facts = EmbeddingFacts(Request(["a"], model="m", due=allowed_s))
    return made


PLAIN = traced()


@pytest.mark.parametrize(
    ("error", "seconds", "one", "levels"),
    [
        (None, 0.9, PLAIN, {"all"}),
        (None, 1.1, PLAIN, {"all", "errors", "slow"}),
        (None, 1.1, traced(allowed_s=5.0), {"all"}),
        (None, 0.3, traced(allowed_s=0.2), {"all", "errors", "slow"}),
        (None, 60.0, traced(late=False), {"all"}),
        (None, 0.1, traced(late=True), {"all", "errors", "slow"}),
        (InvalidInput("x"), 0.1, PLAIN, {"all", "errors"}),
        (Busy("x", retry_after_s=1), 0.1, PLAIN, {"all", "errors"}),
        (EngineFailed("x"), 0.1, PLAIN, {"all", "errors", "slow"}),
        (Unavailable("x"), 0.1, PLAIN, {"all", "errors", "slow"}),
        (DeadlineExceeded("x"), 0.1, PLAIN, {"all", "errors", "slow"}),
        (asyncio.CancelledError(), 0.1, PLAIN, {"all", "errors"}),
        (ValueError("a bug"), 0.1, PLAIN, {"all", "errors", "slow"}),
    ],
)
def test_which_level_wants_which_request(error, seconds, one, levels):
    ended = EndedRequest("POST /embed", 200, seconds, error)
    assert {level for level in LEVELS if is_wanted(level, one, ended, 1.0)} == levels


async def test_a_line_has_the_client_s_ids():
    observer, written = observed()
    parent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    ids = [(b"x-request-id", b"order-7"), (b"traceparent", parent)]
    await ask(HttpApi(FakeRouter(), None, observer), "POST", "/embed", {"inputs": "a"}, headers=ids)
    (line,) = written.lines
    assert (line["request_id"], line["trace_id"]) == ("order-7", "4bf92f3577b34da6a3ce929d0e0e4736")
    assert (line["route"], line["status"], line["error"]) == ("POST /embed", 200, None)


async def test_probes_are_left_out_while_they_find_all_well():
    observer, written = observed()
    router = FakeRouter()
    api = HttpApi(router, None, observer)
    await ask(api, "GET", "/health")
    assert written.lines == []
    router.can_answer = False
    await ask(api, "GET", "/health")
    (line,) = written.lines
    assert (line["route"], line["status"], line["error"]) == ("GET /health", 503, "unavailable")


# --- the writer, a thread of its own ----------------------------------------------------------------------------------


class Kept(logging.Handler):
    """Keeps what it is given; `news` is set each time."""

    def __init__(self, file=None):
        super().__init__()
        self.lines, self.news, self.file = [], asyncio.Event(), file
        self.loop = asyncio.get_running_loop()

    def emit(self, record):
        try:
            if self.file is not None:
                self.file.write_text("x")
            self.lines += [json.loads(line) for line in record.getMessage().splitlines()]
        except OSError:
            self.handleError(record)
        self.loop.call_soon_threadsafe(self.news.set)


@pytest.mark.real_time
async def test_lines_are_written_in_a_thread_and_what_is_too_much_is_counted(monkeypatch):
    monkeypatch.setattr("serve_app.observe.access_log._MOST_WAITING", 2)
    kept = Kept()
    writer = LineWriter(kept)
    for number in range(5):
        writer.add({"number": number})
    assert kept.lines == []
    await kept.news.wait()
    assert kept.lines == [{"number": 0}, {"number": 1}, {"dropped": 3}]
    kept.news.clear()
    writer.add({"number": 5})
    await kept.news.wait()
    writer.add({"number": 6})
    writer.close()
    assert kept.lines[3:] == [{"number": 5}, {"number": 6}]


@pytest.mark.real_time
async def test_a_disk_that_is_full_breaks_nothing(caplog):
    full = Kept(Path("/dev/full"))
    writer = LineWriter(full)
    for _ in range(3):
        writer.add({})
        await full.news.wait()
        full.news.clear()
    assert [record.message for record in caplog.records if "access log" in record.message] == [
        "cannot write the access log ([Errno 28] No space left on device); lines are lost until the problem is fixed"
    ]


def test_the_file_is_beside_serve_s_own_and_rotates_as_it_does(tmp_path, monkeypatch):
    serves = RotatingFileHandler(tmp_path / "replica_windve_Router_r1.log", maxBytes=100, backupCount=2)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [MemoryHandler(1, target=serves)])
    handler = access_log_handler()
    path = tmp_path / "access_windve_Router_r1.log"
    assert not path.exists()  # before the first line
    for number in range(20):
        handler.emit(logging.makeLogRecord({"msg": f"line {number:02}, of thirty characters"}))
    handler.close()
    serves.close()
    assert sorted(found.name for found in tmp_path.iterdir() if found.name.startswith("access")) == [
        *(path.name, f"{path.name}.1", f"{path.name}.2")
    ]
    assert path.stat().st_size <= 100


# --- no text of a client ----------------------------------------------------------------------------------------------

BODIES = [
    {"input": MARKER, "inputs": MARKER, "texts": [MARKER], "prompt": MARKER, "query": MARKER, "documents": [MARKER]},
    {"inputs": [MARKER, MARKER], "input": [MARKER], "query": MARKER, "texts": [MARKER], "prompt": MARKER},
    {"inputs": {"source_sentence": MARKER, "sentences": [MARKER]}, "model": MARKER, "prompt_name": MARKER},
    {"inputs": [[MARKER] * 3], MARKER: MARKER},
    [MARKER],
    MARKER,
]
HEADERS = [
    (b"x-request-id", b"<" + MARKER.encode() + b">"),
    (b"traceparent", MARKER.encode()),
    (b"x-request-timeout-ms", MARKER.encode()),
    (b"x-windve-priority", MARKER.encode()),
    (b"authorization", b"Bearer " + MARKER.encode()),
    (b"user-agent", MARKER.encode()),
]
ERRORS = [
    None,
    InvalidInput(f"bad: {MARKER}", param=MARKER),
    EngineFailed(f"failed: {MARKER}"),
    Busy(MARKER, retry_after_s=1),
]


async def ask_everything(api):
    for path in sorted(ALL_ROUTES | {"/", "/tokenize", "/decode", f"/{MARKER}", f"/v1/models/{MARKER}", "/info"}):
        for body in (*BODIES, MARKER.encode()):
            await ask(api, "POST", path, body)
        for header in HEADERS:
            await ask(api, "POST", path, BODIES[0], headers=[header])
        await ask(api, "GET", path)
        await ask(api, MARKER, path, MARKER.encode())


class Failing(FakeRouter):
    """Fails in all that is not asked of replicas."""

    async def tokenize(self, texts, **_):
        raise InvalidInput(f"no token of {texts}")

    decode = tokenize

    async def hear_replicas(self):
        raise Unavailable(MARKER)


@pytest.mark.parametrize("keys", [None, ApiKeys(["another"])])
@pytest.mark.parametrize("kind", ["embedding", "reranker", "classifier", "sparse", "multi_vector"])
async def test_no_line_and_no_other_log_has_what_a_client_wrote_over_http(kind, keys, caplog):
    caplog.set_level(logging.DEBUG)
    observer, written = observed()
    for error in ERRORS:
        await ask_everything(HttpApi(Failing(kind, error=error), keys, observer))
    assert len(written.lines) > 1000
    assert {line["route"].split()[1] for line in written.lines} >= {*routes_of((kind,)), "other", "/v1/models/{name}"}
    assert MARKER not in json.dumps(written.lines)
    assert MARKER not in caplog.text


@pytest.mark.parametrize("metadata", [(), (("model", MARKER),), (("authorization", MARKER),)])
@pytest.mark.parametrize("error", ERRORS)
def test_no_line_and_no_other_log_has_what_a_client_wrote_over_grpc(error, metadata, caplog):
    caplog.set_level(logging.DEBUG)
    observer, written = observed()
    api = tei_calls(Failing(error=error), None, observer)
    for call, message in {"Embed": EmbedRequest, "Predict": PredictRequest, "Tokenize": EncodeRequest}.items():
        answer(api, call, message(inputs=MARKER), *metadata)
    answer(api, "Embed", InvalidInput(MARKER), *metadata)
    stream(api, "EmbedStream", [EmbedRequest(inputs=MARKER)] * 3, *metadata)
    assert {line["route"] for line in written.lines} >= {"tei.v1.Embed/Embed", "tei.v1.Predict/Predict"}
    assert MARKER not in json.dumps(written.lines)
    assert MARKER not in caplog.text


@pytest.mark.parametrize(
    ("keys", "metadata", "status", "count"),
    [(None, ("x-request-id", "s-1"), "OK", 3), (ApiKeys(["another"]), ("x-request-id", "s-1"), "UNAUTHENTICATED", 1)],
)
def test_each_message_of_a_stream_is_a_line_and_one_that_is_not_let_in(keys, metadata, status, count):
    observer, written = observed()
    _, _, error = stream(
        tei_calls(FakeRouter(), keys, observer), "EmbedStream", [EmbedRequest(inputs="a")] * 3, metadata
    )
    assert isinstance(error, Unauthorized) == (keys is not None)
    told = [(line["route"], line["status"], line["request_id"]) for line in written.lines]
    assert told == [("tei.v1.Embed/EmbedStream", status, "s-1")] * count


async def test_a_line_has_the_name_of_the_key_that_was_shown():
    keys = ApiKeys([ApiKey("sk-one", "team")])
    observer, written = observed()
    api, shown = HttpApi(FakeRouter(), keys, observer), [(b"authorization", b"Bearer sk-one")]
    for body, headers in (({"inputs": "a"}, shown), ({"wrong": "a"}, shown), ({"inputs": "a"}, [])):
        await ask(api, "POST", "/embed", body, headers=headers)
    router = await World({"accelerator": [Replica("a")]}).router()
    calls, context = tei_calls(router, keys, observer), Context(("authorization", "Bearer sk-one"))
    await calls.Embed(EmbedRequest(inputs="a"), context)
    [_ async for _ in calls.EmbedStream(incoming([EmbedRequest(inputs="a")]), context)]
    assert [(line["route"], line["status"], line["tenant"]) for line in written.lines] == [
        ("POST /embed", 200, "team"),
        ("POST /embed", 422, "team"),
        ("POST /embed", 401, None),
        ("tei.v1.Embed/Embed", "OK", "team"),
        ("tei.v1.Embed/EmbedStream", "OK", "team"),
    ]
    assert "sk-one" not in json.dumps(written.lines)


@pytest.mark.parametrize(("given", "told"), [([("x-request-id", "mine")], "mine"), ([], "of-serve")])
async def test_a_call_s_answer_carries_the_id_that_serve_or_the_client_gave(given, told):
    context = Context(*given)
    context.trailing = {"request_id": "of-serve"}
    await tei_calls(FakeRouter()).Embed(EmbedRequest(inputs="a"), context)
    assert context.trailing == {"x-request-id": told, "x-windve-pool": "cpu", "x-windve-space": SPACE}
