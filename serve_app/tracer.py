"""Traces of requests: OpenTelemetry spans of what the Router's `Record` says, made when the request has ended.

    request                        SERVER: `POST /v1/embeddings`, `tei.v1.Embed/Embed`
    ├── tokenize                   from its arrival to its last token id
    ├── admission                  of each replica that it was offered to: until it decided, with the predicted finish
    ├── queue                      of each run that its queries waited for
    └── run                        until the last of its queries was answered: so many queries and tokens ran together

Where text is generated (`generation.generation_facts`), of each prompt::

    ├── admission                  of each replica that it was offered to: until it decided
    ├── first_token                from the decision to the first token
    └── stream                     from the first token to the last

The replica's times come with its answers as durations. The time for the way there and back is known only in sum; half
of it counts as the way there, as NTP has it (RFC 5905, section 8).

`opentelemetry` is imported only where `args.traces` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.errors import EngineFailed, SettingsError
from deployments.placement.request import Part, Record
from deployments.settings import Traces
from deployments.transport.channel import Refused
from deployments.transport.frames import Answered
from serve_app.access_log import Ended, Followed
from serve_app.answers import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

Attributes = dict[str, str | int | float | list[str]]
_PROPAGATED = ("traceparent", "tracestate")  # W3C Trace Context
_OURS = 500  # HTTP: from this status on it is an error of the server


class Phase(NamedTuple):
    """A span within a request's. Times are the loop's, s. `error`: what it failed of, in one word."""

    name: str
    began: float
    ended: float
    attributes: Attributes
    error: str | None = None


class Tracer:
    """Makes the spans of one Router replica."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider = provider
        self._tracer = provider.get_tracer("windve", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def exporting(cls, settings: Traces, replica: str) -> Tracer:
        """Spans go to a collector. Raises SettingsError where the packages for it are missing."""
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
        """The span of a request that arrives with these headers, or None where its trace is not sampled."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        sent = {name: headers[key].decode("latin-1") for name in _PROPAGATED if (key := name.encode()) in headers}
        parent = self._propagator.extract(sent, Context())
        span = self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=_ns(began_s))
        return span if span.is_recording() else None

    def end(self, followed: Followed, ended: Ended) -> None:
        """The request has ended: its span and those within it are done."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        span = followed.span
        span.update_name(ended.route)
        span.set_attributes(_about(followed, ended))
        if ended.error is not None and (getattr(ended.error, "status", _OURS) >= _OURS):
            _fail(span, ended.code)
        within = set_span_in_context(span, Context())
        offset_s = followed.began_s - followed.started
        now, facts = followed.started + ended.actual_s, followed.facts
        for phase in phases(followed.record, now) if facts is None else facts.phases(now):
            began, until = _ns(phase.began + offset_s), _ns(phase.ended + offset_s)
            child = self._tracer.start_span(phase.name, within, attributes=phase.attributes, start_time=began)
            if phase.error is not None:
                _fail(child, phase.error)
            child.end(until)
        span.end(_ns(followed.began_s + ended.actual_s))


def trace_id(span: Span) -> str:
    """As `traceparent` has it."""
    return f"{span.get_span_context().trace_id:032x}"


def phases(record: Record, now: float) -> Iterator[Phase]:
    """What a request went through until it ended, `now`."""
    request = record.request
    if request is None:
        return
    sizes: Attributes = {"windve.queries": len(request.queries)}
    if request.tokenised:
        yield Phase("tokenize", request.started, request.tokenised, {**sizes, "windve.tokens": _tokens(record)})
    if not record.parts and record.done is None:  # no replica was asked
        yield Phase("admission", request.tokenised or request.started, now, {**sizes, "windve.admission": "refused"})
    for part, predicted_s in record.parts:
        yield from _at_replica(part, predicted_s, now)


def _at_replica(part: Part, predicted_s: float, now: float) -> Iterator[Phase]:
    pending = part.pending
    outcome, answers = _outcome(part)
    there = pending.settled_at if pending.ended and outcome != "cancelled" else now
    if answers:
        stay_s = max(answer.stay_s for answer in answers)
        there = pending.sent_at + max(0.0, pending.settled_at - pending.sent_at - stay_s) / 2
    place: Attributes = {"windve.pool": part.pool, "windve.replica": part.link.view.replica}
    asked: Attributes = {"windve.queries": pending.size, "windve.predicted_s": predicted_s, "windve.admission": outcome}
    failed = outcome if outcome in {"failed", "lost"} else None
    yield Phase("admission", pending.sent_at, there, place | asked, failed)
    for queue_s, together in groupby(sorted(answers, key=_queue_s), key=_queue_s):  # of one run
        ran = list(together)
        ours: Attributes = {**place, "windve.queries": len(ran)}
        size: Attributes = {"windve.run.queries": ran[0].run_queries, "windve.run.tokens": ran[0].run_tokens}
        began = there + queue_s
        yield Phase("queue", there, began, ours)
        yield Phase("run", began, began + max(answer.compute_s for answer in ran), ours | size)


def _outcome(part: Part) -> tuple[str, list[Answered]]:
    """What the replica decided, in one word, and its answers."""
    outcome = part.pending.outcome
    if not outcome.done() or outcome.cancelled():
        return "cancelled", []
    if (error := outcome.exception()) is not None:
        return "failed" if isinstance(error, EngineFailed) else "lost", []
    found = outcome.result()
    if isinstance(found, Refused):
        return "never" if found.never else "refused", []
    return "admitted", found


def _queue_s(answer: Answered) -> float:
    return answer.queue_s


def _tokens(record: Record) -> int:
    return sum(map(len, record.request.ids)) if record.request is not None else 0


def _about(followed: Followed, ended: Ended) -> Attributes:
    """OpenTelemetry's names where it has some (semantic conventions of HTTP, RPC and GenAI)."""
    record = followed.record
    told: dict[str, Any] = {"windve.request_id": followed.request_id, "windve.key": followed.key}
    if isinstance(ended.status, int):
        method, _, route = ended.route.partition(" ")
        told |= {"http.request.method": method, "http.route": route, "http.response.status_code": ended.status}
    else:
        told |= {"rpc.system.name": "grpc", "rpc.method": ended.route, "rpc.response.status_code": ended.status}
    if ended.code is not None:
        told["error.type"] = ended.code
    if (request := record.request) is not None:
        told |= {
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": _tokens(record),
            "windve.queries": len(request.queries),
            "windve.bulk": request.bulk,
            "windve.deadline_s": request.allowed_s,
            "windve.predicted_s": record.predicted_s,
        }
    if followed.facts is not None:
        told |= {"gen_ai.request.model": record.model, **followed.facts.attributes()}
    if record.done is not None:
        told["windve.pools"] = list(record.done.pools)
    return {name: value for name, value in told.items() if value is not None}


def _fail(span: Span, error: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
