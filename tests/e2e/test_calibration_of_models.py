"""The calibration of one of two models, over emulated devices; the other one serves meanwhile as before."""

import json
import threading
import time
from collections import Counter

import pytest
import yaml
from test_calibration import TEXT, Job

from benchmarks.kit.arrivals import burst
from calibration.load import request_bytes
from tests.kit.service import load_yaml, running

pytestmark = pytest.mark.alone

SLO_S = 1.0
TRUE = {"accelerator": 40, "cpu": 7}  # floor((1 - beta) / alpha)
OTHER, NAME = "other", "org/v1.5"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    config = load_yaml("rehearsal.yaml")
    application = config["applications"][0]
    args = application["args"]
    model = args.pop("model")
    args["models"] = [{"model": {**model, "name": name}} for name in (OTHER, NAME)]
    application["deployments"][0]["user_config"] = {"slo_s": 2.0}
    with running(config, tmp_path_factory.mktemp("models")) as service:
        yield service


@pytest.fixture
def job(service, tmp_path):
    job = Job(service, tmp_path)
    job.config.write_text(service.file.read_text())
    return job


def shown(service, name):
    return service.get(f"/models/{name}/info")["windve"]


def test_one_of_two_models_is_calibrated_while_the_other_serves(service, job, figure):
    answers, stop = Counter(), threading.Event()

    def keep_asking():
        while not stop.wait(0.2):
            request = request_bytes({"input": TEXT, "model": OTHER})
            answers[burst(service.address, [request])[0].status] += 1

    asking, before = threading.Thread(target=keep_asking), shown(service, OTHER)
    asking.start()
    started = time.monotonic()
    done = job.run("--slo", str(SLO_S), "--apply", "--model", NAME)
    stop.set()
    asking.join()
    assert done.returncode == 0, done.stdout + done.stderr
    found = {pool: about["queue_depth"] for pool, about in shown(service, NAME)["pools"].items()}
    figure(
        f"one of two models calibrated: {found}, true {TRUE}, in {time.monotonic() - started:.0f} s; {dict(answers)}"
    )
    assert all(0.4 * TRUE[pool] <= depth <= TRUE[pool] for pool, depth in found.items())
    written = yaml.safe_load(job.config.read_text())["applications"][0]["deployments"][0]["user_config"]
    assert written["slo_s"] == 2.0
    assert set(written["models"]) == {NAME}
    own = written["models"][NAME]
    assert {pool: own[pool]["queue_depth"] for pool in found} == found
    assert "trial" not in own
    assert shown(service, NAME)["slo_s"] == own["slo_s"] == SLO_S
    assert shown(service, NAME)["calibration"] == {**own["calibration"], "heterogeneous": None}
    now = shown(service, OTHER)
    assert (now["slo_s"], now["calibration"], now["trial_seconds_ago"]) == (before["slo_s"], None, None)
    assert set(answers) == {200}
    report = json.loads((job.out / "report.json").read_text())
    assert report["application"]["model"] == NAME


def test_the_model_must_be_chosen(job):
    done = job.run("--slo", "1")
    assert done.returncode == 1
    assert f"--model: the application serves several, choose one: {OTHER}, {NAME}" in done.stderr
