"""Sends requests that are none, and says how each ended: the statuses of its answers, or how it was dropped."""

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import replace

import grpc
from bad_requests import GOAWAY, HEADERS, RST, Bad

SENT_S = 0.5  # without an answer for so long, whoever has no more to send says so
_SHOWN = 300  # bytes
QUIET_S = 0.1  # after an answer: is there a second one?
DROPPED, REFUSED, HUNG = "dropped", "reset", "HUNG"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_GRPC_STATUS = re.compile(rb"grpc-status[\x01\x02](\d{1,2})")  # HAProxy writes neither Huffman's code nor an index
GRPC = {code.value[0]: code.name for code in grpc.StatusCode}


async def send(service, requests: Iterable[Bad], at_once: int, longest_s: float) -> list[tuple[Bad, list[str]]]:
    """Each, with the beginning of what was sent, and the statuses of its answers or one of DROPPED, REFUSED, HUNG."""
    places, ended = asyncio.Semaphore(at_once), []

    async def one(bad):
        try:
            found = await _outcome(service, bad, places, longest_s)
        except OSError:  # reset while it is read (ECONNRESET), or before it is half-closed (ENOTCONN)
            found = [REFUSED]
        ended.append((replace(bad, sent=bad.sent[:_SHOWN]), found))

    async with asyncio.TaskGroup() as group:
        for bad in requests:
            await places.acquire()
            group.create_task(one(bad))
    return ended


async def _outcome(service, bad, places, longest_s):
    """A request that has no answer after SENT_S gives its place to another, and is waited for all the same."""
    held = True
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.grpc_port if bad.grpc else service.port)
        parse = grpc_statuses if bad.grpc else http_statuses
        try:
            writer.write(bad.sent)
            received, ends = b"", time.monotonic() + longest_s
            while time.monotonic() < ends:
                found = parse(received)
                patience = QUIET_S if found else SENT_S if held else ends - time.monotonic()
                try:
                    more = await asyncio.wait_for(reader.read(2**16), patience)
                except TimeoutError:
                    if found:
                        return found
                    if bad.halves and held and not writer.is_closing():
                        writer.write_eof()
                    if held:
                        held = False
                        places.release()
                    continue
                if not more:
                    return found or [DROPPED]
                received += more
            return [HUNG]
        finally:
            writer.transport.abort()
    finally:
        if held:
            places.release()


def http_statuses(received: bytes) -> list[str]:
    """Of all whole answers."""
    found, at = [], 0
    while match := _STATUS.match(received, at):
        length = _LENGTH.search(match[2])
        at = match.end() + (int(length[1]) if length and match[1] != b"100" else 0)
        if at <= len(received) and match[1] != b"100":
            found.append(match[1].decode())
    return found


def grpc_statuses(received: bytes) -> list[str]:
    """Of the streams that ended; a stream or connection that HTTP/2 ends is 'RST' or 'GOAWAY'."""
    found, at = [], 0
    while at + 9 <= len(received):
        length, kind = int.from_bytes(received[at : at + 3]), received[at + 3]
        payload = received[at + 9 : at + 9 + length]
        at += 9 + length
        if kind == HEADERS and (match := _GRPC_STATUS.search(payload)):
            found.append(GRPC[int(match[1])])
        elif kind == HEADERS and payload[:1] != b"\x88" and not payload.startswith(b"\x48\x03200"):
            found.append(f"HTTP {_http2_status(payload)}")
        elif kind == RST:
            found.append("RST")
        elif kind == GOAWAY:
            found.append("GOAWAY")
    return found


def _http2_status(payload: bytes) -> str:
    by_index = {0x89: "204", 0x8A: "206", 0x8B: "304", 0x8C: "400", 0x8D: "404", 0x8E: "500"}
    return by_index.get(payload[0]) or payload[2:5].decode("latin-1")
