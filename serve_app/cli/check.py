"""`windve check` reports that a Serve config is valid, or what is wrong with it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from serve_app.cli.options import add_config


def main(words: Sequence[str]) -> None:
    """Raises SettingsError that names the file or the key."""
    parser = argparse.ArgumentParser(
        prog="windve check",
        description=(
            "Check a Serve config without starting anything: unknown keys at every level, values out "
            "of range, settings that contradict each other. Names the first bad key and exits with status 1."
        ),
        epilog="examples: windve check my.yaml; for k8s: windve check k8s/overlays/gpu/cluster/serve.yaml",
    )
    add_config(parser)
    config = parser.parse_args(words).config
    from serve_app.config.service_config import load_config

    load_config(config)
    print(f"{config}: good")
