"""What a replica finds in the process that Serve made for it, and what Serve looks for in the replica."""

from __future__ import annotations

import gc
import logging
from abc import ABC, abstractmethod
from logging.handlers import RotatingFileHandler
from pathlib import Path

from starlette.types import ASGIApp


class AsgiIngress(ABC):
    """An ingress that makes its own ASGI application, once it is constructed: `serve.ingress()` without an argument."""

    @abstractmethod
    def asgi_app(self) -> ASGIApp:
        """What answers HTTP."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve, once."""
        return self.asgi_app()


def is_stopping() -> bool:
    """Serve has told this process's replica to stop: it waits for what is under way, but says so to nobody.

    Read from Serve's own replica. False where there is none, or where Serve has changed.
    """
    from ray._private.worker import global_worker

    replicas = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)


def access_log_handler() -> logging.Handler:
    """Writes to `access_*.log` beside Serve's own `replica_*.log`, rotated as that; to stderr where there is none."""
    for handler in logging.getLogger("ray.serve").handlers:
        file = getattr(handler, "target", handler)  # Serve buffers what goes into its file
        if isinstance(file, RotatingFileHandler):
            path = Path(file.baseFilename)
            name = f"access_{path.name.removeprefix('replica_')}"
            return RotatingFileHandler(
                path.with_name(name), maxBytes=file.maxBytes, backupCount=file.backupCount, encoding="utf-8", delay=True
            )
    return logging.StreamHandler()


def freeze_gc() -> None:
    """Called when a replica is ready: no collection looks at what it has by now, but for what is garbage already.

    Libraries and models make some 300,000 objects. A full collection looks at each of them, and takes 0.12 s in which
    nothing else runs in the process (torch, transformers and Ray on a core of an Intel Xeon): for a query that is late.
    """
    gc.collect()
    gc.freeze()
