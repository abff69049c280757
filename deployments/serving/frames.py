"""What frames between Routers and replicas share: a small JSON head, then arrays as they lie in memory. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import orjson

from deployments.admission.fair_share import Tenant

HEAD, SIZE = struct.Struct("<II"), struct.Struct("<I")  # of a frame and its head; of the frame, which comes first


LARGEST_FRAME = 2**28  # bytes; a frame is cut long before


CUT_BYTES = 2**24  # a frame that has so much takes nothing more


def tenant_of(plain: Sequence[Any] | None) -> Tenant | None:
    return None if plain is None else Tenant(*plain)


def plain_tenant(tenant: Tenant | None) -> tuple[str, float] | None:
    """As orjson writes it: it takes no named tuples."""
    return None if tenant is None else (tenant.name, tenant.weight)


def frame_of(head: Any, arrays: Sequence[bytes]) -> list[bytes]:
    """The buffers of one frame: its sizes, the head as JSON, the arrays."""
    told = orjson.dumps(head)
    told += b" " * (-len(told) % 4)  # arrays begin at a multiple of four
    size = HEAD.size + len(told) + sum(map(len, arrays))
    return [HEAD.pack(size, len(told)), told, *arrays]


def head_of(frame: bytes) -> tuple[Any, int]:
    """(a frame's head, where its arrays begin). Raises ValueError or struct.error."""
    _, size = HEAD.unpack_from(frame)
    end = HEAD.size + size
    return orjson.loads(frame[HEAD.size : end]), end
