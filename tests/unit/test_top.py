"""`windve top`: what it makes of `/info`, and what it says where none is."""

import copy
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from serve_app.cli import top
from serve_app.cli.main import main
from serve_app.cli.top import Snapshot, add, render

REPLICA = {
    "queries": 100,
    "opens_s": 0.0,
    "slowdown": 1.02,
    "safety_margin": 0.1,
    "refusals": {"full": 3, "never": 0, "closed": 1},
}
POOL = {
    "expected_replicas": 2,
    "live_replicas": 1,
    "queue_depth": None,
    "in_flight": 7,
    "waiting": 2,
    "latency_model": {"alpha_s": 0.01, "beta_s": 0.2, "source": "measured at warm-up"},
    "replicas": {"r": REPLICA},
}
WINDVE = {
    "topology": "CPU only",
    "slo_s": 1.0,
    "router": "one",
    "busy_answers": 5,
    "config_problem": None,
    "emulated": False,
    "pools": {"cpu": POOL},
}
INFO = {"model_id": "m3", "windve": WINDVE}


def changed(*changes):
    """INFO with `(path, value)` set."""
    info = copy.deepcopy(INFO)
    for path, value in changes:
        *parents, last = path.split(".")
        place = info
        for key in parents:
            place = place[key]
        place[last] = value
    return info


def shown(now, last=None, since_s=2.0):
    console = Console(width=200, file=io.StringIO())
    heard = [] if last is None else add([], Snapshot(10.0, last))
    console.print(render(add(heard, Snapshot(10.0 + since_s, now))))
    return lines_of(console)


def lines_of(console):
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_model_and_its_pool():
    assert shown(INFO) == [
        "m3 CPU only; promise 1 s; refused 5",
        "cpu",
        "replicas 1 of 2",
        "in flight 7, 2 waiting",
        "room now",
        "answered 100",
        "slowdown 1.02",
        "safety margin 0.10",
        "takes 0.0100 C + 0.2000 s",
    ]


ONE = "windve.pools.cpu.replicas.r"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((f"{ONE}.opens_s", 0.25), "room in 0.25 s\n"),
        ((f"{ONE}.opens_s", None), "room -\n"),
        (("windve.pools.cpu.queue_depth", 0), "room closed\n"),
        (
            ("windve.pools.cpu.replicas.s", {**REPLICA, "opens_s": 3.0, "slowdown": 10.5}),
            "room now\nanswered 200\nslowdown 1.02 to 10.50\nsafety margin 0.10\n",
        ),
        (("windve.pools.cpu.replicas", {}), "room -\nanswered -\nslowdown -\nsafety margin -\n"),
        (("windve.pools.cpu.latency_model.source", "calibrated"), "takes 0.0100 C + 0.2000 s, calibrated"),
        (("windve.emulated", True), "refused 5; EMULATED devices"),
        (("windve.config_problem", "user_config.slo: no"), "refused 5; user_config.slo: no"),
        (("windve.recent", {"bucket_s": 5, "late": [0, 2, 1]}), "refused 5; late in five minutes 3"),
    ],
)
def test_what_is_told_is_shown(change, words):
    assert words in "\n".join(shown(changed(change)))


def test_two_pools_fit_80_columns():
    """No figure and no word is broken."""
    pool = {**POOL, "latency_model": {**POOL["latency_model"], "source": "calibrated"}}
    pool["replicas"] = {"a": REPLICA, "b": {**REPLICA, "queries": 123456789, "slowdown": 10.5, "safety_margin": 0.3}}
    info = changed(("windve.pools", {"accelerator": pool, "cpu": pool}))
    console = Console(width=80, file=io.StringIO())
    console.print(render(add([], Snapshot(1.0, info))))
    assert len(lines_of(console)) == 9
    assert lines_of(console)[-1] == "takes 0.0100 C + 0.2000 s, calibrated 0.0100 C + 0.2000 s, calibrated"


def test_a_narrow_terminal_cuts_no_figure():
    console = Console(width=20, file=io.StringIO())
    console.print(render(add([], Snapshot(1.0, changed((f"{ONE}.queries", 123456789))))))
    assert "\N{HORIZONTAL ELLIPSIS}" not in console.file.getvalue()


def test_answers_a_second_are_of_the_same_replicas():
    later = changed((f"{ONE}.queries", 130))
    assert "answered 130 (15.0/s)" in shown(later, INFO)
    another = changed(("windve.pools.cpu.replicas", {"new": REPLICA}))
    assert "answered 100" in shown(another, INFO)


def test_what_routers_have_counted_is_summed():
    """Each call reaches one of them. As many as live are kept, those that said something last."""

    def said(router, at, queries, refused, late, routers=2):
        named = (("windve.router", router), ("windve.routers", routers), ("windve.busy_answers", refused))
        return Snapshot(at, changed(*named, (f"{ONE}.queries", queries), ("windve.recent", {"late": [late]})))

    console, heard = Console(width=200, file=io.StringIO()), []
    for snapshot in (
        said("one", 1.0, 100, 5, 1), said("two", 2.0, 40, 2, 2), said("one", 3.0, 130, 6, 1),
        said("two", 4.0, 60, 3, 2), said("three", 5.0, 7, 0, 0), said("one", 6.0, 200, 7, 4, routers=1),
    ):  # fmt: skip
        heard = add(heard, snapshot)
        console.print(render(heard))
    shown = lines_of(console)
    assert shown[::9] == [
        "m3 CPU only; promise 1 s; refused 5; late in five minutes 1; counted by 1 of 2 Routers",
        "m3 CPU only; promise 1 s; refused 7; late in five minutes 3",
        "m3 CPU only; promise 1 s; refused 8; late in five minutes 3",
        "m3 CPU only; promise 1 s; refused 9; late in five minutes 3",
        "m3 CPU only; promise 1 s; refused 3; late in five minutes 2",
        "m3 CPU only; promise 1 s; refused 7; late in five minutes 4",
    ]
    answered = [line.removeprefix("answered ") for line in shown[5::9]]
    assert answered == ["100", "140", "170", "190 (25.0/s)", "67", "200"]


DOOR = {"in_hand": 3, "free": 40}


def test_the_door_is_that_of_all_routers():
    """The models of a Router share it."""
    one = changed(("windve.door", DOOR), ("windve.routers", 2))
    two = changed(("windve.door", {**DOOR, "in_hand": 0, "free": 2}), ("windve.router", "two"), ("windve.routers", 2))
    assert shown({**one, "models": {"m3": one, "m4": one}})[-1] == "door: 3 in hand, 40 free"
    assert shown(two, one)[-1] == "door: 3 in hand, 42 free"
    assert "door" not in "".join(shown(changed(("windve.door", {}))))  # without HAProxy


def test_what_haproxies_count_is_summed_once_for_each_host():
    def told(router, host, refused):
        there = {**DOOR, "haproxy": {"host": host, "waiting": 5, "refused": refused}}
        named = (("windve.router", router), ("windve.routers", 3), ("windve.door", there))
        return Snapshot(1.0, changed(*named))

    console, heard = Console(width=200, file=io.StringIO()), []
    for snapshot in (told("one", "a", 12), told("two", "b", 3), told("three", "a", 13)):
        heard = add(heard, snapshot)
    console.print(render(heard))
    assert lines_of(console)[-1] == "door: 9 in hand, 120 free; at HAProxy 10 wait, 16 refused"


def test_each_of_several_models_is_shown():
    second = {**INFO, "model_id": "m4"}
    lines = shown({**INFO, "models": {"m3": INFO, "m4": second}})
    assert [line.split()[0] for line in lines[::9]] == ["m3", "m4"]


def test_an_application_that_generates():
    pool = {"expected_replicas": 1, "live_replicas": 1, "rows": 3, "waiting": 1, "free_blocks": 40, "blocks": 64}
    pool["replicas"] = {"r": {"opens_s": 0.0, "slowdown": 1.0, "safety_margin": 0.0, "refusals": [2, 1]}}
    windve = {
        "topology": "CPU only",
        "ttft_s": 2.0,
        "tpot_s": 0.2,
        "refused": 3,
        "router": "one",
        "pools": {"cpu": pool},
    }
    head, *rows = shown({"model_id": "toy", "windve": windve})
    assert head == "toy CPU only; promise 2 s, then 0.2 s a token; refused 3"
    assert rows == [
        "cpu", "replicas 1 of 1", "in flight 3, 1 waiting", "room 40 blocks", "answered -", "slowdown 1.00",
        "safety margin 0.00", "takes -",
    ]  # fmt: skip


# --- over HTTP


@pytest.fixture
def service():
    """Answers what `service.answers` holds, (status, body) in turn, and keeps the last one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append((self.path, self.headers.get("authorization")))
            status, body = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.asked = [(200, json.dumps(INFO).encode())], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_once_prints_one_table_and_shows_the_key(service, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["top", f"{service.url}/prefix/", "--once", "--key", "env:MY_KEY"]) == 0
    told = capsys.readouterr()
    assert "m3  CPU only" in told.out
    assert "takes          0.0100 C + 0.2000 s" in told.out
    assert "sk-secret" not in told.out + told.err
    assert service.asked == [("/prefix/info", "Bearer sk-secret")]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((401, b"{}"), "answers 401: use --key to say where its API key is"),
        ((500, b"{}"), "answers 500"),
        ((200, b"<html>"), "is not JSON: this is not a windve service"),
        ((200, b'{"model_id": "tei"}'), "has no pools: this is not a windve service"),
        ((200, b"[]"), "has no pools: this is not a windve service"),
    ],
)
def test_what_is_not_windve_is_said_in_one_sentence(service, capsys, answer, sentence):
    service.answers = [answer]
    assert main(["top", service.url]) == 1
    assert capsys.readouterr().err == f"windve: {service.url}/info {sentence}\n"


def test_nobody_there(capsys):
    assert main(["top", "http://127.0.0.1:1", "--once"]) == 1
    assert capsys.readouterr().err.startswith("windve: http://127.0.0.1:1 does not answer: ")


def test_it_goes_on_while_the_service_is_away_until_ctrl_c(service, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    later = json.dumps(changed((f"{ONE}.queries", 130))).encode()
    service.answers = [*service.answers, (503, b""), (200, later)]
    left = [None, None, KeyboardInterrupt]

    def sleep(_):
        if (raised := left.pop(0)) is not None:
            raise raised

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top", service.url, "--every", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("m3  CPU only") == 2
    assert "answers 503; asking again" in said  # a pipe gets all pictures, one behind the other
    assert "130 (" in said
    assert len(service.asked) == 3
