"""Whether Serve has told this process's replica to stop. It then waits for what is under way, but says so to nobody."""

from __future__ import annotations

from ray._private.worker import global_worker


def is_stopping() -> bool:
    """Read from Serve's own replica in this process. False where there is none, or where Serve has changed."""
    replicas = (getattr(actor, "_replica_impl", None) for actor in global_worker.actors.values())
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)
