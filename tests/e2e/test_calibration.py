"""A whole calibration of one of two models over emulated devices: killed twice, and then run to its end. The other
model serves meanwhile as before.

Depths are bounded by `--most`, and the devices could answer far more in time: so no machine is too slow to prove them.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml

from calibration.load import burst, request_bytes
from tests.kit.service import ROOT, load_yaml

SLO_S, MOST = 1.5, 16
DEVICES = {"accelerator": {"alpha_s": 0.002, "beta_s": 0.3}, "cpu": {"alpha_s": 0.002, "beta_s": 0.45}}
OTHER, NAME = "other", "org/v1.5"
CALIBRATE = ("--model", NAME, "--slo", str(SLO_S), "--most", str(MOST), "--tokens", "10", "--apply")


@pytest.fixture(scope="module")
def service(shared):
    config = load_yaml("rehearsal.yaml")
    (application,) = config["applications"]
    args = application["args"]
    model = args.pop("model")
    args["models"] = [{"model": {**model, "name": name}} for name in (OTHER, NAME)]
    for pool, emulated in DEVICES.items():
        args[pool]["emulated"] = emulated
    application["deployments"][0]["user_config"] = {"slo_s": 30.0}
    return shared.serve(config)


class Job:
    """`python -m calibration` in a folder of its own, on a copy of the service's config with a comment."""

    def __init__(self, service, folder, *words):
        self.folder, self.config, self.out = folder, folder / "serve.yaml", folder / "report"
        self.before = f"# ours\n{service.file.read_text()}"
        self.config.write_text(self.before)
        self.said = folder / "said.txt"
        token, self.dashboard = service.token_and_dashboard()
        self.environment = {**os.environ, **token, "COLUMNS": "200"}
        self.command = [sys.executable, "-m", "calibration", *words, "--config", self.config, "--out", self.out]

    def run(self):
        """What it prints."""
        command = [*self.command, "--dashboard", self.dashboard]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kill_when(self, reached):
        """In another terminal, where it finds dashboard and token as the service has announced them."""
        with self.said.open("wb") as said:
            process = subprocess.Popen(self.command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        while not reached():
            assert process.poll() is None, self.said.read_text()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stages(self):
        """The stages of the bursts that have landed."""
        with contextlib.suppress(FileNotFoundError):
            return re.findall(r'"stage":"([^"]+)"', (self.out / "unfinished.jsonl").read_text())
        return []

    def report(self):
        return json.loads((self.out / "report.json").read_text())

    def user_config(self):
        """The Router's, as the config file has it."""
        return yaml.safe_load(self.config.read_text())["applications"][0]["deployments"][0]["user_config"]

    def backups(self):
        return [path.read_text() for path in sorted(self.folder.glob("serve.yaml.bak-*"))]


def shown(service, name):
    return service.get(f"/models/{name}/info")["windve"]


def depths(service, name=NAME):
    return {pool: about["queue_depth"] for pool, about in shown(service, name)["pools"].items()}


def status_of_a_query(service, model):
    return burst(service.address, [request_bytes({"input": "one query", "model": model})])[0].status


@contextlib.contextmanager
def asked_meanwhile(service, model):
    """How often each status was the answer of this model."""
    statuses, stop = Counter(), threading.Event()

    def keep_asking():
        while not stop.wait(0.5):
            statuses[status_of_a_query(service, model)] += 1

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        yield statuses
    finally:
        stop.set()
        asking.join()


@pytest.fixture(scope="module")
def calibrated(service, tmp_path_factory):
    """A run to its end, after two that were killed: each goes on from what the one before has measured."""
    job = Job(service, tmp_path_factory.mktemp("calibrated"), *CALIBRATE)
    live, other = depths(service), shown(service, OTHER)
    with asked_meanwhile(service, OTHER) as statuses:
        job.kill_when(lambda: "verify" in job.stages())
        verifying = SimpleNamespace(
            bursts=len(job.stages()), config=job.config.read_text(), files={path.name for path in job.folder.iterdir()},
            live=depths(service), status=status_of_a_query(service, NAME),
        )  # fmt: skip
        job.kill_when(lambda: job.config.read_text() != job.before)
        writing = SimpleNamespace(
            bursts=len(job.stages()), config=job.user_config(), files={path.name for path in job.folder.iterdir()},
            live=depths(service), status=status_of_a_query(service, NAME), said=job.said.read_text(),
        )  # fmt: skip
        said = job.run()
    return SimpleNamespace(
        job=job, live=live, other=other, statuses=statuses, verifying=verifying, writing=writing, said=said
    )


def test_killed_while_verifying_nothing_has_changed_and_it_serves(calibrated):
    seen = calibrated.verifying
    assert seen.config == calibrated.job.before
    assert seen.files == {"serve.yaml", "report", "said.txt"}
    assert (seen.live, seen.status) == (calibrated.live, 200)
    assert f"going on from {seen.bursts} bursts" in calibrated.writing.said


def test_killed_as_the_file_is_written_it_is_whole_and_it_serves(calibrated):
    seen, job = calibrated.writing, calibrated.job
    found = {pool: seen.config["models"][NAME][pool]["queue_depth"] for pool in DEVICES}
    assert seen.config["models"][NAME]["calibration"]["slo_s"] == SLO_S
    assert seen.live in (calibrated.live, found)
    assert seen.status == 200
    assert len(seen.files - {"serve.yaml", "report", "said.txt"}) == 1, "a half-written file is left"
    assert job.backups()[0] == job.before
    assert f"going on from {seen.bursts} bursts" in calibrated.said


def test_depths_are_proven_written_and_live(service, calibrated, figure):
    job, report = calibrated.job, calibrated.job.report()
    figure(f"one of two models calibrated: {depths(service)}; {report['verification']['share']:.2%} in time")
    assert depths(service) == dict.fromkeys(DEVICES, MOST)
    config = job.user_config()
    assert (config["slo_s"], set(config["models"])) == (30.0, {NAME})
    own = config["models"][NAME]
    assert {pool: own[pool]["queue_depth"] for pool in DEVICES} == depths(service)
    assert "trial" not in own
    for pool, device in DEVICES.items():  # no machine is quicker than its device
        assert own[pool]["alpha_s"] * MOST + own[pool]["beta_s"] > 0.9 * device["beta_s"]
        assert set(own[pool]["cost"]) == {"query_s", "token_s", "token2_s"}
    assert own["calibration"]["proved"] == ["bursts", "stream", "mixed lengths"]
    assert (own["calibration"]["shape"], own["calibration"]["tokens"]) == ("burst", 10)
    live = shown(service, NAME)
    assert live["slo_s"] == own["slo_s"] == SLO_S
    assert live["calibration"] == {**own["calibration"], "heterogeneous": None}
    assert live["trial_seconds_ago"] is None
    assert job.config.read_text().startswith("# ours\n")
    assert len(job.backups()) == 2
    assert report["application"]["model"] == NAME
    assert report["verification"]["share"] >= 0.99
    assert report["written"]["applied"]
    assert {path.name for path in job.out.iterdir()} >= {"report.html", "fit-accelerator.png", "verification.png"}
    assert not (job.out / "unfinished.jsonl").exists()


def test_the_other_model_serves_as_before(service, calibrated):
    now = shown(service, OTHER)
    assert (now["slo_s"], now["calibration"], now["trial_seconds_ago"]) == (calibrated.other["slo_s"], None, None)
    assert set(calibrated.statuses) == {200}
