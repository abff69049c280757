"""The calibration of generation, from planned steps to the proof: what is measured, fitted, promised and refused."""

import asyncio
import contextlib
import copy
import dataclasses
import io
import random
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from calibration.generation import generation_run, request_capacity, step_report
from calibration.generation.generation_result import GenerationCalibrationReport, GenerationOptions
from calibration.generation.generation_run import GenerationCalibration
from calibration.generation.overlap import Overlap
from calibration.generation.promise_proof import PromiseProof, PromiseStream
from calibration.generation.request_capacity import Arrival, Mix, SimulatedReplica, capacity, longest_prompt, refused
from calibration.generation.step_series import MeasuredStep, StepFit, StepRoom, all_series, measure
from calibration.generation.token_stream import ClientStream
from calibration.load import Address
from calibration.progress import Progress
from calibration.prove import in_force
from calibration.report import plots
from calibration.report.report_model import WrittenReport
from calibration.service.application import CalibrationFailed
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.settings import StepTimeSettings
from deployments.serving.planned_runs import Timed
from serve_app.cli.main import main

ROOT = Path(__file__).parents[2]
ROOM = StepRoom(max_num_batched_tokens=2048, blocks=512, context=8192)
TIMES = {
    "accelerator": StepTime(0.04, 0.0004, 1e-6, 0.0002, 5e-8, 16),
    "cpu": StepTime(0.08, 0.004, 4e-6, 0.002, 2e-7, 4),
    "a small model": StepTime(0.002, 0.0002, 1e-7, 0.00005, 1e-8, 0),
}
POLICY = StepPolicy(2.0, 0.2)
HYBRID = ROOM._replace(num_cpu_blocks=2000)
HOST = HostTime(1e-4, 5e-6, 2e-6, 32)
SOME = [Arrival(0.0, 10, 2)]


class Device:
    """Steps take what `time` and `host` say, and scatter; what does not fit into the room is not run."""

    def __init__(self, time, noise=0.0, room=ROOM, seed=0, host=None):
        self.time, self.noise, self.room, self.draw = time, noise, room, random.Random(seed)
        self.asked, self.host = [], host

    async def ask(self, step):
        self.asked.append(step)
        if not step.fits(*self.room):
            return None
        host_s = 0.0 if self.host is None else self.host.seconds(*step.host_load[:2])
        return tuple(
            tuple(seconds * (1 + self.draw.gauss(0, self.noise)) for _ in range(3))
            for seconds in (step.seconds(self.time, self.host), host_s)
        )

    def measured(self, longest_s=0.25, planned_for=None):
        return asyncio.run(measure(planned_for or self.room, longest_s, self.ask))


@pytest.mark.parametrize(
    "room",
    [ROOM, HYBRID, StepRoom(64, 2048, 512), StepRoom(8, 256, 8192, 5), StepRoom(4096, 2048, 64), StepRoom(4, 8, 16)],
)
def test_series_grow_and_fit(room):
    for steps in all_series(room).values():
        assert all(step.fits(*room) for step in steps)
        sizes = [(step.tokens, step.copied) for step in steps]
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("seed", range(3))
def test_the_truth_is_found_through_noise(name, seed):
    truth = TIMES[name]
    fit = StepFit.of(Device(truth, noise=0.03, seed=seed).measured())
    fit.check(name, 0.2)
    assert fit.median_error < 0.03
    for load in (StepLoad(8, 8 * 500), StepLoad(24, 24 * 300).with_chunk(0, 100), StepLoad().with_chunk(500, 60)):
        assert fit.time.seconds(load) == pytest.approx(truth.seconds(load), rel=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_a_hosts_times_are_found_beside_the_accelerators(seed):
    truth = TIMES["accelerator"]
    measured = Device(truth, 0.02, HYBRID, seed, HOST).measured()
    fit = StepFit.of(measured, 32)
    fit.check("accelerator", 0.2)
    assert fit.median_error < 0.03
    assert fit.settings()["host_time"]["layers"] == 32
    assert fit.host.seconds(20, 20_000) == pytest.approx(HOST.seconds(20, 20_000), rel=0.05)
    assert fit.host.copy_token_s == pytest.approx(HOST.copy_token_s, rel=0.25)
    load = StepLoad(24, 24 * 300).with_chunk(0, 100)
    assert fit.time.seconds(load) == pytest.approx(truth.seconds(load), rel=0.06)
    both = PlannedStep(8, 999, host_rows=8, copied=4)
    hidden_s = truth.linear_s(StepLoad(16)) + HOST.seconds(8, 8000) + 1024 * HOST.copy_token_s
    assert both.seconds(truth, HOST) == pytest.approx(hidden_s)


def chance(seed):
    """Steps that follow nothing."""
    draw = random.Random(seed)
    steps = [step for steps in all_series(ROOM).values() for step in steps]
    return [MeasuredStep("any", step, (draw.lognormvariate(-4, 1),) * 3) for step in steps]


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        (chance(1), "do not fit the formula"),
        (Device(TIMES["cpu"]).measured()[:5], "only 5 steps of the cpu pool fit"),
        (Device(StepTime(0.5, 0, 0, 0, 0)).measured(1.0), "0.5 s for one token of one answer"),
    ],
)
def test_a_bad_fit_is_refused_in_a_sentence(measured, problem):
    with pytest.raises(CalibrationFailed, match=problem):
        StepFit.of(measured).check("cpu", 0.2)


def test_at_the_capacity_nearly_all_are_admitted_and_two_replicas_take_more(monkeypatch):
    monkeypatch.setattr(request_capacity, "_FEWEST", 100)  # requests: quicker, and less exact
    monkeypatch.setattr(request_capacity, "_MOST", 200)
    one = [SimulatedReplica(TIMES["accelerator"], 512, 2048)]
    mix = Mix(200, 8, longest_prompt(one, POLICY), 8192)
    found = capacity(one, POLICY, mix, 0)
    for times, least, most in ((0.8, 0.0, 0.02), (2.0, 0.1, 1.0)):
        arrivals = mix.arrivals(times * found, 300 / (times * found), seed=5)
        share = refused(one, POLICY, arrivals, len(arrivals)) / len(arrivals)
        assert least <= share <= most, (times, share)
    assert 1.5 * found < capacity(one * 2, POLICY, mix, 0) < 3 * found
    assert capacity([SimulatedReplica(StepTime(3.0, 0, 0, 0, 0), 512, 2048)], POLICY, mix, 0) == 0


@pytest.mark.parametrize(("most", "found"), [(3.0, 3.0), (0.0005, 0.0), (float("inf"), 1000.0)])
def test_the_search_for_a_capacity_ends(most, found):
    """A device that takes every stream that is tried, too: a stream of 500 requests is too short to fill it."""
    assert request_capacity._largest(lambda rate: rate <= most, 1.0) == pytest.approx(
        found, rel=0.5 if found > 100 else 0.05
    )


# --- a whole run ------------------------------------------------------------------------------------------------------


class Application:
    """One that generates, on emulated devices."""

    name, address, headers, generates = "windve", Address("127.0.0.1", 8000), (), True

    def __init__(self):
        self.tried, self.applied, self.granted = [], [], False
        self.windve = {
            "config_problem": None, "kind": "generation", "emulated": True,
            "ttft_s": 2.0, "tpot_s": 0.2, "pools": {pool: {
                "live_replicas": 1, "expected_replicas": 1, "rows": 0, "waiting": 0, "step_time": None,
                "max_num_batched_tokens": 2048, "blocks": 512, "num_cpu_blocks": 0,
                "replicas": {f"{pool}-1": {
                    "device": pool, "engine": "emulated", "dtype": "float32", "host_warm_up": None, "block_size": 128
                }},
            } for pool in ("accelerator", "cpu")},
        }  # fmt: skip

    def info(self):
        return {"model_id": "m", "max_input_length": 8192, "windve": copy.deepcopy(self.windve)}

    def try_out(self, changes, note=None):
        self.granted = True
        self.tried.append(changes)

    def restore(self):
        self.granted = False

    def placed(self, changes):
        return changes

    def check_unchanged(self):
        assert not self.granted

    def apply(self, changes):
        self.applied.append(changes)


@pytest.fixture
def wired(monkeypatch):
    """`wired(*seen)`: streams see first tokens after `first_s` and a token each `pace_s`, one pair for each stream."""

    class Replicas:
        @classmethod
        def connect(cls, application, pools, cost_s):
            found = cls()
            found.devices = {pool: Device(TIMES[pool], 0.02, HYBRID, host=HOST) for pool in pools}
            return found

        async def time(self, pool, step, times):
            took = await self.devices[pool].ask(step)
            return None if took is None else [Timed(*one) for one in zip(*took, strict=True)]

        async def release(self): ...

    def wire(*seen):
        views = iter(seen or [(0.5, 0.1)] * 3)

        async def send_all(address, plan):
            first_s, pace_s = next(views)
            return [
                ClientStream(429, 0.0),
                *(ClientStream(200, 0.0, first_s, first_s + 9 * pace_s, 10) for _ in plan[1:]),
            ]

        monkeypatch.setattr(
            generation_run, "capacity", lambda *given: 15.0 if refused(*given[:2], SOME, 0) == 0 else 0.0
        )
        monkeypatch.setattr(plots, "DOTS_PER_INCH", 30)
        monkeypatch.setattr(generation_run, "Replicas", Replicas)
        monkeypatch.setattr(in_force, "watched", contextlib.nullcontext)
        monkeypatch.setattr(generation_run, "send_all", send_all)

    return wire


@pytest.fixture
def calibrate(wired):
    """A run on `application`."""

    def run(application, *seen, **options):
        wired(*seen)
        chosen = GenerationOptions(prompt_tokens=200, answer_tokens=16, seed=0)
        calibration = GenerationCalibration(application, chosen, Progress(Console(file=io.StringIO())))
        run.result = calibration.result
        try:
            asyncio.run(calibration.measure(**options))
        finally:
            assert not application.granted
        return calibration.result

    return run


def shown(found, folder):
    """(the report, its page, what the terminal says)."""
    made, console = found.report(None, WrittenReport()), Console(file=io.StringIO(), width=120)
    step_report.shown(made).show(console)
    return made, step_report.shown(made).write(folder).read_text(), " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("admitted", "late", "held"), [(40, 0, True), (40, 1, True), (40, 2, False), (400, 2, True), (400, 3, False)]
)
def test_a_share_of_first_tokens_may_be_late_and_of_few_one(admitted, late, held):
    stream = PromiseStream(1.0, 5.0)
    assert PromiseProof(stream, admitted, 0, (1.0,) * admitted, (0.1,), late, 0).held is held


def test_a_run_finds_tries_and_proves_and_its_report_says_so(calibrate, tmp_path):
    application = Application()
    found = calibrate(application)
    assert application.tried == [found.changes()]
    for pool, changed in found.changes()["user_config"].items():
        assert set(changed) == {"step_time"}
        assert isinstance(changed["step_time"]["knee"], int)
        times = StepTimeSettings(**changed["step_time"]).step_time
        load = StepLoad(8, 8 * 500)
        assert times.seconds(load) == pytest.approx(TIMES[pool].seconds(load), rel=0.05)
    assert [(proof.busy, proof.held) for proof in found.proofs] == [(1, True)] * 3
    made, page, said = shown(found, tmp_path)
    assert made.outcome == "calibrated"
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.json", "report.html", "steps-accelerator.png", "steps-cpu.png", "promises.png"
    }  # fmt: skip
    assert "EMULATED" in page
    assert GenerationCalibrationReport.model_validate_json((tmp_path / "report.json").read_text()) == made
    assert f"{found.capacity:.3g} requests a second" in said


def test_a_run_says_whether_the_host_pays(calibrate, tmp_path):
    application = Application()
    pool = application.windve["pools"]["accelerator"]
    pool["num_cpu_blocks"] = HYBRID.num_cpu_blocks
    pool["replicas"]["accelerator-1"]["host_warm_up"] = dataclasses.asdict(HOST)
    found = calibrate(application)
    changes = found.changes()["user_config"]
    assert (set(changes["accelerator"]), set(changes["cpu"])) == ({"step_time", "host_time"}, {"step_time"})
    mean, *others = found.overlaps("accelerator")
    truth = Overlap.of(TIMES["accelerator"], HOST, 512, 208)  # prompts of 200 tokens and half of an answer of 16
    assert [one.context for one in (mean, *others)] == [208, 256, 1024, 4096]
    assert (mean.ratio, mean.largest_ratio) == pytest.approx((truth.ratio, truth.largest_ratio), rel=0.1)
    assert found.overlaps("cpu") == []
    _, page, terminal = shown(found, tmp_path)
    said = "two batches pay:" if truth.pays else "two batches do not pay:"
    for text in (page, terminal):
        assert f"At 208 tokens {said}" in text.replace("&lt;", "<")


def test_what_rows_cost_besides_is_not_taken_for_attention():
    """Where few rows fit into the cache they are all below the knee, and a fit knows no other cause than attention."""
    device = EMULATED_ACCELERATORS["neo-t4-llama-2-7b"]
    room = StepRoom(device.blocks, 2048, 256, 400)

    class Picks(Device):
        async def ask(self, step):
            seconds, host_seconds = await super().ask(step)
            return tuple(took_s + 0.0005 * (step.rows + step.host_rows) for took_s in seconds), host_seconds

    fit = StepFit.of(Picks(device.step_time, 0.005, room, host=device.host_time).measured(0.5), 32)
    assert fit.time.kv_token_s > 2 * device.step_time.kv_token_s
    assert fit.kv_token_s == pytest.approx(device.step_time.kv_token_s, rel=0.15)
    found = Overlap.of(fit.time, fit.host, room.blocks, 256, fit.kv_token_s)
    truth = Overlap.of(device.step_time, device.host_time, room.blocks, 256)
    assert found.ratio == pytest.approx(truth.ratio, rel=0.15)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ([(2.1, 0.1)] * 2, "first tokens came after 2 s"),
        ([(0.5, 0.1), (0.5, 0.21), (0.5, 0.21)], "were slower than 0.2 s per token"),
    ],
)
def test_late_streams_are_sent_once_more_and_then_refused(calibrate, tmp_path, seen, problem):
    assert calibrate(Application(), seen[0], *[(0.5, 0.1)] * 3).proven
    with pytest.raises(CalibrationFailed, match=problem) as refused:
        calibrate(Application(), *seen)
    made = calibrate.result.report(str(refused.value), WrittenReport())
    assert made.outcome == "refused"
    assert problem in step_report.shown(made).write(tmp_path).read_text()


def changed(**windve):
    application = Application()
    application.windve |= windve
    return application


@pytest.mark.parametrize(
    ("application", "problem"),
    [
        (changed(config_problem="bulk_share: no"), "has refused its own config: bulk_share: no"),
        (changed(tpot_s=0.01), "but tpot_s is 0.01 s"),
        (changed(ttft_s=0.03), "no request can get its first token"),
    ],
)
def test_what_cannot_be_promised_is_refused(calibrate, application, problem):
    with pytest.raises(CalibrationFailed, match=problem):
        calibrate(application)


def answered(first_s, last_s, tokens, error=None):
    return ClientStream(200, 0.0, first_s, last_s, tokens, error=error)


@pytest.mark.parametrize(
    ("came", "late"),
    [
        ([answered(2.0, 3.8, 10), ClientStream(429, 0.0)], (0, 0)),
        ([answered(2.1, 3.0, 10)], (1, 0)),
        ([answered(1.0, 2.9, 10)], (0, 1)),
        ([answered(1.0, 1.0, 1)], (0, 0)),
    ],
)
def test_what_a_client_counts_as_late(came, late):
    proof = PromiseProof.of(PromiseStream(1.0, 5.0), came, POLICY)
    assert (proof.late_firsts, proof.late_paces) == late


@pytest.mark.parametrize(
    "came",
    [
        [ClientStream(429, 0.0)],
        [answered(1.0, 2.0, 10), ClientStream(503, 0.0)],
        [answered(1.0, 2.0, 10), answered(1.0, 2.0, 3, "the engine failed")],
        [answered(1.0, 2.0, 10), ClientStream(0, 0.0, error="ConnectionResetError")],
    ],
)
def test_a_stream_that_fails_proves_nothing(came):
    with pytest.raises(CalibrationFailed, match="nothing was written"):
        PromiseProof.of(PromiseStream(1.0, 5.0), came, POLICY)


@pytest.fixture
def command(monkeypatch, wired, tmp_path):
    """`windve calibrate` with these words, on a copy of generation.yaml."""
    application, config = Application(), tmp_path / "generation.yaml"
    config.write_text((ROOT / "serve_app" / "generation.yaml").read_text())
    application.deployed = yaml.safe_load(config.read_text())["applications"][0]

    def run(*words, seen=()):
        wired(*seen)
        words = ["calibrate", "--config", str(config), "--out", str(tmp_path / "report"), *words]
        monkeypatch.setattr("calibration.session._find", lambda *_: application)
        return main(words)

    run.application, run.config = application, config
    return run


def written(config):
    return yaml.safe_load(config.read_text())["applications"][0]["deployments"][0]["user_config"]


def test_the_command_writes_and_applies_and_a_dry_run_shows_the_change_alone(command, capsys):
    before = command.config.read_bytes()
    assert command("--apply", "--dry-run", "--prompt-tokens", "200", "--answer-tokens", "16") == 0
    changed = [line for line in capsys.readouterr().out.splitlines() if line[:2] in {"+ ", "- "}]
    assert [line.split(": ")[0] for line in changed] == [
        "+          accelerator:", "+            step_time", "+          cpu:", "+            step_time"
    ]  # fmt: skip
    assert (command.config.read_bytes(), command.application.applied) == (before, [])
    assert command("--apply", "--prompt-tokens", "200", "--answer-tokens", "16") == 0
    found = {pool: config["step_time"] for pool, config in written(command.config).items() if pool in TIMES}
    assert set(found) == {"accelerator", "cpu"}
    assert command.application.applied == [{"user_config": {pool: {"step_time": found[pool]} for pool in found}}]
    assert [path.read_bytes() for path in command.config.parent.glob("*.bak-*")] == [before]
    assert "applied: /info shows the new step times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "seen", "problem"),
    [
        (["--apply"], [(2.1, 0.1)] * 2, "first tokens came after 2 s (the last after 2.1 s)"),
        (["--slo", "1"], [], "--slo: is for embeddings, but this application generates"),
        (["--stress-step", "5"], [], "--stress-step: is for embeddings"),
        (["--out", "/dev/null/x"], [], "--out: /dev/null/x cannot be written: Not a directory"),
        (["--prompt-tokens", "9000"], [], "--prompt-tokens: should be from 1 to below the model's context of 81"),
    ],
)
def test_a_command_that_is_refused_says_why_and_writes_nothing(command, capsys, words, seen, problem):
    before = command.config.read_bytes()
    assert command(*words, seen=seen) == (2 if problem.startswith("--") else 1)
    assert problem in capsys.readouterr().err
    assert (command.config.read_bytes(), command.application.applied) == (before, [])
