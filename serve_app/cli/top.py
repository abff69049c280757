"""`windve top` shows a service's `/info` in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from deployments.errors import WindveError
from serve_app.api_keys import read_keys

_TIMEOUT_S = 10.0
_UNAUTHORIZED = 401
_WIDE = 200  # columns
_COLUMNS = (
    "pool", "replicas", "in flight", "waiting", "room", "answered", "refused", "slowdown", "safety margin", "learned",
)  # fmt: skip
_DESCRIPTION = """\
Watch a service: shows its /info every second until Ctrl-C.

  room           now, or the seconds until a replica admits a query of mean cost; for generation the free blocks
  answered       by the Router that answers this call, and its rate per second since it last answered
  refused        by the pool's replicas since they started; the Router then asks the other pool
  slowdown       measured over predicted time of a batch, as the replica learned it
  safety margin  what admission adds to a prediction, as a fraction of it
  learned        seconds for C queries"""


class _NotReached(WindveError):
    """Nothing answers at the address, or it is not a windve service."""


class Snapshot(NamedTuple):
    """One answer of `/info`. `at`: monotonic seconds."""

    at: float
    info: dict[str, Any]

    @property
    def models(self) -> list[dict[str, Any]]:
        """What `/info` says about each model: TEI's fields, and windve's own under `windve`."""
        return list(self.info.get("models", {"": self.info}).values())

    @property
    def router(self) -> str:
        """Which Router answered. Each counts its own answers, and each call may reach another one."""
        return str(self.info["windve"].get("router"))


def main(words: Sequence[str]) -> None:
    """Raises WindveError if the first call fails. A later failure is shown, and the call is repeated."""
    wanted = _parser().parse_args(words)
    key = None if wanted.key is None else read_keys(wanted.key, "--key")[0].key
    console, address = _console(), wanted.url.rstrip("/")
    last = _read(address, key)
    if wanted.once:
        console.print(render(last, None))
        return
    before = {last.router: last}
    if not console.is_terminal or console.is_dumb_terminal:  # one picture behind the other
        console.print(render(last, None))
        _watch(lambda: console.print(_next(address, key, before)), wanted.every)
        return
    with Live(render(last, None), console=console, screen=True, auto_refresh=False) as live:
        _watch(lambda: live.update(_next(address, key, before), refresh=True), wanted.every)


def _console() -> Console:
    """A file or a pipe has no edge at which figures would be cut, unless COLUMNS gives it one."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def _watch(show: Callable[[], None], every_s: float) -> None:
    """Until Ctrl-C."""
    try:
        while True:
            time.sleep(every_s)
            show()
    except KeyboardInterrupt:
        return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="windve top",
        description=_DESCRIPTION,
        epilog="examples:\n  windve top\n  windve top https://embed.example.org --key env:WINDVE_KEY\n"
        "  windve top --once       one table, for a script or a report",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", nargs="?", type=_url, metavar="URL", default="http://127.0.0.1:8000", help="default: %(default)s")
    add("--key", metavar="WHERE", help="where to read the API key, if the service requires one: file:PATH or env:NAME")
    add("--every", type=_interval, default=1.0, metavar="S", help="seconds between calls (default: %(default)g)")
    add("--once", action="store_true", help="print one table and exit")
    return parser


def _url(word: str) -> str:
    if not word.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"should begin with http:// or https://, not '{word}'")
    try:
        parts = urlsplit(word)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise argparse.ArgumentTypeError(f"should look like http://127.0.0.1:8000, not '{word}'")
    return word


def _interval(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"should be seconds from 0.1 to 3600, not '{word}'")
    return seconds


def _next(address: str, key: str | None, before: dict[str, Snapshot]) -> RenderableType:
    """The next screen. `before`: the last reading of each Router; updated in place."""
    try:
        now = _read(address, key)
    except _NotReached as error:
        return Text(f"{error}; asking again", style="yellow")
    last, before[now.router] = before.get(now.router), now
    return render(now, last)


def _read(address: str, key: str | None) -> Snapshot:
    """Raises _NotReached."""
    request = urllib.request.Request(f"{address}/info")  # noqa: S310 - the scheme was checked
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            info = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        hint = ": use --key to say where its API key is" if error.code == _UNAUTHORIZED else ""
        raise _NotReached(f"{address}/info answers {error.code}{hint}") from None
    except (ValueError, http.client.HTTPException):
        raise _NotReached(f"{address}/info is not JSON: this is not a windve service") from None
    except OSError as error:
        raise _NotReached(f"{address} does not answer: {getattr(error, 'reason', error)}") from None
    if not isinstance(info, dict) or "pools" not in (info.get("windve") or {}):
        raise _NotReached(f"{address}/info has no pools: this is not a windve service")
    return Snapshot(time.monotonic(), info)


# --- rendering ---


def render(now: Snapshot, last: Snapshot | None) -> Group:
    """The screen for a reading. `last`: the same Router's previous reading, for the rates. Pure."""
    shown: list[RenderableType] = []
    former = {} if last is None else {model.get("model_id"): model for model in last.models}
    for model in now.models:
        before = former.get(model.get("model_id"))
        since_s = 0.0 if last is None else now.at - last.at
        shown += [_head(model), _table(model["windve"], None if before is None else before["windve"], since_s)]
    return Group(*shown)


def _head(model: Mapping[str, Any]) -> Text:
    ours = model["windve"]
    promise = f"{ours['ttft_s']:g} s, then {ours['tpot_s']:g} s a token" if "ttft_s" in ours else f"{ours['slo_s']:g} s"
    refused = ours.get("busy_answers", ours.get("refused"))
    head = Text(f"{model.get('model_id')}", style="bold")
    head.append(f"  {ours.get('topology')}; promise {promise}; refused {refused}", style="not bold")
    recent = ours.get("recent")
    if recent is not None:  # absent in older services
        head.append(f"; late in five minutes {sum(recent['late'])}", style="not bold")
    if ours.get("emulated"):
        head.append("; EMULATED devices", style="yellow")
    if ours.get("config_problem"):
        head.append(f"; {ours['config_problem']}", style="yellow")
    return head


def _table(ours: Mapping[str, Any], before: Mapping[str, Any] | None, since_s: float) -> Table:
    columns = (Column(name, overflow="fold") for name in _COLUMNS)  # on a narrow terminal no figure is cut
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, pool in ours["pools"].items():
        members = list(pool["replicas"].values())
        rate = _rate(pool, None if before is None else before["pools"].get(name), since_s)
        expected = pool.get("expected_replicas")
        live = f"{pool['live_replicas']} of {expected}" if expected is not None else str(pool["live_replicas"])
        table.add_row(
            name,
            live,
            str(pool.get("in_flight", pool.get("rows", "-"))),
            str(pool.get("waiting", "-")),
            _room(pool, members),
            f"{_answered(pool)}{rate}",
            str(sum(sum(_counts(member.get("refusals"))) for member in members)),
            _range(members, "slowdown"),
            _range(members, "safety_margin"),
            _learned(pool),
        )
    return table


def _answered(pool: Mapping[str, Any]) -> int | str:
    """Queries answered. `/info` does not count the answers of generation."""
    counts = [member["queries"] for member in pool["replicas"].values() if "queries" in member]
    return sum(counts) if counts else "-"


def _rate(pool: Mapping[str, Any], before: Mapping[str, Any] | None, since_s: float) -> str:
    """Answers per second; empty if replicas joined or left, because their counts start at 0."""
    if before is None or since_s <= 0 or pool["replicas"].keys() != before["replicas"].keys():
        return ""
    now, then = _answered(pool), _answered(before)
    if isinstance(now, str) or isinstance(then, str):
        return ""
    return f" ({(now - then) / since_s:.1f}/s)"


def _room(pool: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> str:
    if pool.get("queue_depth") == 0:
        return "closed"
    if "free_blocks" in pool:
        return f"{pool['free_blocks']} blocks"
    opens = [float(member["opens_s"]) for member in members if _is_number(member.get("opens_s"))]
    if not opens:
        return "-"
    return "now" if min(opens) <= 0 else f"in {min(opens):.2f} s"


def _range(members: Iterable[Mapping[str, Any]], key: str) -> str:
    """The value in all replicas: one number, or the smallest and the largest."""
    found = [member[key] for member in members if _is_number(member.get(key))]
    if not found:
        return "-"
    least, most = f"{min(found):.2f}", f"{max(found):.2f}"
    return least if least == most else f"{least} to {most}"


def _learned(pool: Mapping[str, Any]) -> str:
    model = pool.get("latency_model")
    if not model:
        return "-"
    calibrated = ", calibrated" if model["source"] == "calibrated" else ""
    return f"{model['alpha_s']:.4f} C + {model['beta_s']:.4f}{calibrated}"


def _counts(refusals: Any) -> Iterator[int]:
    """One replica's counts, one per reason. Embedding replicas name the reasons."""
    yield from refusals.values() if isinstance(refusals, Mapping) else refusals or ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
