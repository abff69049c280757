"""What the dashboard and the alerts ask, asked of a real Prometheus that reads a service under load."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from benchmarks.kit.prometheus import is_installed, panels, reading
from calibration.load import burst
from tests.kit.service import ROOT, queries

RULES = yaml.safe_load((ROOT / "k8s" / "base" / "alerts.yaml").read_text())["spec"]
WITHIN_S = 180  # all there is to see of a load is seen


@pytest.fixture(scope="module")
def prometheus(request, tmp_path_factory):
    """It reads the rehearsal: by the paper's rule, with depths, so that there is one to show. The SLO is made so short
    that each query misses it: something to see for each expression.
    """
    if not is_installed():
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus): its expressions are not tested")
    service = request.getfixturevalue("rehearsal")
    slo_s = service.router["slo_s"]
    put_in_force(service, 1.0)
    with reading(service.metrics_address, RULES["groups"]) as prometheus:
        yield prometheus
    put_in_force(service, slo_s)


def put_in_force(service, slo_s):
    service.router["slo_s"] = slo_s
    service.deploy()
    service.wait_for_each(lambda ours: ours["slo_s"] == slo_s, f"an SLO of {slo_s} s")


@pytest.fixture(scope="module")
def load(rehearsal, prometheus):
    """Bursts that overflow to the CPU, and of which replicas refuse some, until the tests here are over."""
    bursts, over = [], threading.Event()

    def send():
        """A replica that is not full is sent as many as it takes when idle: it refuses some of them."""
        while not over.is_set():
            first = some.submit(burst, rehearsal.address, queries(15))
            rehearsal.wait_for(lambda pools, first=first: pools["accelerator"]["in_flight"] > 0 or first.done())
            bursts.append(burst(rehearsal.address, queries(40)))
            bursts.append(first.result())

    with ThreadPoolExecutor() as some:
        sending = some.submit(send)
        try:
            yield bursts
        finally:
            over.set()
            sending.result()
        seen = {reply.pool if reply.status == 200 else reply.status for replies in bursts for reply in replies}
        assert seen == {"accelerator", "cpu", 429}


def until_answered(prometheus, expressions):
    """Asks until each has given a number; returns those that never did."""
    open_ones, ends = dict(expressions), time.monotonic() + WITHIN_S
    while open_ones and time.monotonic() < ends:
        open_ones = {name: expr for name, expr in open_ones.items() if not prometheus.values(expr)}
        time.sleep(0.5)
    return open_ones


def filled_in(expr):
    return expr.replace("$__rate_interval", "20s").replace("$application", "windve")


OF_GENERATION = re.compile("ttft|tpot")  # what an embedding service does not tell


# What the rehearsal lacks: HAProxy's metrics, named keys, a GPU that Ray knows, generated text, a host's blocks.
LACKING = re.compile(
    "haproxy_|tenant|gpus|ttft|tpot|first_token|output_token|worst_gap|prompt_tokens|answer|_blocks_|mode_steps"
    "|(hybrid|alone|host)_tokens"
)


def test_each_query_of_the_dashboard_and_what_replicas_tell_is_answered(prometheus, load):
    asked = {
        f"{panel['title']} {query['legendFormat']}": filled_in(query["expr"])
        for panel in panels()
        for query in panel["targets"]
    }
    lacking = [asked.pop(name) for name in list(asked) if LACKING.search(asked[name])]
    asked |= {
        name: f"ray_windve_{name} > 0"
        for name in ('refusals_total{reason="full"}', "slowdown_ratio", "safety_margin_ratio", "free_seconds")
    }
    assert until_answered(prometheus, asked) == {}
    for expr in lacking:
        prometheus.values(expr)


def test_the_rules_are_evaluated_and_no_run_is_quicker_than_its_device(prometheus, load):
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    recorded = [rule["record"] for rule in RULES["groups"][0]["rules"] if not OF_GENERATION.search(rule["record"])]
    assert until_answered(prometheus, {name: name for name in recorded}) == {}
    told = [rule for group in prometheus.ask("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in told} == {rule.get("alert") or rule["record"] for rule in rules}
    assert {rule["name"]: rule.get("lastError") for rule in told if rule["health"] != "ok"} == {}
    drift = prometheus.values("windve:drift:ratio_rate15m")
    # A busy machine makes runs longer, and nothing makes them shorter. All runs of a pool may be older than the first
    # scrape: it has no rate then.
    assert min(drift) > 0.9
