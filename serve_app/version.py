"""The version of windve, as it is installed."""

from __future__ import annotations

import importlib.metadata

VERSION = importlib.metadata.version("windve")
