"""A whole calibration, from the sweep to what is written, of an application that is a formula."""

import asyncio
import io
import math
import threading
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

import calibration.measure.trials
import calibration.run
from calibration.load import Address
from calibration.measure.journal import Burst, Journal
from calibration.progress import Progress
from calibration.report import report
from calibration.report.report_model import CalibrationReport, WrittenReport
from calibration.result import CalibrationOptions
from calibration.run import Calibration
from calibration.service.application import CalibrationFailed
from calibration.service.serve_config import edit
from deployments.embedding.config import RouterConfig

CURVES = {"accelerator": (0.018, 0.27), "cpu": (0.0858, 0.32)}
TILES = {"accelerator": 24, "cpu": 4}
CONFIG = """\
applications:
- import_path: serve_app.app:build
  name: windve
  deployments:
  - name: Router
    user_config: {slo_s: 1.0, cpu: {queue_depth: 7}}  # guessed
"""


class Application:
    name, address, headers, model = "windve", Address("127.0.0.1", 8000), (), None

    def __init__(self, ago_s=None, **router):
        self.router, self.ago_s, self.has_pass = router, ago_s, False

    def router_config(self):
        return {"slo_s": 1.0, **self.router}

    def info(self):
        pools = {
            pool: {
                "queue_depth": None, "in_flight": 0, "live_replicas": 1, "expected_replicas": 1,
                "replicas": {f"{pool}-1": {"device": pool, "cores": None, "engine": "emulated", "dtype": "float32"}},
            }
            for pool in CURVES
        }  # fmt: skip
        windve = {"config_problem": None, "kind": "embedding", "emulated": True, "trial_seconds_ago": self.ago_s}
        return {"model_id": "m", "max_input_length": 512, "windve": {**windve, "pools": pools}}

    def grant_trials(self):
        self.has_pass = True
        return "secret"

    def end_trials(self):
        self.has_pass = False


class Trials:
    """In place of those that send queries: what the devices would answer."""

    problem = ""

    def __init__(self, address, headers, secret, journal, replicas, tokens, *_):
        self.replicas, self.tokens, self.journal, self.streamed = replicas, tokens, journal, []

    async def prepare(self, most_tokens):
        pass

    async def nearest(self, tokens):
        return tokens

    def latency_s(self, pool, depth, tokens):
        alpha_s, beta_s = CURVES[pool]
        return beta_s + alpha_s * depth * (0.2 + 0.8 * tokens / self.tokens)

    async def burst(self, stage, depths, extra=0, tokens=None):
        latencies = {
            pool: [self.latency_s(pool, depth, tokens or self.tokens)] * depth for pool, depth in depths.items()
        }
        sent = sum(depths.values()) + extra
        return self._done(Burst(stage, 0.0, dict(depths), sent, extra, 0, latencies))

    async def stream(self, stage, slo_s, arrivals, only):
        answered = {pool: [0.95 * slo_s] * 100 for pool in self.replicas if only in {None, pool}}
        return self._done(Burst(stage, 0.0, {}, len(arrivals), len(arrivals) - 100 * len(answered), 0, answered))

    def _done(self, burst):
        self.journal.add(burst)
        return burst

    def close(self):
        pass


class Tiled(Trials):
    def latency_s(self, pool, depth, tokens):
        return super().latency_s(pool, TILES[pool] * math.ceil(depth / TILES[pool]), tokens)


@pytest.fixture
def calibrate(tmp_path, monkeypatch):
    def run(application, trials=Trials, slo_s=2.0, most=2048, **more):
        monkeypatch.setattr(calibration.run, "TrialLoads", trials)
        options = CalibrationOptions(slo_s, "burst", 75, 1.0, most, 0, 0)
        work = Calibration(application, options, Progress(Console(file=io.StringIO())))
        journal = Journal(tmp_path, work.about, fresh=True)
        try:
            asyncio.run(work.measure(journal, **more))
        finally:
            journal.close()
        assert not application.has_pass
        return work.result

    return run


def written(found):
    """The Router's settings that a run writes into a Serve config, as the Router reads them."""
    entry = yaml.safe_load(edit(CONFIG, "windve", found.changes()))["applications"][0]["deployments"][0]
    return RouterConfig.parse(entry["user_config"], ("accelerator", "cpu"))


def test_depths_costs_and_what_was_proved_are_written(calibrate, tmp_path):
    found = calibrate(Application())
    config = written(found)
    assert (config.accelerator.queue_depth, config.cpu.queue_depth) == (96, 19)
    assert config.calibration.proved == ["bursts", "stream", "mixed lengths"]
    for pool, (alpha_s, beta_s) in CURVES.items():
        settings = config.pool(pool)
        assert settings.alpha_s == pytest.approx(alpha_s, rel=1e-3)
        assert settings.beta_s == pytest.approx(beta_s, rel=1e-3)
        assert settings.cost.query_s == pytest.approx(0.2 * alpha_s, rel=0.02)
        assert settings.cost.token_s == pytest.approx(0.8 * alpha_s / 75, rel=0.02)
        assert settings.cost.token2_s == pytest.approx(0, abs=1e-7)
    rate = 1.5 * (96 / 1.998 + 19 / 1.9502)  # what both answer in full runs, and half as much more
    assert [proof.stream.rate for proof in found.streams] == [pytest.approx(rate, rel=0.01)] * 2
    console = Console(file=io.StringIO(), width=100)
    made = found.report(None, WrittenReport(applied=True))
    report.show(console, made)
    assert "Cost of a query by its length" in console.file.getvalue()
    page = report.write(tmp_path / "report", made)
    assert "stream of mixed lengths" in page.read_text()
    assert CalibrationReport.parse(page.with_name("report.json").read_bytes(), "it") == made


def test_by_depth_bursts_are_proof_enough(calibrate):
    assert written(calibrate(Application(admission="depth"))).calibration.proved == ["bursts"]


def test_devices_that_compute_in_tiles_are_calibrated(calibrate):
    found = calibrate(Application(), Tiled, slo_s=1.2)
    assert found.depths == {"accelerator": 48, "cpu": 8}
    assert sum("found by bisection" in note for note in found.notes) == 2
    for pool, settings in (("accelerator", written(found).accelerator), ("cpu", written(found).cpu)):
        assert settings.alpha_s > 0
        for sample in found.estimates[pool].samples:
            if sample.concurrency <= found.depths[pool]:
                assert settings.alpha_s * sample.concurrency + settings.beta_s >= 0.999 * sample.latency_s


def test_a_pool_whose_latency_does_not_rise_gets_a_depth_alone(calibrate, monkeypatch):
    monkeypatch.setitem(CURVES, "cpu", (0.0, 1.0))
    found = calibrate(Application(), most=200)
    config = written(found)
    assert (config.cpu.queue_depth, config.cpu.alpha_s, config.cpu.cost) == (200, None, None)
    assert config.accelerator.cost is not None
    console = Console(file=io.StringIO(), width=100)
    report.show(console, found.report(None, WrittenReport()))
    assert "Cost of a query by its length" in console.file.getvalue()


def test_a_cpu_that_is_left_out_does_not_help_in_the_proof(calibrate, monkeypatch):
    monkeypatch.setitem(CURVES, "cpu", (0.5, 3.0))
    found = calibrate(Application())
    assert found.depths == {"accelerator": 96, "cpu": 0}
    assert {len(proof.latencies_s) for proof in found.streams} == {100}
    assert written(found).calibration.cpu_overflow.startswith("off: one query on the cpu pool takes 3.5 s")


def test_an_estimate_is_not_proved(calibrate):
    found = calibrate(Application(), estimate_only=True)
    made = found.report(None, WrittenReport())
    assert made.pools["cpu"].cost.by_tokens[1] == (75, pytest.approx(0.0858, rel=1e-3))
    assert (made.outcome, made.verification, made.pools["cpu"].fine_tuned) == ("estimated", None, None)
    assert (found.verification, found.streams) == (None, [])


@pytest.mark.parametrize(("ago_s", "another"), [(None, False), (10.0, False), (9.9, True)])
def test_a_run_waits_for_the_last_trial_query_of_another(calibrate, monkeypatch, ago_s, another):
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(
        calibration.measure.trials, "time", SimpleNamespace(monotonic=lambda: next(now), time=lambda: 0.0)
    )
    if not another:
        assert calibrate(Application(ago_s), estimate_only=True).estimates
        return
    with pytest.raises(CalibrationFailed, match="another calibration of this application is running"):
        calibrate(Application(ago_s))


def test_a_run_that_is_stopped_while_its_grant_is_made_takes_it_back():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Application):
        def grant_trials(self):
            begun.set()
            go_on.wait(10)
            return super().grant_trials()

    async def stop(application):
        async def run():
            async with calibration.measure.trials.granted_trials(application, print):
                pytest.fail("it went on")

        running = asyncio.ensure_future(run())
        await asyncio.to_thread(begun.wait, 10)
        running.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    application = Slow()
    asyncio.run(stop(application))
    assert not application.has_pass


def test_an_slo_that_cannot_be_met_is_refused_with_the_smallest_that_can(calibrate):
    with pytest.raises(CalibrationFailed, match=r"the smallest SLO that works here is about 0\.29 s"):
        calibrate(Application(), slo_s=0.2)
