"""The calibration of an application that generates, over emulated devices whose steps scatter."""

import json

import pytest
from test_calibration import Job, written

from deployments.generation.generation_settings import StepTimeSettings
from deployments.generation.scheduling.step_time import StepLoad
from tests.kit.service import load_yaml, running

pytestmark = pytest.mark.alone

NOISE = 0.02
HANDED_S, PICKED_S = 0.004, 0.0005  # most that a step takes to be handed over, and a token to be picked
WORDS = ("--prompt-tokens", "200", "--answer-tokens", "8", "--apply")
LOADS = {  # within what a step may take
    "accelerator": [StepLoad(4, 4 * 200), StepLoad(32, 32 * 256), StepLoad(8, 8 * 256).with_chunk(0, 128)],
    "cpu": [StepLoad(1, 200), StepLoad(6, 6 * 128), StepLoad().with_chunk(64, 12)],
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    config = load_yaml("generation_rehearsal.yaml")
    (application,) = config["applications"]
    for pool in LOADS:
        application["args"][pool]["emulated"]["noise"] = NOISE
    application["args"]["accelerator"]["emulated"]["prompt_token_s"] = 0.001  # few requests a second fill it
    application["deployments"][0]["user_config"] = {"ttft_s": 2.0, "tpot_s": 0.12}
    with running(config, tmp_path_factory.mktemp("generation"), until="max_tokens") as service:
        yield service


@pytest.fixture
def job(service, tmp_path):
    job = Job(service, tmp_path)
    job.config.write_text(f"# ours\n{service.file.read_text()}")
    return job


def step_times(service):
    return {name: pool["step_time"] for name, pool in service.pools().items()}


def test_step_times_are_found_proven_written_and_live(service, job, figure):
    tables = service.config["applications"][0]["args"]
    before = job.config.read_text()
    done = job.run(*WORDS)
    assert done.returncode == 0, done.stdout + done.stderr
    config, live = written(job.config), step_times(service)
    report = json.loads((job.out / "report.json").read_text())
    for pool, loads in LOADS.items():
        assert live[pool] == config[pool]["step_time"]
        found = StepTimeSettings(**live[pool]).step_time
        truth = StepTimeSettings(**{key: tables[pool]["emulated"][key] for key in live[pool]}).step_time
        for load in loads:
            own_s = HANDED_S + PICKED_S * load.rows  # beside what the table says
            least_s, most_s = 0.93 * truth.seconds(load), 1.07 * truth.seconds(load) + own_s
            assert least_s < found.seconds(load) < most_s, (pool, load)
        assert report["pools"][pool]["median_error"] < 0.05
    assert (config["ttft_s"], config["tpot_s"]) == (2.0, 0.12)
    assert "trial:" not in service.serve("config")
    assert job.config.read_text().startswith("# ours\n")
    assert [backup.read_text() for backup in job.folder.glob("serve.yaml.bak-*")] == [before]
    assert report["written"]["applied"] is True
    assert len(report["streams"]) == 3
    figure(f"generation: {report['capacity']:.3g} requests/s, in {report['seconds']:.0f} s")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--slo", "1"], "--slo: is for embeddings, and this application generates: leave it out"),
        (["--prompt-tokens", "9000"], "--prompt-tokens: should be at least 1 and below the model's context of"),
    ],
)
def test_bad_input_gets_one_sentence(job, words, problem):
    done = job.run(*words)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
