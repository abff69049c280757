"""The load generator against a server in the test: what it sends when, and how it counts what comes back."""

import asyncio
import itertools
from contextlib import asynccontextmanager
from functools import partial

import pytest

from benchmarks.kit import http_load
from benchmarks.kit.http_load import Load

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = [b"HTTP/1.1 200 OK\r\nTransfer-Enc", b"oding: chunked\r\n\r\n2\r\n{}", b"\r\n0\r\n\r", b"\n"]
UNTIL_CLOSED = b"HTTP/1.0 503 Service Unavailable\r\n\r\nno server"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
TIMEOUT = b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{"
SHORT = Load(rate=200, seconds=0.5, warm_s=0.1, drain_s=0.3)

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def program():
    try:
        http_load.ensure()
    except RuntimeError as error:
        pytest.skip(str(error))


class Server:
    """Answers requests in turn with `answers`: bytes, several of them with a pause between, or None to hang up. `wait`
    is awaited before each.
    """

    def __init__(self, answers, wait):
        self.answers, self.wait = itertools.cycle(answers), wait
        self.bodies, self.open, self.most_open, self.tasks = [], 0, 0, set()

    async def converse(self, reader, writer):
        self.tasks.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                await self.wait()
                self.open -= 1
                answer = next(self.answers)
                for part in [answer] if isinstance(answer, bytes) else answer or []:
                    writer.write(part)
                    await asyncio.sleep(0.001)
                if answer in (None, UNTIL_CLOSED, TIMEOUT, CUT):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def at_once():
    pass


@asynccontextmanager
async def serving(*answers, wait=at_once):
    server = Server(answers, wait)
    async with await asyncio.start_server(server.converse, "127.0.0.1", 0, backlog=1000) as listening:
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/embeddings"
        yield server
        for task in server.tasks:
            task.cancel()


async def send(server, load, samples=None, slo_s=60.0):
    return await asyncio.to_thread(
        http_load.send, server.url, [{"input": "a"}, {"input": "b"}], load, slo_s=slo_s, samples=samples
    )


async def test_the_open_loop_keeps_its_schedule_whatever_the_server_does(tmp_path):
    """Requests are due at the same times and are all sent, whether the server answers or says nothing."""
    due, counts = {}, {}
    for name, wait in {"quick": at_once, "silent": asyncio.Event().wait}.items():
        async with serving(OK, wait=wait) as server:
            found = await send(server, SHORT, tmp_path / name)
        lines = [line.split() for line in (tmp_path / name).read_text().splitlines()]
        due[name] = sorted(float(line[0]) for line in lines)
        counts[name] = found["answered"], found["unanswered"]
        assert len(server.bodies) >= found["requests"]  # those before the measured time were sent too
    assert due["quick"] == pytest.approx(due["silent"], abs=1e-5)
    sent = len(due["quick"])
    assert counts == {"quick": (sent, 0), "silent": (0, sent)}
    assert 60 < sent < 140  # Poisson: 100 on average


async def test_a_request_is_timed_from_when_it_was_due():
    """A server that takes one request at a time, each for 20 ms, is far behind 200/s: the last ones wait long."""
    turn = asyncio.Lock()

    async def slowly():
        async with turn:
            await asyncio.sleep(0.02)

    for connections in (1, 8192):  # they wait in the client, or in the server
        async with serving(OK, wait=slowly) as server:
            found = await send(
                server, Load(rate=200, seconds=0.5, warm_s=0, drain_s=30, connections=connections), slo_s=0.1
            )
        assert found["answered"] == found["requests"] > 60
        assert found["answer_ms"]["max"] >= 1000 * (0.02 * found["requests"] - 0.5) - 20
        assert found["late"] > 0
        assert found["late_worst_s"] == pytest.approx(found["answer_ms"]["max"] / 1000 - 0.1, abs=0.001)
        assert found["answered"] == found["in_time"] + found["late"]
        assert (found["without_connection"] > 0) == (connections == 1)


async def test_answers_are_counted_by_their_kind():
    answers = (OK, CHUNKED, BUSY, UNTIL_CLOSED, TIMEOUT, None, CUT)
    async with serving(*answers) as server:
        found = await send(server, Load(rate=700, seconds=1, warm_s=0, drain_s=30))
    rounds = found["requests"] / len(answers)
    counts = {
        "answered": 2, "refused_429": 1, "refused_503": 1, "with_retry_after": 1, "broken": 2,
        "broken_before_answer": 1, "broken_in_answer": 1,
    }  # fmt: skip
    for key, times in counts.items():
        assert found[key] == pytest.approx(times * rounds, abs=2), key
    assert found["other"]["504"] == pytest.approx(rounds, abs=2)
    assert found["unanswered"] == found["broken_connecting"] == 0
    assert found["refusal_ms"]["p50"] > 0


async def test_nobody_listens():
    async with serving(OK) as server:
        pass
    for load in (SHORT, Load(clients=3, seconds=0.2, warm_s=0)):
        found = await send(server, load)
        assert found["requests"] == found["broken"] == found["broken_connecting"] > 0
        assert found["answer_ms"]["p50"] is None


async def test_the_closed_loop_has_as_many_requests_open_as_clients():
    async with serving(OK, wait=partial(asyncio.sleep, 0.005)) as server:
        found = await send(server, Load(clients=5, seconds=0.3, warm_s=0.1))
    assert server.most_open <= found["connections"] == 5
    assert found["answered"] == found["requests"] > 5
    assert set(server.bodies) == {b'{"input": "a"}', b'{"input": "b"}'}


async def test_a_burst_comes_at_once_beside_a_stream(tmp_path):
    async with serving(OK) as server:
        found = await send(server, Load(rate=50, burst=40, every_s=0.2, seconds=0.6, warm_s=0), tmp_path / "samples")
    due = [float(line.split()[0]) for line in (tmp_path / "samples").read_text().splitlines()]
    together = {at: due.count(at) for at in due if due.count(at) > 1}
    assert together == {0.0: 40, 0.2: 40, 0.4: 40}
    assert 10 < found["requests"] - 3 * 40 < 60  # Poisson: 30 on average


async def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(http_load, "_CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C compiler.*apt-get install gcc"):
        http_load.ensure()
