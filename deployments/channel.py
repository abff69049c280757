"""The wire between a Router and an embedder replica: one connection, whole batches, arrays as they lie in memory.

A call through Serve's handle costs both processes about a millisecond of their cores, several times what all else on
the way of a query costs, so batches travel by a socket of their own. Serve still says which replicas live and where
they listen; a replica admits who knows its secret, which only the application's own processes are told. Who has not
shown it yet may send as many bytes as a secret has, and of such connections few are kept. Pure asyncio.

A frame is its header and what the header counts, little-endian as both machines' arrays are:
    batch    size, queries, tokens, each, fill   lengths int32 [queries], ids int32 [tokens], the batch's id
    answer   size, status, vectors, dimension, seconds   unit float32 [vectors, dimension], norms float32 [vectors], id
             or, where the status is not 0, the bytes of a sentence that says why, id
A vector of each query is wanted, or of each token where `each` is 1; `fill` is the share of the pool's depth that the
Router has in flight. A batch without queries calls the one of that id off.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from deployments.errors import EngineFailed, ReplicaLost, WindveError

logger = logging.getLogger("ray.serve")

Ids = npt.NDArray[np.int32]
Reply = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float]
Embed = Callable[[str, "Batch"], Awaitable[Reply]]  # by the batch's id: unit vectors, norms, engine seconds
Abandon = Callable[[str], None]

_BATCH, _ANSWER = struct.Struct("<IIIIf"), struct.Struct("<IIIId")
_SIZE = struct.Struct("<I")
_OK, _FAILED, _LOST = range(3)
_CONNECT_TIMEOUT_S = 5.0
_LARGEST_FRAME = 2**30  # bytes
_SECRET_BYTES = 32
_MOST_STRANGERS = 64  # connections that have not shown the secret: a Router does so at once, so the oldest gives way


class Batch(NamedTuple):
    """What arrives at a replica: `ids` int32 of all queries in a row, `lengths` int32 [queries], whether a vector of
    each token is wanted, and the share of the pool's depth that its Router has in flight.
    """

    ids: Ids
    lengths: Ids
    each_token: bool = False
    fill: float = 0.0


class _Peer(asyncio.Protocol):
    """Either end: cuts what arrives into frames."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.largest = _LARGEST_FRAME

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has no such base class

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(buffer)
            if not _SIZE.size <= size <= self.largest:
                self.transport.abort()  # not one of ours
                return
            if len(buffer) < size:
                return
            with memoryview(buffer) as view:
                frame = bytes(view[:size])
            del buffer[:size]
            try:
                self.frame_received(frame)
            except (ValueError, struct.error) as error:
                logger.warning("a frame of %d bytes is damaged (%s): the connection is closed", size, error)
                self.transport.abort()
            if self.transport.is_closing():
                return

    def frame_received(self, frame: bytes) -> None:
        """Raises ValueError or struct.error where it is not what it says."""
        raise NotImplementedError


class BatchServer:
    """A replica's end. `secret` and `port` are what a Router must know."""

    def __init__(self, host: str, embed: Embed, abandon: Abandon) -> None:
        self.secret = secrets.token_hex(_SECRET_BYTES)
        self._host, self._embed, self._abandon = host, embed, abandon
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[_Served, None] = {}  # in the order in which they came

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Served(self), self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    async def drain(self) -> None:
        """Until every batch that has come is answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def meet(self, stranger: _Served) -> None:
        """One has connected."""
        self._strangers[stranger] = None
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            self.part(oldest)
            oldest.transport.abort()

    def part(self, stranger: _Served) -> None:
        """It has shown the secret, or has gone."""
        self._strangers.pop(stranger, None)

    def take(self, peer: _Served, batch_id: str, batch: Batch) -> None:
        if not len(batch.lengths):
            self._abandon(batch_id)
            return
        task = asyncio.get_running_loop().create_task(self._answer(peer, batch_id, batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, peer: _Served, batch_id: str, batch: Batch) -> None:
        name = batch_id.encode()
        try:
            unit, norms, seconds = await self._embed(batch_id, batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, the Router waits for a word
            status = _LOST if isinstance(error, ReplicaLost) else _FAILED
            body = [str(error).encode()]
            head = _ANSWER.pack(_ANSWER.size + len(body[0]) + len(name), status, len(body[0]), 0, 0.0)
        else:
            unit = np.ascontiguousarray(unit, dtype=np.float32)
            size = _ANSWER.size + unit.nbytes + norms.nbytes + len(name)
            head, body = _ANSWER.pack(size, _OK, *unit.shape, seconds), [unit.tobytes(), norms.tobytes()]
        if not peer.transport.is_closing():
            peer.transport.writelines([head, *body, name])


class _Served(_Peer):
    """One Router's connection, as the replica sees it."""

    def __init__(self, server: BatchServer) -> None:
        super().__init__()
        self._server, self._known = server, False
        self.largest = _SIZE.size + 2 * _SECRET_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.meet(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._server.part(self)

    def frame_received(self, frame: bytes) -> None:
        if not self._known:
            if not hmac.compare_digest(frame[_SIZE.size :], self._server.secret.encode()):
                self.transport.abort()
                return
            self._known, self.largest = True, _LARGEST_FRAME
            self._server.part(self)
            return
        _, queries, tokens, each, fill = _BATCH.unpack_from(frame)
        lengths = np.frombuffer(frame, np.int32, queries, _BATCH.size)
        ids = np.frombuffer(frame, np.int32, tokens, _BATCH.size + lengths.nbytes)
        if queries and (lengths.min() < 1 or lengths.sum() != tokens):
            raise ValueError("its lengths do not add up")  # one query's tokens would be another's
        batch_id = frame[_BATCH.size + lengths.nbytes + ids.nbytes :].decode()
        self._server.take(self, batch_id, Batch(ids, lengths, bool(each), fill))


class Channel(_Peer):
    """A Router's end: `embed` and `abandon` at the replica that listens there. `on_lost` is told of its end."""

    def __init__(self, on_lost: Callable[[Channel], None]) -> None:
        super().__init__()
        self._on_lost = on_lost
        self._waiting: dict[str, asyncio.Future[Reply]] = {}

    @classmethod
    async def open(
        cls, host: str, port: int, secret: str, on_lost: Callable[[Channel], None] = lambda _: None
    ) -> Channel:
        """Raises OSError or TimeoutError."""
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(on_lost), host, port)
        word = secret.encode()
        channel.transport.writelines([_SIZE.pack(_SIZE.size + len(word)), word])
        return channel

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    async def embed(
        self, batch_id: str, queries: Sequence[Ids], *, each_token: bool = False, fill: float = 0.0
    ) -> Reply:
        """Run one batch there: (unit vectors float32 [n, dimension], norms float32 [n], engine seconds), where n counts
        the queries, or their tokens.

        Raises EngineFailed, ReplicaLost, or ConnectionError where the connection broke before the answer.
        """
        if self.transport.is_closing():
            raise ConnectionError("the connection is closed")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[batch_id] = answer
        self._write(batch_id, queries, each_token=each_token, fill=fill)
        try:
            return await answer
        finally:
            self._waiting.pop(batch_id, None)

    def abandon(self, batch_id: str) -> None:
        """Nobody waits for that batch any more."""
        if self.is_open:
            self._write(batch_id, ())

    def close(self) -> None:
        self.transport.close()

    def _write(self, batch_id: str, queries: Sequence[Ids], *, each_token: bool = False, fill: float = 0.0) -> None:
        name = batch_id.encode()
        lengths = np.fromiter(map(len, queries), np.int32, len(queries))
        tokens = int(lengths.sum())
        size = _BATCH.size + lengths.nbytes + 4 * tokens + len(name)
        head = _BATCH.pack(size, len(queries), tokens, each_token, fill)
        self.transport.writelines([head, lengths.tobytes(), *(query.tobytes() for query in queries), name])

    def frame_received(self, frame: bytes) -> None:
        _, status, count, dimension, seconds = _ANSWER.unpack_from(frame)
        start = _ANSWER.size
        if status == _OK:
            unit = np.frombuffer(frame, np.float32, count * dimension, start).reshape(count, dimension)
            norms = np.frombuffer(frame, np.float32, count, start + unit.nbytes)
            self._settle(frame[start + unit.nbytes + norms.nbytes :].decode(), (unit, norms, seconds))
        else:
            kind: type[WindveError] = ReplicaLost if status == _LOST else EngineFailed
            self._settle(frame[start + count :].decode(), kind(frame[start : start + count].decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        for batch_id in list(self._waiting):
            self._settle(batch_id, ConnectionError(str(exc or "the connection was closed")))
        self._on_lost(self)

    def _settle(self, batch_id: str, outcome: Reply | Exception) -> None:
        answer = self._waiting.pop(batch_id, None)
        if answer is None or answer.done():
            return  # nobody waits any more
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
