"""Options that subcommands share. An option counts before its environment variable, and that before the config file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).parents[1] / "config.yaml"


def add_config(parser: argparse.ArgumentParser) -> None:
    """The Serve config: WINDVE_CONFIG, or the packaged one, where none is given."""
    default = Path(os.environ.get("WINDVE_CONFIG") or _PACKAGED)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", default=default, help="default: %(default)s")


def add_setting(add: Callable[..., Any], option: str, variable: str, **how: Any) -> None:
    """An option whose environment variable counts where the option is not given. An empty variable is none."""
    how["help"] += f" (or {variable})"
    add(option, default=os.environ.get(variable) or None, **how)
