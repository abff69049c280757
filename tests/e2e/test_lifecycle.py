"""Starting, refusing to start, and leaving nothing behind."""

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
import yaml
from conftest import SLOW
from grpc_health.v1.health_pb2 import HealthCheckResponse

from calibration.load import burst, request_bytes
from deployments.hardware.affinity import read_cpu_shape
from tests.kit import tei_wire
from tests.kit.service import ROOT, STOP_TIMEOUT_S, emulating, free_port, load_yaml, one_at_a_time, running, wait_until


def stray_files():
    places = [Path(tempfile.gettempdir()), Path.home()]
    names = {path for place in places for path in place.iterdir()}
    kept = {
        f"windve-service-{os.getuid()}",  # Ray's logs, where only this user can read them
        ".cache",  # what a tokenizer's check said
    }
    return {path for path in names if path.name not in kept and not path.name.startswith("pytest-of-")}


NOT_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # Serve's template for HAProxy is not ASCII


def test_ctrl_c_takes_down_exactly_what_was_started(tmp_path, monkeypatch):
    for name, value in NOT_UTF8.items():
        monkeypatch.setenv(name, value)
    keys = tmp_path / "api-keys"
    keys.write_text("sk-shown-to-nobody")
    config = emulating(12.0, **SLOW)
    config["applications"][0]["args"]["api_keys"] = f"file:{keys}"
    before = stray_files()
    with running(config, tmp_path) as service, tei_wire.connected(service.grpc_port) as tei:
        shown = service.log.read_text()
        for words in ("machine:", "topology: accelerator first, CPU for the overflow", "SLO 12.0 s", "EMULATED",
                      '-H "authorization: Bearer KEY"', "for Prometheus:", "for gRPC:"):  # fmt: skip
            assert words in shown
        assert "sk-shown" not in shown
        wait_until(lambda: has_haproxy(service), "HAProxy")  # Serve may just replace it
        watch = tei.watch(timeout=600)  # a client that watches the health does not hold the service up
        assert next(watch).status == HealthCheckResponse.SERVING
        service.headers = {"authorization": "Bearer sk-shown-to-nobody"}
        with ThreadPoolExecutor(1) as pool:
            request = request_bytes({"inputs": "in time"}, "/embed", service.headers.items())
            asked = pool.submit(burst, service.address, [request] * 20)  # more than three seconds' work
            service.wait_for(lambda pools: in_flight(pools) == 20)
            os.killpg(service.process.pid, signal.SIGINT)
            wait_until(lambda: "in flight" in service.log.read_text(), "the end of new queries")
            refused = service.ask("/embed", {"inputs": "too late"})
            assert [reply.status for reply in asked.result()] == [200] * 20
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error_type"] == "Unhealthy"
        assert service.process.wait(STOP_TIMEOUT_S) == 0, service.log.read_text()
        assert health_told_last(watch) in {HealthCheckResponse.NOT_SERVING, grpc.StatusCode.UNAVAILABLE}
        assert service.leftovers() == []
        assert "Traceback" not in service.log.read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", service.port)) != 0
    assert stray_files() - before == set()


def has_haproxy(service):
    children = psutil.Process(service.process.pid).children(recursive=True)
    return any("haproxy" in process.name() for process in children)


def in_flight(pools):
    return sum(replica["in_flight"] for pool in pools.values() for replica in pool["replicas"].values())


def health_told_last(watch):
    """The last status of a watch, or the error that ended it."""
    try:
        return [answer.status for answer in watch][-1]
    except grpc.RpcError as error:
        return error.code()


def test_an_application_without_room_says_what_it_waits_for(tmp_path):
    """Two applications that book more CPUs than there are: the second waits for ever, and not without a word."""
    config = load_yaml("rehearsal.yaml")
    one, cpus = config["applications"][0], read_cpu_shape().usable
    one["args"]["accelerator"] = {"device": "none"}
    one["args"]["cpu"]["num_cpus"] = 0.6 * cpus
    two = copy.deepcopy(one) | {"name": "two", "route_prefix": "/two"}
    two["args"]["model"]["name"] = "second"
    config["applications"] = [one, two]
    with running(config, tmp_path, until="; set cpu.num_cpus") as service:
        shown = service.log.read_text()
        line = next(line for line in shown.splitlines() if "set cpu.num_cpus" in line)  # it is said again and again
        booked = f"{0.6 * cpus:.3g} CPU: the cluster has {cpus}, "
        assert re.fullmatch(
            rf"waiting for \d+ s: CpuEmbedder of (emulated|second) waits for {booked}.* taken; .*", line
        )
        assert service.press_ctrl_c() == 0
        assert service.leftovers() == []


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [  # of our own checks and of Serve's; the application's own: test_rehearsal.py
        (("applications", 0, "args", "modle"), {"id": "x"}, "args.modle: there is no such setting"),
        (("applications", 0, "deployments", 0, "max_ongoing_request"), 3, "did you mean max_ongoing_requests?"),
    ],
)
def test_bad_settings_refuse_to_start_and_name_the_key(tmp_path, where, value, sentence):
    config = load_yaml("config.yaml")
    place = config
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    config["http_options"]["port"], config["grpc_options"]["port"] = free_port(), free_port(19000)
    refuse(tmp_path, config, sentence)


@pytest.mark.parametrize("key", ["http_options", "grpc_options"])
def test_a_port_that_is_taken_is_named(tmp_path, key):
    config = load_yaml("config.yaml")
    config["http_options"]["port"], config["grpc_options"]["port"] = free_port(), free_port(19000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config[key]["port"] = port = taken.getsockname()[1]
        refuse(tmp_path, config, f"{key}.port: cannot listen on 127.0.0.1:{port}: Address already in use")


def refuse(folder, config, sentence):
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with one_at_a_time():
        done = subprocess.run(
            [sys.executable, "-m", "serve_app", "serve", str(file)],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
