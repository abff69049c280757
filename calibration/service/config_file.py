"""The file with the Serve config: read before anything is measured, and written atomically at the end."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calibration.service.application import Application
from calibration.service.deployment import for_the_devices_there
from calibration.service.serve_config import FILE, edit, router_application
from deployments.errors import SettingsError

_POOL = {"queue_depth": 1, "alpha_s": 0.1, "beta_s": 0.1, "cost": {"query_s": 0.1, "token_s": 0.1, "token2_s": 0.1}}
_RECORD = {"at": "now", "r2": {"cpu": 1.0}, "proved": ["bursts"]}
_CHANGED = {"slo_s": 1.0, "accelerator": _POOL, "cpu": _POOL, "calibration": _RECORD}
_EXAMPLE: dict[str, Any] = {"max_ongoing_requests": 1, "user_config": _CHANGED}
_STEPS = {"step_time": {"beta_s": 0.1, "knee": 1}}
_EXAMPLE_OF_STEPS: dict[str, Any] = {"user_config": {"accelerator": _STEPS, "cpu": _STEPS}}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The Serve config, or the RayService manifest with one, to be written. Keeps its original text."""

    path: Path
    text: str
    application: Application

    @classmethod
    def read(cls, path: Path, application: Application) -> ConfigFile:
        """Read the file before anything is measured. Raises SettingsError if it cannot be edited or written."""
        found = cls(path, read_text(path), application)
        found.edited(example(application))
        if not os.access(path.resolve().parent, os.W_OK):
            raise SettingsError(str(path), "cannot be written: no permission to write to its folder")
        return found

    def edited(self, changes: Mapping[str, Any]) -> str:
        """Raises SettingsError that names the file and the key. The number of replicas may differ from the running."""
        name = self.application.name
        try:
            after = edit(self.text, name, self.application.placed(changes))
        except SettingsError as error:
            key = str(self.path) if error.key == FILE else f"{self.path}: {error.key}"
            raise SettingsError(key, error.problem) from None
        if _args(router_application(self.text, name)) != _args(self.application.deployed):
            raise SettingsError(
                str(self.path),
                "describes another application than the running one (its args differ); deploy the same to both",
            )
        return after


def _args(application: Mapping[str, Any]) -> Any:
    return for_the_devices_there({"applications": [application]})["applications"][0].get("args")


def example(application: Application) -> dict[str, Any]:
    """Changes of the kind that a calibration of the application writes (`result.changes_for`): whether they can be
    written is tried first.
    """
    return _EXAMPLE_OF_STEPS if application.generates else _EXAMPLE


def unified_diff(before: str, after: str, name: str) -> str:
    """The change in the format of `diff -u`; empty if there is none."""
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (before, after))
    lines = difflib.unified_diff(old, new, name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def read_text(path: Path) -> str:
    """The text of a file, with its line ends unchanged. Raises SettingsError if it is unreadable or not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SettingsError(str(path), f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SettingsError(str(path), "is not UTF-8 text") from None


def write_atomically(path: Path, before: str, after: str) -> Path:
    """Replace `before` by `after` atomically. Returns the path of a backup of `before`.

    A link stays a link: its target is replaced, and the backup is beside the target. Permissions are kept, and the
    owner if we may set it. Raises SettingsError if the file no longer contains `before`, or cannot be written; the
    original is then unchanged, and nothing is left beside it.
    """
    target = path.resolve()
    backup = target.with_name(f"{target.name}.bak-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    new = backup.with_suffix(".tmp")
    try:
        status = target.stat()
        shutil.copy2(target, backup)
        shutil.copy2(target, new)
        with contextlib.suppress(OSError):  # only root may change the owner
            for made in (backup, new):
                shutil.chown(made, status.st_uid, status.st_gid)
        with new.open("wb") as file:
            file.write(after.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        _check_holds(path, before)
        new.replace(target)
    except (OSError, SettingsError, KeyboardInterrupt) as error:
        for leftover in (new, backup):
            leftover.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise SettingsError(str(path), f"cannot be written: {error.strerror or error}") from None
        raise
    return backup


def _check_holds(path: Path, before: str) -> None:
    if path.read_bytes() != before.encode("utf-8"):
        raise SettingsError(str(path), "changed during the calibration: nothing was written; run it again")
