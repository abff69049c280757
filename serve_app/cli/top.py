"""`windve top` shows a service's `/info` in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
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
from serve_app.cli.options import parser_of, seconds_from

_TIMEOUT_S = 10.0
_UNAUTHORIZED = 401
_DESCRIPTION = """\
Watch a service: shows its /info every second until Ctrl-C.

  room           now, or the seconds until a replica admits a query of mean cost; for generation the free blocks
  answered       by all Routers that have answered a call, and how many per second
  slowdown       measured over predicted time of a batch, as the replica learned it
  safety margin  what admission adds to a prediction, as a fraction of it
  takes          seconds for C queries
  door           requests that need a Router now, and how many more the Routers take; requests that wait at their
                 HAProxies, and those refused there since each last (re)started"""

_EPILOG = """\
examples:
  windve top
  windve top https://embed.example.org --key env:WINDVE_KEY
  windve top --once       one table, for a script or a report"""


class _NotReached(WindveError):
    """Nothing answers at the address, or it is not a windve service."""


class Snapshot(NamedTuple):
    """One answer of `/info`. `at`: monotonic seconds."""

    at: float
    info: dict[str, Any]

    @property
    def models(self) -> dict[str | None, dict[str, Any]]:
        """What `/info` says about each model, by its name: windve's own fields."""
        models = self.info.get("models", {"": self.info}).values()
        return {one.get("model_id"): one["windve"] for one in models}

    @property
    def router(self) -> str:
        """Which Router answered. Each counts its own answers, and each call may reach another one."""
        return str(self.info["windve"].get("router"))


class Reading(NamedTuple):
    """What a Router has said last, and the time before, for its rates."""

    now: Snapshot
    last: Snapshot | None


class _Said(NamedTuple):
    """What a Router says of one model, now and `since_s` seconds before; None if it had said nothing."""

    ours: Mapping[str, Any]
    before: Mapping[str, Any] | None
    since_s: float


def main(words: Sequence[str]) -> None:
    """Raises WindveError if the first call fails. A later failure is shown, and the call is repeated."""
    wanted = _parser().parse_args(words)
    key = None if wanted.key is None else read_keys(wanted.key, "--key")[0].key
    console, address = Console(highlight=False), wanted.url.rstrip("/")
    heard = add([], _read(address, key))
    if wanted.once or not console.is_terminal or console.is_dumb_terminal:  # one picture behind the other
        console.print(render(heard))
        if wanted.once:
            return
        _watch(lambda: console.print(_next(address, key, heard)), wanted.every)
        return
    with Live(render(heard), console=console, screen=True, auto_refresh=False) as live:
        _watch(lambda: live.update(_next(address, key, heard), refresh=True), wanted.every)


def _watch(show: Callable[[], None], every_s: float) -> None:
    """Until Ctrl-C."""
    try:
        while True:
            time.sleep(every_s)
            show()
    except KeyboardInterrupt:
        return


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("top", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("url", nargs="?", type=_url, metavar="URL", default="http://127.0.0.1:8000", help="default: %(default)s")
    add("--key", metavar="WHERE", help="where to read the API key, if the service requires one: file:PATH or env:NAME")
    add(
        "--every",
        type=seconds_from(0.1, 3600),
        default=1.0,
        metavar="S",
        help="seconds between calls (default: %(default)g)",
    )
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


def _next(address: str, key: str | None, heard: list[Reading]) -> RenderableType:
    """The next screen. `heard` is updated in place."""
    try:
        heard[:] = add(heard, _read(address, key))
    except _NotReached as error:
        return Text(f"{error}; asking again", style="yellow")
    return render(heard)


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


def add(heard: Sequence[Reading], now: Snapshot) -> list[Reading]:
    """The readings of all Routers, the latest first. As many as live are kept. Pure."""
    last = next((one.now for one in heard if one.now.router == now.router), None)
    others = [one for one in heard if one.now.router != now.router]
    return [Reading(now, last), *others][: max(1, now.info["windve"].get("routers", 1))]


def render(heard: Sequence[Reading]) -> Group:
    """The screen for these readings, the latest first. Pure."""
    shown: list[RenderableType] = []
    for model, ours in heard[0].now.models.items():
        said = [
            _Said(now.models[model], last and last.models.get(model), now.at - last.at if last else 0.0)
            for now, last in heard
            if model in now.models
        ]
        shown += [_head(model, ours, said), _table(ours, said)]
    return Group(*shown, *_door(heard))


def _door(heard: Sequence[Reading]) -> Iterator[Text]:
    """The door of these Routers, which all models share; nothing without HAProxy."""
    doors = [door for one in heard if (door := one.now.info["windve"].get("door"))]
    if doors:
        in_hand, free = (sum(door[key] for door in doors) for key in ("in_hand", "free"))
        hosts = {one["host"]: one for door in reversed(doors) if (one := door.get("haproxy"))}  # the latest of each
        waiting, refused = (sum(one[key] for one in hosts.values()) for key in ("waiting", "refused"))
        there = f"; at HAProxy {waiting} wait, {refused} refused" if hosts else ""
        yield Text(f"door: {in_hand} in hand, {free} free{there}")


def _head(model: str | None, ours: Mapping[str, Any], said: Sequence[_Said]) -> Text:
    promise = f"{ours['ttft_s']:g} s, then {ours['tpot_s']:g} s a token" if "ttft_s" in ours else f"{ours['slo_s']:g} s"
    refused = sum(one.ours.get("busy_answers", one.ours.get("refused", 0)) for one in said)
    facts = [f"{ours.get('topology')}; promise {promise}; refused {refused}"]
    if busy := [one.ours["router_busy"] for one in said if _is_number(one.ours.get("router_busy"))]:
        facts.append(f"Routers busy {sum(busy) / len(busy):.0%}")
    if recent := [one.ours["recent"] for one in said if "recent" in one.ours]:  # absent in older services
        facts.append(f"late in five minutes {sum(sum(one['late']) for one in recent)}")
    if (routers := ours.get("routers", 1)) > len(said):
        facts.append(f"counted by {len(said)} of {routers} Routers")
    problems = ["EMULATED devices"] if ours.get("emulated") else []
    problems += [ours["config_problem"]] if ours.get("config_problem") else []
    yellow = "".join(f"; {problem}" for problem in problems)
    return Text.assemble((f"{model}", "bold"), f"  {'; '.join(facts)}", (yellow, "yellow"))


def _table(ours: Mapping[str, Any], said: Sequence[_Said]) -> Table:
    """A column for each pool: so it fits 80 characters."""
    columns = (Column(name, overflow="fold") for name in ("", *ours["pools"]))  # on a narrow terminal no figure is cut
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    pools = (_figures(name, pool, said).items() for name, pool in ours["pools"].items())
    for row in zip(*pools, strict=True):
        table.add_row(row[0][0], *(shown for _, shown in row))
    return table


def _figures(name: str, pool: Mapping[str, Any], said: Sequence[_Said]) -> dict[str, str]:
    members = list(pool["replicas"].values())
    expected = pool.get("expected_replicas")
    of_expected = "" if expected is None else f" of {expected}"
    return {
        "replicas": f"{pool['live_replicas']}{of_expected}",
        "in flight": f"{pool.get('in_flight', pool.get('rows', '-'))}, {pool.get('waiting', '-')} waiting",
        "room": _room(pool, members),
        "answered": _answers(name, said),
        "slowdown": _range(members, "slowdown"),
        "safety margin": _range(members, "safety_margin"),
        "takes": _learned(pool),
    }


def _answers(pool: str, said: Sequence[_Said]) -> str:
    """Queries that a pool has answered, and per second. `/info` does not count the answers of generation. Counts of
    replicas that joined or left are no rate, because they start at 0.
    """
    total, rate, has_rate = 0, 0.0, True
    for ours, before, since_s in said:
        now, then = (_counts((one or {"pools": {}})["pools"].get(pool)) for one in (ours, before))
        total += sum(now.values())
        has_rate &= since_s > 0 and now.keys() == then.keys()
        rate += (sum(now.values()) - sum(then.values())) / since_s if since_s > 0 else 0.0
    if not any(_counts(one.ours["pools"].get(pool)) for one in said):
        return "-"
    return f"{total} ({rate:.1f}/s)" if has_rate else f"{total}"


def _counts(pool: Mapping[str, Any] | None) -> dict[str, int]:
    """Answered queries by replica."""
    replicas = {} if pool is None else pool["replicas"]
    return {name: member["queries"] for name, member in replicas.items() if "queries" in member}


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
    return f"{model['alpha_s']:.4f} C + {model['beta_s']:.4f} s{calibrated}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
