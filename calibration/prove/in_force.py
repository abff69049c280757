"""Puts settings in force for a proof, and what stood before back at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from calibration.service.application import Application, CalibrationFailed
from calibration.service.put_back import PutBack

T = TypeVar("T")
PutInForce = Callable[[Mapping[str, Any]], Awaitable[None]]


@asynccontextmanager
async def trying_out(application: Application, note: Callable[[str], None]) -> AsyncIterator[PutInForce]:
    """Yields a function that puts changes in force at all Routers. `note` gets a line if the earlier settings cannot be
    put back. Raises CalibrationFailed.
    """

    def restore() -> None:
        try:
            application.restore()
        except CalibrationFailed as error:
            note(f"could not put the earlier settings back; deploy the config again: {error}")

    with PutBack(application) as put_back:  # if this process is killed
        try:
            yield lambda changes: _finished(lambda: application.try_out(changes, put_back.tries))
        finally:
            await _finished(restore)


async def _finished(change: Callable[[], T]) -> T:
    """What `change` returns, in a thread. Whoever is cancelled meanwhile hears of it when it has ended: then it can be
    put back.
    """
    changing = asyncio.ensure_future(asyncio.to_thread(change))
    try:
        return await asyncio.shield(changing)
    except asyncio.CancelledError:
        await asyncio.gather(changing, return_exceptions=True)
        raise
