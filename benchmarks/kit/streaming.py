"""An open-loop client of streams, in a process of its own: `python -m benchmarks.kit.streaming URL PLAN FOUND`.

PLAN is a JSON list of `{"at": seconds from the start, "payload": a completion that is streamed}`. Each is sent at its
moment, on a connection of its own, whatever became of those before it. FOUND becomes a JSON list of `Streamed`, in the
plan's order. A client in the process that measures would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kit.serving import ROOT
from calibration.load import Address, request_bytes

_BEFORE_S = 1.0  # from the start of the process to second 0 of the plan
_LONGEST_S = 300.0


class Streamed(NamedTuple):
    """What a client saw of one. Times are seconds from the moment for which it was planned; None: there was none.
    `error`: in a sentence, where the status is 200 too.
    """

    status: int
    lag_s: float  # of the client: sent so much later than planned
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    text: str = ""
    finish: str | None = None
    error: str | None = None


def stream_all(url: str, plan: Sequence[dict[str, Any]]) -> list[Streamed]:
    """Run the client to its end. Raises RuntimeError with its last line where it fails."""
    with tempfile.TemporaryDirectory(prefix="windve-client-") as scratch:
        asked, found = Path(scratch) / "plan.json", Path(scratch) / "found.json"
        asked.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.kit.streaming", url, str(asked), str(found)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - our own
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr.strip().splitlines()[-1]}")
        return [Streamed(*one) for one in json.loads(found.read_text(encoding="utf-8"))]


async def _send(address: Address, plan: Sequence[dict[str, Any]]) -> list[Streamed]:
    loop = asyncio.get_running_loop()
    requests = [request_bytes(one["payload"], "/v1/completions") for one in plan]
    starts = loop.time() + _BEFORE_S

    async def one(number: int) -> Streamed:
        planned = starts + plan[number]["at"]
        await asyncio.sleep(planned - loop.time())
        lag_s = loop.time() - planned
        try:
            async with asyncio.timeout(_LONGEST_S):
                return await _stream(address, requests[number], planned, lag_s)
        except (OSError, EOFError, TimeoutError) as error:
            return Streamed(0, lag_s, error=repr(error))

    return await asyncio.gather(*map(one, range(len(plan))))


async def _stream(address: Address, request: bytes, planned: float, lag_s: float) -> Streamed:
    loop = asyncio.get_running_loop()
    reader, writer = await address.open()
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).split(maxsplit=2)
        status = int(head[1])
        if status != 200:
            return Streamed(status, lag_s)
        chunks = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            chunks.append((loop.time() - planned, (await reader.readexactly(size + 2))[:-2]))
    finally:
        writer.transport.abort()
    return _read(Streamed(status, lag_s), chunks)


def _read(found: Streamed, chunks: Sequence[tuple[float, bytes]]) -> Streamed:
    """Of chunks of a body and when they came. An event comes with its last byte."""
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


if __name__ == "__main__":
    _url, _plan, _found = sys.argv[1:]
    _sent = asyncio.run(_send(Address.parse(_url), json.loads(Path(_plan).read_text(encoding="utf-8"))))
    Path(_found).write_text(json.dumps(_sent), encoding="utf-8")
