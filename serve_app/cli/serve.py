"""`windve serve` starts a local Ray and serves an application on it until Ctrl-C."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from serve_app.cli.options import add_config, add_setting, parser_of
from serve_app.config.overrides import Overrides

_DESCRIPTION = """\
Start a separate Ray on this machine's loopback interface, deploy a Serve config on it, print the detected devices, and
serve until Ctrl-C. Ctrl-C stops exactly what this command started.

Each option overrides the value in CONFIG. The file is not changed."""
_EPILOG = """\
examples:
  windve serve                                       all-MiniLM-L6-v2 on http://127.0.0.1:8000
  windve serve --model BAAI/bge-m3 --slo 0.5         a model of the hub; answers within 0.5 s, or refuses at once
  windve serve --port 8001 --grpc-port 9001          a second service beside the first
  windve serve serve_app/generation.yaml             generated text (paths of the repository)

All other settings are in CONFIG: `windve check CONFIG` checks it."""


def main(words: Sequence[str]) -> None:
    """Raises WindveError if a setting is bad or the start fails."""
    wanted = _parser().parse_args(words)
    from serve_app.local.serve import serve_until_interrupted

    overrides = Overrides(wanted.model, wanted.slo, wanted.host, wanted.port, wanted.grpc_port)
    serve_until_interrupted(wanted.config, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("serve", _DESCRIPTION, _EPILOG)
    add_config(parser)
    add = parser.add_argument
    # WINDVE_PORT and WINDVE_SERVICE_HOST are taken: Kubernetes sets them in pods beside a Service named windve.
    add_setting(add, "--model", "WINDVE_MODEL", metavar="ID", help="hub name, folder, or package:NAME/FOLDER")
    add_setting(
        add,
        "--slo",
        "WINDVE_SLO",
        type=_seconds,
        metavar="S",
        help="seconds within which admitted queries are answered",
    )
    add_setting(
        add, "--host", "WINDVE_HTTP_HOST", type=_host, metavar="ADDRESS", help="where it listens; 0.0.0.0: for all"
    )
    add_setting(add, "--port", "WINDVE_HTTP_PORT", type=_port, metavar="N", help="of HTTP")
    add_setting(add, "--grpc-port", "WINDVE_GRPC_PORT", type=_port, metavar="N", help="of gRPC")
    return parser


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"should be seconds above 0, not '{word}'")
    return seconds


def _host(word: str) -> str:
    if not word:
        raise argparse.ArgumentTypeError("should be an address, not '': that would be all of them")
    return word


def _port(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 65535:
        raise argparse.ArgumentTypeError(f"should be a port from 1 to 65535, not '{word}'")
    return int(word)
