"""The `windve` command. It imports only the subcommand that is called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from deployments.errors import SettingsError, WindveError

_MISUSED, _INTERRUPTED = 2, 130
_OF_CALIBRATION = {"matplotlib", "scipy"}


class Command(NamedTuple):
    """`module`: its `main` takes the words after the command and returns an exit status, or None for 0."""

    module: str
    about: str


COMMANDS = {
    "serve": Command("serve_app.cli.serve", "start a Ray of its own here and serve a Serve config until Ctrl-C"),
    "check": Command("serve_app.cli.check", "check a Serve config: names the first bad key, if any"),
    "top": Command("serve_app.cli.top", "watch a service: pools, queues, room, answers, learned latency"),
    "calibrate": Command("calibration.command", "measure, prove and save what a query costs on this hardware"),
    "plan": Command("calibration.planning.command", "compute devices and money for a demand, from a calibration"),
    "bench": Command("serve_app.cli.bench", "run benchmarks: windve and other servers (in the repository)"),
}
_EXAMPLES = """\
examples:
  windve serve                                    real embeddings on http://127.0.0.1:8000
  windve serve --model BAAI/bge-m3 --slo 0.5      another model, another SLO
  windve serve my.yaml --port 8001                a config of your own, at another port
  windve top                                      in a second terminal
  windve calibrate --slo 1 --config my.yaml --apply

`windve COMMAND --help` describes each command. To deploy on a running cluster, use Ray's own command:
serve deploy CONFIG -a ADDRESS."""


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 refused or failed (one sentence says why), 2 misused, 130 interrupted."""
    words = sys.argv[1:] if words is None else words
    name = str(_parser().parse_args(words[:1]).command)
    try:
        status: int | None = importlib.import_module(COMMANDS[name].module).main(words[1:])
        sys.stdout.flush()  # so that a closed pipe fails here, not when Python exits
    except WindveError as error:
        print(f"windve: {error}", file=sys.stderr)
        return _MISUSED if isinstance(error, SettingsError) and error.key.startswith("--") else 1
    except ModuleNotFoundError as error:
        if error.name not in _OF_CALIBRATION:
            raise
        print(f"windve: {name} needs {error.name}: pip install 'windve[calibration]'", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as in `windve top --once | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status or 0


class _Version(argparse.Action):
    """Reads the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from serve_app.version import VERSION

        print(f"windve {VERSION}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {name:<{width}}{command.about}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="windve",
        usage="windve COMMAND ...",
        description=(
            "Serve embeddings and generated text within a latency SLO: an accelerator answers first, the CPUs take\n"
            f"the overflow.\n\ncommands:\n{listed}"
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("--version", nargs=0, action=_Version, help="print the version")
    return parser
