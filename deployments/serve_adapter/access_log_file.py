"""Where a Router's access log goes: beside the log that Serve writes of the same replica, rotated as that one."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path


def access_log_handler() -> logging.Handler:
    """Writes to `access_*.log` beside Serve's own `replica_*.log`, or to stderr where Serve writes no file."""
    for handler in logging.getLogger("ray.serve").handlers:
        file = getattr(handler, "target", handler)  # Serve buffers what goes into its file
        if isinstance(file, RotatingFileHandler):
            path = Path(file.baseFilename)
            name = f"access_{path.name.removeprefix('replica_')}"
            return RotatingFileHandler(
                path.with_name(name), maxBytes=file.maxBytes, backupCount=file.backupCount, encoding="utf-8", delay=True
            )
    return logging.StreamHandler()
