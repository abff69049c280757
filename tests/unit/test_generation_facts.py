"""What the access log and traces say of generations: times by hand, spans as an in-process exporter gets them."""

import numpy as np
import pytest
from opentelemetry.trace import StatusCode
from test_generation_metrics import BULK, PROMISE, Told
from test_tracer import Collector, seconds

from deployments.errors import Busy, EngineFailed
from deployments.generation.request import GenerationRecord, OfferRecord, WantedGeneration
from deployments.generation.text.sampling import Sampling
from serve_app.generation.facts import GenerationFacts
from serve_app.observe.facts import EndedRequest, TracedRequest

ROUTE = "POST /v1/completions"


def recorded(times, *, promise=PROMISE, error=None, lost=False, over=20.0):
    """A generation that arrived at 10.0; the first replica refused it, or was `lost`; tokens come at these times."""
    offers = [OfferRecord("accelerator", "a", 10.1, 10.2, "lost" if lost else "refused")]
    record = GenerationRecord(Told().begin(promise), offers)
    if times is not None:
        offers.append(OfferRecord("cpu", "c", 10.2, 10.3, "admitted"))
        record.streamed.admitted("cpu")
    for at in times or ():
        record.streamed.arrived(at, 0)
    if error is None:
        record.streamed.ended(0, "length")
    record.streamed.over(over, error)
    return record


def facts(*records, sent=0):
    wanted = [WantedGeneration(np.arange(30, dtype=np.int32), 50, Sampling(0.0), record=record) for record in records]
    return GenerationFacts("m", wanted, lambda: sent)


@pytest.mark.parametrize(
    ("times", "promise", "late"),
    [
        ([10.9, 10.99, 11.05], PROMISE, False),
        ([11.1, 11.2], PROMISE, True),  # its first token
        ([10.5, 10.6, 10.9], PROMISE, True),  # its pace
        ([10.5, 10.5, 10.65, 10.7], PROMISE, False),  # one gap is long, and the pace is kept
        ([13.0, 14.0], BULK, False),
    ],
)
def test_late_is_what_the_metrics_count(times, promise, late):
    assert facts(recorded(times, promise=promise)).is_late(0.0, 0.0) == late
    assert facts(recorded([10.5]), recorded(times, promise=promise)).is_late(0.0, 0.0) == late


def test_a_line_gives_the_worst_of_its_prompts():
    told = facts(recorded([10.5, 10.6]), recorded([10.4, 10.45, 10.8]), sent=5).line()
    assert told == {
        "prompts": 2, "tokens": 60, "answer_tokens": 5, "bulk": False, "deadline_s": 1.0, "offers": 4, "pools": ["cpu"],
        "first_token_s": 0.5, "pace_s": pytest.approx(0.2),
    }  # fmt: skip
    told = facts(recorded(None, error=Busy("x", retry_after_s=1.0)), GenerationRecord()).line()
    assert (told["pools"], told["offers"], told["first_token_s"], told["pace_s"]) == ([], 1, None, None)


def traced(found, error=None, ended_at=20.0):
    """The collector after such a request."""
    collector = Collector()

    tracer = collector.observer._tracer
    request = TracedRequest(None, None, 10.0, 10.0, facts=found, span=tracer.begin({}, 10.0))
    tracer.end(request, EndedRequest(ROUTE, 200, ended_at - 10.0, error))
    return collector


def test_the_spans_of_a_generation():
    collector = traced(facts(recorded([10.5, 10.6, 11.0], over=11.0), sent=3), ended_at=11.0)
    request = collector.request
    assert (request.name, request.status.status_code) == (ROUTE, StatusCode.UNSET)
    told = dict(request.attributes)
    assert told.pop("windve.first_token_s") == pytest.approx(0.5)
    assert told.pop("windve.pace_s") == pytest.approx(0.25)
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 3,
        "windve.prompts": 1,
        "windve.bulk": False,
        "windve.deadline_s": 1.0,
        "windve.offers": 2,
        "windve.pools": ("cpu",),
    }
    inner = [span for span in collector.spans if span.parent]
    lengths = {"tokenize": 0.1, "admission": 0.1, "first_token": 0.2, "stream": 0.5}
    assert [span.name for span in inner] == ["tokenize", "admission", "admission", "first_token", "stream"]
    for span in inner:
        assert seconds(span) == pytest.approx(lengths[span.name], abs=1e-3)
        assert span.parent.span_id == request.context.span_id
    outcomes = [(span.attributes["windve.pool"], span.attributes["windve.admission"]) for span in inner[1:3]]
    assert outcomes == [("accelerator", "refused"), ("cpu", "admitted")]
    stream = dict(inner[-1].attributes)
    assert (stream.pop("windve.pace_s"), stream.pop("windve.gap_s")) == (pytest.approx(0.25), pytest.approx(0.4))
    assert stream == {"windve.pool": "cpu", "windve.replica": "c", "windve.answer_tokens": 3}


@pytest.mark.parametrize(
    ("record", "names", "failed"),
    [
        (recorded(None, error=Busy("x", retry_after_s=1.0)), ["tokenize", "admission"], []),
        (recorded(None, error=EngineFailed("x"), lost=True), ["tokenize", "admission"], ["admission"]),
        (recorded([], error=EngineFailed("x")), ["tokenize", "admission", "admission", "first_token"], ["first_token"]),
        (
            recorded([10.5, 10.6], error=EngineFailed("x")),
            ["tokenize", "admission", "admission", "first_token", "stream"],
            ["stream"],
        ),
    ],
)
def test_a_span_says_where_it_failed(record, names, failed):
    spans = [span for span in traced(facts(record), error=EngineFailed("x")).spans if span.parent]
    assert [span.name for span in spans] == names
    assert [span.name for span in spans if span.status.status_code == StatusCode.ERROR] == failed


def test_what_no_replica_was_asked_for_is_one_refusal():
    record = GenerationRecord(Told().begin())
    record.streamed.over(10.5, Busy("x", retry_after_s=1.0))
    (span,) = [span for span in traced(facts(record)).spans if span.parent]
    assert (span.name, span.attributes["windve.admission"]) == ("admission", "refused")
