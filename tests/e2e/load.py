"""A light load generator: connections opened beforehand, one request on each at the same moment, times as a client sees
them. A heavier client would compete with the service for the same two cores and measure itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def pool(self) -> str | None:
        return self.headers.get("x-windve-pool")

    def json(self):
        return json.loads(self.body)


def request_bytes(payload, path="/v1/embeddings", headers=()) -> bytes:
    body = json.dumps(payload).encode()
    lines = [f"POST {path} HTTP/1.1", "host: windve", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    """One keep-alive HTTP/1.1 connection, opened anew where the server says `connection: close`."""

    def __init__(self, port, reader, writer):
        self.port, self.reader, self.writer = port, reader, writer

    @classmethod
    async def open(cls, port):
        return cls(port, *await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: bytes, timeout_s: float = 60) -> Reply:
        started = time.perf_counter()
        self.writer.write(request)
        async with asyncio.timeout(timeout_s):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {}
            for line in head[1:]:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        reply = Reply(int(head[0].split()[1]), headers, body, time.perf_counter() - started)
        if headers.get("connection") == "close":
            self.hang_up()
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return reply

    def hang_up(self):
        self.writer.transport.abort()


async def connect(port: int, connections: int) -> list[Connection]:
    """Open them all and use each once, so that nothing is left to set up when the burst comes."""
    opened = await asyncio.gather(*(Connection.open(port) for _ in range(connections)))
    ping = b"GET /ping HTTP/1.1\r\nhost: windve\r\n\r\n"
    for first in range(0, connections, 50):
        await asyncio.gather(*(connection.ask(ping) for connection in opened[first : first + 50]))
    return opened


async def _burst(port: int, requests: list[bytes]) -> list[Reply]:
    connections = await connect(port, len(requests))
    try:
        return await asyncio.gather(*(c.ask(r) for c, r in zip(connections, requests, strict=True)))
    finally:
        for connection in connections:
            connection.hang_up()


def burst(port: int, requests: list[bytes]) -> list[Reply]:
    """All requests at once; their replies in the same order."""
    return asyncio.run(_burst(port, requests))
