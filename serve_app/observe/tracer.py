"""Traces of requests: OpenTelemetry spans, built from what the Router kept of the request, when it has ended.

    request                        SERVER: `POST /v1/embeddings`, `tei.v1.Embed/Embed`
    ├── tokenize                   from arrival to the last token id
    ├── admission                  per replica that was asked: until it decided, with the predicted finish
    ├── queue                      per batch: until the batch started
    └── run                        per batch: until the request's last query was answered; has the batch's size

For generated text (`generation.facts`), per prompt::

    ├── admission                  per replica that was asked: until it decided
    ├── first_token                from the decision to the first token
    └── stream                     from the first token to the last

The replica's times arrive with its answers as durations. Only the sum of the network times there and back is known;
half of it is taken as the time there, as in NTP (RFC 5905, section 8).

`opentelemetry` is imported only where `args.traces` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deployments.errors import SettingsError, is_ours
from deployments.settings import Traces
from serve_app.observe.facts import Attributes, EndedRequest, TracedRequest
from serve_app.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_PROPAGATED = ("traceparent", "tracestate")  # W3C Trace Context
_NAMES = {"tokens": "gen_ai.usage.input_tokens", "answer_tokens": "gen_ai.usage.output_tokens"}


class Tracer:
    """Creates the spans of one Router replica."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self._tracer = provider.get_tracer("windve", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def exporting(cls, settings: Traces, replica: str) -> Tracer:
        """A tracer that exports spans to a collector. Raises SettingsError if the packages for it are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ImportError as error:
            raise SettingsError("args.traces", f"{error.name} is missing; pip install 'windve[traces]'") from None
        ratio = settings.sample_ratio
        about = {"service.name": "windve", "service.version": VERSION, "service.instance.id": replica}
        provider = TracerProvider(
            sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio),
            resource=Resource.create().merge(Resource(about)).merge(OTELResourceDetector().detect()),
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
        return cls(provider)

    def begin(self, headers: Mapping[bytes, bytes], began_s: float) -> Span | None:
        """The span of a request that arrives with these headers; None if its trace is not sampled."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        sent = {name: headers[key].decode("latin-1") for name in _PROPAGATED if (key := name.encode()) in headers}
        parent = self._propagator.extract(sent, Context())
        span = self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=_ns(began_s))
        return span if span.is_recording() else None

    def end(self, traced: TracedRequest, ended: EndedRequest) -> None:
        """End the request's span and create those within it."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        span = traced.span
        span.update_name(ended.route)
        span.set_attributes(_about(traced, ended))
        if ended.error is not None and is_ours(ended.error):
            _fail(span, ended.code)
        within = set_span_in_context(span, Context())
        offset_s = traced.began_s - traced.started
        for phase in () if traced.facts is None else traced.facts.phases(traced.started + ended.actual_s):
            began, until = _ns(phase.began + offset_s), _ns(phase.ended + offset_s)
            child = self._tracer.start_span(phase.name, within, attributes=phase.attributes, start_time=began)
            if phase.error is not None:
                _fail(child, phase.error)
            child.end(until)
        span.end(_ns(traced.began_s + ended.actual_s))


def _about(traced: TracedRequest, ended: EndedRequest) -> Attributes:
    """The span's attributes, named by OpenTelemetry's semantic conventions (HTTP, RPC, GenAI) where they exist."""
    told: dict[str, Any] = {"windve.request_id": traced.request_id, "windve.tenant": traced.tenant}
    if isinstance(ended.status, int):
        method, _, route = ended.route.partition(" ")
        told |= {"http.request.method": method, "http.route": route, "http.response.status_code": ended.status}
    else:
        told |= {"rpc.system.name": "grpc", "rpc.method": ended.route, "rpc.response.status_code": ended.status}
    if ended.code is not None:
        told["error.type"] = ended.code
    if traced.facts is not None:
        told["gen_ai.request.model"] = traced.model
        told |= {_NAMES.get(name, f"windve.{name}"): value for name, value in traced.facts.line().items()}
    return {name: value for name, value in told.items() if value is not None}


def _fail(span: Span, error: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
