"""Records where this machine's `windve serve` can be reached, for commands in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = "service.json"


@dataclass(frozen=True, slots=True)
class LocalService:
    """`address`: of its Ray. `environment`: the variables that Ray's clients need. It names the file with the token,
    not the token itself.
    """

    pid: int
    dashboard: str
    address: str
    environment: dict[str, str]

    def announce(self) -> None:
        """Write the record; only this user can read or change it. It replaces that of an earlier service."""
        folder = private_folder()
        if folder is None:
            return  # other commands then need the address as an option
        path = folder / _NAME
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    def withdraw(self) -> None:
        if find() == self:
            (_folder() / _NAME).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                _folder().rmdir()


def find() -> LocalService | None:
    """The service that this user announced last, if its process still runs."""
    try:
        if not _is_private(_folder()):
            return None
        found = LocalService(**json.loads((_folder() / _NAME).read_text(encoding="utf-8")))
        os.kill(found.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return found


def private_folder() -> Path | None:
    """A folder in the system's temporary folder that only this user can read; created if necessary.

    None if another user already has a folder or file of that name.
    """
    folder = _folder()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return folder if _is_private(folder) else None


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"windve-service-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Whether this is a real folder of this user, to which nobody else has access."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
