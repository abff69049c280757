"""`windve serve` before its Ray is there: what it makes of the config, and Ctrl-C."""

import io
import itertools
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console
from test_terminal import info

from deployments.errors import SettingsError
from serve_app.config.models import Args
from serve_app.config.overrides import Overrides
from serve_app.local import ray_environment, serve
from serve_app.local.console import _show_model
from serve_app.local.ray_environment import StartFailed, free_port

APPLICATION = """\
applications:
- import_path: serve_app.app:build
  args: {model: {id: m}}
  deployments: [{name: Router, user_config: {slo_s: 1.0}}]
"""


@pytest.fixture
def read(tmp_path):
    """The config with these lines before it."""

    def read(lines, **said):
        (tmp_path / "c.yaml").write_text(f"{lines}\n{APPLICATION}")
        return serve._read(tmp_path / "c.yaml", Overrides(**said))

    return read


@pytest.mark.parametrize(
    ("lines", "said", "host"),
    [
        ("", {}, "127.0.0.1"),
        ("http_options: {port: 8123}", {}, "127.0.0.1"),
        ("http_options: {host: 0.0.0.0}", {}, "0.0.0.0"),
        ("", {"host": "0.0.0.0"}, "0.0.0.0"),
    ],
)
def test_a_config_that_names_no_host_is_served_on_loopback(read, lines, said, host):
    assert read(lines, **said)["http_options"]["host"] == host


@pytest.mark.parametrize("port", [0, 65536, "'8000'"])
def test_what_is_no_port_is_refused(read, port):
    found = read(f"http_options: {{port: {port}}}")
    with pytest.raises(SettingsError, match=f"http_options.port: should be a port from 1 to 65535, not {port}"):
        serve._http_addresses(found)


def test_each_has_a_port_of_its_own(read, monkeypatch):
    functions, port = "grpc_servicer_functions: [x.y]", free_port(20_000)
    with pytest.raises(SettingsError, match=f"grpc_options.port: {port} is http_options.port as well: give each its"):
        serve._grpc_address(read(f"http_options: {{port: {port}}}\ngrpc_options: {{port: {port}, {functions}}}"))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(port))
    with pytest.raises(SettingsError, match=f"http_options.port: {port} is RAY_SERVE_HAPROXY_STATS_PORT here"):
        serve._http_addresses(read(f"http_options: {{port: {port}}}"))
    assert port < free_port(port, kept=serve._ports(read(f"http_options: {{port: {port}}}")))


def test_an_application_without_a_route_is_shown_at_the_root(read):
    found, port = read(""), free_port(20_000)
    found["http_options"]["port"] = port
    found["applications"][0]["route_prefix"] = None
    assert serve._http_addresses(found) == [f"http://127.0.0.1:{port}"]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Serves a config with another function in place of the download; what it began with."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found = {"scratch": tmp_path / "scratch"}
    found["scratch"].mkdir()

    def console(**how):
        found["console"] = Console(width=200, file=io.StringIO(), **how)
        return found["console"]

    def start(download):
        monkeypatch.setattr(Args, "find_models", download)
        monkeypatch.setattr(serve, "Console", console)
        monkeypatch.setattr(serve, "set_ray_environment", lambda *_: None)
        monkeypatch.setattr(ray_environment, "scratch_parent", lambda: str(found["scratch"]))
        (tmp_path / "c.yaml").write_text(APPLICATION)
        try:
            serve.serve_until_interrupted(tmp_path / "c.yaml", Overrides(port=free_port(20_000)))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    start.found = found
    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_download_ends_where_it_stands_and_leaves_nothing(start, number):
    def download(_):
        os.kill(os.getpid(), number)
        time.sleep(1)
        pytest.fail("it went on")

    signal.signal(number, signal.SIG_IGN)  # as in a job that a script starts with &
    with pytest.raises(KeyboardInterrupt):
        start(download)
    assert list(start.found["scratch"].iterdir()) == []


def test_a_zombie_whose_parent_hangs_delays_no_end():
    """As of a dashboard that a busy machine has not started in time."""
    code = "import os, signal; os.fork() and os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-c", code]) as hangs:
        parent = psutil.Process(hangs.pid)
        while not (children := parent.children()) or children[0].status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        began = time.monotonic()
        serve._end([*children, parent])
        assert time.monotonic() < began + serve._LAST_WORKERS_S + serve._KILLED_S / 2
    assert not parent.is_running()


def test_brackets_in_a_model_s_name_are_no_markup(start):
    def download(_):
        raise SettingsError("args.model.id", "none")

    with pytest.raises(SettingsError):
        start(download)
    console = start.found["console"]
    _show_model(console, {**info(), "model_id": "/models/[v2]/a[/b]"})
    assert "model: /models/[v2]/a[/b], embedding" in console.file.getvalue()


def test_a_wrong_setting_ends_the_start_at_its_first_failure(monkeypatch):
    """Serve would try three replicas, which fail in the same way."""
    ray_serve = pytest.importorskip("ray.serve")
    text = (
        "A replica failed to start with exception. Retrying 2 more time(s). Error:\nSettingsError: args.cpu.dtype: no\n"
    )
    deployment = SimpleNamespace(message=text)
    starting = SimpleNamespace(status="DEPLOYING", message="", deployments={"CpuEmbedder": deployment})
    monkeypatch.setattr(ray_serve, "status", lambda: SimpleNamespace(applications={"windve": starting}))
    stop, reporter = SimpleNamespace(wait=lambda _: False), SimpleNamespace(tick=lambda _: None)
    with pytest.raises(StartFailed, match=r"^args\.cpu\.dtype: no$"):
        serve._wait_until_running(stop, reporter)


@pytest.mark.parametrize(
    ("failures", "tries"),
    [([], 1), (["The current node timed out during startup."], 2), (["timed out"] * 2, None), (["no port"], None)],
)
def test_ray_is_started_again_once_with_another_port(monkeypatch, failures, tries):
    """Its agent ends where somebody has just taken the port of its metrics, and Ray waits in vain."""
    left, calls, ports, free = list(failures), [], [], itertools.count(8080)
    monkeypatch.setattr(serve, "free_port", lambda first, **_: next(free) if first == 8080 else first)
    monkeypatch.setattr(serve, "_stop_ray", lambda: calls.append("stopped"))

    def start_local_ray(_, metrics_port, __, ___):
        ports.append(metrics_port)
        if left:
            raise RuntimeError(left.pop(0))
        return "http://dashboard"

    monkeypatch.setattr(serve, "start_local_ray", start_local_ray)
    console = Console(file=io.StringIO(), width=200)
    if tries is None:
        with pytest.raises(serve.StartFailed, match=f"Ray did not start: {failures[0]}; see "):
            serve._start_ray(console, ())
    else:
        assert serve._start_ray(console, ()) == ("http://dashboard", 8079 + tries)
    assert ports == list(range(8080, next(free)))
    assert calls == ["stopped"] * len(failures)
    assert console.file.getvalue().count("once more") == (failures[:1] != [] and "timed out" in failures[0])
