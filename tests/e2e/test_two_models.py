"""Two models under one URL: the real one and a small one with random weights, with deployments of their own."""

import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter

import numpy as np
import pytest
import torch
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from reference import worst
from sentence_transformers import SentenceTransformer
from texts import TEXTS
from transformers import BertConfig, BertModel

from calibration.load import burst, request_bytes
from tests.kit import tei_wire
from tests.kit.kinds_of_models import PACKAGE, SHAPE, VOCABULARY
from tests.kit.service import load_yaml

REAL, SMALL = "all-MiniLM-L6-v2", "org/small"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of 64 numbers, which pools as MiniLM does."""
    folder = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(2)
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=260, initializer_range=0.2, **SHAPE)
    BertModel(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder, shared):
    config = load_yaml("two_models.yaml")
    application = config["applications"][0]
    args = application["args"]
    args["cpu"] = {"engine": "torch"}
    args["models"][0].pop("cpu")
    args["models"][1]["model"] = {"id": str(folder), "name": SMALL}
    application["deployments"][0]["user_config"]["models"] = {SMALL: {"slo_s": 0.5}}
    return shared.serve(config)


@pytest.fixture(scope="module")
def small_reference(folder):
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:8], normalize_embeddings=True)


def ask(service, path, payload):
    return burst(service.address, [request_bytes(payload, path)])[0]


def vectors(reply):
    assert reply.status == 200, reply.body
    found = reply.json()
    return np.array(found if isinstance(found, list) else [item["embedding"] for item in found["data"]], np.float32)


def test_each_model_has_its_own_pools_and_cores(both):
    info = both.get("/info")
    assert info["model_id"] == REAL
    assert [info["models"][name]["windve"]["slo_s"] for name in (REAL, SMALL)] == [1.0, 0.5]
    members = [
        next(iter(info["models"][name]["windve"]["pools"]["cpu"]["replicas"].values())) for name in (REAL, SMALL)
    ]
    cores = [set(member["cores"]) for member in members]
    assert len({member["pid"] for member in members}) == 2
    if os.cpu_count() > 1:
        assert all(cores)
        assert cores[0].isdisjoint(cores[1])
    assert both.get(f"/models/{SMALL}/info")["model_id"] == SMALL


def test_http_goes_by_model(both, reference, small_reference):
    few = TEXTS[:8]
    for path, payload, wanted in (
        ("/v1/embeddings", {"input": few, "model": REAL}, reference[:8]),
        ("/v1/embeddings", {"input": few}, reference[:8]),
        ("/v1/embeddings", {"input": few, "model": SMALL}, small_reference),
        ("/embed", {"inputs": few, "model": SMALL, "truncate": True}, small_reference),
        (f"/models/{SMALL}/embed", {"inputs": few}, small_reference),
        (f"/models/{SMALL}", {"inputs": few}, small_reference),
        (f"/models/{REAL}/v1/embeddings", {"input": few}, reference[:8]),
    ):
        assert worst(vectors(ask(both, path, payload)), wanted) >= 0.999, (path, payload)


def test_an_unknown_name_is_404_in_the_routes_own_shape(both):
    sentence = f"there is no model 'nobody' here; this server has '{REAL}' and '{SMALL}'"
    openai = ask(both, "/v1/embeddings", {"input": "x", "model": "nobody"})
    assert (openai.status, openai.json()["error"]["message"]) == (404, sentence)
    for path, payload in (("/embed", {"inputs": "x", "model": "nobody"}), ("/models/nobody/embed", {"inputs": "x"})):
        reply = ask(both, path, payload)
        assert (reply.status, reply.json()) == (404, {"error": sentence, "error_type": "Validation"})


def test_openais_client_by_model(both):
    with OpenAI(base_url=f"http://127.0.0.1:{both.port}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [REAL, SMALL]
        sizes = [len(client.embeddings.create(model=name, input="x").data[0].embedding) for name in (REAL, SMALL)]
        assert sizes == [384, 64]
        with pytest.raises(NotFoundError, match="there is no model 'nobody'"):
            client.embeddings.create(model="nobody", input="x")


def test_grpc_goes_by_the_metadata_model(both, small_reference):
    with tei_wire.connected(both.grpc_port) as client:
        found = {
            name: np.array(client.call("Embed/Embed", inputs=TEXTS[0], truncate=True, metadata=metadata).embeddings)
            for name, metadata in ((None, []), (REAL, [("model", REAL)]), (SMALL, [("model", SMALL)]))
        }
        assert [len(vector) for vector in found.values()] == [384, 384, 64]
        assert found[SMALL] @ small_reference[0] >= 0.999
        assert client.call("Info/Info", metadata=[("model", SMALL)]).model_id == SMALL
        refused = client.refused("Embed/Embed", inputs="x", metadata=[("model", "nobody")])
        assert refused.code().name == "NOT_FOUND"
        assert SMALL in refused.details()
        streamed = client.stream("Embed/EmbedStream")(
            iter([tei_wire.request("Embed/EmbedStream", inputs="x")] * 3), timeout=30, metadata=[("model", SMALL)]
        )
        assert [len(answer.embeddings) for answer in streamed] == [64] * 3


def test_metrics_tell_the_models_apart(both):
    ask(both, "/embed", {"inputs": ["a", "b"], "model": SMALL})

    def counted():
        with urllib.request.urlopen(both.metrics_address, timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        found = Counter()
        for family in families:
            for sample in family.samples:
                if sample.name in {"ray_windve_queries_total", "ray_windve_runs_total"}:
                    found[sample.name, sample.labels["model"]] += sample.value
        return found

    wanted = {(f"ray_windve_{name}_total", model) for name in ("queries", "runs") for model in (REAL, SMALL)}
    ends = time.monotonic() + 30
    while not all(counted()[key] for key in wanted):
        assert time.monotonic() < ends, counted()
        time.sleep(0.5)


def replica(service, model):
    found = service.get(f"/models/{model}/info")["windve"]["pools"]["cpu"]["replicas"]
    return next((about["pid"] for about in found.values()), None)


def test_one_models_embedder_dies_while_the_other_answers(both, figure):
    statuses, stop = {REAL: Counter(), SMALL: Counter()}, threading.Event()

    def keep_asking(model):
        while not stop.wait(0.02):
            statuses[model][ask(both, "/v1/embeddings", {"input": "x", "model": model}).status] += 1

    threads = [threading.Thread(target=keep_asking, args=(model,)) for model in statuses]
    for thread in threads:
        thread.start()
    pid, health = replica(both, SMALL), []
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while replica(both, SMALL) in {pid, None}:
        health.append(both.get("/health")["models"])
        assert time.monotonic() - started < 60
        time.sleep(0.05)
    back_s = time.monotonic() - started
    stop.set()
    for thread in threads:
        thread.join()
    figure(
        f"two models, one killed: the other {dict(statuses[REAL])}, it {dict(statuses[SMALL])}, back in {back_s:.1f} s"
    )
    assert set(statuses[REAL]) == {200}
    assert statuses[REAL][200] > 20
    assert set(statuses[SMALL]) <= {200, 429, 503}
    assert {one[REAL]["status"] for one in health} == {"ok"}
    assert {"status": "unavailable", "missing": ["cpu"]} in [one[SMALL] for one in health]
    assert ask(both, "/v1/embeddings", {"input": "x", "model": SMALL}).status == 200


def test_a_config_for_one_model_applies_in_place(both):
    pid, own = replica(both, SMALL), both.router["models"][SMALL]
    own["slo_s"] = 0.25
    both.deploy()
    both.wait_for(lambda _: both.get(f"/models/{SMALL}/info")["windve"]["slo_s"] == 0.25, 20, what="the SLO")
    assert both.get("/info")["windve"]["slo_s"] == 1.0
    own["cpu"] = {"queue_dept": 3}
    both.deploy()
    problem = f"user_config.models.{SMALL}.cpu.queue_dept: there is no such setting"
    both.wait_for(lambda _: both.get("/info")["windve"]["config_problem"] == problem, 20, what="the problem")
    assert both.get(f"/models/{SMALL}/info")["windve"]["slo_s"] == 0.25
    own.clear()
    both.deploy()
    both.wait_for(lambda _: both.get(f"/models/{SMALL}/info")["windve"]["slo_s"] == 1.0, 20, what="what is for both")
    assert both.get("/info")["windve"]["config_problem"] is None
    assert replica(both, SMALL) == pid


def test_a_named_route_is_found_by_any_client(both):
    """The address of one model serves as the address of a service with one model."""
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"http://127.0.0.1:{both.port}/models/{SMALL}/embed")
    with urllib.request.urlopen(f"http://127.0.0.1:{both.port}/models/{SMALL}/openapi.json") as answer:
        assert json.load(answer)["servers"] == [{"url": f"/models/{SMALL}"}]
