"""Which of a pool's replicas a Router prefers where several are idle. Pure; looked at only when replicas come or go."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any


def nearest_first(members: Mapping[str, Mapping[str, Any]], node: str, router: str) -> list[str]:
    """Replica ids: those on the Router's own `node` first, which the network need not carry anything to; among others
    in an order of each Router's own, so that several Routers do not all turn to the same one.
    """

    def rank(replica: str) -> tuple[bool, int]:
        return members[replica].get("node") != node, zlib.crc32(f"{router} {replica}".encode())

    return sorted(members, key=rank)
