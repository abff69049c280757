"""A replica's process under Serve: what Serve expects of the replica, and what the replica reads and sets there."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from abc import ABC, abstractmethod
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

_COLLECT_AFTER = 20_000, 20, 20  # objects that stay, and collections of the generation before
_ACCEPTS = 16  # connections that the HTTP server accepts at most each time that the event loop looks


class AsgiIngress(ABC):
    """An ingress that creates its ASGI application after it is constructed: `serve.ingress()` without an argument."""

    @abstractmethod
    def asgi_app(self) -> ASGIApp:
        """The application that answers HTTP."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve calls this once."""
        return self.asgi_app()


def is_stopping() -> bool:
    """Whether Serve has told this process's replica to stop. The replica then finishes its requests, without any hook.

    It reads a private attribute of Serve's replica. False if there is none, or if Serve has changed.
    """
    return any(getattr(replica, "_shutting_down", False) for replica in _replicas())


def _replicas() -> list[Any]:
    """Serve's replica in this process, in a list; empty if there is none, or if Serve has changed."""
    from ray._private.worker import global_worker

    found = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    return [replica for replica in found if replica is not None]


def ingress_ports() -> dict[str, int]:
    """The ports on which Serve's servers in this process listen, by protocol ("http", "grpc"). Empty until they do.

    It reads private attributes of Serve's replica, as `is_stopping` does.
    """
    for replica in _replicas():
        if not getattr(replica, "_user_callable_initialized", False):
            continue
        found = {"http": getattr(replica, "_http_port", None), "grpc": getattr(replica, "_grpc_port", None)}
        return {protocol: port for protocol, port in found.items() if port is not None}
    return {}


async def accept_several() -> None:
    """Let Serve's HTTP server in this process accept several connections each time that the event loop looks.

    uvloop accepts one (libuv #3696). A Router short of CPU looks some 50 times a second. Of a few hundred requests that
    came at once on new connections, the last waited for more than 4 s, while later ones on older connections passed.
    """
    for replica in _replicas():
        server = getattr(replica, "_direct_ingress_http_server", None)
        if isinstance(server, uvicorn.Server) and server.started:
            await listen_again(server, _ACCEPTS - 1)


async def listen_again(server: uvicorn.Server, times: int) -> None:
    """Let the server watch its listening socket so many times more. It closes these watches with its own."""
    config, listener = server.config, server.servers[0].sockets[0]

    def protocol() -> asyncio.Protocol:
        return config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=server.server_state, app_state=server.lifespan.state
        )

    for _ in range(times):
        same = socket.socket(fileno=os.dup(listener.fileno()))
        server.servers.append(
            await asyncio.get_running_loop().create_server(protocol, sock=same, ssl=config.ssl, backlog=config.backlog)
        )


def access_log_handler() -> logging.Handler:
    """A handler that writes to `access_*.log` beside Serve's `replica_*.log`, with the same rotation; without such a
    file, to stderr.
    """
    for handler in logging.getLogger("ray.serve").handlers:
        file = getattr(handler, "target", handler)  # Serve may wrap its file handler in a buffer
        if isinstance(file, RotatingFileHandler):
            path = Path(file.baseFilename)
            name = f"access_{path.name.removeprefix('replica_')}"
            return RotatingFileHandler(
                path.with_name(name), maxBytes=file.maxBytes, backupCount=file.backupCount, encoding="utf-8", delay=True
            )
    return logging.StreamHandler()


def freeze_gc() -> None:
    """Collect garbage once, exempt all current objects from later collections, and make these rarer. Called when a
    replica is ready.

    Libraries and models create some 300,000 objects. A full collection visits all of them, and blocks the process for
    0.12 s (torch, transformers and Ray on a core of an Intel Xeon), which can make queries late. Python collects after
    each 700 objects that stay, which a Router with some hundred requests creates hundreds of times a second: after a
    flood had left it many connections, it answered 1,500 requests/s instead of 2,600 (two cores of an AMD EPYC).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
