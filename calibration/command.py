"""The options of `windve calibrate`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.errors import SettingsError

_DEFAULT_OUT = Path("reports/calibration")
_DEEPEST = 100_000  # as a config may have it (`deployments.settings.Depth`)
_INTERRUPTED = 130  # the shell's status for a command that Ctrl-C ended


def main(words: Sequence[str]) -> int:
    """Exit status: 0 calibrated, 130 interrupted. Raises WindveError if it refuses; nothing is written then."""
    arguments = parser().parse_args(words)
    check(arguments)
    try:
        from calibration.session import calibrate  # here, because importing its libraries takes a second

        calibrate(arguments, parser().parse_args([]))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("windve: interrupted; run the same command again, which starts anew", file=sys.stderr)
        return _INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="windve calibrate",
        description=(
            "Time planned runs on each pool of a running windve application, fit latency = alpha*C +\n"
            "beta and the cost of a query by its length, verify the queue depths with all pools loaded, prove the\n"
            "SLO with streams above the capacity, write the result into the Serve config and apply it.\n"
            "For an application that generates: measure planned steps, fit their times, prove both\n"
            "promises with streams, write and apply `step_time`. Writes a report (HTML, pictures, JSON).\n"
            "Calibrate when traffic is low: during a calibration, more client requests are refused."
        ),
        epilog=(
            "examples:\n"
            "  make calibrate SLO=1\n"
            "  windve calibrate --slo 1 --config serve_app/config.yaml --apply\n"
            "  windve calibrate --config serve_app/generation.yaml --apply     # an application that generates\n"
            "  ray job submit -- windve calibrate --slo 1 --apply\n"
            "  windve calibrate --deploy serve.yaml --rayservice windve        # in a KubeRay RayJob"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_measuring(made)
    _add_result(made)
    return made


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("embeddings: the SLO, and the traffic that it is for").add_argument
    add("--slo", type=float, metavar="S", help="seconds within which queries are answered (default: as configured)")
    about = (
        "traffic that the depths are for. burst: queries arrive all at once, alpha*C + beta, as in the paper; "
        "steady: at any time, and may wait for a running batch, alpha*C + 2*beta (default: %(default)s)"
    )
    add("--shape", choices=("burst", "steady"), default="burst", help=about)
    add("--tokens", type=int, default=75, help="length of a query; longer ones reduce depths (default: %(default)s)")
    add("--most", type=int, default=2048, help="most queries at once on one replica (default: %(default)s)")
    add("--stress-step", type=int, default=0, metavar="N", help="also run a stress test in steps of N, to compare")
    add = parser.add_argument_group("generation: the requests that the capacity is for").add_argument
    add("--prompt-tokens", type=int, metavar="N", help="mean length of a prompt (default: 512, or 1/4 of the context)")
    add("--answer-tokens", type=int, metavar="N", help="mean length of an answer (default: 128, or 1/8 of the context)")
    add = parser.add_argument_group("both").add_argument
    add("--seed", type=int, default=0, help="seed of the random texts (default: %(default)s)")
    add("--estimate-only", action="store_true", help="stop after the fit: no proof, write nothing")


def _add_result(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to do with the result").add_argument
    add("--config", type=Path, help="Serve config or RayService manifest to write the result into (default: none)")
    add("--apply", action="store_true", help="update the running application in place, without a restart")
    add("--dry-run", action="store_true", help="measure, and show the change to the config as a diff; write nothing")
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder for the report (default: %(default)s)")
    add = parser.add_argument_group("which application").add_argument
    add("--application", metavar="NAME", help="the application, if several are running")
    add("--model", metavar="NAME", help="embeddings: the model, if the application serves several")
    add("--url", help="address of the application (default: from its config)")
    about = "where to read the application's API key: file:PATH or env:NAME (default: from its config)"
    add("--api-keys", metavar="WHERE", help=about)
    about = (
        "Ray's dashboard (default: this Ray job's, that of `windve serve` here, or http://127.0.0.1:8265). If it "
        "requires a token, set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"
    )
    add("--dashboard", metavar="URL", help=about)
    about = "first deploy this Serve config, with one replica per device, on a cluster that serves nothing yet"
    add("--deploy", type=Path, metavar="CONFIG", help=about)
    about = "with --deploy, in a pod: write the result into this RayService of the pod's namespace"
    add("--rayservice", metavar="NAME", help=about)


def check(arguments: argparse.Namespace) -> None:
    """Raises SettingsError that names the option."""
    if arguments.slo is not None and not 0 < arguments.slo < 3600:
        raise SettingsError("--slo", f"should be seconds above 0 and below 3600, not {arguments.slo:g}")
    if arguments.estimate_only and (arguments.config or arguments.apply):
        raise SettingsError(
            "--estimate-only", "an estimate is not proven, so it is never written: leave out --config and --apply"
        )
    if arguments.rayservice is not None and (arguments.deploy is None or arguments.estimate_only):
        raise SettingsError("--rayservice", "requires --deploy, and proven depths: leave out --estimate-only")
    for option, least in (("tokens", 3), ("most", 1), ("stress_step", 0)):
        if getattr(arguments, option) < least:
            raise SettingsError(f"--{option.replace('_', '-')}", f"should be at least {least}")
    if arguments.most > _DEEPEST:
        raise SettingsError("--most", f"should be at most {_DEEPEST}, the largest depth that a config may have")
    if arguments.stress_step > arguments.most:
        raise SettingsError("--stress-step", f"should be at most --most, which is {arguments.most}")
