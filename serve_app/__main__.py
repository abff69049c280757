"""`python -m serve_app`, which is what `make serve` runs: a local Ray, the application, until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deployments.errors import WindveError

_DEFAULT = Path(__file__).parent / "config.yaml"


def main() -> int:
    """Exit status: 0 after Ctrl-C, a good check or a written model, 1 where a setting or the start failed."""
    try:
        if sys.argv[1:2] == ["convert"]:
            from serve_app import convert

            convert.main(sys.argv[2:])
        elif sys.argv[1:2] == ["small-model"]:
            from serve_app.generation import write_small_model

            write_small_model.main(sys.argv[2:])
        else:
            _serve()
    except WindveError as error:
        print(f"windve: {error}", file=sys.stderr)
        return 1
    return 0


def _serve() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m serve_app",
        description=(
            "Start a Ray of its own on this machine's loopback, deploy a windve Serve config on it, say what was "
            "detected, and serve embeddings over HTTP until Ctrl-C, which takes down exactly what was started."
        ),
        epilog=(
            "On a cluster that runs already, use Ray's own command: serve deploy serve_app/config.yaml -a ADDRESS. "
            "A model for hosts without a hub: python -m serve_app convert --help. A toy that generates text: "
            "python -m serve_app small-model --help"
        ),
    )
    parser.add_argument("config", nargs="?", type=Path, default=_DEFAULT, help="Serve config (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="only check the config: names the first bad key, if any")
    arguments = parser.parse_args()
    if arguments.check:
        from serve_app.config.service_config import load_config

        load_config(arguments.config)
        print(f"{arguments.config}: good")
    else:
        from serve_app.local.serve import serve_until_interrupted

        serve_until_interrupted(arguments.config)


if __name__ == "__main__":
    sys.exit(main())
