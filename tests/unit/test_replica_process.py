"""A replica's process: what is loaded costs no collection anything, and connections are accepted several at once."""

import asyncio
import socket
import subprocess
import sys

import pytest
import uvicorn
import uvloop

from deployments.serve_adapter.replica_process import listen_again

CONNECTIONS = 60

_CODE = """
import gc
from deployments.serve_adapter.replica_process import freeze_gc
gc.disable()
class Node: pass
loaded, garbage = [Node() for _ in range(1000)], Node()
garbage.itself = garbage
gone = __import__("weakref").ref(garbage)
del garbage
freeze_gc()
later = Node()
print(gone() is None, any(one is loaded for one in gc.get_objects()), any(one is later for one in gc.get_objects()))
"""


def test_what_is_loaded_is_looked_at_no_more_and_what_comes_later_is():
    found = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False", "True"]


async def accept(times):
    """How often the loop looked until all connections that came at once were accepted."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = uvicorn.Server(uvicorn.Config(lambda _scope: None, lifespan="off", log_config=None))
    server.install_signal_handlers = lambda: None
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    await listen_again(server, times)
    clients, looks = [socket.create_connection(address) for _ in range(CONNECTIONS)], 0
    while len(server.server_state.connections) < CONNECTIONS:
        await asyncio.sleep(0)
        looks += 1
    for client in clients:
        client.close()
    server.should_exit = True
    await serving
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    return looks


def test_connections_that_come_at_once_are_not_accepted_one_by_one():
    alone, several = uvloop.run(accept(0)), uvloop.run(accept(15))
    assert alone >= CONNECTIONS  # libuv's way; once that changes, `listen_again` is needless
    assert several <= CONNECTIONS / 4
