"""An open-loop client for streams: it sends each request at its planned time on a separate connection, regardless of
earlier ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import NamedTuple

from calibration.load import Address

_LONGEST_S = 300.0


class ClientStream(NamedTuple):
    """What the client saw of one stream. Times are in seconds from the planned time; None if it did not happen.
    `error`: one sentence, also possible with status 200.
    """

    status: int
    lag_s: float  # how much later than planned it was sent
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    text: str = ""
    finish: str | None = None
    error: str | None = None


async def send_all(address: Address, plan: Sequence[tuple[float, bytes]], before_s: float = 0.0) -> list[ClientStream]:
    """Send each (seconds from the start, request) of the plan, and return the outcomes. The start is in `before_s`."""
    loop = asyncio.get_running_loop()
    starts = loop.time() + before_s

    async def one(at: float, request: bytes) -> ClientStream:
        planned = starts + at
        await asyncio.sleep(planned - loop.time())
        lag_s = loop.time() - planned
        try:
            async with asyncio.timeout(_LONGEST_S):
                return await _stream(address, request, planned, lag_s)
        except (OSError, EOFError, TimeoutError) as error:
            return ClientStream(0, lag_s, error=repr(error))

    return await asyncio.gather(*(one(at, request) for at, request in plan))


async def _stream(address: Address, request: bytes, planned: float, lag_s: float) -> ClientStream:
    loop = asyncio.get_running_loop()
    reader, writer = await address.open()
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).split(maxsplit=2)
        status = int(head[1])
        if status != 200:
            return ClientStream(status, lag_s)
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            chunks.append((loop.time() - planned, (await reader.readexactly(size + 2))[:-2]))
    finally:
        writer.transport.abort()
    return _read(ClientStream(status, lag_s), chunks)


def _read(found: ClientStream, chunks: Sequence[tuple[float, bytes]]) -> ClientStream:
    """Add what the chunks of a body, with their arrival times, contain. An event arrives with its last byte."""
    left = b""
    for at, chunk in chunks:
        *lines, left = (left + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            told = json.loads(line.removeprefix(b"data: "))
            if "error" in told:
                found = found._replace(error=told["error"]["message"])
            elif told["choices"]:
                (choice,) = told["choices"]
                first_s = at if found.first_s is None else found.first_s
                text, finish = found.text + choice["text"], choice["finish_reason"]
                found = found._replace(first_s=first_s, last_s=at, text=text, finish=finish)
            else:
                found = found._replace(tokens=told["usage"]["completion_tokens"])
    return found
