"""A cluster on one machine: several Ray nodes, each started by `ray start` on its own loopback address (Linux)."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from serve_app.local.ray_environment import scratch_parent
from tests.kit.service import ROOT, SHARED, START_TIMEOUT_S, STOP_TIMEOUT_S, Service, free_port, wait_until

_MARK = "WINDVE_REHEARSAL_NODE"  # in the environment of all processes of a node
_STORE_BYTES = 80_000_000  # per node: about the minimum that Ray accepts
_SWITCHES = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Ray declares a silent node dead after 2 s; with its defaults it takes 15 s or more.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
_HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
_PROXY_PORTS = {
    "HAPROXY_STATS_PORT": 18_404,
    "HAPROXY_METRICS_PORT": 19_101,
    "FALLBACK_PROXY_HTTP_PORT": 18_600,
    "FALLBACK_PROXY_GRPC_PORT": 19_500,
}


class Node:
    """One raylet with its agents and workers."""

    def __init__(self, address: str, mark: str):
        self.address, self.mark = address, mark

    def kill(self):
        return kill({self.mark})

    def processes(self):
        return processes_of({self.mark})


def processes_of(marks):
    """All processes of these nodes."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) in marks:
                found |= {process, *process.children(recursive=True)}  # agents overwrite the mark with their title
    return found


def kill(marks):
    """Send SIGKILL to all processes of these nodes, raylets first, so that they report no deaths of workers. Returns
    how many there were.
    """
    found = processes_of(marks)
    for process in sorted(found, key=lambda process: process.name() != "raylet"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(found)


class Cluster(Service):
    """A head node without CPUs, and the nodes that are added. The application is deployed with Ray's command."""

    def __init__(self, config: dict):
        self.scratch = Path(tempfile.mkdtemp(prefix="windve-", dir=scratch_parent()))
        super().__init__({**config, "proxy_location": "HeadOnly"}, self.scratch)
        self.nodes: list[Node] = []
        self._gcs_port, self._dashboard_port = free_port(17_000), free_port(17_100)
        self._token = secrets.token_hex(32)
        token = self.scratch / "ray-token"
        token.touch(mode=0o600)
        token.write_text(self._token)
        self.environment = {
            **_SWITCHES,
            "RAY_AUTH_TOKEN_PATH": str(token),
            **{f"RAY_SERVE_HAPROXY_{name}": str(self.scratch / file) for name, file in _HAPROXY_FILES.items()},
            **{f"RAY_SERVE_{name}": str(free_port(first)) for name, first in _PROXY_PORTS.items()},
        }

    def start(self):
        """Start the head node only."""
        self._start(
            "--head", "--num-cpus=0", f"--port={self._gcs_port}", f"--ray-client-server-port={free_port(17_200)}",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard_port}", f"--temp-dir={self.scratch}",
        )  # fmt: skip

    @property
    def head(self):
        return self.nodes[0]

    def add_node(self, cpus: int, **resources: float):
        """Start one more node. Start them one by one: two that start at once in one session use the same socket."""
        head = f"--address={self.head.address}:{self._gcs_port}"
        return self._start(head, f"--num-cpus={cpus}", f"--resources={json.dumps(resources)}")

    def _start(self, *words: str):
        number = len(self.nodes)
        node = Node(f"127.0.0.{number + 2}", f"{self.scratch.name}-{number}")
        self.nodes.append(node)
        with (self.scratch / f"node-{number}.txt").open("w") as log:
            status = subprocess.call(
                [
                    Path(sys.executable).parent / "ray", "start", *words, f"--node-ip-address={node.address}",
                    "--disable-usage-stats", f"--object-store-memory={_STORE_BYTES}",
                    "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
                ],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=START_TIMEOUT_S,
                env={**os.environ, **self.environment, "PYTHONPATH": str(ROOT), _MARK: node.mark},
            )  # fmt: skip
        assert status == 0, Path(log.name).read_text()[-3000:]
        return node

    def stop(self):
        marks = {node.mark for node in self.nodes}
        # A process that was just starting another may have done so.
        wait_until(lambda: not kill(marks), "the end of the cluster's processes", STOP_TIMEOUT_S)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def token_and_dashboard(self):
        names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        return {name: self.environment[name] for name in names}, f"http://127.0.0.1:{self._dashboard_port}"

    def wait_until_running(self):
        def runs():
            application = self.status()["applications"].get("windve", {"status": "none"})
            assert application["status"] != "DEPLOY_FAILED", application["message"]
            return application["status"] == "RUNNING"

        wait_until(runs, "the application")


@contextlib.contextmanager
def cluster_for(config):
    SHARED.stop()
    cluster = Cluster(config)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
