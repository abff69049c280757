"""The calibration of an application that generates, over emulated devices whose steps scatter.

Caches are so small that they are full long before a promise is near: so no machine is too slow to prove it.
"""

import math

import pytest
from test_calibration import Job

from deployments.generation.scheduler.step_time import StepLoad
from deployments.generation.settings import StepTimeSettings
from tests.kit.service import load_yaml

BLOCKS = {"accelerator": 8, "cpu": 4}
DEVICES = {
    "accelerator": {"beta_s": 0.05, "row_s": 4e-4, "kv_token_s": 1e-6, "prompt_token_s": 2e-4, "pair_s": 5e-8},
    "cpu": {"beta_s": 0.1, "row_s": 4e-3, "kv_token_s": 4e-6, "prompt_token_s": 1e-3, "pair_s": 2e-7},
}
KNEE, NOISE = 4, 0.02
PROMISE = {"ttft_s": 3.0, "tpot_s": 0.8}
WORDS = ("--prompt-tokens", "50", "--answer-tokens", "8", "--apply")
PROMPT = StepLoad().with_chunk(0, 256)  # takes the CPU 3.6 times as long


@pytest.fixture(scope="module")
def service(shared):
    config = load_yaml("generation_rehearsal.yaml")
    (application,) = config["applications"]
    for pool, blocks in BLOCKS.items():
        emulated = {**DEVICES[pool], "knee": KNEE, "noise": NOISE}
        application["args"][pool] |= {"blocks": blocks, "emulated": emulated}
    application["deployments"][0]["user_config"] = PROMISE
    return shared.serve(config)


def test_step_times_are_found_proven_written_and_live(service, tmp_path, figure):
    job = Job(service, tmp_path, *WORDS)
    job.run()
    config, report = job.user_config(), job.report()
    truths = {name: StepTimeSettings(**device, knee=KNEE).step_time for name, device in DEVICES.items()}
    for pool, about in service.pools().items():
        assert about["step_time"] == config[pool]["step_time"] == report["pools"][pool]["step_time"]
        took_s = StepTimeSettings(**about["step_time"]).step_time.seconds(PROMPT)
        distance = {name: abs(math.log(took_s / truth.seconds(PROMPT))) for name, truth in truths.items()}
        assert min(distance, key=distance.get) == pool, took_s
    assert {name: config[name] for name in PROMISE} == PROMISE
    assert job.config.read_text().startswith("# ours\n")
    assert job.backups() == [job.before]
    assert report["written"]["applied"] is True
    assert len(report["streams"]) == 3
    figure(f"generation: {report['capacity']:.3g} requests/s, in {report['seconds']:.0f} s")
