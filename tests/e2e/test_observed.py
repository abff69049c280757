"""What operators see on a real Ray: spans at an OTLP collector, and the access log."""

import contextlib
import itertools
import json

import grpc
import pytest
from test_with_keys import session_logs

from tests.kit import tei_wire
from tests.kit.otlp_collector import Collector, attributes
from tests.kit.service import emulating, wait_until

MARKER = "Zaubertrank-4711"
PARENT_ID = "00f067aa0ba902b7"
DEVICE = {"alpha_s": 0.01, "beta_s": 0.25}


def seconds(span):
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@pytest.fixture(scope="module")
def collector():
    collector = Collector()
    yield collector
    collector.server.stop(0)


@pytest.fixture(scope="module")
def service(collector, shared):
    config = emulating(20.0, accelerator=DEVICE)
    application = config["applications"][0]
    application["args"]["traces"] = {"endpoint": f"http://127.0.0.1:{collector.port}", "sample_ratio": 0.0}
    application["deployments"][0]["user_config"]["access_log"] = "all"
    return shared.serve(config)


def post(service, payload, path="/v1/embeddings", **headers):
    return service.ask(path, payload, [(name.replace("_", "-"), value) for name, value in headers.items()])


def by_id(service, awaited):
    """The lines of the access log by their requests' ids, once the awaited one is there."""
    found = {}

    def is_there():
        for path in session_logs(service):
            if path.name.startswith("access_"):
                found.update({line["request_id"]: line for line in map(json.loads, path.read_text().splitlines())})
        return awaited in found

    wait_until(is_there, f"the line of {awaited}", timeout_s=20)
    return found


def test_a_trace_goes_through_to_the_device(service, collector):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    reply = post(service, {"input": ["a", "b"]}, traceparent=f"00-{trace}-{PARENT_ID}-01")
    assert reply.status == 200
    spans, resources = collector.wait_for(trace, "POST /v1/embeddings", "tokenize", "admission", "queue", "run")
    assert {(one["service.name"], one["service.version"]) for one in resources} == {("windve", "0.1.0")}
    (request,) = spans["POST /v1/embeddings"]
    assert request.parent_span_id.hex() == PARENT_ID
    for name in ("tokenize", "admission", "queue", "run"):
        assert [span.parent_span_id for span in spans[name]] == [request.span_id]
    (admission,), (run,) = spans["admission"], spans["run"]
    told, ran = attributes(admission), attributes(run)
    assert (told["windve.admission"], told["windve.pool"], ran["windve.batch.queries"]) == (
        "admitted",
        "accelerator",
        2,
    )
    assert attributes(request)["windve.predicted_s"] > DEVICE["beta_s"]
    assert seconds(run) == pytest.approx(int(reply.headers["x-inference-time"]) / 1000, abs=0.002)  # one measurement
    assert seconds(request) >= seconds(run) > DEVICE["beta_s"]


def test_a_line_of_the_access_log(service):
    reply = post(service, {"input": ["a", "b"]}, x_request_id="order-7")
    assert reply.headers["x-request-id"] == "order-7"
    line = by_id(service, "order-7")["order-7"]
    assert (line["route"], line["status"], line["model"]) == ("POST /v1/embeddings", 200, "emulated")
    assert (line["queries"], line["pools"], line["offers"]) == (2, ["accelerator"], 1)
    assert line["tokens"] == int(reply.headers["x-compute-tokens"])
    assert line["actual_s"] >= int(reply.headers["x-inference-time"]) / 1000 > DEVICE["beta_s"]
    assert line["predicted_s"] > DEVICE["beta_s"]
    with tei_wire.connected(service.grpc_port) as client:
        client.call("Embed/Embed", inputs="a", metadata=[("x-request-id", "order-8")])
        refused = client.refused("Embed/Embed", inputs="", metadata=[("x-request-id", "order-9")])
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
    told = by_id(service, "order-9")
    assert {told["order-8"]["route"], told["order-9"]["route"]} == {"tei.v1.Embed/Embed"}
    assert (told["order-8"]["status"], told["order-9"]["status"]) == ("OK", "INVALID_ARGUMENT")


def test_no_log_and_no_span_holds_a_text(service, collector):
    """Neither ours nor Serve's."""
    paths = "/v1/embeddings", "/embed", "/", "/v2/embed", "/tokenize", "/rerank", f"/{MARKER}", "/similarity"
    payloads = (
        {"input": MARKER, "inputs": MARKER, "texts": [MARKER]},
        {"input": MARKER, "inputs": [MARKER, 1], "texts": [MARKER], "model": MARKER, "prompt_name": MARKER},
        {"inputs": {"source_sentence": MARKER, "sentences": [MARKER]}, MARKER: MARKER},
    )
    for path, payload, timeout_ms in itertools.product(paths, payloads, ("9000", MARKER)):
        post(service, payload, path, traceparent=f"00-{'3' * 32}-{PARENT_ID}-01", x_request_timeout_ms=timeout_ms)
    with tei_wire.connected(service.grpc_port) as client:
        for metadata in ([], [("model", MARKER)], [("x-windve-priority", MARKER)]):
            for call in ("Embed/Embed", "Tokenize/Tokenize", "Predict/Predict"):
                with contextlib.suppress(grpc.RpcError):
                    client.call(call, metadata=metadata, inputs=MARKER)
    post(service, {"input": "a"}, x_request_id="the-last", traceparent=f"00-{'4' * 32}-{PARENT_ID}-01")
    by_id(service, "the-last")
    collector.wait_for("4" * 32, "POST /v1/embeddings")
    logs = session_logs(service)
    assert any(path.name.startswith("access_windve_Router") for path in logs)
    assert [path for path in logs if MARKER.encode() in path.read_bytes()] == []
    assert not [one for one in collector.requests if MARKER.encode() in one.SerializeToString()]
    assert len(collector.spans("3" * 32)[0]["POST other"]) == 6
