"""Settings of an application that generates: what is wrong is refused by its key, before anything starts."""

from pathlib import Path

import pytest
import yaml

import serve_app
from deployments.errors import SettingsError
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.scheduler.step_time import HostTime, StepLoad
from deployments.generation.settings import GenerationAcceleratorSettings, GenerationLimits, GenerationRouterConfig
from serve_app.config.generation import GenerationArgs
from serve_app.config.service_config import args_of, check_config, load_config

FOLDER = Path(serve_app.__file__).parent
EMULATED = {"engine": "emulated", "emulated": {"beta_s": 0.02}}
UNKNOWN = {"engine": "emulated", "emulated": {"beta_s": 0.02, "device": "t4"}}


@pytest.mark.parametrize("name", ["generation.yaml", "generation_rehearsal.yaml", "hybrid_rehearsal.yaml"])
def test_shipped_configs_are_good(name):
    (args,) = args_of(load_config(FOLDER / name)).values()
    assert isinstance(args, GenerationArgs)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"slo_s": 1}, "args.slo_s: there is no such setting"),
        ({"cpu": {"engine": "openvino"}}, "args.cpu.engine"),
        ({"cpu": {"max_batch_tokens": 9}}, "args.cpu.max_batch_tokens: there is no such setting"),
        ({"cpu": {"blocks": 0}}, "args.cpu.blocks"),
        ({"cpu": {"engine": "emulated"}}, "args.cpu: engine: emulated needs"),
        ({"cpu": {"emulated": {"beta_s": 1.0}}}, "args.cpu: `emulated` is given"),
        ({"accelerator": EMULATED}, "args: accelerator.engine and cpu.engine"),
        ({"limits": {"max_answers": 0}}, "args.limits.max_answers"),
        ({"cpu": {"num_cpu_blocks": 9}}, "args.cpu.num_cpu_blocks: there is no such setting"),
        ({"accelerator": {"num_cpu_blocks": -1}}, "args.accelerator.num_cpu_blocks"),
        ({"accelerator": {"num_cpu_blocks": 9, "device": "none"}}, "args.accelerator: num_cpu_blocks"),
        ({"accelerator": {**EMULATED, "num_cpu_blocks": 9}}, "args.accelerator: num_cpu_blocks of an"),
        ({"accelerator": UNKNOWN}, "args.accelerator.emulated: `device: t4` is unknown; choose one: neo-t4-llama-"),
        ({"cpu": UNKNOWN}, "args.cpu.emulated.device: there is no such setting"),
    ],
)
def test_args_are_refused_by_their_key(args, key):
    with pytest.raises(SettingsError) as caught:
        GenerationArgs({"model": {"id": "m"}, **args})
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    ("user_config", "key"),
    [
        (None, "user_config: missing"),
        ({"ttft_s": 1.0}, "user_config.tpot_s: missing"),
        ({"ttft_s": 0, "tpot_s": 0.1}, "user_config.ttft_s"),
        ({"ttft_s": 1.0, "tpot_s": 0.1, "slo_s": 1.0}, "user_config.slo_s: there is no such setting"),
        ({"ttft_s": 1.0, "tpot_s": 0.1, "cpu": {"step_time": {"beta_s": -1}}}, "user_config.cpu.step_time.beta_s"),
        ({"ttft_s": 1.0, "tpot_s": 0.1, "cpu": {"host_time": {}}}, "user_config.cpu.host_time: there is no such"),
        ({"ttft_s": 1.0, "tpot_s": 0.1, "accelerator": {"host_time": {}}}, "user_config.accelerator.host_time.row_s"),
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


def test_what_a_calibration_found_of_a_host_is_sent_to_the_accelerators_replicas():
    host = {"row_s": 1e-4, "kv_token_s": 2e-6, "copy_token_s": 1e-6, "layers": 28}
    config = GenerationRouterConfig.parse({"ttft_s": 1.0, "tpot_s": 0.1, "accelerator": {"host_time": host}})
    assert HostTime(*config.policy("accelerator")["host"]) == HostTime(**host)
    assert config.policy("cpu")["host"] is None
    assert GenerationRouterConfig.parse({"ttft_s": 1.0, "tpot_s": 0.1}).policy("accelerator")["host"] is None


@pytest.mark.parametrize("name", EMULATED_ACCELERATORS)
def test_a_device_that_is_known_is_emulated_by_its_name(name):
    device = EMULATED_ACCELERATORS[name]
    emulated = {"device": name, "noise": 0.01, "kv_token_s": 1e-6}
    found = GenerationAcceleratorSettings.model_validate(
        {"engine": "emulated", "emulated": emulated, "num_cpu_blocks": 100}
    )
    assert found.emulated.host.host_time == device.host_time
    assert (found.emulated.beta_s, found.emulated.kv_token_s) == (device.step_time.beta_s, 1e-6)
    assert found.emulated.blocks == device.blocks > 0


def test_the_figures_of_a_known_device_are_those_of_its_data_sheet():
    """T4 with Llama-2-7B: 13.48 GB of weights at 0.8 of 320 GB/s; 2 GB are left for keys and values of 0.5 MB each."""
    device = EMULATED_ACCELERATORS["neo-t4-llama-2-7b"]
    step, host = device.step_time, device.host_time
    assert step.linear_s(StepLoad(rows=1)) == pytest.approx(13.48 / (0.8 * 320))
    assert step.linear_s(StepLoad().with_chunk(0, 1024)) == pytest.approx(1024 * 2 * 6.74e9 / 32.5e12, rel=1e-2)
    assert step.attention_s(StepLoad(1, 1000)) == pytest.approx(1000 * 524_288 / (0.8 * 320e9))
    assert device.blocks * 128 * 524_288 == pytest.approx(0.85 * 2.52e9, rel=0.04)
    assert host.seconds(0, 1000) == pytest.approx(1000 * 524_288 / (0.6 * 140.8e9 / 3))
    assert host.copy_token_s == pytest.approx(524_288 / (0.8 * 15.75e9))


def test_a_body_holds_a_text_of_the_whole_context():
    assert GenerationLimits().body_bytes(4096) == 4 * 2**20
    assert GenerationLimits().body_bytes(10**6) == 8 * 10**6
    assert GenerationLimits(max_body_bytes=5).body_bytes(10**6) == 5
