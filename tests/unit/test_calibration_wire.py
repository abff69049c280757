"""What a calibration of generation says to a service, and reads of it, over HTTP."""

import json
from dataclasses import replace

import pytest
from test_load import serve

from calibration.generation import step_trials
from calibration.generation.promise_proof import payload
from calibration.generation.request_capacity import Arrival
from calibration.generation.step_trials import StepTrials
from calibration.generation.token_stream import send_all
from calibration.load import request_bytes
from calibration.service.application import CalibrationFailed
from deployments.generation.planned_steps import PlannedStep


def answered(ask, *replies):
    """What `ask(address)` returns beside a server that answers one request after another so; and what it was asked."""
    found = []

    async def test(address):
        found.append(await ask(replace(address, prefix="/at")))

    server = serve(test, *replies)
    return found[0], [request.decode().split("\r\n\r\n") for _, request in server.asked]


def reply(status, body):
    content = json.dumps(body).encode()
    return f"HTTP/1.1 {status} x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def streamed(*events):
    chunks = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body


def said(text, finish=None):
    return {"choices": [{"text": text, "finish_reason": finish}]}


STEP = PlannedStep(4, 256, ((0, 512),))
FOUND = {"pool": "cpu", "replica": "one", "seconds": [[0.25, 0.5, 0.25]], "host_seconds": [[0.0, 0.1, 0.0]]}
TOOK = (0.25, 0.5, 0.25), (0.0, 0.1, 0.0)


@pytest.mark.parametrize(
    ("replies", "took", "problem"),
    [
        ([reply(200, FOUND)], TOOK, None),
        ([reply(403, {"error": "not yet"}), reply(503, {"error": "busy"}), reply(200, FOUND)], TOOK, None),
        ([reply(200, {**FOUND, "seconds": [None], "host_seconds": [None]})], None, None),
        ([reply(422, {"error": "no pool"})], None, "the cpu pool refused a planned step: 422 no pool"),
        ([reply(424, {"error": {"message": "lost"}})], None, "the cpu pool refused a planned step: 424 lost"),
        ([b""], None, "a planned step on the cpu pool was not answered"),
    ],
)
def test_a_planned_step_is_asked_for_until_it_is_answered(monkeypatch, replies, took, problem):
    monkeypatch.setattr(step_trials, "_AGAIN_S", 0.0)

    async def ask(address):
        trials = StepTrials(address, [("authorization", "Bearer key")], "secret", "cpu")
        try:
            return await trials.ask(STEP), trials.replicas
        finally:
            trials.close()

    if problem is not None:
        with pytest.raises(CalibrationFailed, match=problem):
            answered(ask, *replies)
        return
    found, asked = answered(ask, *replies)
    assert (found, len(asked)) == ((took, {"one"}), len(replies))
    for head, body in asked:
        assert head.startswith("POST /at/calibration/steps HTTP/1.1")
        assert "x-windve-trial: secret" in head
        assert "authorization: Bearer key" in head
        load = {"rows": 4, "cached": 256, "chunks": [[0, 512]], "host_rows": 0, "copied": 0}
        assert json.loads(body) == {"pool": "cpu", "times": 3, "loads": [load]}


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (
            streamed(said("a"), said("b", "length"), {"choices": [], "usage": {"completion_tokens": 7}}),
            (200, 7, "ab", None),
        ),
        (streamed(said("a"), {"error": {"message": "it died"}}), (200, 0, "a", "it died")),
        (reply(429, {"error": "busy"}), (429, 0, "", None)),
        (b"", (0, 0, "", "IncompleteReadError('0 bytes read on a total of undefined expected bytes')")),
    ],
)
def test_a_stream_is_read_as_it_comes(answer, seen):
    asked = request_bytes(payload("m", Arrival(0.0, 30, 7), seed=1), "/v1/completions")
    (found,), _ = answered(lambda address: send_all(address, [(0.0, asked)]), answer)
    assert (found.status, found.tokens, found.text, found.error) == seen
    assert (found.first_s is None) == (found.status != 200)


def test_a_prompt_has_its_tokens_and_an_answer_just_so_many():
    asked = payload("m", Arrival(0.0, 30, 7), seed=1)
    assert (len(asked["prompt"]), asked["max_tokens"], asked["ignore_eos"]) == (30, 7, True)
