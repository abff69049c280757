"""A cache of JSON files beside the hub's cache, for results that take long. Keys are made of everything that a result
depends on. No torch here.

A file that cannot be read, or belongs to another user, counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """The folder of windve in the user's cache of models."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "windve"


class KeptFile:
    """One cached value. `about`: everything that it depends on, as JSON."""

    def __init__(self, kind: str, about: Any) -> None:
        key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = cache_folder() / kind / f"{key}.json"

    def read(self) -> Any:
        """The value, or None."""
        try:
            with self.path.open(encoding="utf-8") as file:
                return json.load(file) if os.fstat(file.fileno()).st_uid == os.getuid() else None
        except (OSError, ValueError):
            return None

    def write(self, value: Any) -> None:
        """Write the value atomically, even with concurrent writers. Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            json.dump(value, file)
        Path(file.name).replace(self.path)


def state_of_files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and modification time of each file in a folder, to detect changes."""
    found = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]
