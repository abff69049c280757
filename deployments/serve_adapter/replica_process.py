"""A replica's process under Serve: what Serve expects of the replica, and what the replica reads and sets there."""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from logging.handlers import RotatingFileHandler
from pathlib import Path

from starlette.types import ASGIApp


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
    from ray._private.worker import global_worker

    replicas = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)


def ingress_ports() -> dict[str, int]:
    """The ports on which Serve's servers in this process listen, by protocol ("http", "grpc"). Empty until they do.

    It reads private attributes of Serve's replica, as `is_stopping` does.
    """
    from ray._private.worker import global_worker

    for actor in global_worker.actors.values():
        replica = getattr(actor, "_replica_impl", None)
        if not getattr(replica, "_user_callable_initialized", False):
            continue
        found = {"http": getattr(replica, "_http_port", None), "grpc": getattr(replica, "_grpc_port", None)}
        return {protocol: port for protocol, port in found.items() if port is not None}
    return {}


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
    """Collect garbage once, and exempt all current objects from later collections. Called when a replica is ready.

    Libraries and models create some 300,000 objects. A full collection visits all of them, and blocks the process for
    0.12 s (torch, transformers and Ray on a core of an Intel Xeon), which can make queries late.
    """
    gc.collect()
    gc.freeze()
