"""An answer's head and body go to the socket together."""

import asyncio
import socket

import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from deployments.serve_adapter.gathered_writes import GatheredWrites, GatheringProtocol, install

REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi"


class Wire:
    """An asyncio transport that keeps what is written."""

    def __init__(self):
        self.sent, self.open = [], True

    def write(self, data):
        assert self.open
        self.sent.append(bytes(data))

    def close(self):
        self.open = False

    def is_closing(self):
        return not self.open


def written(act):
    wire, problems = Wire(), []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, about: problems.append(about))
        await act(GatheredWrites(wire))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert not problems
    return wire


def test_writes_of_a_turn_go_together_and_in_order():
    async def act(transport):
        transport.write(b"head ")
        transport.write(b"body")
        await asyncio.sleep(0)
        transport.write(b"later")

    assert written(act).sent == [b"head body", b"later"]


def test_a_connection_closes_behind_what_was_written():
    async def act(transport):
        transport.write(b"bye")
        transport.close()
        assert transport.is_closing()

    wire = written(act)
    assert (wire.sent, wire.open) == ([b"bye"], False)


@pytest.mark.parametrize(("size", "waits"), [(65_536, True), (65_537, False)])
def test_a_large_body_does_not_wait(size, waits):
    async def act(transport):
        transport.write(bytes(size))
        assert (transport._transport.sent == []) == waits

    assert len(written(act).sent) == 1


def test_writes_of_a_turn_do_not_wait_once_they_are_large_together():
    """Else an answer in many pieces would grow in memory, because nothing tells its writer to wait."""

    async def act(transport):
        for _ in range(3):
            transport.write(bytes(40_000))
        assert list(map(len, transport._transport.sent)) == [40_000, 40_000]

    assert list(map(len, written(act).sent)) == [40_000, 40_000, 40_000]


def test_what_was_written_is_dropped_if_the_client_has_gone():
    async def act(transport):
        transport.write(b"bye")
        transport._transport.close()
        transport.write(bytes(70_000))

    assert written(act).sent == []


def test_a_server_answers_by_one_write_after_it_is_installed(monkeypatch):
    """Over real sockets, kept open for a second request; a body in pieces comes whole."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    install()
    sent = []
    monkeypatch.setattr(GatheredWrites, "_send", lambda self, send=GatheredWrites._send: (
        sent.append(len(self._parts)), send(self)
    ))  # fmt: skip

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
        await send({"type": "http.response.body", "body": b"yes", "more_body": True})
        await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b", and on"})

    async def run():
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        for _ in range(2):
            writer.write(REQUEST)
            head, _, body = (await reader.readuntil(b"0\r\n\r\n")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert body == b"3\r\nyes\r\n8\r\n, and on\r\n0\r\n\r\n"
        assert isinstance(next(iter(server.server_state.connections)), GatheringProtocol)
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(run(), 20))
    assert [parts for parts in sent if parts] == [2, 1] * 2
