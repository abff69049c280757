"""`windve small-model`: the toy that `id: small:docstrings` means, as a folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deployments.errors import SettingsError
from deployments.generation.text.small_model import make_and_show, small_model_folder

_DESCRIPTION = """\
Train a small language model on Python's own documentation, in about a minute, and write it into a new
FOLDER. It is a toy: it writes like docstrings, and knows nothing. It shows how text is generated where no model hub is
at hand. A config asks for it by args.model.id: small:docstrings, or by FOLDER's path.

Without FOLDER it is made where that id looks for it (beside the hub's cache), if it is not there yet. Several machines
need the same one: write FOLDER once, and copy it."""


def main(arguments: Sequence[str]) -> None:
    """Raises SettingsError where it cannot be made or written."""
    parser = argparse.ArgumentParser(
        prog="windve small-model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="must not be there yet")
    folder = parser.parse_args(arguments).folder
    if folder is None:
        print(small_model_folder())
        return
    if folder.exists():
        raise SettingsError("FOLDER", f"{folder} is there already; remove it, or write somewhere else")
    try:
        make_and_show(folder)
    except OSError as error:
        raise SettingsError("FOLDER", f"{folder} cannot be written: {error}") from None
