"""The ports and the folder that `make serve` looks for."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest

from serve_app.local.ray_environment import (
    StartFailed,
    _check_space,
    _remove_old_sessions,
    free_port,
    scratch_parent,
)

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def listening(host=LOOPBACK):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, 0))
        server.listen()
        yield server, server.getsockname()[1]


@pytest.mark.parametrize("host", ["", LOOPBACK])
def test_a_port_at_which_somebody_listens_is_passed_over(host):
    with listening() as (_, port):
        assert port < free_port(port, host=host)


def test_a_block_of_ports_is_free_as_a_whole():
    with listening() as (_, port):
        assert free_port(port - 1, block=2) > port


def test_a_port_that_a_service_has_just_left_is_free():
    with listening() as (server, port):
        client = socket.create_connection((LOOPBACK, port))
        accepted, _ = server.accept()
        accepted.close()  # who closes first keeps the connection for a minute
        client.close()
    with socket.socket() as careful, pytest.raises(OSError, match="in use"):
        careful.bind((LOOPBACK, port))
    assert free_port(port) == port


def test_a_listener_at_another_address_takes_no_port_of_loopback():
    with listening("127.0.0.2") as (_, port):
        assert free_port(port, host=LOOPBACK) == port


def test_where_none_is_free_it_is_said(monkeypatch):
    monkeypatch.setattr("serve_app.local.ray_environment.bind_problem", lambda host, port: "Address already in use")
    with pytest.raises(StartFailed, match="no 50 ports from 31100 on are free"):
        free_port(31100, block=50)


@pytest.mark.parametrize(("usual", "chosen"), [("/tmp", "/tmp"), ("/var/tmp", "/var/tmp"), ("/" + 11 * "x", "/tmp")])
def test_the_sockets_of_haproxy_have_paths_that_it_takes(monkeypatch, usual, chosen):
    monkeypatch.setattr(tempfile, "tempdir", usual)
    assert scratch_parent() == chosen
    assert len(f"{chosen}/windve-12345678/{56 * 'f'}/metrics.sock") <= 97


TURN = """
import os, sys
from rich.console import Console
from serve_app.local import ray_environment
ray_environment.TURN_PORT = int(os.environ["PORT"])
turn = ray_environment.turn_to_start(Console())
print("mine", flush=True)
sys.stdin.readline()
turn.close()
print("started", flush=True)
sys.stdin.readline()
"""


def test_services_start_one_after_the_other(tmp_path):
    """Each looks for free ports long before it listens on them, whoever started it, and wherever its files lie."""
    port = free_port(29_000)  # not the true one: a service may just start
    with contextlib.ExitStack() as stack:

        def start(number):
            (folder := tmp_path / str(number)).mkdir()
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", TURN], stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT,
                    env={**os.environ, "TMPDIR": str(folder), "PORT": str(port)},
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process, process.stdout.readline()

        first, said = start(0)
        assert said == "mine\n"
        second, said = start(1)
        assert said == f"waiting for another windve serve to start (it has port {port})\n"
        first.stdin.write("\n")
        first.stdin.flush()
        assert [first.stdout.readline(), second.stdout.readline()] == ["started\n", "mine\n"]
        third, said = start(2)
        assert said.startswith("waiting")
        second.kill()  # it is not in the way of others for ever
        assert third.stdout.readline() == "mine\n"


def test_logs_of_the_last_services_are_kept_and_of_those_that_run(tmp_path):
    names = [f"session_2026-11-28_01-00-{second:02}_123456_{2**22 + second}" for second in range(9)]
    names[1] = f"session_2026-11-28_01-00-01_123456_{os.getpid()}"
    for name in (*names, "session_latest"):
        (tmp_path / "ray" / name / "logs").mkdir(parents=True)
    _remove_old_sessions(tmp_path)
    assert {path.name for path in (tmp_path / "ray").iterdir()} == {names[1], *names[-5:], "session_latest"}


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("free_mib", [63, 64])
def test_a_full_disk_is_named_at_once(monkeypatch, tmp_path, variable, free_mib):
    """Ray waited a minute, and gave no reason."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mib * 2**20 + 5))
    expected = contextlib.nullcontext()
    if free_mib == 63:
        expected = pytest.raises(StartFailed, match=f"{tmp_path} has 63 MiB free, .* set {variable} to another")
    with expected:
        _check_space()
