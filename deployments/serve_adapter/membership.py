"""The live replicas of each deployment, as Serve reports them. `ReplicaRouter` writes them, and `ReplicaSet` reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Members = Mapping[str, Mapping[str, Any]]  # replica id -> its metadata (Replica.record_replica_metadata)
Watcher = Callable[[Members, str | None], None]  # (live replicas, a replica that has certainly died just now)

_watchers: dict[str, Watcher] = {}
_members: dict[str, Members] = {}


def watch(deployment: str, watcher: Watcher) -> None:
    """Call `watcher` with the live replicas of `deployment`: now, if they are known, and at every change.

    It is called in the thread in which Serve's handle runs its router.
    """
    _watchers[deployment] = watcher
    if deployment in _members:
        watcher(_members[deployment], None)


def publish(deployment: str, members: Members, died: str | None = None) -> None:
    """Set the live replicas of `deployment`. `died`: one that is certainly gone, not draining."""
    _members[deployment] = members
    if deployment in _watchers:
        _watchers[deployment](members, died)
