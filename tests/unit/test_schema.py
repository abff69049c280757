"""The JSON Schema of a Serve config: it is up to date, it takes all of our configs, and refuses what the check does."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from deployments.errors import SettingsError
from serve_app.cli.main import main
from serve_app.config import schema
from serve_app.config.service_config import check_config

ROOT = Path(__file__).parents[2]
PACKAGED = sorted((ROOT / "serve_app").glob("*.yaml"))
FILES = [*PACKAGED, *sorted((ROOT / "k8s" / "overlays").glob("*/cluster/serve.yaml"))]
VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema.PATH.read_text()))


def test_it_is_up_to_date_and_printed(capsys):
    assert schema.PATH.read_text() == schema.text(), "run `make manifests`"
    VALIDATOR.check_schema(VALIDATOR.schema)
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema.text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_takes_our_configs(path):
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.name)
def test_editors_find_it(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=config/schema.json\n")


ROUTER = ("applications", 0, "deployments", 0, "user_config")
WRONG = [
    ("config.yaml", ("http_options", "prot"), 1),
    ("config.yaml", ("applications", 0, "arg"), {}),
    ("config.yaml", ("applications", 0, "args", "cpu_overflows"), True),
    ("config.yaml", ("applications", 0, "args", "model", "pooling"), "max"),
    ("config.yaml", ("applications", 0, "args", "cpu", "replicas"), 0),
    ("config.yaml", ("applications", 0, "deployments", 0, "num_replica"), 2),
    ("config.yaml", ("applications", 0, "deployments", 0, "autoscaling_config"), {"min_replica": 2}),
    ("config.yaml", ("applications", 0, "deployments", 0, "ray_actor_options"), {"num_cpu": 2}),
    ("config.yaml", (*ROUTER, "slo_s"), 0),
    ("config.yaml", (*ROUTER, "slo"), 1.0),
    ("config.yaml", (*ROUTER, "models"), {"short": {"slo_s": 1.0}, "long": {"depth": 1}}),
    ("two_models.yaml", ("applications", 0, "args", "models", 0, "modle"), {}),
    ("two_models.yaml", (*ROUTER, "models", "short", "slo_s"), -1),
    ("generation.yaml", (*ROUTER, "slo_s"), 1.0),
    ("generation.yaml", ("applications", 0, "args", "models"), []),
]


@pytest.mark.parametrize(("name", "where", "value"), WRONG, ids=lambda value: str(value)[-40:])
def test_it_refuses_typos_and_values_out_of_range(name, where, value):
    config = yaml.safe_load((ROOT / "serve_app" / name).read_text())
    place = config
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    assert not VALIDATOR.is_valid(config)
    with pytest.raises(SettingsError):
        check_config(config)


@pytest.mark.parametrize("replicas", [2, "auto", {"min": 1, "max": 3}])
def test_it_takes_each_form_of_a_setting(replicas):
    config = yaml.safe_load((ROOT / "serve_app" / "config.yaml").read_text())
    config["applications"][0]["args"]["cpu"]["replicas"] = copy.copy(replicas)
    VALIDATOR.validate(config)


def test_a_setting_has_its_comment_or_those_above_it_as_description():
    kinds = VALIDATOR.schema["$defs"]
    said = {name: kinds[name]["properties"] for name in ("CpuSettings", "ModelSettings", "GenerationCpuSettings")}
    assert said["CpuSettings"]["cores"]["description"] == "for each instance"
    assert said["CpuSettings"]["engine"]["description"] == "auto: the fastest installed one"
    assert said["ModelSettings"]["max_tokens"]["description"].startswith("lowers the model's own limit")
    assert said["GenerationCpuSettings"]["blocks"]["description"].startswith(
        "Cache blocks of 128 tokens; 256 on NVIDIA"
    )
    assert said["GenerationCpuSettings"]["max_num_batched_tokens"]["description"].startswith(
        "the most tokens in one step"
    )
