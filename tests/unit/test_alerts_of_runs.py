"""The alerts over series that the product's own Router and replicas make, in virtual time: what fires when a device
fails, hangs, is slow, is full or is gone, and that nothing fires while all is well.
"""

import asyncio
import contextlib
import re
import shutil
import subprocess

import pytest
import yaml
from test_alerts import ALERTS, MANIFEST

from deployments.metrics import EmbedderMetrics, OfModel, publish_again_and_again
from deployments.placement.request import Wanted
from tests.kit.router_world import Replica, World, text
from tests.kit.virtual_time import run

EVERY_S = 15  # Prometheus reads so often
PATIENCE_S = 5.0  # a client hangs up


class Instruments:
    """What Ray's agent would export of one replica of a deployment, by series."""

    def __init__(self, series, replica):
        self.series, self.replica = series, replica
        self.Counter, self.Gauge, self.Histogram = map(self._made, ("inc", "set", "observe"))

    def _made(self, method):
        def make(name, about, *_):
            told = f"ray_{name}_total" if method == "inc" else f"ray_{name}"
            return Instrument(self.series, told, self.replica, method)

        return make


class Instrument:
    def __init__(self, series, name, replica, method):
        self.series, self.name, self.tags = series, name, {"application": "a", "replica": replica}
        setattr(self, method, {"inc": self._add, "set": self._put, "observe": lambda *_: None}[method])

    def set_default_tags(self, tags):
        self.tags |= tags

    def _key(self, tags):
        return self.name, tuple(sorted((self.tags | tags).items()))

    def _add(self, value, tags):
        self.series[self._key(tags)] = self.series.get(self._key(tags), 0.0) + value

    def _put(self, value, tags):
        self.series[self._key(tags)] = value


def series_of(minutes, every_s, harm, tokens=75):
    """{series: its value at each reading}, of one query every so many seconds. `harm(world, minute)` does its worst."""
    found = {}

    async def scene():
        now, taken = {}, 0
        world = World({"accelerator": [Replica("a")], "cpu": [Replica("c")]})
        world.series = now
        for pool, (replica,) in world.pools.items():
            instruments = OfModel(Instruments(now, replica.name), "m")
            metrics, runner = EmbedderMetrics(instruments, pool, {}), replica.runner
            runner._on_run, runner._on_failure = metrics.ran, lambda error, m=metrics: m.failed() or str(error)
            publish_again_and_again(lambda r=replica, m=metrics: r.alive and m.publish(r.runner.state()))
        router = await world.router(instruments=OfModel(Instruments(now, "r0"), "m"))

        async def ask():
            with contextlib.suppress(Exception):
                await asyncio.wait_for(router.embed([text(tokens)], Wanted()), PATIENCE_S)

        tasks = set()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 60 * minutes:
            tasks.add(task := asyncio.ensure_future(ask()))
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(every_s)
            if loop.time() >= began + EVERY_S * taken:
                harm(world, EVERY_S * taken / 60)
                for key in {**found, **now}:
                    values = found.setdefault(key, ["_"] * taken)
                    gone = "_" if {"stale", "_"} & set(values[-1:]) else "stale"
                    values.append(f"{now[key]:g}" if key in now else gone)
                taken += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scene(), most_turns=10**6)
    return found


def fired(series, minutes, folder):
    """The alerts that fire at the end: promtool is told that all are silent, and says which are not."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus): the alerts are not tested")

    def name(key):
        return key[0] + "{" + ", ".join(f'{tag}="{value}"' for tag, value in key[1]) + "}"

    silent = [
        {"eval_time": f"{minutes * 60 - EVERY_S}s", "alertname": rule["alert"], "exp_alerts": []} for rule in ALERTS
    ]
    values = [{"series": name(key), "values": " ".join(each)} for key, each in series.items()]
    tests = [{"interval": f"{EVERY_S}s", "input_series": values, "alert_rule_test": silent}]
    (folder / "rules.yaml").write_text(yaml.safe_dump(MANIFEST["spec"]))
    (folder / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": f"{EVERY_S}s", "tests": tests})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    told = set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr))
    assert bool(told) == bool(done.returncode), done.stdout + done.stderr
    return told


def nothing(world, minute):
    pass


def one_run_in_three_fails(world, minute):
    for replica in world.replicas.values():
        runs = replica.engine.runs
        replica.engine.outcome = lambda _, runs=runs: RuntimeError("the device says no") if len(runs) % 3 == 0 else None


def a_device_hangs(world, minute):
    if minute >= 2:
        for replica in world.replicas.values():
            replica.engine.slow = 1e6


def the_accelerator_dies(world, minute):
    if minute == 2:
        (replica,) = world.pools["accelerator"]
        replica.die()
        for key in [key for key in world.series if ("replica", replica.name) in key[1]]:
            del world.series[key]  # its node's agent does not export it any more


def devices_are_slow(world, minute):
    for replica in world.replicas.values():
        replica.engine.slow = 1.5


def devices_are_very_slow(world, minute):
    for replica in world.replicas.values():
        replica.engine.slow = 3.0


BURNS = {"WindveSloBurnsFast", "WindveSloBurnsSlowly"}


@pytest.mark.parametrize(
    ("harm", "load", "expected"),
    [
        (nothing, {"minutes": 20, "every_s": 0.5}, set()),
        (one_run_in_three_fails, {"minutes": 20, "every_s": 0.5}, BURNS | {"WindveRunsFail"}),
        (a_device_hangs, {"minutes": 16, "every_s": 0.5}, {"WindveQueueStuck", "WindveBusy"}),
        (the_accelerator_dies, {"minutes": 8, "every_s": 0.5}, {"WindvePoolWithoutReplicas"}),
        (devices_are_slow, {"minutes": 48, "every_s": 0.9}, {"WindveCalibrationDrifts"}),
        (devices_are_very_slow, {"minutes": 13, "every_s": 0.1, "tokens": 250}, {"WindveBusy"}),
    ],
    ids=["well", "runs fail", "devices hang", "a pool dies", "slow devices", "too much load"],
)  # fmt: skip
def test_what_fires(tmp_path, harm, load, expected):
    series = series_of(harm=harm, **load)
    assert fired(series, load["minutes"], tmp_path) == expected
