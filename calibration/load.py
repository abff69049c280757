"""A light load generator. It opens connections beforehand, sends bursts, steady load or streams on them, and measures
times as a client sees them. A heavier client would compete with a service on the same cores and measure itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from deployments.errors import SettingsError

T = TypeVar("T")

_AT_ONCE = 50  # connections opened or tested at the same time, outside of bursts
_LARGEST_HEAD = 2**16


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an application. `prefix`: its route prefix without the trailing slash."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises SettingsError if `url` is not an HTTP or HTTPS URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise SettingsError("--url", f"should look like http://127.0.0.1:8000, not '{url}'")
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        """Host and port for the header `host`, which a gateway may route by."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        secured = ssl.create_default_context() if self.tls else None
        return await asyncio.open_connection(self.host, self.port, ssl=secured, limit=_LARGEST_HEAD)


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer as a client sees it. `seconds`: from the first byte sent to the last byte read. `ended_s`: when that
    was, by `time.perf_counter`.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float
    ended_s: float = 0.0

    @property
    def pool(self) -> str | None:
        return self.headers.get("x-windve-pool")

    @property
    def problem(self) -> str:
        """The status and the text of an error answer."""
        try:
            error = self.json()["error"]
            error = error if isinstance(error, str) else error["message"]
        except (ValueError, KeyError, TypeError):
            error = self.body[:200].decode(errors="replace")
        return f"{self.status} {error}"

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    payload: Any, path: str = "/v1/embeddings", headers: Iterable[tuple[str, str]] = (), host: str = "windve"
) -> bytes:
    """The bytes of a POST of `payload` as JSON."""
    body = json.dumps(payload).encode()
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class ClientConnection:
    """One keep-alive HTTP/1.1 connection. It reconnects if the server says `connection: close`."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address, self._reader, self._writer = address, reader, writer

    @classmethod
    async def open(cls, address: Address) -> ClientConnection:
        return cls(address, *await address.open())

    @property
    def is_open(self) -> bool:
        """False once the server has closed the connection, as many servers do after some idle seconds."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def ask(self, request: bytes, timeout_s: float = 60) -> HttpReply:
        """Send a request and read the answer. Raises OSError, EOFError or TimeoutError if there is none."""
        started = time.perf_counter()
        self._writer.write(request)
        async with asyncio.timeout(timeout_s):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {}
            for line in head[1:]:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = b"" if request.startswith(b"HEAD ") else await self._read_body(headers)
        ended_s = time.perf_counter()
        reply = HttpReply(int(head[0].split()[1]), headers, body, ended_s - started, ended_s)
        if headers.get("connection") == "close":
            self.hang_up()
            self._reader, self._writer = await self._address.open()
        return reply

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.readexactly(int(headers.get("content-length", 0)))
        body = b""
        while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readuntil(b"\r\n")
        return body

    def hang_up(self) -> None:
        self._writer.transport.abort()


async def connect(address: Address, connections: int) -> list[ClientConnection]:
    """Open the connections and use each once, so that a burst has nothing left to set up."""
    opened: list[ClientConnection] = []

    async def open_one() -> None:
        opened.append(await ClientConnection.open(address))

    try:
        await _some_at_a_time([open_one] * connections)
        await ping(opened, address)
    except BaseException:
        for connection in opened:
            connection.hang_up()
        raise
    return opened


async def ping(connections: Sequence[ClientConnection], address: Address) -> None:
    """Use each connection once. Raises OSError or EOFError if the server has closed one."""
    request = f"GET {address.prefix}/ping HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode()
    await _some_at_a_time([lambda connection=connection: connection.ask(request) for connection in connections])  # type: ignore[misc]


async def _some_at_a_time(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    done: list[T] = []
    for first in range(0, len(calls), _AT_ONCE):
        done += await asyncio.gather(*(call() for call in calls[first : first + _AT_ONCE]))
    return done


class Clients:
    """Clients of one service, with persistent connections. A load ends when all its requests have ended. `burst` and
    `steady` then raise OSError, EOFError or TimeoutError if an answer did not arrive; its connection is closed.
    """

    def __init__(self, address: Address, timeout_s: float = 60.0) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._connections: list[ClientConnection] = []
        self._free: list[ClientConnection] = []  # those on which `ask` awaits no answer

    async def open(self, wanted: int) -> None:
        """Open connections until there are `wanted`, and use each once. If the server has closed any, reopen all.
        Raises OSError or EOFError.
        """
        try:
            await ping(self._connections, self.address)
            self._connections += await connect(self.address, max(0, wanted - len(self._connections)))
        except (OSError, EOFError):  # the server has closed some
            self.hang_up()
            self._connections = await connect(self.address, wanted)
        self._free = list(self._connections)

    def hang_up(self) -> None:
        for connection in self._connections:
            connection.hang_up()
        self._connections, self._free = [], []

    async def burst(self, requests: Sequence[bytes]) -> list[HttpReply]:
        """Send all requests at once, one per open connection. Returns the replies in the same order."""
        pairs = zip(self._connections[: len(requests)], requests, strict=True)
        return await _all_or_first_error(self._ask(*pair) for pair in pairs)

    async def steady(
        self, clients: int, request: Callable[[], bytes], seconds: float, pause_s: float = 0.0, seed: int = 0
    ) -> list[HttpReply]:
        """So many clients send what `request` makes, each on its own connection. After each answer a client pauses for
        a random time, `pause_s` on average. Returns all replies, after `seconds`.
        """
        chance, ends = random.Random(seed), time.monotonic() + seconds  # noqa: S311 - repeatable, not a secret
        replies: list[HttpReply] = []

        async def ask_again_and_again(connection: ClientConnection) -> None:
            await asyncio.sleep(chance.random() * pause_s)
            while time.monotonic() < ends:
                replies.append(await self._ask(connection, request()))
                if pause_s:
                    await asyncio.sleep(chance.expovariate(1 / pause_s))

        await _all_or_first_error(ask_again_and_again(one) for one in self._connections[:clients])
        return replies

    async def ask(self, request: bytes) -> HttpReply:
        """Send a request on a free connection, or on a new one. Raises OSError, EOFError or TimeoutError if no answer
        arrives.
        """
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                break
            self._drop(connection)
        else:
            async with asyncio.timeout(self.timeout_s):
                connection = await ClientConnection.open(self.address)
            self._connections.append(connection)
        reply = await self._ask(connection, request)
        if connection.is_open:  # `hang_up` was not called meanwhile
            self._free.append(connection)
        return reply

    async def stream(self, arrivals: Iterable[tuple[float, bytes]]) -> list[HttpReply | Exception]:
        """Send each request at its time, in seconds from now, regardless of earlier ones. Returns the outcomes in the
        same order: a reply, or the OSError, EOFError or TimeoutError that came instead.
        """
        began, asking = time.monotonic(), []

        async def ask(request: bytes) -> HttpReply | Exception:
            try:
                return await self.ask(request)
            except (OSError, EOFError, TimeoutError) as error:
                return error

        for at_s, request in arrivals:
            await asyncio.sleep(began + at_s - time.monotonic())
            asking.append(asyncio.create_task(ask(request)))
        return await asyncio.gather(*asking)

    async def _ask(self, connection: ClientConnection, request: bytes) -> HttpReply:
        try:
            return await connection.ask(request, self.timeout_s)
        except BaseException:  # the answer may still arrive, and would be taken for that of the next request
            self._drop(connection)
            raise

    def _drop(self, connection: ClientConnection) -> None:
        connection.hang_up()
        for kept in (self._connections, self._free):
            if connection in kept:  # `hang_up` was not called meanwhile
                kept.remove(connection)


async def _all_or_first_error(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results, once all calls have ended. Raises the first error among them."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value] # none is an error


def burst(address: Address, requests: Sequence[bytes]) -> list[HttpReply]:
    """Send all requests at once, each on its own open connection. Returns the replies in the same order."""

    async def run() -> list[HttpReply]:
        clients = Clients(address)
        await clients.open(len(requests))
        try:
            return await clients.burst(requests)
        finally:
            clients.hang_up()

    return asyncio.run(run())
