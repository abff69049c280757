"""`windve schema` prints the JSON Schema of a Serve config with windve's applications."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files


def main(words: Sequence[str]) -> None:
    argparse.ArgumentParser(
        prog="windve schema",
        description=(
            "Print the JSON Schema of a Serve config. An editor with a YAML language server completes and checks a "
            "config whose first line names it."
        ),
        epilog=(
            "example: windve schema > windve.schema.json, and as the first line of the config beside it: "
            "# yaml-language-server: $schema=windve.schema.json"
        ),
    ).parse_args(words)
    print(files("serve_app.config").joinpath("schema.json").read_text(encoding="utf-8"), end="")
