"""What a calibration of generation says to a service, and reads of it, over HTTP."""

import json
from dataclasses import replace

import pytest
from test_load import serve

from calibration.generation.promise_proof import payload
from calibration.generation.request_capacity import Arrival
from calibration.generation.token_stream import send_all
from calibration.load import request_bytes


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
