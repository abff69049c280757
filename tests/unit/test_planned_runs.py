"""How a calibration has replicas time planned runs, and finds the way to them."""

import asyncio
from types import SimpleNamespace

import pytest

from calibration.fit.curve import Curve
from calibration.measure.sweep import LEAST_WAY_S, PlannedBursts, measure_way
from calibration.prove.proof import most_at_once, most_rate
from calibration.report.report_model import Burst
from calibration.service import replicas as module
from calibration.service.application import CalibrationFailed
from calibration.service.replicas import Replicas
from deployments.embedding.run import PlannedBatch
from deployments.errors import EngineFailed, Unavailable
from deployments.serving.planned_runs import LEASE_S, Timed
from serve_app.local.service_file import LocalService

SOME = [Timed(0.5)]


class Handle:
    """A deployment whose calls end with these, one after the other."""

    def __init__(self, *ends):
        self.ends, self.calls = list(ends), []

    def options(self, method_name):
        assert method_name == "time_planned"
        return SimpleNamespace(remote=self.remote)

    async def remote(self, planned, times, **how):
        self.calls.append((planned, times, how))
        end = self.ends.pop(0) if self.ends else [SOME]
        if isinstance(end, BaseException) and not isinstance(end, Unavailable | EngineFailed):
            raise end
        return end


@pytest.mark.parametrize(
    ("ends", "found", "problem"),
    [
        ([[SOME]], SOME, None),
        ([[None]], None, None),
        ([Unavailable("busy"), [SOME]], SOME, None),
        ([EngineFailed("out of memory")], None, "the cpu pool timed no planned run: out of memory"),
        ([OSError("it died")], None, "the cpu pool's replica was lost: it died"),
    ],
)
def test_a_planned_run_is_asked_for_until_it_is_timed(monkeypatch, ends, found, problem):
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    handle = Handle(*ends)
    replicas = Replicas({"cpu": handle}, {"cpu": "c-1"}, "me")
    if problem is not None:
        with pytest.raises(CalibrationFailed, match=problem):
            asyncio.run(replicas.time("cpu", "run"))
        return
    assert asyncio.run(replicas.time("cpu", "run", 3)) == found
    how = {"replica": "c-1", "holder": "me", "lease_s": LEASE_S, "warm_up": True}
    assert set(map(str, handle.calls)) == {str((["run"], 3, how))}
    asyncio.run(replicas.release())
    assert handle.calls[-1] == ([], 0, {**how, "lease_s": 0.0, "warm_up": False})
    asyncio.run(replicas.release())
    assert len(handle.calls) == len(ends) + 1


def test_a_first_run_of_a_size_is_no_measurement():
    bursts, asked = [], []

    async def time(pool, batch, *, warm_up):
        asked.append((pool, batch))
        return [Timed(0.1 * len(asked))]

    runs = PlannedBursts(SimpleNamespace(time=time), bursts, 75)
    usual, longer = ("cpu", PlannedBatch(2, 75)), ("cpu", PlannedBatch(2, 225))
    assert asyncio.run(runs.seconds("sweep", "cpu", 2)) == pytest.approx(0.2)
    assert asyncio.run(runs.seconds("sweep", "cpu", 2)) == pytest.approx(0.3)
    assert asyncio.run(runs.seconds("225 tokens", "cpu", 2, 225)) == pytest.approx(0.5)
    assert asked == [usual, usual, usual, longer, longer]
    assert len(bursts) == 3


class World:
    """A device of (alpha, beta), a way of `lone_s` and `query_s` more for each other query of a burst; `room` queries
    of a burst are answered.
    """

    def __init__(self, lone_s=0.004, query_s=0.001, room=100):
        self.lone_s, self.query_s, self.room = lone_s, query_s, room

    async def seconds(self, stage, pool, size):
        return 0.27 + 0.018 * size

    async def burst(self, stage, depths, queries):
        answered = min(self.room, queries)
        took = self.lone_s + self.query_s * (queries - 1) + await self.seconds(stage, "accelerator", answered)
        latencies = {"accelerator": [took] * answered, "cpu": []}
        return Burst(stage, 0.0, {}, queries, queries - answered, 0, latencies)


@pytest.mark.parametrize(
    ("world", "found"),
    [
        (World(), Curve(pytest.approx(0.001), pytest.approx(0.004))),
        (World(lone_s=-0.001, query_s=0.0), Curve(LEAST_WAY_S, 0.0)),  # the noise of a slow device
        (World(room=15), Curve(LEAST_WAY_S, pytest.approx(0.004))),  # it does not take so many
    ],
)
def test_the_way_is_what_a_client_waits_beyond_the_batch(world, found):
    assert asyncio.run(measure_way(world, world, "accelerator")) == found


def test_a_closed_pool_has_no_way():
    with pytest.raises(CalibrationFailed, match="the accelerator pool answers no queries"):
        asyncio.run(measure_way(World(room=0), World(), "accelerator"))


def test_a_proof_is_no_larger_than_the_way_carries():
    found = Curve(0.001, 0.004)
    assert (most_at_once(found, 2.0), most_rate(found)) == pytest.approx((1000, 700))
    assert most_at_once(found, 1e-6) == 1


HERE = LocalService(1, "http://here", "127.0.0.1:6379", {})


@pytest.mark.parametrize(
    ("service", "dashboard", "variable", "address"),
    [
        (HERE, "http://here", None, "127.0.0.1:6379"),
        (HERE, "http://here", "10.0.0.1:6379", "127.0.0.1:6379"),
        (HERE, "http://there", "10.0.0.1:6379", "10.0.0.1:6379"),  # a Ray job's
        (None, "http://there", None, "auto"),
    ],
)
def test_it_joins_the_ray_of_the_service(monkeypatch, service, dashboard, variable, address):
    joined = []
    monkeypatch.setattr(module.service_file, "find", lambda: service)
    monkeypatch.setattr("ray.init", lambda address, **_: joined.append(address))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    module.join_ray(dashboard)
    assert joined == [address]


def test_where_no_ray_is_reached_it_says_how_to_run(monkeypatch):
    def refuse(**_):
        raise ConnectionError("nobody there")

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(CalibrationFailed, match=r"nobody there; run it there, as a Ray job: ray job submit --address"):
        module.join_ray("http://there")
