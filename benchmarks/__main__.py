"""`windve bench` compares windve with a minimal server, with peers and with itself, each in one run on one machine."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.kit import results
from benchmarks.kit.bench import Bench, NotAvailable
from benchmarks.kit.registry import ABOUT, OPTIONAL, comparison
from benchmarks.kit.serving import ROOT
from benchmarks.overload.command import main as overload

_RESULTS = ROOT / "benchmarks" / "results"
_SCRATCH = ROOT / "reports" / "bench"
_INTERRUPTED = 130
OVERLOAD = "overload"


def main(words: Sequence[str]) -> int:
    """Exit status: 0 measured, 1 something could not be measured (a sentence says what), 130 interrupted."""
    if words[:1] == [OVERLOAD] and any(word.split("=")[0] == "--url" for word in words):
        return overload(words[1:])  # measures a server that already runs; the others start theirs
    arguments = _parser().parse_args(words)
    if arguments.true_speed:
        arguments.names = ["streams" if name == "generation" else name for name in arguments.names]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop servers as on Ctrl-C
    console = Console(highlight=False, soft_wrap=True)
    partial = (arguments.quick or arguments.only) and not arguments.add
    out: Path = arguments.out or (_SCRATCH if partial else _RESULTS)
    failed = False
    for name in arguments.names or _all(out, show=arguments.show):
        console.rule(name)
        try:
            if not arguments.show:
                bench = Bench(
                    name, console, out, arguments.quick, frozenset(arguments.only or ()), arguments.take_turns
                )
                if arguments.add:
                    bench.go_on()
                comparison(name).run(bench)
                bench.save()
            results.write(out, json.loads((out / f"{name}.json").read_text(encoding="utf-8")), console)
        except (NotAvailable, RuntimeError, FileNotFoundError) as error:
            if isinstance(error, NotAvailable) and name in OPTIONAL and not arguments.names:
                console.print(f"left out: {error}")
                continue
            print(f"benchmarks: {name}: {error}", file=sys.stderr)
            failed = True
        except KeyboardInterrupt:
            print(f"benchmarks: interrupted; what landed is in {out}", file=sys.stderr)
            return _INTERRUPTED
        results.write_summary(out)
    console.print(f"kept: {out}")
    return int(failed)


def _all(out: Path, *, show: bool) -> list[str]:
    """All comparisons. With `show`, the optional ones are included only if they were measured."""
    return [name for name in ABOUT if not (show and name in OPTIONAL) or (out / f"{name}.json").exists()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windve bench",
        description=f"{__doc__}\n\ncomparisons:\n"
        + "\n".join(f"  {name:<11}{about}" for name, about in ABOUT.items())
        + "\n  paper      the paper's tables and figures: windve bench paper"
        + "\n`overload --url URL` measures a running server: windve bench overload --url URL --help",
        epilog=(
            "examples:\n"
            "  make bench                              all of them, some hours\n"
            "  make bench ARGS=path                    one\n"
            "  make bench ARGS='path service --quick'  shorter and fewer rounds, kept in reports/bench\n"
            "  make bench ARGS=--show                  rewrite tables and pictures from the saved results"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", type=_name, metavar="NAME", help="comparisons to run (default: all)")
    add("--true-speed", action="store_true", help="with `generation`: on real Ray, as the comparison `streams`")
    add("--quick", action="store_true", help="fewer and shorter rounds, for trying things, not for quoting")
    add("--only", action="append", metavar="CONTESTANT", help="measure only this contestant; may be repeated")
    add(
        "--out",
        type=Path,
        help="folder (default: benchmarks/results; reports/bench with --quick or --only, without --add)",
    )
    add("--show", action="store_true", help="measure nothing; rewrite tables and pictures from the saved results")
    add(
        "--add",
        action="store_true",
        help="add to this machine's saved results; replaces only what is measured again",
    )
    add("--take-turns", type=Path, metavar="FILE", help="lock FILE while measuring, if others measure here too")
    return parser


def _name(word: str) -> str:
    if word not in ABOUT:
        raise argparse.ArgumentTypeError(f"there is no comparison '{word}'; choose from: {', '.join(ABOUT)}")
    return word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
