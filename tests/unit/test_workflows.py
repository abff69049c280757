"""GitHub's workflows and `.ci/run`: what they call exists, and they may do no more than read."""

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = {
    file.stem: yaml.load(file.read_text(), yaml.BaseLoader)  # which takes `on` for a word
    for file in (ROOT / ".github" / "workflows").glob("*.yml")
}
of_each = pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)
of_each_caller = pytest.mark.parametrize("name", ["checks", "nightly"])


def calls(name):
    """The job that calls bare-machine.yml, and the commands it hands over."""
    (job,) = WORKFLOWS[name]["jobs"].values()
    assert job["uses"] == "./.github/workflows/bare-machine.yml"
    command = job["with"]["command"]
    return job, job["strategy"]["matrix"]["command"] if "matrix" in command else [command]


@of_each_caller
def test_what_is_called_exists(name):
    for command in calls(name)[1]:
        word, target, *_ = [*command.split(), ""]
        assert target in TARGETS if word == "make" else os.access(ROOT / word, os.X_OK), command


def test_what_ci_run_calls_exists():
    called = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert called == ["check", "mutants", "test"]
    assert set(called) <= TARGETS


def test_each_change_is_checked_and_each_night_what_takes_hours():
    assert calls("checks")[1] == [".ci/run"]
    assert WORKFLOWS["checks"]["on"].keys() == {"push", "pull_request"}
    assert [command.split()[1] for command in calls("nightly")[1]] == ["test-more", "mutants", "test", "test", "soak"]
    assert "schedule" in WORKFLOWS["nightly"]["on"]


@of_each_caller
def test_a_run_ends_and_gives_way_to_the_next(name):
    job, _ = calls(name)
    assert 0 < int(job["with"]["minutes"]) < 360  # GitHub's own limit
    assert WORKFLOWS[name]["concurrency"]["cancel-in-progress"] == "true"
    assert WORKFLOWS["bare-machine"]["jobs"]["run"]["timeout-minutes"] == "${{ inputs.minutes }}"


@of_each
def test_it_may_only_read_and_runs_no_action_that_may_change(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        for step in job.get("steps", ()):
            assert re.fullmatch(r"actions/[a-z]+@[0-9a-f]{40}", step.get("uses", f"actions/none@{'0' * 40}"))
