"""What a calibration of generation says to a service, and reads of it, over HTTP."""

import asyncio
import json

import pytest

from calibration.generation import step_trials
from calibration.generation.promise_proof import payload
from calibration.generation.request_capacity import Arrival
from calibration.generation.step_trials import StepTrials
from calibration.generation.token_stream import Streamed, send_all
from calibration.load import Address, request_bytes
from calibration.service.application import CalibrationFailed
from deployments.generation.timed_steps import PlannedStep


class Scripted:
    """A server that answers one request after another as it is told."""

    def __init__(self, *replies):
        self.replies, self.asked = list(replies), []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return self, Address("127.0.0.1", self.server.sockets[0].getsockname()[1], "/at")

    async def __aexit__(self, *_):
        self.server.close()

    async def serve(self, reader, writer):
        while self.replies:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
            self.asked.append((head, json.loads(await reader.readexactly(length))))
            writer.write(self.replies.pop(0))
        writer.close()


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
        ([reply(422, {"error": "no pool"})], None, "the cpu pool runs no planned step: 422 no pool"),
        ([reply(424, {"error": {"message": "lost"}})], None, "the cpu pool runs no planned step: 424 lost"),
        ([b""], None, "a planned step on the cpu pool was not answered"),
    ],
)
def test_a_planned_step_is_asked_for_until_it_is_answered(monkeypatch, replies, took, problem):
    monkeypatch.setattr(step_trials, "_AGAIN_S", 0.0)

    async def ask():
        async with Scripted(*replies) as (server, address):
            trials = StepTrials(address, [("authorization", "Bearer key")], "secret", "cpu")
            try:
                return await trials.ask(STEP), trials.replicas, server.asked
            finally:
                trials.close()

    if problem is not None:
        with pytest.raises(CalibrationFailed, match=problem):
            asyncio.run(ask())
        return
    found, replicas, asked = asyncio.run(ask())
    assert (found, replicas, len(asked)) == (took, {"one"}, len(replies))
    for head, body in asked:
        assert head.startswith("POST /at/calibration/steps HTTP/1.1")
        assert "x-windve-trial: secret" in head
        assert "authorization: Bearer key" in head
        load = {"rows": 4, "cached": 256, "chunks": [[0, 512]], "host_rows": 0, "copied": 0}
        assert body == {"pool": "cpu", "times": 3, "loads": [load]}


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (
            streamed(said("a"), said("b", "length"), {"choices": [], "usage": {"completion_tokens": 7}}),
            (200, 7, "ab", None),
        ),
        (streamed(said("a"), {"error": {"message": "it died"}}), (200, 0, "a", "it died")),
        (reply(429, {"error": "busy"}), (429, 0, "", None)),
    ],
)
def test_a_stream_is_read_as_it_comes(answer, seen):
    async def send():
        async with Scripted(answer) as (_, address):
            asked = payload("m", Arrival(0.0, 30, 7), seed=1)
            return await send_all(address, [(0.0, request_bytes(asked, "/v1/completions"))])

    (found,) = asyncio.run(send())
    assert (found.status, found.tokens, found.text, found.error) == seen
    assert (found.first_s is None) == (found.status != 200)


def test_who_does_not_answer_is_a_failure():
    async def send():
        async with Scripted() as (_, address):
            return await send_all(address, [(0.0, request_bytes({}, "/v1/completions"))])

    (found,) = asyncio.run(send())
    assert isinstance(found, Streamed)
    assert (found.status, bool(found.error)) == (0, True)


def test_a_prompt_has_its_tokens_and_an_answer_just_so_many():
    asked = payload("m", Arrival(0.0, 30, 7), seed=1)
    assert (len(asked["prompt"]), asked["max_tokens"], asked["ignore_eos"]) == (30, 7, True)
