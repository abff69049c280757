"""Which of a pool's replicas a Router prefers where several would finish at the same time. Pure."""

from __future__ import annotations

import zlib


def rank(replica: str, replica_node: str | None, *, node: str, router: str) -> tuple[bool, int]:
    """The smallest first: replicas on the Router's own `node`, which the network need not carry anything to; among
    others in an order of each Router's own, so that several Routers do not all turn to the same one.
    """
    return replica_node != node, zlib.crc32(f"{router} {replica}".encode())
