"""A whole calibration, from the sweep to what is written, of an application that is a formula."""

import asyncio
import contextlib
import io
import json
import math
import sys
import threading
from typing import ClassVar

import pytest
import yaml
from rich.console import Console

import calibration.run
from calibration.load import Address
from calibration.progress import Progress
from calibration.prove import in_force
from calibration.prove.in_force import trying_out
from calibration.report import report
from calibration.report.report_model import Burst, CalibrationOptions, CalibrationReport, WrittenReport
from calibration.run import Calibration
from calibration.service.application import CalibrationFailed
from calibration.service.serve_config import edit
from deployments.embedding.config import RouterConfig

CURVES = {"accelerator": (0.018, 0.27), "cpu": (0.0858, 0.32)}
WAY_S, QUERY_S = 0.01, 0.0005
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

    generates = False

    def __init__(self, **router):
        self.router, self.tried, self.restored = router, [], 0

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
        windve = {"config_problem": None, "kind": "embedding", "emulated": True}
        return {"model_id": "m", "max_input_length": 512, "windve": {**windve, "pools": pools}}

    def try_out(self, changes, note=None):
        self.tried.append({pool: changes["user_config"][pool]["queue_depth"] for pool in CURVES})

    def restore(self):
        self.restored += 1


class Runs:
    """In place of planned runs on devices: what these would take."""

    def __init__(self, replicas, bursts, tokens):
        self.bursts, self.tokens = bursts, tokens

    def seconds_of(self, pool, size, tokens):
        alpha_s, beta_s = CURVES[pool]
        return beta_s + alpha_s * size * (0.2 + 0.8 * tokens / self.tokens)

    async def seconds(self, stage, pool, size, tokens=None):
        found = self.seconds_of(pool, size, tokens or self.tokens)
        self.bursts.append(Burst(stage, 0.0, {pool: size}, size, 0, 0, {pool: [found]}))
        return found


class Replicas:
    connected: ClassVar = []

    @classmethod
    def connect(cls, *_):
        cls.connected.append(found := cls())
        found.released = 0
        return found

    async def release(self):
        self.released += 1


class Traffic:
    """In place of one that sends queries: the accelerator answers after `WAY_S` more than its batch takes."""

    problem = ""

    def __init__(self, address, headers, bursts, pools, tokens, *_):
        self.bursts, self.pools = bursts, pools

    async def prepare(self, most_tokens):
        pass

    async def burst(self, stage, depths, queries):
        latencies, left = {}, queries
        for pool in self.pools:
            alpha_s, beta_s = CURVES[pool]
            taken = min(left, depths.get(pool, queries))
            way_s = WAY_S + QUERY_S * (queries - 1)
            latencies[pool] = [beta_s + alpha_s * taken + (way_s if stage == "way" else 0.0)] * taken
            left -= taken
        return self._done(Burst(stage, 0.0, dict(depths), queries, left, 0, latencies))

    async def stream(self, stage, slo_s, arrivals):
        answered = {pool: [0.95 * slo_s] * 100 for pool in self.pools}
        return self._done(Burst(stage, 0.0, {}, len(arrivals), len(arrivals) - 100 * len(answered), 0, answered))

    def _done(self, burst):
        self.bursts.append(burst)
        return burst

    def close(self):
        pass


class Tiled(Runs):
    def seconds_of(self, pool, size, tokens):
        return super().seconds_of(pool, TILES[pool] * math.ceil(size / TILES[pool]), tokens)


@pytest.fixture
def calibrate(monkeypatch):
    def run(application, runs=Runs, slo_s=2.0, most=2048, **more):
        monkeypatch.setattr(in_force, "watched", contextlib.nullcontext)
        for name, fake in (("PlannedBursts", runs), ("Traffic", Traffic), ("Replicas", Replicas)):
            monkeypatch.setattr(calibration.run, name, fake)
        options = CalibrationOptions(slo_s=slo_s, shape="burst", tokens=75, most=most, seed=0, stress_step=0)
        work = Calibration(application, options, Progress(Console(file=io.StringIO())))
        try:
            asyncio.run(work.measure(**more))
        finally:
            assert Replicas.connected[-1].released == 1
        return work.result

    return run


def written(found):
    """The Router's settings that a run writes into a Serve config, as the Router reads them."""
    entry = yaml.safe_load(edit(CONFIG, "windve", found.changes()))["applications"][0]["deployments"][0]
    return RouterConfig.parse(entry["user_config"], ("accelerator", "cpu"))


def test_depths_costs_and_what_was_proved_are_written(calibrate, tmp_path):
    application = Application()
    found = calibrate(application)
    assert (application.tried, application.restored) == ([found.depths], 1)
    config = written(found)
    assert (config.accelerator.queue_depth, config.cpu.queue_depth) == (95, 19)
    assert config.calibration.proved == ["bursts", "stream", "mixed lengths"]
    for pool, (alpha_s, beta_s) in CURVES.items():
        settings = config.pool(pool)
        assert settings.alpha_s == pytest.approx(alpha_s, rel=1e-3)
        assert settings.beta_s == pytest.approx(beta_s, rel=1e-3)
        assert settings.cost.query_s == pytest.approx(0.2 * alpha_s, rel=0.02)
        assert settings.cost.token_s == pytest.approx(0.8 * alpha_s / 75, rel=0.02)
        assert settings.cost.token2_s == pytest.approx(0, abs=1e-7)
    rate = 1.5 * (95 / 1.98 + 19 / 1.9502)  # what both answer in full runs, and half as much more
    assert [proof.rate for proof in found.streams] == [pytest.approx(rate, rel=0.01)] * 2
    console = Console(file=io.StringIO(), width=100)
    made = found.report(None, WrittenReport(applied=True))
    report.shown(made).show(console)
    assert "Cost of a query by its length" in console.file.getvalue()
    page = report.shown(made).write(tmp_path / "report")
    assert "stream of mixed lengths" in page.read_text()
    assert CalibrationReport.parse(json.loads(page.with_name("report.json").read_bytes())) == made


def test_by_depth_bursts_are_proof_enough(calibrate):
    assert written(calibrate(Application(admission="depth"))).calibration.proved == ["bursts"]


def test_devices_that_compute_in_tiles_are_calibrated(calibrate):
    found = calibrate(Application(), Tiled, slo_s=1.25)
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
    report.shown(found.report(None, WrittenReport())).show(console)
    assert "Cost of a query by its length" in console.file.getvalue()


def test_a_cpu_that_is_left_out_does_not_help_in_the_proof(calibrate, monkeypatch):
    monkeypatch.setitem(CURVES, "cpu", (0.5, 3.0))
    application = Application()
    found = calibrate(application)
    assert found.depths == {"accelerator": 95, "cpu": 0}
    assert application.tried[-1] == found.depths  # it is closed during the proof
    assert written(found).calibration.cpu_overflow.startswith("off: one query on the cpu pool takes 3.5 s")


def test_an_estimate_is_not_proved(calibrate):
    found = calibrate(Application(), estimate_only=True)
    made = found.report(None, WrittenReport())
    assert made.pools["cpu"].cost.by_tokens[1] == (75, pytest.approx(0.0858, rel=1e-3))
    assert (made.outcome, made.verification, made.pools["cpu"].depth) == ("estimated", None, None)
    assert (found.verification, found.streams) == (None, [])


def test_the_way_is_no_part_of_a_device_and_leaves_less_depth(calibrate, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "WAY_S", 0.5)
    found = calibrate(Application())
    assert found.way.beta_s == pytest.approx(0.5)
    assert found.estimates["accelerator"].line.curve.alpha_s == pytest.approx(0.018, rel=1e-3)
    assert found.depths == {"accelerator": int((2.0 - 0.5 - 0.27) / 0.018), "cpu": int((2.0 - 0.5 - 0.32) / 0.0858)}


def test_a_way_that_carries_less_than_the_devices_bounds_the_proof(calibrate, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "QUERY_S", 0.05)
    found = calibrate(Application())
    assert {burst.sent for burst in found.bursts if burst.stage == "verify"} == {20 + 2}  # half an SLO of 20/s
    assert [proof.rate for proof in found.streams] == [pytest.approx(0.7 * 20)] * 2
    assert any("the devices have 114 slots, but only about 20 queries a second reach them" in it for it in found.notes)


def test_a_run_that_is_stopped_while_settings_are_tried_puts_them_back(monkeypatch):
    monkeypatch.setattr(in_force, "watched", contextlib.nullcontext)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Application):
        def try_out(self, changes, note=None):
            begun.set()
            go_on.wait(10)

    async def stop(application):
        async def run():
            async with trying_out(application, print) as try_out:
                await try_out({})
                pytest.fail("it went on")

        running = asyncio.ensure_future(run())
        await asyncio.to_thread(begun.wait, 10)
        running.cancel()
        await asyncio.sleep(0.05)
        assert not application.restored
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    application = Slow()
    asyncio.run(stop(application))
    assert application.restored == 1


def test_an_slo_that_cannot_be_met_is_refused_with_the_smallest_that_can(calibrate):
    with pytest.raises(CalibrationFailed, match=r"the smallest SLO that works here is about 0\.29 s"):
        calibrate(Application(), slo_s=0.2)
