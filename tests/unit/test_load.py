import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration import load
from calibration.generation.promise_proof import payload
from calibration.generation.request_capacity import Arrival
from calibration.generation.token_stream import send_all
from calibration.load import Address, ClientConnection, Clients, burst, request_bytes
from deployments.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "address", "text"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000), "http://127.0.0.1:8000"),
        ("http://windve.local", Address("windve.local", 80), "http://windve.local:80"),
        ("https://windve.local", Address("windve.local", 443, tls=True), "https://windve.local:443"),
        ("http://h:81/embed/", Address("h", 81, "/embed"), "http://h:81/embed"),
        ("https://h:444/a/b", Address("h", 444, "/a/b", tls=True), "https://h:444/a/b"),
        ("HTTP://H:8000/", Address("h", 8000), "http://h:8000"),
        ("http://[::1]:8000", Address("::1", 8000), "http://[::1]:8000"),
    ],
)
def test_good_urls(url, address, text):
    assert Address.parse(url) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:8000", "localhost", "ftp://h:8000", "http://", "http://:8000"),
        *("http://h:eight", "http://h:99999", "http://[::1:8000"),
    ],
)
def test_bad_urls_are_shown(url):
    with pytest.raises(SettingsError) as refused:
        Address.parse(url)
    assert str(refused.value) == f"--url: should look like http://127.0.0.1:8000, not '{url}'"


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text())))
def test_a_request_says_how_long_its_body_is(payload):
    head, _, body = request_bytes(payload, "/embed/v1", [("x-windve-priority", "s cpu=1")]).partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = dict(line.split(": ") for line in lines)
    assert first == "POST /embed/v1 HTTP/1.1"
    assert headers["content-length"] == str(len(body))
    assert headers["x-windve-priority"] == "s cpu=1"
    assert json.loads(body) == payload


@dataclass
class Server:
    """Answers each request by the next of `answers` (the last one again and again), and notes what it was asked."""

    answers: list[bytes]
    asked: list[tuple[int, bytes]] = field(default_factory=list)  # number of the connection, head and body
    connections: int = 0

    async def __call__(self, reader, writer):
        number, self.connections = self.connections, self.connections + 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[16:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"), 0)
                self.asked.append((number, head + await reader.readexactly(length)))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                writer.write(answer)
                if not answer or b"connection: close" in answer:
                    return
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()


def serve(test, *answers):
    """Runs `test(address)` beside such a server, which is returned."""
    server = Server(list(answers))

    async def run():
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
            await test(Address("127.0.0.1", listening.sockets[0].getsockname()[1]))

    asyncio.run(run())
    return server


def ask_twice(*answers):
    """The server, and its replies to two requests on one connection."""
    replies = []

    async def test(address):
        connection = await ClientConnection.open(address)
        try:
            replies.extend([await connection.ask(request_bytes({"input": "a"}), timeout_s=5) for _ in range(2)])
        finally:
            connection.hang_up()

    return serve(test, *answers), replies


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nX-Windve-Pool: cpu\r\n\r\n" + b'{"a": 1}'
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nretry-after:1\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b'2\r\n{"\r\n6;x=y\r\na": 1}\r\n0\r\n\r\n'
CLOSE = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


def test_a_body_of_known_length():
    server, (first, second) = ask_twice(OK, BUSY)
    assert (first.status, first.pool, first.json()) == (200, "cpu", {"a": 1})
    assert (second.status, second.pool, second.body) == (429, None, b"")
    assert second.headers["retry-after"] == "1"
    assert 0 < first.seconds < 5
    assert server.asked == [(0, request_bytes({"input": "a"}))] * 2


@pytest.mark.parametrize(("answers", "connections"), [((CHUNKED, CHUNKED), [0, 0]), ((CLOSE, OK), [0, 1])])
def test_a_body_in_chunks_and_a_connection_that_the_server_closes(answers, connections):
    server, replies = ask_twice(*answers)
    assert [reply.json() for reply in replies] == [{"a": 1}, {"a": 1}]
    assert [number for number, _ in server.asked] == connections


def use(test, *answers):
    """Runs `test(clients)` beside such a server, which is returned with what the test returned."""
    found = []

    async def run(address):
        clients = Clients(address, timeout_s=5)
        try:
            found.append(await test(clients))
        finally:
            clients.hang_up()

    return serve(run, *answers), *found


PING = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def test_all_at_once_each_on_its_own_connection():
    requests = [request_bytes({"input": str(number)}) for number in range(60)]

    async def test(clients):
        await clients.open(len(requests))
        return await clients.burst(requests)

    server, replies = use(test, OK)
    assert [reply.status for reply in replies] == [200] * 60
    assert server.connections == 60
    assert all(request.startswith(b"GET /ping ") for _, request in server.asked[:60])  # warm before the burst
    assert {request for _, request in server.asked[60:]} == set(requests)
    assert len({number for number, _ in server.asked[60:]}) == 60


def test_connections_that_the_server_has_closed_are_opened_anew():
    async def test(clients):
        await clients.open(2)
        await clients.open(3)  # the server closes one as it is used
        await clients.open(1)

    server, _ = use(test, PING, PING, b"", PING)
    assert server.connections == 5


def test_a_burst_without_an_answer_raises_and_its_connection_is_not_used_again():
    async def test(clients):
        await clients.open(2)
        with pytest.raises(EOFError):
            await clients.burst([request_bytes("a"), request_bytes("b")])
        await clients.open(2)
        return await clients.burst([request_bytes("c"), request_bytes("d")])

    server, replies = use(test, PING, PING, OK, b"", PING, PING, OK)
    assert ([reply.status for reply in replies], server.connections) == ([200] * 2, 3)


def test_a_client_asks_again_once_it_is_answered(monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count().__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(load, "time", clock)  # a second for each look at it

    async def test(clients):
        await clients.open(2)
        return await clients.steady(2, lambda: b"POST /a\r\n\r\n", 6.0, pause_s=0.001)

    server, replies = use(test, OK)
    assert len(replies) == 5
    assert len({(number, request) for number, request in server.asked if request.startswith(b"POST")}) == 2


def test_a_stream_goes_on_whatever_becomes_of_its_requests():
    arrivals = [(0.0, request_bytes("a")), (0.02, request_bytes("b")), (0.04, request_bytes("c"))]

    async def test(clients):
        await clients.open(1)
        return await clients.stream(arrivals)

    server, (first, second, third) = use(test, PING, OK, b"", OK)
    assert (first.status, type(second).__mro__[1], third.status) == (200, EOFError, 200)
    assert [number for number, _ in server.asked] == [0, 0, 0, 1]  # a broken connection is not used again


def test_a_burst_leaves_no_connection_behind():
    async def test(address):
        replies = await asyncio.to_thread(burst, address, [request_bytes(number) for number in range(3)])
        assert [reply.json() for reply in replies] == [{"a": 1}] * 3

    assert serve(test, OK).connections == 3


# Streams of tokens


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
        (BUSY, (429, 0, "", None)),
        (b"", (0, 0, "", "IncompleteReadError('0 bytes read on a total of undefined expected bytes')")),
    ],
)
def test_a_stream_is_read_as_it_comes(answer, seen):
    asked = request_bytes(payload("m", Arrival(0.0, 30, 7), seed=1), "/v1/completions")
    replies = []

    async def test(address):
        replies.extend(await send_all(address, [(0.0, asked)]))

    serve(test, answer)
    (found,) = replies
    assert (found.status, found.tokens, found.text, found.error) == seen
    assert (found.first_s is None) == (found.status != 200)


def test_a_prompt_has_its_tokens_and_an_answer_just_so_many():
    asked = payload("m", Arrival(0.0, 30, 7), seed=1)
    assert (len(asked["prompt"]), asked["max_tokens"], asked["ignore_eos"]) == (30, 7, True)
