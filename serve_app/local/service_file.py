"""Records where each `windve serve` of this machine can be reached, for commands in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_NAMES = "service-*.json"  # by process id


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
        """Write the record; only this user can read or change it."""
        folder = private_folder()
        if folder is None:
            return  # other commands then need the address as an option
        path = self._path
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):  # another service has records there, too
            self._path.unlink(missing_ok=True)
            _folder().rmdir()

    @property
    def _path(self) -> Path:
        return _folder() / _NAMES.replace("*", str(self.pid))


def find() -> LocalService | None:
    """Of this user's services that run, the one that was announced last."""
    with contextlib.suppress(OSError):
        if _is_private(_folder()):
            for path in sorted(_folder().glob(_NAMES), key=lambda path: path.stat().st_mtime_ns, reverse=True):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    found = LocalService(**json.loads(path.read_text(encoding="utf-8")))
                    os.kill(found.pid, 0)
                    return found
    return None


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
