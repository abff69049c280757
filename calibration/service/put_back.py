"""Puts an application's settings back if the calibration that tries others is killed.

It is a process of its own, and no child of the calibration, because `ray job stop` ends all children of a job. The
calibration writes each config that it tries to its standard input, and a last line when it has put the settings back
itself. If the input ends without that line, the calibration has died.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Self

from calibration.load import Address
from calibration.service.application import Application

_DONE = "done\n"
_CODE = """
import os, sys
if os.fork():
    os._exit(0)
from calibration.service.put_back import watch
watch(sys.stdin)
"""
_ARRIVES_S = 2.0  # for the last config that a killed calibration had sent


class PutBack:
    """The process, while settings are tried."""

    def __init__(self, application: Application) -> None:
        command = [sys.executable, "-c", _CODE]
        # Its own session: what is sent to the calibration's process group does not reach it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
        self._process.wait()  # it has forked
        self._tell(
            {
                "name": application.name,
                "dashboard": application.dashboard,
                "address": asdict(application.address),
                "deployed": application.deployed,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(_DONE)
        self._process.stdin.close()

    def tries(self, config: Mapping[str, Any]) -> None:
        """Note a config that is put in force next."""
        self._tell(config)

    def _tell(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


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
