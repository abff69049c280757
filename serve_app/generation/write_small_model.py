"""`windve small-model` writes the toy model `small:docstrings` to a folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deployments.errors import SettingsError
from deployments.generation.text.small_model import make_and_show, small_model_folder

_DESCRIPTION = """\
Train a small language model on Python's own documentation, in about a minute, and write it into a new
FOLDER. It is a toy: it writes text like docstrings, and knows nothing. Use it to try generation without a model hub:
set args.model.id to small:docstrings, or to FOLDER's path.

Without FOLDER, the model is written where small:docstrings looks for it (beside the hub's cache), unless it exists.
All machines of a cluster need the same model: write FOLDER once, and copy it."""


def main(arguments: Sequence[str]) -> None:
    """Raises SettingsError if the model cannot be trained or written."""
    parser = argparse.ArgumentParser(
        prog="windve small-model", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="must not exist yet")
    folder = parser.parse_args(arguments).folder
    if folder is None:
        print(small_model_folder())
        return
    if folder.exists():
        raise SettingsError("FOLDER", f"{folder} already exists; remove it, or choose another folder")
    try:
        make_and_show(folder)
    except OSError as error:
        raise SettingsError("FOLDER", f"{folder} cannot be written: {error}") from None
