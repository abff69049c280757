"""A service changes its model under load: every vector is of the space that its answer names, and someone answers."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from calibration.load import ClientConnection, request_bytes
from tests.kit.service import load_yaml, running, wait_until

TEXT = "Where does the overflow go?"
PAUSE_S = 0.02
# Both have the same files and shape. What differs is the pooling, as between two versions of a model.
POOLINGS = {"model-a": "mean", "model-b": "cls"}


def config_of(name):
    config = load_yaml("config.yaml")
    (application,) = config["applications"]
    application["args"] |= {
        "model": {**application["args"]["model"], "name": name, "aliases": ["docs"], "pooling": POOLINGS[name]},
        "accelerator": {"device": "cpu", "replicas": 2, "dtype": "float32"},
        "cpu": {"num_cpus": 0.1, "dtype": "float32"},
        "cpu_overflow": True,
    }
    application["deployments"][0]["user_config"] = {"slo_s": 10.0}
    return config


class Clients:
    """Clients that ask for the alias again and again. `answers`: (when, status, space, model, vector) of each."""

    def __init__(self, address):
        self._address, self._enough, self.answers = address, threading.Event(), []

    def run(self):
        asyncio.run(self._run())

    async def _run(self):
        request = request_bytes({"input": TEXT, "model": "docs", "encoding_format": "float"}, path="/v1/embeddings")
        await asyncio.gather(*(self._ask_again_and_again(request) for _ in range(4)))

    async def _ask_again_and_again(self, request):
        connection = None
        while not self._enough.is_set():
            try:
                connection = connection or await ClientConnection.open(self._address)
                reply = await connection.ask(request)
            except (OSError, EOFError, TimeoutError):
                connection = None
                self.answers.append((time.monotonic(), 0, None, None, None))
            else:
                told = reply.json()
                good = reply.status == 200
                self.answers.append((
                    time.monotonic(), reply.status, reply.headers.get("x-windve-space"),
                    told["model"] if good else None, told["data"][0]["embedding"] if good else None,
                ))  # fmt: skip
            await asyncio.sleep(PAUSE_S)
        if connection is not None:
            connection.hang_up()

    def stop(self):
        self._enough.set()


def test_no_vector_is_another_models(tmp_path, figure):
    spaces, vectors = {}, {}

    def note(name):
        reply = service.ask("/v1/embeddings", {"input": TEXT, "model": name})
        spaces[name] = reply.headers["x-windve-space"]
        vectors[spaces[name]] = np.array(reply.json()["data"][0]["embedding"])

    with running(config_of("model-a"), tmp_path) as service, ThreadPoolExecutor(1) as pool:
        clients = Clients(service.address)
        asking = pool.submit(clients.run)
        try:
            note("model-a")
            service.replace_in_place(config_of("model-b"))
            wait_until(lambda: changed_to(service, "model-b"), "the change of the model", 120)
            note("model-b")
            expected = [("x-windve-expect-space", spaces["model-a"])]
            assert service.ask("/v1/embeddings", {"input": TEXT}, expected).status == 409
        finally:
            clients.stop()
            asking.result()
    assert spaces["model-a"] != spaces["model-b"]
    strange = [
        (space, model)
        for _, status, space, model, vector in clients.answers
        if status == 200 and (spaces[model] != space or not np.allclose(vector, vectors[space], atol=1e-3))
    ]
    statuses = Counter(status for _, status, *_ in clients.answers)
    good = [at for at, status, *_ in clients.answers if status == 200]
    gap_s = max(after - before for before, after in itertools.pairwise(good))
    figure(f"answers by status: {dict(statuses)}; longest time without one: {gap_s:.1f} s")
    assert not strange
    assert statuses[200] > 100


def changed_to(service, name):
    applications = service.status()["applications"]
    (about,) = applications.values()
    assert about["status"] != "DEPLOY_FAILED", about["message"]
    return about["status"] == "RUNNING" and {info["model_id"] for info in service.infos()} == {name}
