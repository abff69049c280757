"""The wire between Router and embedder, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import struct

import numpy as np
import pytest

from deployments.channel import BatchServer, Channel
from deployments.errors import EngineFailed, ReplicaLost

HOST = "127.0.0.1"
QUERIES = [np.array([1, 2, 3], np.int32), np.array([7], np.int32)]


async def echo(batch_id, batch):
    """Row by row: the first id and the number of ids; of each token its id and 0."""
    ids, lengths, each_token, _ = batch
    if each_token:
        return np.stack([ids, np.zeros_like(ids)], axis=1).astype(np.float32), np.ones(len(ids), np.float32), 0.5
    starts = np.cumsum(lengths) - lengths
    unit = np.stack([ids[starts], lengths], axis=1).astype(np.float32)
    return unit, lengths.astype(np.float32), 0.25


def run(use, embed=echo, abandon=lambda batch_id: None):
    async def whole():
        server = BatchServer(HOST, embed, abandon)
        port = await server.start()
        channel = await Channel.open(HOST, port, server.secret)
        try:
            async with asyncio.timeout(20):
                return await use(server, port, channel)
        finally:
            channel.close()
            server.close()
            for task in server._tasks:
                task.cancel()
            await asyncio.sleep(0.01)

    return asyncio.run(whole())


def test_a_batch_and_its_answer():
    async def use(server, port, channel):
        return await channel.embed("router:1", QUERIES)

    unit, norms, seconds = run(use)
    assert unit.tolist() == [[1, 3], [7, 1]]
    assert norms.tolist() == [3, 1]
    assert (unit.dtype, norms.dtype, seconds) == (np.float32, np.float32, 0.25)


def test_a_batch_that_wants_a_vector_of_each_token():
    async def use(server, port, channel):
        return await asyncio.gather(channel.embed("r:1", QUERIES, each_token=True), channel.embed("r:2", QUERIES))

    (unit, norms, seconds), (pooled, *_) = run(use)
    assert unit.tolist() == [[1, 0], [2, 0], [3, 0], [7, 0]]
    assert (norms.tolist(), seconds) == ([1, 1, 1, 1], 0.5)
    assert pooled.tolist() == [[1, 3], [7, 1]]


def test_a_batch_says_how_full_its_router_has_the_queue():
    heard = []

    async def embed(batch_id, batch):
        heard.append(batch.fill)
        return await echo(batch_id, batch)

    async def use(server, port, channel):
        await channel.embed("r:1", QUERIES, fill=0.25)

    run(use, embed)
    assert heard == [0.25]


def test_the_end_of_an_idle_connection_is_told_at_once():
    async def use(server, port, channel):
        ended = asyncio.get_running_loop().create_future()
        idle = await Channel.open(HOST, port, "not the secret", ended.set_result)  # the server hangs up
        assert await ended is idle
        return idle.is_open

    assert run(use) is False


def test_many_batches_of_any_size_at_once_are_not_mixed_up():
    async def use(server, port, channel):
        random = np.random.default_rng(0)
        sizes = [int(size) for size in random.integers(1, 400, 60)]
        batches = [
            [random.integers(0, 30_000, random.integers(1, 300), dtype=np.int32) for _ in range(n)] for n in sizes
        ]
        answers = await asyncio.gather(*(channel.embed(f"r:{i}", batch) for i, batch in enumerate(batches)))
        for batch, (unit, norms, _) in zip(batches, answers, strict=True):
            assert unit[:, 0].tolist() == [query[0] for query in batch]
            assert norms.tolist() == [len(query) for query in batch]

    run(use)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(EngineFailed("out of memory"), EngineFailed), (ReplicaLost("gone"), ReplicaLost), (KeyError("x"), EngineFailed)],
)
def test_an_error_comes_back_with_its_sentence(raised, kind):
    async def fail(batch_id, batch):
        raise raised

    async def use(server, port, channel):
        with pytest.raises(kind) as caught:
            await channel.embed("r:1", QUERIES)
        assert type(caught.value) is kind
        assert str(caught.value) == str(raised)

    run(use, embed=fail)


def test_abandon_arrives_after_the_batch_it_means():
    seen = []
    called_off = asyncio.Event()

    async def hang(batch_id, batch):
        seen.append(batch_id)
        await asyncio.sleep(3600)

    def abandon(batch_id):
        seen.append(f"not {batch_id}")
        called_off.set()

    async def use(server, port, channel):
        asking = asyncio.create_task(channel.embed("r:1", QUERIES))
        await asyncio.sleep(0)
        channel.abandon("r:1")
        await called_off.wait()
        await asyncio.sleep(0)
        asking.cancel()

    run(use, embed=hang, abandon=abandon)
    assert set(seen) == {"r:1", "not r:1"}


def test_a_connection_that_breaks_fails_what_waits_and_what_comes():
    async def hang(batch_id, batch):
        await asyncio.sleep(3600)

    async def use(server, port, channel):
        asking = asyncio.create_task(channel.embed("r:1", QUERIES))
        await asyncio.sleep(0.05)
        channel.transport.abort()
        with pytest.raises(ConnectionError):
            await asking
        with pytest.raises(ConnectionError):
            await channel.embed("r:2", QUERIES)
        channel.abandon("r:1")  # nothing to call off, nothing raised

    run(use, embed=hang)


@pytest.mark.parametrize(
    "sent", [b"", b"\x00\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n", (68).to_bytes(4, "little") + b"0" * 64, b"\xff" * 4]
)
def test_who_does_not_know_the_secret_gets_nowhere(sent):
    async def use(server, port, channel):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        if not sent:
            writer.write_eof()
        assert await reader.read() == b""  # closed
        writer.close()
        assert (await channel.embed("r:1", QUERIES))[2] == 0.25  # nobody else is touched

    run(use)


def test_draining_waits_for_what_has_come():
    release = asyncio.Event()

    async def slow(batch_id, batch):
        await release.wait()
        return await echo(batch_id, batch)

    async def use(server, port, channel):
        asking = asyncio.create_task(channel.embed("r:1", QUERIES))
        await asyncio.sleep(0.05)
        assert server.busy
        draining = asyncio.create_task(server.drain())
        release.set()
        await draining
        assert not server.busy
        assert (await asking)[2] == 0.25

    run(use, embed=slow)


async def eventually(condition):
    while not condition():  # noqa: ASYNC110 - what a socket brings tells nobody
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("sent", [b"", b"\x44", (68).to_bytes(4, "little"), (68).to_bytes(4, "little") + b"0" * 63])
def test_half_a_secret_waits_and_holds_nothing_up(sent):
    async def use(server, port, channel):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        await eventually(lambda: len(server._strangers) == 1)
        assert (await channel.embed("r:1", QUERIES))[2] == 0.25
        (stranger,) = server._strangers
        await eventually(lambda: len(stranger._buffer) == len(sent))
        writer.close()
        await eventually(lambda: not server._strangers)
        assert await reader.read() == b""

    run(use)


@pytest.mark.parametrize("size", [0, 3, 69, 2**20, 2**30, 2**32 - 1])
def test_a_stranger_may_send_no_more_than_a_secret(size):
    async def use(server, port, channel):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(size.to_bytes(4, "little"))  # and no more: closed because of what it says
        assert await reader.read() == b""
        writer.close()
        assert not server._strangers

    run(use)


def test_of_those_who_do_not_show_the_secret_few_are_kept():
    async def use(server, port, channel):
        idle = [await asyncio.open_connection(HOST, port) for _ in range(200)]
        await eventually(lambda: idle[135][0].at_eof() or len(server._strangers) == 64)
        for reader, _ in idle[:136]:
            assert await reader.read() == b"", "the oldest gave way"
        assert len(server._strangers) == 64
        another = await Channel.open(HOST, port, server.secret)
        for each in (channel, another):
            assert (await each.embed("r:1", QUERIES))[2] == 0.25
        another.close()
        for _, writer in idle:
            writer.close()

    run(use)


HEAD = struct.Struct("<IIIIf")
DAMAGED = {
    "shorter than its header": struct.pack("<II", 8, 1),
    "counts that it has no bytes for": HEAD.pack(20, 1_000, 1_000_000, 0, 0),
    "counts beyond any memory": HEAD.pack(20, 2**32 - 1, 2**32 - 1, 0, 0),
    "lengths of more tokens": HEAD.pack(32, 1, 1, 0, 0) + struct.pack("<ii", 2, 7) + b"r:00",
    "a negative length": HEAD.pack(36, 2, 1, 0, 0) + struct.pack("<iii", -1, 2, 7) + b"r:00",
    "a query of no tokens": HEAD.pack(36, 2, 1, 0, 0) + struct.pack("<iii", 0, 1, 7) + b"r:00",
    "an id that is no text": HEAD.pack(29, 1, 1, 0, 0) + struct.pack("<ii", 1, 7) + b"\xff",
    "a size beyond the largest": HEAD.pack(2**30 + 1, 1, 1, 0, 0),
}


@pytest.mark.parametrize("frame", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_frame_ends_its_connection_and_touches_nobody_else(frame):
    seen = []

    async def embed(batch_id, batch):
        seen.append(batch_id)
        return await echo(batch_id, batch)

    async def use(server, port, channel):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write((68).to_bytes(4, "little") + server.secret.encode() + frame)
        assert await reader.read() == b""
        writer.close()
        assert (await channel.embed("r:1", QUERIES))[2] == 0.25

    run(use, embed=embed)
    assert seen == ["r:1"]


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("<II", 8, 0),
        struct.pack("<IIIId", 24, 0, 1_000, 1_000, 0.0),
        struct.pack("<IIIId", 24, 0, 2**32 - 1, 2**32 - 1, 0.0),
        struct.pack("<I", 2**32 - 1),
    ],
)
def test_a_damaged_answer_fails_what_waits(answer):
    async def whole():
        async def serve(reader, writer):
            await reader.read(1)
            writer.write(answer)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, HOST, 0)
        channel = await Channel.open(HOST, server.sockets[0].getsockname()[1], "0" * 64)
        async with asyncio.timeout(20):
            with pytest.raises(ConnectionError):
                await channel.embed("r:1", QUERIES)
        server.close()

    asyncio.run(whole())
