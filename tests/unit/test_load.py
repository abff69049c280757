import asyncio
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kit.arrivals import burst
from calibration.load import Address, Connection, ask_all, connect, hold_open, request_bytes
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


def test_an_ipv6_address_is_printed_as_it_was_given():
    assert str(Address.parse("http://[::1]:8000")) == "http://[::1]:8000"


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text())))
def test_a_request_says_how_long_its_body_is(payload):
    head, _, body = request_bytes(payload, "/embed/v1", [("x-windve-trial", "s cpu=1")]).partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = dict(line.split(": ") for line in lines)
    assert first == "POST /embed/v1 HTTP/1.1"
    assert headers["content-length"] == str(len(body))
    assert headers["x-windve-trial"] == "s cpu=1"
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
        connection = await Connection.open(address)
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


def test_a_body_in_chunks():
    server, replies = ask_twice(CHUNKED, CHUNKED)
    assert [reply.json() for reply in replies] == [{"a": 1}, {"a": 1}]
    assert server.connections == 1


def test_a_connection_that_the_server_closes_is_opened_anew():
    server, replies = ask_twice(CLOSE, OK)
    assert [reply.json() for reply in replies] == [{"a": 1}, {"a": 1}]
    assert [number for number, _ in server.asked] == [0, 1]


def test_no_answer_is_an_error():
    with pytest.raises(EOFError):
        ask_twice(b"")


def test_all_at_once_each_on_its_own_connection():
    requests = [request_bytes({"input": str(number)}) for number in range(60)]

    async def test(address):
        connections = await connect(address, len(requests))
        try:
            replies = await ask_all(connections, requests)
        finally:
            for connection in connections:
                connection.hang_up()
        assert [reply.status for reply in replies] == [200] * 60

    server = serve(test, OK)
    assert server.connections == 60
    assert all(request.startswith(b"GET /ping ") for _, request in server.asked[:60])  # warm before the burst
    assert {request for _, request in server.asked[60:]} == set(requests)
    assert len({number for number, _ in server.asked[60:]}) == 60


def test_connections_that_the_server_has_closed_are_opened_anew():
    ping = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    async def test(address):
        connections = await connect(address, 2)
        for wanted in (3, 1):
            await hold_open(connections, address, wanted)
            assert len(connections) == 3
        for connection in connections:
            connection.hang_up()

    assert serve(test, ping, ping, b"", ping).connections == 5


def test_a_burst_leaves_no_connection_behind():
    async def test(address):
        replies = await asyncio.to_thread(burst, address, [request_bytes(number) for number in range(3)])
        assert [reply.json() for reply in replies] == [{"a": 1}] * 3

    assert serve(test, OK).connections == 3
