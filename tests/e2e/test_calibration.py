"""The calibration job against the real application over the paper's emulated V100 and Xeon."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.kit.arrivals import burst
from calibration.load import request_bytes
from tests.kit.service import ROOT, running

pytestmark = pytest.mark.alone

SLO_S = 0.8
TRUE = {"accelerator": 29, "cpu": 5}  # floor((0.8 - beta) / alpha); the way through the application takes its part
CALIBRATE = ("--slo", str(SLO_S), "--apply")
BUSY_MACHINE = re.compile("[cC]alibrate when it is quiet")
TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


def rehearsal_text():
    """rehearsal.yaml with depths in it, and its comments."""
    text = (ROOT / "serve_app" / "rehearsal.yaml").read_text()
    for pool, depth in (("accelerator", 90), ("cpu", 18)):
        text, count = re.subn(rf"(          {pool}: \{{)(alpha_s)", rf"\g<1>queue_depth: {depth}, \g<2>", text)
        assert count == 1
    return text


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with running(yaml.safe_load(rehearsal_text()), tmp_path_factory.mktemp("calibration")) as service:
        yield service
        service.process.terminate()  # SIGTERM, as systemd and Kubernetes stop a service: taken down as by Ctrl-C
        assert service.process.wait(90) == 0
        ends = time.monotonic() + 10
        while service.leftovers():  # the dashboard's own children end a moment after it
            assert time.monotonic() < ends, service.leftovers()
            time.sleep(0.1)


class Job:
    """`python -m calibration` in a folder of its own, on a copy of rehearsal.yaml with its comments."""

    def __init__(self, service, folder):
        self.service, self.folder = service, folder
        self.config = folder / "serve.yaml"
        self.config.write_text(rehearsal_text())
        self.out = folder / "report"
        self.said = folder / "said.txt"
        self.token, self.dashboard = service.token_and_dashboard()
        self.tries = []

    def command(self, *words):
        return [
            *(sys.executable, "-m", "calibration", "--dashboard", self.dashboard),
            *("--config", str(self.config), "--out", str(self.out), *words),
        ]

    @property
    def environment(self):
        return {**os.environ, **self.token, "COLUMNS": "200"}

    def run(self, *words):
        return self.run_command(self.command(*words))

    def run_command(self, command, **others):
        """Four times more where the machine was too busy to prove anything: what the job then says to do."""
        for _ in range(5):
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, **others
            )
            self.tries.append(done)
            if done.returncode == 0 or not BUSY_MACHINE.search(done.stderr + done.stdout):
                break
        return done

    def start(self, *words):
        with self.said.open("wb") as said:
            return subprocess.Popen(
                self.command(*words), cwd=ROOT, env=self.environment, stdout=said, stderr=subprocess.STDOUT
            )

    def start_until(self, reached, *words):
        """Start it and wait until `reached(self)`; started twice more where the machine was too busy."""
        for _ in range(3):
            process = self.start(*words)
            while not reached(self):
                if process.poll() is not None:
                    break
                time.sleep(0.005)
            else:
                return process
            if not BUSY_MACHINE.search(self.said.read_text()):
                break
        raise AssertionError(f"it ended too early:\n{self.said.read_text()}")

    @property
    def journal(self):
        return self.out / "unfinished.jsonl"

    def stages(self):
        """The stages of the bursts that have landed."""
        try:
            return re.findall(r'"stage":"([^"]+)"', self.journal.read_text())
        except FileNotFoundError:
            return None

    def report(self):
        return json.loads((self.out / "report.json").read_text())

    def has_said(self, words):
        return words in self.said.read_text()


@pytest.fixture
def job(service, tmp_path):
    return Job(service, tmp_path)


POINTS = {
    "before the first burst": lambda job: job.stages() is not None,
    "while a pool is measured": lambda job: len(job.stages() or ()) >= 4,
    "while fine-tuning": lambda job: "fine-tune" in (job.stages() or ()),
    "while verifying": lambda job: "verify" in (job.stages() or ()),
}


@pytest.fixture(scope="module")
def calibrated(service, tmp_path_factory):
    """A run to its end, after SIGKILL at each of the points: each run goes on from what the one before has measured."""
    job, live, killed = Job(service, tmp_path_factory.mktemp("calibrated")), depths(service), {}
    for point, reached in POINTS.items():
        kill(job.start_until(reached, *CALIBRATE))
        killed[point] = SimpleNamespace(
            bursts=len(job.stages()),
            config=job.config.read_text(),
            files={path.name for path in job.folder.iterdir()},
            live=depths(service),
            status=status_of_a_query(service),
        )
    about = job.journal.read_bytes().splitlines(keepends=True)[0]
    started = time.monotonic()
    done = job.run(*CALIBRATE)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout + done.stderr
    return SimpleNamespace(
        job=job, live=live, killed=killed, about=about, said=done.stdout, seconds=seconds, bursts=job.report()["bursts"]
    )


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def nearly(job, calibrated):
    """A job that goes on from all bursts of that run but the last, as if it had been killed before: the last stream is
    sent anew.
    """
    job.out.mkdir()
    lines = [json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode() for one in calibrated.bursts[:-1]]
    job.journal.write_bytes(calibrated.about + b"".join(line + b"\n" for line in lines))
    yield job
    then = job.report()["bursts"] if (job.out / "report.json").exists() else []
    assert not then or (then[: len(lines)] == calibrated.bursts[:-1] and then[-1]["at"] > calibrated.bursts[-1]["at"])


LAST_STREAM = "proving a stream of mixed lengths"


def depths(service):
    return {name: pool["queue_depth"] for name, pool in service.pools().items()}


def written(config):
    router = yaml.safe_load(config.read_text())["applications"][0]["deployments"][0]
    return router["user_config"]


def status_of_a_query(service):
    return burst(service.address, [request_bytes({"input": TEXT})])[0].status


def test_killed_at_any_point_leaves_the_config_whole_and_the_application_serving(calibrated, figure):
    bursts = [seen.bursts for seen in calibrated.killed.values()]
    figure(f"killed at {len(bursts)} points, {bursts} bursts kept for the next run, {len(calibrated.bursts)} in all")
    for point, seen in calibrated.killed.items():
        assert seen.config == rehearsal_text(), point
        assert seen.live == calibrated.live, point
        assert seen.status == 200, point
        assert seen.files == {"serve.yaml", "report", "said.txt"}, "a half-written file is left"
    assert bursts == sorted(bursts)
    assert bursts[1] >= 4
    assert f"going on from {bursts[-1]} bursts" in calibrated.job.tries[0].stdout
    assert not calibrated.job.journal.exists()


def test_depths_are_found_proven_written_and_live(service, calibrated, figure):
    job, report = calibrated.job, calibrated.job.report()
    found = depths(service)
    figure(
        f"calibration at {SLO_S} s: {found}, true {TRUE}, the end of it in {calibrated.seconds:.0f} s; "
        f"{report['verification']['share']:.2%} in time"
    )
    for pool, depth in found.items():
        assert 0.4 * TRUE[pool] <= depth <= TRUE[pool]  # on a busy machine the way through it takes more

    config = written(job.config)
    assert {pool: config[pool]["queue_depth"] for pool in found} == found
    assert config["slo_s"] == SLO_S
    assert service.get("/info")["windve"]["calibration"] == {**config["calibration"], "heterogeneous": None}
    assert (config["calibration"]["shape"], config["calibration"]["tokens"]) == ("burst", 75)
    ours = re.compile(r"^ +(slo_s|accelerator: \{queue|cpu: \{queue|calibration:|max_ongoing_requests)|^ {12}\w+: ")
    kept = [line for line in rehearsal_text().splitlines() if not ours.match(line)]
    lines = iter(job.config.read_text().splitlines())
    assert all(line in lines for line in kept), "a line that is not ours was changed, or has moved"
    backups = list(job.folder.glob("serve.yaml.bak-*"))
    assert [backup.read_text() for backup in backups] == [rehearsal_text()]

    assert report["verification"]["share"] >= 0.99
    assert report["written"] == {"config": str(job.config), "backup": str(backups[0]), "applied": True}
    assert {name.name for name in job.out.iterdir()} >= {"report.html", "fit-accelerator.png", "verification.png"}
    assert "fine-tuned" in calibrated.said
    assert config["calibration"]["proved"] == ["bursts", "stream", "mixed lengths"]
    assert all(set(config[pool]["cost"]) == {"query_s", "token_s", "token2_s"} for pool in found)

    replies = burst(service.address, [request_bytes({"input": f"{TEXT}{n}"}) for n in range(60)])
    answered = {pool: sum(reply.pool == pool for reply in replies if reply.status == 200) for pool in found}
    assert all(0.5 * found[pool] <= answered[pool] <= found[pool] for pool in found), answered


def test_killed_as_the_file_is_written_it_is_whole(service, nearly):
    live = depths(service)
    kill(nearly.start_until(lambda job: job.config.read_text() != rehearsal_text(), *CALIBRATE))
    assert written(nearly.config)["calibration"]["slo_s"] == SLO_S
    assert depths(service) in (live, {name: written(nearly.config)[name]["queue_depth"] for name in live})
    assert not [path for path in nearly.folder.iterdir() if "tmp" in path.name], "a half-written file is left"
    assert status_of_a_query(service) == 200


def test_as_a_ray_job(service, nearly, calibrated):
    """From the head node: the dashboard and the application are found by the job itself."""
    command = [
        *(Path(sys.executable).parent / "ray", "job", "submit", "--address", nearly.dashboard, "--working-dir", "."),
        *("--", sys.executable, "-m", "calibration", *CALIBRATE, "--out", str(nearly.out)),
    ]
    done = nearly.run_command(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    assert f"going on from {len(calibrated.bursts) - 1} bursts" in nearly.tries[0].stdout
    record = service.get("/info")["windve"]["calibration"]
    assert record["slo_s"] == SLO_S
    assert record["at"] > written(calibrated.job.config)["calibration"]["at"]
    assert (nearly.out / "report.html").exists()


def test_a_dry_run_shows_the_change_and_makes_none(service, nearly):
    """And as in another terminal: without the dashboard's address and Ray's token, which the service has announced."""
    before, live = nearly.config.read_bytes(), depths(service)
    command = nearly.command(*CALIBRATE, "--dry-run")
    command = [word for word in command if word not in {"--dashboard", nearly.dashboard}]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\+ +accelerator: \{queue_depth: \d+, alpha_s: 0\.0", done.stdout, re.MULTILINE)
    assert (nearly.config.read_bytes(), depths(service)) == (before, live)
    assert list(nearly.folder.glob("*.bak*")) == []


def test_an_slo_that_cannot_be_met_is_refused_with_the_smallest_that_can(service, job):
    before, live = job.config.read_bytes(), depths(service)
    done = job.run("--slo", "0.2", "--apply")
    assert done.returncode == 1
    smallest = float(re.search(r"smallest SLO that works here is about ([\d.]+) s", done.stderr)[1])
    assert 0.288 < smallest < 1
    assert (job.config.read_bytes(), depths(service)) == (before, live)


def test_a_config_that_changes_meanwhile_is_not_touched(service, nearly):
    live = depths(service)
    process = nearly.start_until(lambda job: job.has_said(LAST_STREAM), *CALIBRATE)
    with nearly.config.open("a") as file:
        file.write("# somebody else was here\n")
    changed = nearly.config.read_bytes()
    assert process.wait() == 1
    assert "changed while the calibration ran" in nearly.report()["reason"]
    assert (nearly.config.read_bytes(), depths(service)) == (changed, live)


def test_an_application_that_is_deployed_anew_meanwhile_is_not_touched(service, nearly):
    before = nearly.config.read_bytes()
    process = nearly.start_until(lambda job: job.has_said(LAST_STREAM), *CALIBRATE)
    service.router["accelerator"]["queue_depth"] = 33
    service.deploy()
    assert process.wait() == 1
    assert depths(service)["accelerator"] == 33
    assert nearly.config.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--slo", "-1"], "--slo: should be seconds above 0"),
        (["--tokens", "5000"], "--tokens: the model takes at most 256, not 5000"),
        (["--quantile", "0.5"], "--quantile: should be 0.99 to 1"),
        (["--slo", "60"], "the application gives up on a query after 60 s"),
        (["--config", "serve_app/config.yaml"], "describes another application than the one that runs"),
        (["--application", "other"], "--application: there is no windve application named other, only windve"),
        (["--dashboard", "http://127.0.0.1:1"], "Ray's dashboard does not answer at http://127.0.0.1:1"),
        (["--config", "Makefile"], "Makefile"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_bad_input_gets_one_sentence(job, words, problem):
    done = job.run(*words)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_trial_depths_are_for_the_holder_of_the_secret_only(service):
    before_s = service.get("/info")["windve"]["trial_seconds_ago"]
    request = request_bytes({"input": TEXT}, headers=[("x-windve-trial", "guessed accelerator=1000 cpu=1000")])
    assert burst(service.address, [request])[0].status == 403
    bad = urllib.request.Request(
        f"{service.address}/embed", b'{"inputs": "x"}', {"x-windve-trial": "guessed accelerator=many"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(bad, timeout=10)
    assert refused.value.code == 422
    assert "accelerator=many" in refused.value.read().decode()
    after_s = service.get("/info")["windve"]["trial_seconds_ago"]
    assert after_s is None if before_s is None else after_s >= before_s
