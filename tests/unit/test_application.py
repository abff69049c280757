"""What a calibration changes of a running application: of the one model, or of one of several."""

import copy
import json
from dataclasses import asdict
from types import SimpleNamespace

import psutil
import pytest
import yaml

from calibration.prove import in_force
from calibration.service import application as module
from calibration.service.application import Application, CalibrationFailed, check_replicas
from calibration.service.serve_config import edit
from deployments.errors import SettingsError

ONE = """\
name: w
import_path: serve_app.app:build
args: {model: {id: m}}
deployments:
- {name: Router, user_config: {slo_s: 1.0, bulk: {share: 0.2}}}
"""
SEVERAL = """\
name: w
import_path: serve_app.app:build
args: {models: [{model: {id: org/m, name: v1.5}}, {model: {id: "7"}, cpu: {replicas: 2}}]}
deployments:
- name: Router
  user_config:
    slo_s: 1.0
    models:
      "7": {slo_s: 2.0, cpu: {queue_depth: 3}}
"""
GENERATES = """\
name: w
import_path: serve_app.generation.generation_app:build
args: {model: {id: m}, cpu: {engine: emulated, emulated: {beta_s: 0.1, row_s: 0.01}}}
deployments:
- {name: Router, user_config: {ttft_s: 1.0, tpot_s: 0.1}}
"""
FOUND = {"max_ongoing_requests": 7, "user_config": {"slo_s": 0.5, "cpu": {"queue_depth": 9}}}


class Serve:
    """Ray Serve's REST API, and `/info`."""

    routers = (("r", "RUNNING"), ("gone", "STOPPING"))

    def __init__(self, monkeypatch, text):
        self.application = yaml.safe_load(text)
        monkeypatch.setattr(module, "serve_details", lambda _: self.details())
        monkeypatch.setattr(module, "deploy_config", self.deploy)
        windve = {"config_problem": None, "router": "r", "pools": {"cpu": {"queue_depth": 9}}}
        monkeypatch.setattr(Application, "info", lambda _: {"windve": windve})

    def details(self):
        applications = {"w": self.application, "other": {"name": "other"}}
        routers = {"Router": {"replicas": [{"replica_id": name, "state": state} for name, state in self.routers]}}
        deployed = {
            name: {"deployed_app_config": found, "deployments": routers} for name, found in applications.items()
        }
        return copy.deepcopy({"http_options": {"host": "h", "port": 80}, "applications": deployed})

    def deploy(self, _, config):
        self.application, other = copy.deepcopy(config["applications"])
        assert other == {"name": "other"}

    @property
    def user_config(self):
        return self.application["deployments"][0]["user_config"]

    def find(self, **more):
        return Application.find(dashboard="http://x", name=None, url=None, **more)


@pytest.mark.parametrize(
    ("text", "model", "address", "config"),
    [
        (ONE, None, "http://h:80", {"slo_s": 1.0, "bulk": {"share": 0.2}}),
        (ONE, "m", "http://h:80", {"slo_s": 1.0, "bulk": {"share": 0.2}}),
        (SEVERAL, "v1.5", "http://h:80/models/v1.5", {"slo_s": 1.0}),
        (SEVERAL, "7", "http://h:80/models/7", {"slo_s": 2.0, "cpu": {"queue_depth": 3}}),
    ],
)
def test_one_model_is_found(monkeypatch, text, model, address, config):
    found = Serve(monkeypatch, text).find(model=model)
    assert (str(found.address), found.router_config()) == (address, config)


@pytest.mark.parametrize(
    ("text", "model", "sentence"),
    [
        (SEVERAL, None, "--model: the application serves several models; choose one: v1.5, 7"),
        (SEVERAL, "m", "--model: the application serves no model named m; choose one: v1.5, 7"),
        (ONE, "x", "--model: the application serves no model named x; choose one: m"),
    ],
)
def test_the_model_must_be_chosen(monkeypatch, text, model, sentence):
    with pytest.raises(SettingsError) as caught:
        Serve(monkeypatch, text).find(model=model)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("text", "model"), [(ONE, None), (SEVERAL, "v1.5"), (SEVERAL, "7")])
def test_what_is_tried_out_is_the_models_own_and_leaves_nothing(monkeypatch, text, model):
    serve = Serve(monkeypatch, text)
    before = copy.deepcopy(serve.application)
    found = serve.find(model=model)
    found.try_out(FOUND)
    own = serve.user_config if model is None else serve.user_config["models"][model]
    assert own["cpu"] == {"queue_depth": 9}
    found.try_out(FOUND)  # as a verification does with smaller depths
    found.restore()
    assert serve.application == before


@pytest.mark.parametrize("model", ["v1.5", "7"])
def test_what_was_found_is_applied_to_the_one_model(monkeypatch, model):
    serve = Serve(monkeypatch, SEVERAL)
    found = serve.find(model=model)
    others = {name: own for name, own in serve.user_config["models"].items() if name != model}
    found.apply(FOUND)
    assert serve.application["deployments"][0]["max_ongoing_requests"] == 7
    assert serve.user_config["slo_s"] == 1.0
    assert serve.user_config["models"] == {**others, model: FOUND["user_config"]}
    found.restore()
    assert serve.user_config["models"][model] == FOUND["user_config"]
    serve.user_config["slo_s"] = 3.0
    with pytest.raises(CalibrationFailed, match="changed during the calibration"):
        found.check_unchanged()


@pytest.mark.parametrize("ended", [True, False])
def test_what_a_killed_run_tried_is_put_back(monkeypatch, ended):
    monkeypatch.setattr(in_force.time, "sleep", lambda _: None)
    serve = Serve(monkeypatch, ONE)
    before = copy.deepcopy(serve.application)
    found = serve.find()
    head = {"name": "w", "dashboard": "http://x", "address": asdict(found.address), "deployed": found.deployed}
    lines = [head]
    for depth in (9, 9):
        changes = {"user_config": {"cpu": {"queue_depth": depth}}}
        found.try_out(changes, lines.append)
    told = [json.dumps(line) + "\n" for line in lines]
    in_force.watch([*told, "done\n"] if ended else [*told, '{"cut o'])
    assert (serve.application == before) is not ended


def test_what_puts_it_back_is_no_child_of_the_run(monkeypatch):
    found = Serve(monkeypatch, ONE).find()
    before = {process.pid for process in psutil.process_iter()}
    with in_force.watched(found):
        (watcher,) = (
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid not in before and "in_force" in " ".join(process.info["cmdline"] or ())
        )
        assert watcher not in psutil.Process().children(recursive=True)
    watcher.wait(30)


def test_it_waits_until_every_router_shows_the_depths(monkeypatch):
    serve = Serve(monkeypatch, ONE)
    serve.routers = [("r", "RUNNING"), ("s", "RUNNING")]
    told = iter([("r", 9), ("s", None), ("r", 9), ("s", 9), ("r", 1)])

    def info(_):
        router, depth = next(told)
        return {"windve": {"config_problem": None, "router": router, "pools": {"cpu": {"queue_depth": depth}}}}

    monkeypatch.setattr(Application, "info", info)
    serve.find().apply(FOUND)
    assert next(told) == ("r", 1)


@pytest.mark.parametrize("somebody_else", [False, True])
def test_step_times_are_tried_out_put_back_and_applied(monkeypatch, somebody_else):
    serve = Serve(monkeypatch, GENERATES)
    shown = lambda _: {"windve": {"config_problem": None, "router": "r", "pools": {  # noqa: E731
        pool: {"step_time": (serve.user_config.get(pool) or {}).get("step_time")} for pool in ("accelerator", "cpu")
    }}}  # fmt: skip
    monkeypatch.setattr(Application, "info", shown)
    before, changes = copy.deepcopy(serve.application), {"user_config": {"cpu": {"step_time": {"beta_s": 0.2}}}}
    found = serve.find()
    assert found.generates
    found.try_out(changes)
    assert serve.user_config["cpu"] == {"step_time": {"beta_s": 0.2}}
    if somebody_else:
        serve.user_config["ttft_s"] = 3.0
        found.restore()
        assert serve.user_config["ttft_s"] == 3.0
        return
    found.restore()
    assert serve.application == before
    found.apply(changes)
    assert serve.user_config == {"ttft_s": 1.0, "tpot_s": 0.1, "cpu": {"step_time": {"beta_s": 0.2}}}


def test_the_file_gets_it_at_the_models_place(monkeypatch):
    found = Serve(monkeypatch, SEVERAL).find(model="7")
    text = "applications:\n- " + SEVERAL.rstrip("\n").replace("\n", "\n  ") + "\n"
    record = {"user_config": {**FOUND["user_config"], "calibration": {"at": "x", "old": 1}}}
    once = edit(text, "w", found.placed(record))
    again = edit(once, "w", found.placed({"user_config": {"calibration": {"at": "y"}}}))
    (changed,) = yaml.safe_load(again)["applications"]
    config = changed["deployments"][0]["user_config"]
    assert config == {"slo_s": 1.0, "models": {"7": {**FOUND["user_config"], "calibration": {"at": "y"}}}}


def test_the_file_and_what_runs_say_the_same_of_a_pool_that_was_measured_before(monkeypatch):
    measured = "{queue_depth: 5, alpha_s: 0.1, beta_s: 0.2, cost: {query_s: 0.1, token_s: 0.0, token2_s: 0.0}}"
    text = ONE.replace("bulk: {share: 0.2}", f"bulk: {{share: 0.2}}, cpu: {measured}")
    serve = Serve(monkeypatch, text)
    serve.find().apply(FOUND)
    whole = "applications:\n- " + text.rstrip("\n").replace("\n", "\n  ") + "\n"
    (written,) = yaml.safe_load(edit(whole, "w", FOUND))["applications"]
    assert written == serve.application
    assert serve.user_config == {"slo_s": 0.5, "bulk": {"share": 0.2}, "cpu": {"queue_depth": 9}}


def test_a_pool_that_is_gone_is_a_change_of_its_replicas():
    running = SimpleNamespace(info=lambda: {"windve": {"pools": {}}})
    with pytest.raises(CalibrationFailed, match="replicas of the cpu pool joined or left during the run"):
        check_replicas(running, {"cpu": {"replicas": {"one": {}}}})
