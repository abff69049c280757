"""A cable between clients and the service that can be cut, and that can swallow everything."""

import asyncio
import contextlib
import socket
import struct

_CHUNK = 2**16


class Wire:
    """Passes bytes on to `port` on this machine. Used from one event loop."""

    def __init__(self, port: int):
        self._to = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None] | None] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        await self.flow()
        await self.reset()
        await asyncio.gather(*filter(None, self._carrying))

    async def swallow(self) -> None:
        """From now on nothing arrives; nobody is told."""
        self._flows.clear()

    async def flow(self) -> None:
        self._flows.set()

    async def reset(self) -> None:
        """Every connection ends with RST, on both sides."""
        for end in list(self._ends):
            connection = end.get_extra_info("socket")
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        ends, carrying = {writer, to_there}, asyncio.current_task()
        self._ends |= ends
        self._carrying.add(carrying)
        try:
            await asyncio.gather(self._pass(reader, to_there), self._pass(there, writer))
        except OSError:
            pass  # one side hung up: so do we, on the other
        finally:
            self._ends -= ends
            self._carrying.discard(carrying)
            for end in ends:
                end.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._flows.wait()
            to.write(data)
            await to.drain()
        raise ConnectionResetError  # the end of one direction is the end of both
