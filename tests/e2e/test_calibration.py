"""A whole calibration of one of two models over emulated devices and two Routers: killed while a replica times a run,
killed while it proves, and then run to its end. The other model serves meanwhile as before.

Depths are bounded by `--most`, and the devices could answer far more in time: so no machine is too slow to prove them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import yaml

from deployments.serving.planned_runs import LEASE_S
from tests.kit.service import ROOT, load_yaml, wait_until

SLO_S, MOST, TOKENS = 2.0, 16, 10
# Latency rises by 0.3 s from one query to the most: more than a busy machine hides.
DEVICES = {"accelerator": {"alpha_s": 0.02, "beta_s": 0.3}, "cpu": {"alpha_s": 0.02, "beta_s": 0.45}}
ROUTERS = 2
OTHER, NAME = "other", "org/v1.5"
CALIBRATE = ("--model", NAME, "--slo", str(SLO_S), "--most", str(MOST), "--tokens", str(TOKENS), "--apply")


A_TIMED_RUN, A_PROOF = r"\n  \d+ at once: ", r"\nverifying.*\n  1 of "  # as a job's log tells them


@pytest.fixture(scope="module")
def service(shared):
    config = load_yaml("rehearsal.yaml")
    (application,) = config["applications"]
    args = application["args"]
    model = args.pop("model")
    args["models"] = [{"model": {**model, "name": name}} for name in (OTHER, NAME)]
    for pool, emulated in DEVICES.items():
        args[pool]["emulated"] = emulated
    application["deployments"][0] |= {"num_replicas": ROUTERS, "user_config": {"slo_s": 30.0}}
    return shared.serve(config)


class Job:
    """`windve calibrate` in a folder of its own, on a copy of the service's config with a comment. It finds
    dashboard and token as the service has announced them.
    """

    def __init__(self, service, folder, *words):
        self.folder, self.config, self.out = folder, folder / "serve.yaml", folder / "report"
        self.before = f"# ours\n{service.file.read_text()}"
        self.config.write_text(self.before)
        self.said = folder / "said.txt"
        files = ["--config", self.config, "--out", self.out]
        self.command = [sys.executable, "-m", "serve_app", "calibrate", *words, *files]

    def start(self):
        environment = {**os.environ, "COLUMNS": "200"}
        with self.said.open("wb") as said:
            return subprocess.Popen(self.command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)

    def run(self):
        assert self.start().wait() == 0, self.said.read_text()

    def report(self):
        return json.loads((self.out / "report.json").read_text())

    def user_config(self):
        """The Router's, as the config file has it."""
        return yaml.safe_load(self.config.read_text())["applications"][0]["deployments"][0]["user_config"]

    def backups(self):
        return [path.read_text() for path in sorted(self.folder.glob("serve.yaml.bak-*"))]


def shown(service, name):
    return service.get(f"/models/{name}/info")["windve"]


def depths(service):
    """The depths that all Routers have in force; None if they differ."""
    found = {}
    while len(found) < ROUTERS:
        windve = shown(service, NAME)
        found[windve["router"]] = {pool: about["queue_depth"] for pool, about in windve["pools"].items()}
    first, *others = found.values()
    return first if all(other == first for other in others) else None


def status_of_a_query(service, model):
    return service.ask("/v1/embeddings", {"input": "one query", "model": model}).status


@pytest.fixture
def asked_meanwhile(service):
    """How often each status was the answer of the other model."""
    statuses, stop = Counter(), threading.Event()

    def keep_asking():
        while not stop.wait(0.5):
            statuses[status_of_a_query(service, OTHER)] += 1

    asking = threading.Thread(target=keep_asking)
    asking.start()
    yield statuses
    stop.set()
    asking.join()


def test_a_killed_calibration_changes_nothing_and_the_next_one_ends(service, tmp_path, asked_meanwhile, figure):
    job, live, other = Job(service, tmp_path, *CALIBRATE), depths(service), shown(service, OTHER)
    for landed in (A_TIMED_RUN, A_PROOF):
        killed_at(job, landed)
        assert job.config.read_text() == job.before
        assert {path.name for path in job.folder.iterdir()} == {"serve.yaml", "report", "said.txt"}
        wait_until(lambda: status_of_a_query(service, NAME) == 200, "an answer", 2 * LEASE_S)
        wait_until(lambda: depths(service) == live, "the former depths", 30)
    job.run()
    check_what_was_found(service, job, figure)
    now = shown(service, OTHER)
    assert (now["slo_s"], now["calibration"]) == (other["slo_s"], None)
    assert set(asked_meanwhile) == {200}


def killed_at(job, landed):
    """Start the calibration, and kill it when it says so of a run."""
    process = job.start()
    while not re.search(landed, job.said.read_text()):
        assert process.poll() is None, job.said.read_text()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def check_what_was_found(service, job, figure):
    """Depths are proven, written and live."""
    report, config = job.report(), job.user_config()
    figure(f"one of two models calibrated: {depths(service)}; {report['verification']['share']:.2%} in time")
    assert (config["slo_s"], set(config["models"])) == (30.0, {NAME})
    own = config["models"][NAME]
    assert {pool: own[pool]["queue_depth"] for pool in DEVICES} == depths(service) == dict.fromkeys(DEVICES, MOST)
    for pool, device in DEVICES.items():
        took_s = device["alpha_s"] * MOST * TOKENS / 75 + device["beta_s"]
        assert own[pool]["alpha_s"] * MOST + own[pool]["beta_s"] == pytest.approx(took_s, rel=0.25)
        assert set(own[pool]["cost"]) == {"query_s", "token_s", "token2_s"}
    assert own["calibration"]["proved"] == ["bursts", "stream", "mixed lengths"]
    live = shown(service, NAME)
    assert live["slo_s"] == own["slo_s"] == SLO_S
    assert live["calibration"] == {**own["calibration"], "cpu_overflow": None}
    assert job.config.read_text().startswith("# ours\n")
    assert job.backups() == [job.before]
    assert report["application"]["model"] == NAME
    assert report["verification"]["share"] >= 0.99
    assert report["written"]["applied"]
    assert {path.name for path in job.out.iterdir()} >= {"report.html", "fit-accelerator.png", "verification.png"}
