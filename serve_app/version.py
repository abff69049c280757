"""The installed version of windve."""

from __future__ import annotations

import importlib.metadata

VERSION = importlib.metadata.version("windve")
