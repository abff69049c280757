"""Options that subcommands share. Precedence: the option, its environment variable, the config file."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGED = Path(__file__).parents[1] / "config.yaml"


def parser_of(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of a subcommand; both texts keep their lines."""
    return argparse.ArgumentParser(
        prog=f"windve {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the Serve config. The default is WINDVE_CONFIG, or else the packaged config."""
    default = Path(os.environ.get("WINDVE_CONFIG") or _PACKAGED)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", default=default, help="default: %(default)s")


def add_setting(add: Callable[..., Any], option: str, variable: str, **how: Any) -> None:
    """Add an option that defaults to an environment variable. An empty variable counts as unset."""
    how["help"] += f" (or {variable})"
    add(option, default=os.environ.get(variable) or None, **how)


def seconds_from(least: float, most: float) -> Callable[[str], float]:
    """Reads an option's seconds."""

    def seconds(word: str) -> float:
        try:
            found = float(word)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"should be seconds from {least:g} to {most:g}, not '{word}'")
        return found

    return seconds
