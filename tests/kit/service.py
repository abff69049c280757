"""A real service for tests: runs `windve serve CONFIG` as a module, so that no installed script is needed."""

import contextlib
import copy
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from http.client import HTTPException
from pathlib import Path

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from calibration.load import Address, HttpReply, burst, request_bytes

ROOT = Path(__file__).parents[2]
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))  # number of this test process
ROUTERS = 2  # as on all but the smallest machines; a test about another number says so in its config
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 90
GRPC_SERVICES = [  # for all kinds of applications, because they cannot change while a Ray runs
    "serve_app.grpc_services.add_to_server",
    "serve_app.generation.generation_services.add_to_server",
]
ENVIRONMENT = {
    "COLUMNS": "200",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


@contextlib.contextmanager
def one_at_a_time():
    """Let only one service start at a time, because it looks for free ports long before it uses them."""
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free_port(first=18000):
    """A free port below the range from which Ray and clients get ports while the service starts."""
    first += 50 * PROCESS
    for port in range(first, first + 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


class Service:
    """A running service, and the output on its terminal."""

    def __init__(self, config: dict, folder: Path):
        self.port, self.grpc_port = free_port(), free_port(19000)
        self.file, self.log = folder / "config.yaml", folder / "terminal.txt"
        self._take(config)
        self.command = [sys.executable, "-m", "serve_app", "serve", str(self.file)]
        self.started_in = ROOT
        self.headers = {}  # sent with our own requests: an API key
        self.process = None
        self.family: list[psutil.Process] = []

    def _take(self, config):
        self.config = {
            **config,
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "grpc_options": {"port": self.grpc_port, "grpc_servicer_functions": GRPC_SERVICES},
        }
        for application in config["applications"]:
            for deployment in application.get("deployments", ()):
                if deployment["name"] == "Router" and "autoscaling_config" not in deployment:
                    deployment.setdefault("num_replicas", ROUTERS)  # on whichever machine
        self.write()

    def write(self):
        self.file.write_text(yaml.safe_dump(self.config, sort_keys=False))

    def start(self, until="curl -s"):
        """Start the service; returns once its terminal shows `until`."""
        with one_at_a_time():
            self._start_until(until)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def _start_until(self, until):
        with self.log.open("w") as log:
            # Its own session, so that Ctrl-C can be sent to the whole process group, as a terminal does.
            self.process = subprocess.Popen(
                self.command, cwd=self.started_in, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        ends = time.monotonic() + START_TIMEOUT_S
        while until not in self.log.read_text():
            assert self.process.poll() is None, f"the service did not start:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < ends, f"the service is not up in time:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)

    def replace(self, config, headers):
        """Serve this config instead. The previous applications are removed first, with everything they have learned."""
        self.ask_dashboard("PUT", {**self.config, "applications": []})
        wait_until(lambda: not self.status()["applications"], "the end of the former applications")
        self._take(config)
        self.headers = headers
        self.deploy()
        wait_until(self.is_complete, "the next applications")

    def is_complete(self):
        """Whether every application runs, and each of its Routers knows all replicas of each pool."""
        applications = self.status()["applications"]
        for name, about in applications.items():
            assert about["status"] != "DEPLOY_FAILED", f"{name}: {about['message']}"
        if {about["status"] for about in applications.values()} != {"RUNNING"}:
            return False
        models = [model for info in self.infos() for model in info.get("models", {"": info}).values()]
        pools = [pool for model in models for pool in model["windve"]["pools"].values()]
        return all(pool["live_replicas"] >= pool["expected_replicas"] for pool in pools)

    def routers(self):
        """Each Router's process id and its own address, past the proxy."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "Router" in " ".join(process.cmdline()):
                    for connection in process.net_connections("tcp"):
                        if connection.status == psutil.CONN_LISTEN:
                            found |= self._router_at(process.pid, connection.laddr.port)
        return found

    def _router_at(self, pid, port):
        for application in self.applications:
            address = Address("127.0.0.1", port, application["route_prefix"].rstrip("/"))
            with contextlib.suppress(OSError, ValueError, KeyError, HTTPException):
                if self._get(f"{address}/info")["windve"]["router"]:
                    return {pid: address}
        return {}

    def infos(self):
        """What each Router says."""
        return [self._get(f"{address}/info") for address in self.routers().values()]

    def wait_for_each(self, condition, what, timeout_s=60.0):
        """Wait until `condition` holds for what each Router says of windve."""
        wait_until(lambda: all(condition(info["windve"]) for info in self.infos()), what, timeout_s)

    @property
    def address(self):
        return Address("127.0.0.1", self.port)

    def press_ctrl_c(self):
        """Returns the exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def stop(self):
        """Stop the service, and kill what is left of it."""
        try:
            if self.process is not None and self.process.poll() is None:
                self.press_ctrl_c()
        finally:
            if self.process is not None and self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self._kill_leftovers()

    def _kill_leftovers(self):
        for process in self.leftovers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def leftovers(self):
        """Processes of the service that still run."""
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def samples(self):
        """The metrics in Prometheus, {(name, ((label, value), ...)): value}, summed over live replicas. Without those
        of the Routers' processes, which never rest.
        """
        live = self.live_replicas()
        with urllib.request.urlopen(self.metrics_address, timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = Counter()
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith("ray_windve_router_"):
                continue
            if sample.name.startswith("ray_windve_") and sample.labels["replica"].rpartition("#")[2] in live:
                tags = {
                    tag: sample.labels[tag]
                    for tag in sorted(sample.labels)
                    if tag in {"pool", "outcome", "le", "tenant", "mode"}
                }
                found[sample.name.removeprefix("ray_windve_"), tuple(tags.items())] += sample.value
        return found

    def live_replicas(self):
        """The ids of live replicas. Ray keeps exporting metrics of ended ones for a while."""
        deployments = [told for one in self.status()["applications"].values() for told in one["deployments"].values()]
        return {replica["replica_id"] for told in deployments for replica in told["replicas"]}

    @property
    def metrics_address(self):
        """The address of the metrics, as shown on the terminal."""
        return re.search(r"for Prometheus: (\S+)", self.log.read_text())[1]

    @property
    def applications(self):
        return self.config["applications"]

    @property
    def application(self):
        return self.applications[0]

    @property
    def router(self):
        return self.application["deployments"][0]["user_config"]

    def token_and_dashboard(self):
        """Ray's token (as environment variables) and the dashboard's address, as shown on the terminal."""
        line = next(line for line in self.log.read_text().splitlines() if "serve deploy CONFIG" in line)
        return dict(word.split("=", 1) for word in line.split() if re.match(r"RAY_\w+=", word)), line.split()[-1]

    def ask_dashboard(self, method="GET", content=None):
        """Call Serve's REST API of applications. GET returns the details of all that runs."""
        environment, dashboard = self.token_and_dashboard()
        token = Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{dashboard}/api/serve/applications/", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or "null")

    def status(self):
        return self.ask_dashboard()

    def kill(self, pool, number=signal.SIGKILL, count=1):
        """Send the signal to so many replicas of this pool. Returns their process ids."""
        pids = {about["pid"] for about in list(self.pools()[pool]["replicas"].values())[:count]}
        for pid in pids:
            os.kill(pid, number)
        return pids

    def replace_in_place(self, config):
        """Deploy this config over the one that is served."""
        self._take(config)
        self.deploy()

    def deploy(self):
        """Send what `serve deploy` sends, without waiting for that command to start."""
        self.write()
        self.ask_dashboard("PUT", self.config)

    def serve(self, *words):
        """Run Ray's `serve` command with the address and token shown on the terminal. Returns its output."""
        token, dashboard = self.token_and_dashboard()
        command = [Path(sys.executable).parent / "serve", *words, "-a", dashboard]
        done = subprocess.run(command, env={**os.environ, **token}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def type_deploy(self):
        self.write()
        self.serve("deploy", str(self.file))

    def get(self, path):
        return self._get(f"http://127.0.0.1:{self.port}{path}")

    def _get(self, url):
        request = urllib.request.Request(url, headers=self.headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def ask(self, path, payload, headers=()) -> HttpReply:
        """The answer to one request by POST."""
        return burst(self.address, [request_bytes(payload, path, [*self.headers.items(), *headers])])[0]

    def ask_again(self, path, payload, timeout_s=60.0) -> HttpReply:
        """The first answer that is neither a refusal nor late: a machine that is busy elsewhere gives both."""
        ends = time.monotonic() + timeout_s
        while (reply := self.ask(path, payload)).status in (429, 503, 504) and time.monotonic() < ends:
            time.sleep(0.2)
        return reply

    def pools(self):
        return self.get("/info")["windve"]["pools"]

    def wait_for(self, condition, timeout_s=60.0, what="the condition"):
        """Wait until `condition(pools)` holds, by what the Router says that is asked. All hear of replicas at once."""
        wait_until(lambda: condition(self.pools()), what, timeout_s)

    def settled_samples(self, quiet_s=5.0, timeout_s=60.0):
        """`samples` once they no longer change: Routers and embedders report to Ray every two seconds, and Ray exports
        every second (here).
        """
        ends, changed, told = time.monotonic() + timeout_s, time.monotonic(), self.samples()
        while time.monotonic() < changed + quiet_s:
            assert time.monotonic() < ends, "the samples do not come to rest"
            time.sleep(0.5)
            before, told = told, self.samples()
            if told != before:
                changed = time.monotonic()
        return told

    def wait_until_idle(self):
        self.wait_for(lambda pools: all(pool["in_flight"] == 0 for pool in pools.values()), what="idleness")


TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


def queries(count):
    """Requests with one query each."""
    return [request_bytes({"input": f"{TEXT}{number}"}) for number in range(count)]


def outcome(replies):
    """How many were answered, by pool, and how many were not, by status."""
    return Counter(reply.pool if reply.status == 200 else reply.status for reply in replies)


def load_yaml(name):
    return yaml.safe_load((ROOT / "serve_app" / name).read_text())


def emulating(slo_s, **devices):
    """rehearsal.yaml with these devices instead of the paper's: two accelerators, and the CPU once, as on each machine.
    A pool that is not named is left out.
    """
    config = load_yaml("rehearsal.yaml")
    args, router = config["applications"][0]["args"], config["applications"][0]["deployments"][0]
    args["cpu_overflow"] = "cpu" in devices
    args["accelerator"]["replicas"] = 2
    router["user_config"] = {"slo_s": slo_s}
    for pool, device in devices.items():
        args[pool]["emulated"] = device
        router["user_config"][pool] = {name: device[name] for name in ("alpha_s", "beta_s")}
    return config


def by_depth(config, **depths):
    """The config with `admission: depth`, the paper's rule, so that counts are exact."""
    user_config = config["applications"][0]["deployments"][0]["user_config"]
    user_config["admission"] = "depth"
    for pool, depth in depths.items():
        user_config.setdefault(pool, {})["queue_depth"] = depth
    return config


def wait_until(holds, what, timeout_s=START_TIMEOUT_S):
    """Wait until `holds()`. Errors while nothing answers are ignored."""
    ends = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if holds():
                return
        assert time.monotonic() < ends, f"{what} did not come about"
        time.sleep(0.05)


class SharedRay:
    """One Ray for all test modules of this process. It serves their configs one after another.

    Changing the config takes 7 s; a start and a stop take 20 s. A module that changes more than `Service.config`, such
    as the environment or the terminal, needs its own Ray: `running`.
    """

    def __init__(self):
        self._service, self._served = None, None

    def serve(self, config, headers=()):
        """The Service, once it serves this config. `headers`: sent with our own requests, such as an API key. If the
        module before had the same config and left it as it was, nothing is replaced.
        """
        asked = copy.deepcopy((config, dict(headers)))
        if self._service is not None and self._served == (asked, self._service.config):
            wait_until(self._service.is_complete, "what the module before has killed")
            return self._service
        try:
            if self._service is None:
                self._service = Service(config, Path(tempfile.mkdtemp(prefix="shared-")))
                self._service.headers = dict(headers)
                self._service.start()
            else:
                self._service.replace(config, dict(headers))
        except BaseException:
            self.stop()  # the next module gets a new one
            raise
        self._served = asked, copy.deepcopy(self._service.config)
        return self._service

    def stop(self):
        service, self._service = self._service, None
        if service is not None:
            try:
                service.stop()
            finally:
                shutil.rmtree(service.file.parent)


SHARED = SharedRay()


@contextlib.contextmanager
def running(config, folder, **when):
    """A service on its own Ray. The shared one is stopped first."""
    SHARED.stop()
    service = Service(config, folder)
    try:
        service.start(**when)
        yield service
    finally:
        service.stop()
