"""Where the service that `make serve` started on this machine can be reached, for commands in another terminal."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalService:
    """`environment` holds what Ray's clients need to be let in: the name of the file with the token, not the token."""

    pid: int
    dashboard: str
    environment: dict[str, str]

    def announce(self) -> None:
        """Only this user can read or change it. The last service that starts is the one that is found."""
        path = _path()
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    def withdraw(self) -> None:
        if find() == self:
            _path().unlink(missing_ok=True)


def find() -> LocalService | None:
    """The service that was announced last by this user, if its process still runs."""
    try:
        if _path().stat().st_uid != os.getuid():
            return None
        found = LocalService(**json.loads(_path().read_text(encoding="utf-8")))
        os.kill(found.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return found


def _path() -> Path:
    return Path(tempfile.gettempdir()) / f"windve-service-{os.getuid()}.json"
