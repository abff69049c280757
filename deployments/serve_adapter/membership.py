"""Which replicas of a deployment live, as Serve tells this process. Written by `ReplicaRouter`, read by `Pool`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Members = Mapping[str, Mapping[str, Any]]  # replica id -> what it told of itself (Embedder.record_replica_metadata)
Watcher = Callable[[Members, str | None], None]  # (live replicas, one that is known to have died just now)

_watchers: dict[str, Watcher] = {}
_members: dict[str, Members] = {}


def watch(deployment: str, watcher: Watcher) -> None:
    """Call `watcher` with the live replicas of `deployment`, now if they are known and at every change.

    It is called from whichever thread Serve's handle runs its router in.
    """
    _watchers[deployment] = watcher
    if deployment in _members:
        watcher(_members[deployment], None)


def publish(deployment: str, members: Members, died: str | None = None) -> None:
    """The live replicas of `deployment` are now `members`; `died` is one that is gone for sure (not draining)."""
    _members[deployment] = members
    if deployment in _watchers:
        _watchers[deployment](members, died)
