"""A light load generator: connections opened beforehand, one request on each at the same moment, times as a client sees
them. A heavier client would compete with a service on the same cores, and measure itself.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from deployments.errors import SettingsError

T = TypeVar("T")

_AT_ONCE = 50  # connections that are opened or tried at the same time, outside of a burst
_LARGEST_HEAD = 2**16


@dataclass(frozen=True, slots=True)
class Address:
    """Where an application answers; `prefix` is its route prefix without the last slash."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises SettingsError where `url` is not one of http or https."""
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
        """Host and port, as the header `host` has them: a gateway may go by it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        secured = ssl.create_default_context() if self.tls else None
        return await asyncio.open_connection(self.host, self.port, ssl=secured, limit=_LARGEST_HEAD)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as a client sees it; `seconds` from the first byte sent to the last byte read."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def pool(self) -> str | None:
        return self.headers.get("x-windve-pool")

    @property
    def problem(self) -> str:
        """Of an error: the status, and what it says."""
        try:
            error = self.json()["error"]
            error = error if isinstance(error, str) else error["message"]
        except (ValueError, KeyError, TypeError):
            error = self.body[:200].decode(errors="replace")
        return f"{self.status} {error}"

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    payload: Any,
    path: str = "/v1/embeddings",
    headers: Iterable[tuple[str, str]] = (),
    host: str = "windve",
) -> bytes:
    """A POST of `payload` as JSON, ready to be sent."""
    body = json.dumps(payload).encode()
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get_bytes(path: str, host: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode()


class Connection:
    """One keep-alive HTTP/1.1 connection, opened anew where the server says `connection: close`."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address, self._reader, self._writer = address, reader, writer

    @classmethod
    async def open(cls, address: Address) -> Connection:
        return cls(address, *await address.open())

    async def ask(self, request: bytes, timeout_s: float = 60) -> Reply:
        """Send and read the answer. Raises OSError, EOFError or TimeoutError where there is none."""
        started = time.perf_counter()
        self._writer.write(request)
        async with asyncio.timeout(timeout_s):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {}
            for line in head[1:]:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = b"" if request.startswith(b"HEAD ") else await self._read_body(headers)
        reply = Reply(int(head[0].split()[1]), headers, body, time.perf_counter() - started)
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


async def connect(address: Address, connections: int) -> list[Connection]:
    """Open them all and use each once, so that nothing is left to set up when the burst comes."""
    opened: list[Connection] = []

    async def open_one() -> None:
        opened.append(await Connection.open(address))

    try:
        await _some_at_a_time([open_one] * connections)
        await ping(opened, address)
    except BaseException:
        for connection in opened:
            connection.hang_up()
        raise
    return opened


async def hold_open(connections: list[Connection], address: Address, wanted: int) -> None:
    """Keep `wanted` connections open, or more, each just used: others where the server has closed some. Raises OSError
    or EOFError.
    """
    try:
        await ping(connections, address)
        connections += await connect(address, max(0, wanted - len(connections)))
    except (OSError, EOFError):  # the server has closed some
        for connection in connections:
            connection.hang_up()
        connections[:] = await connect(address, wanted)


async def ping(connections: Sequence[Connection], address: Address) -> None:
    """Use each once. Raises OSError or EOFError where the server has closed one."""
    request = get_bytes(f"{address.prefix}/ping", address.netloc)
    await _some_at_a_time([lambda connection=connection: connection.ask(request) for connection in connections])  # type: ignore[misc]


async def _some_at_a_time(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    done: list[T] = []
    for first in range(0, len(calls), _AT_ONCE):
        done += await asyncio.gather(*(call() for call in calls[first : first + _AT_ONCE]))
    return done


async def ask_all(connections: Sequence[Connection], requests: Sequence[bytes], timeout_s: float = 60) -> list[Reply]:
    """All requests at once, one on each connection; their replies in the same order."""
    pairs = zip(connections, requests, strict=True)
    return list(await asyncio.gather(*(connection.ask(request, timeout_s) for connection, request in pairs)))
