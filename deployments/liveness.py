"""Whether an actor lives, by Ray's word."""

from __future__ import annotations

import asyncio

_NAMESPACE = "serve"  # where Serve keeps its replicas' actors


async def actor_lives(name: str) -> bool:
    """Ray forgets the name of an actor when it dies."""
    return await asyncio.to_thread(_is_known, name)


def _is_known(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return False
    return True
