"""A config on a cluster of its own: with what is there, until it runs."""

from types import SimpleNamespace

import pytest
import yaml

from calibration import command
from calibration.service import deployment
from calibration.service.application import CalibrationFailed
from calibration.service.deployment import all_run, deploy, for_the_devices_there
from deployments.errors import SettingsError, WindveError

CONFIG = """\
# A remark.
applications:
  - name: windve
    import_path: serve_app.app:build
    args:
      model: {id: x}
      accelerator: {device: cuda, replicas: 4}
      cpu: {replicas: 2, instance_per: machine}
    deployments:
      - {name: Router, user_config: {slo_s: 1.0, accelerator: {queue_depth: 8}, cpu: {queue_depth: 2}}}
"""


class Serve:
    """Ray Serve's REST API: what was deployed, and one status after another."""

    def __init__(self, *statuses, there=()):
        self.statuses, self.applications, self.deployed = list(statuses), dict.fromkeys(there), None
        self.name = "windve"

    def details(self, dashboard):
        if self.deployed is not None:
            self.applications = {self.name: {"status": self.statuses.pop(0), "message": "", "deployments": {}}}
        return {"applications": self.applications}

    def deploy(self, dashboard, config):
        self.deployed = config


@pytest.fixture
def serve(monkeypatch, tmp_path):
    def begin(*statuses, there=()):
        serve = Serve(*statuses, there=there)
        monkeypatch.setattr(deployment, "serve_details", serve.details)
        monkeypatch.setattr(deployment, "deploy_config", serve.deploy)
        monkeypatch.setattr(deployment, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None))
        (tmp_path / "serve.yaml").write_text(CONFIG)
        return serve, tmp_path / "serve.yaml"

    return begin


@pytest.mark.parametrize("name", ["windve", "default"])
def test_it_is_deployed_and_waited_for(serve, name):
    serving, path = serve("DEPLOYING", "UNHEALTHY", "RUNNING", "not asked for any more")
    serving.name = name
    if name == "default":
        path.write_text(CONFIG.replace("  - name: windve\n    import_path", "  - import_path"))
    deploy(path, "http://dashboard")
    args = serving.deployed["applications"][0]["args"]
    assert args == {"model": {"id": "x"}, "accelerator": {"device": "cuda"}, "cpu": {"instance_per": "machine"}}
    assert serving.statuses == ["not asked for any more"]


def test_each_of_several_models_has_the_devices_there():
    args = {"models": [{"model": {"id": "x"}, "cpu": None, "accelerator": {"replicas": 2}}]}
    (changed,) = for_the_devices_there({"applications": [{"args": args}]})["applications"]
    assert changed["args"]["models"] == [{"model": {"id": "x"}, "cpu": None, "accelerator": {}}]


def test_nothing_is_deployed_over_what_is_served(serve):
    serving, path = serve(there=["other"])
    with pytest.raises(SettingsError, match=r"--deploy: the cluster already serves other"):
        deploy(path, "http://dashboard")
    assert serving.deployed is None


def test_a_run_that_was_interrupted_goes_on_with_what_it_deployed(serve):
    serving, path = serve("RUNNING")
    (ours,) = for_the_devices_there(yaml.safe_load(CONFIG))["applications"]
    serving.applications = {"windve": {"status": "RUNNING", "deployed_app_config": ours}}
    deploy(path, "http://dashboard")
    assert serving.deployed is None
    other = {**ours, "args": {**ours["args"], "model": {"id": "y"}}}
    serving.applications = {"windve": {"status": "RUNNING", "deployed_app_config": other}}
    with pytest.raises(SettingsError, match=r"--deploy: the cluster already serves windve"):
        deploy(path, "http://dashboard")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Traceback\nSettingsError: args.model.id: cannot be read\nmore", r"args\.model\.id: cannot be read$"),
        ("", r"Ray Serve gave no reason; see /.*logs$"),
        (None, r"Ray Serve gave no reason; see /.*logs$"),
    ],
)
def test_what_fails_says_why(message, problem):
    told = {"status": "DEPLOY_FAILED", "message": message, "deployments": {"Router": {"message": message}}}
    with pytest.raises(CalibrationFailed, match=f"windve did not start: {problem}"):
        all_run({"windve": told}, {"windve"})


@pytest.mark.parametrize("words", [["--rayservice", "x"], ["--deploy", "a", "--rayservice", "x", "--estimate-only"]])
def test_the_command_needs_a_config_and_a_proof(words):
    with pytest.raises(WindveError, match="--rayservice: requires --deploy"):
        command.main(words)
