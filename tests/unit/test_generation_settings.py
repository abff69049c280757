"""Settings of an application that generates: what is wrong is refused by its key, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import serve_app
from deployments.errors import SettingsError
from serve_app.generation.generation_args import GenerationArgs
from serve_app.service_config import args_of, check_config, load_config

FOLDER = Path(serve_app.__file__).parent
EMULATED = {"engine": "emulated", "emulated": {"beta_s": 0.02}}


@pytest.mark.parametrize("name", ["generation.yaml", "generation_rehearsal.yaml"])
def test_shipped_configs_are_good(name):
    (args,) = args_of(load_config(FOLDER / name)).values()
    assert isinstance(args, GenerationArgs)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (None, "args: missing"),
        ({"model": {"id": "m"}, "slo_s": 1}, "args.slo_s: there is no such setting"),
        ({"model": {"id": "m"}, "cpu": {"engine": "openvino"}}, "args.cpu.engine"),
        ({"model": {"id": "m"}, "cpu": {"max_batch_tokens": 9}}, "args.cpu.max_batch_tokens: there is no such setting"),
        ({"model": {"id": "m"}, "cpu": {"blocks": 0}}, "args.cpu.blocks"),
        ({"model": {"id": "m"}, "cpu": {"engine": "emulated"}}, "args.cpu: engine: emulated needs"),
        ({"model": {"id": "m"}, "cpu": {"emulated": {"beta_s": 1.0}}}, "args.cpu: `emulated` is given"),
        ({"model": {"id": "m"}, "accelerator": EMULATED}, "args: accelerator.engine and cpu.engine"),
        ({"model": {"id": "m"}, "limits": {"most_answers": 0}}, "args.limits.most_answers"),
    ],
)
def test_args_are_refused_by_their_key(args, key):
    with pytest.raises(SettingsError) as caught:
        GenerationArgs(args)
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    ("user_config", "key"),
    [
        (None, "user_config: missing"),
        ({"ttft_s": 1.0}, "user_config.tpot_s: missing"),
        ({"ttft_s": 0, "tpot_s": 0.1}, "user_config.ttft_s"),
        ({"ttft_s": 1.0, "tpot_s": 0.1, "slo_s": 1.0}, "user_config.slo_s: there is no such setting"),
        ({"ttft_s": 1.0, "tpot_s": 0.1, "cpu": {"step_time": {"beta_s": -1}}}, "user_config.cpu.step_time.beta_s"),
    ],
)
def test_the_promise_is_checked_before_the_start(user_config, key):
    config = yaml.safe_load((FOLDER / "generation.yaml").read_text())
    config["applications"][0]["deployments"][0]["user_config"] = user_config
    with pytest.raises(SettingsError) as caught:
        check_config(config)
    assert str(caught.value).startswith(key)


def test_each_pool_has_a_deployment_of_its_own():
    args = GenerationArgs({"model": {"id": "m", "name": "n"}, "accelerator": EMULATED, "cpu": EMULATED})
    assert args.deployments() == {"n": {"accelerator": "AcceleratorGenerator", "cpu": "CpuGenerator"}}
    assert args.shared.emulated
