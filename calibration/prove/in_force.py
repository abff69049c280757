"""Puts settings in force for a proof, and what stood before back at its end, also if the calibration is killed.

That takes a process of its own, and no child of the calibration, because `ray job stop` ends all children of a job. The
calibration writes each config that it tries to its standard input, and a last line when it has put the settings back
itself. If the input ends without that line, the calibration has died.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from calibration.load import Address
from calibration.service.application import Application, CalibrationFailed

T = TypeVar("T")
PutInForce = Callable[[Mapping[str, Any]], Awaitable[None]]

_DONE = "done\n"
_CODE = """
import os, sys
if os.fork():
    os._exit(0)
from calibration.prove.in_force import watch
watch(sys.stdin)
"""
_ARRIVES_S = 2.0  # for the last config that a killed calibration had sent


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

    with watched(application) as tell:
        try:
            yield lambda changes: _finished(lambda: application.try_out(changes, tell))
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


@contextmanager
def watched(application: Application) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Start the process that puts the settings back. Yields a function that tells it of a config before it is tried."""
    # Its own session: what is sent to the calibration's process group does not reach it.
    command = [sys.executable, "-c", _CODE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
    process.wait()  # it has forked
    assert process.stdin is not None
    said = process.stdin

    def tell(what: Mapping[str, Any]) -> None:
        said.write(json.dumps(what) + "\n")
        said.flush()

    about = {name: getattr(application, name) for name in ("name", "dashboard", "deployed")}
    tell({**about, "address": asdict(application.address)})
    try:
        yield tell
    finally:
        said.write(_DONE)
        said.close()


def watch(lines: Iterable[str]) -> None:
    """Read until the input ends. Puts the settings back unless the calibration has done so."""
    first, *others = lines
    if others and others[-1] == _DONE:
        return
    about = json.loads(first)
    application = Application(**about | {"address": Address(**about["address"])})
    application.tried += [json.loads(line) for line in others if line.endswith("\n")]
    time.sleep(_ARRIVES_S)
    application.restore()
