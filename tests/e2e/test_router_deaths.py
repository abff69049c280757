"""Routers and the HAProxy die, and versions change, under half the load that emulated devices can take."""

import contextlib
import os
import signal
import time
from collections import Counter

import psutil
import pytest
from router_processes import routers, wait_for_routers
from steady_load import TEXT, WITHOUT_ANSWER, streaming

from tests.kit import tei_wire
from tests.kit.service import load_yaml

pytestmark = pytest.mark.alone

HALF_LOAD_S = 28  # queries a second: 48 by the accelerator and 8 by the CPU are all
KILL_EVERY_S = 10
KILLED_FOR_S = float(os.environ.get("KILLED_FOR_S", "20"))  # 300: the whole proof
ANSWERED_OR_BUSY = {200, 429}


@pytest.fixture(scope="module")
def two(shared):
    config = load_yaml("rehearsal.yaml")
    config["applications"][0]["deployments"][0]["num_replicas"] = 2
    service = shared.serve(config)
    wait_for_routers(service, 2)
    return service


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def seconds_until_there(service, count, before, since):
    """Until so many Routers listen that were not there `before`."""
    while len(set(routers(service)) - set(before)) < count:
        assert time.monotonic() - since < 60
        time.sleep(0.2)
    return time.monotonic() - since


def test_nobody_notices_that_one_of_two_routers_dies(two, figure):
    """Every ten seconds, the older one."""
    two.wait_until_idle()
    back_s, ends = [], time.monotonic() + KILLED_FOR_S
    with streaming(two.address, HALF_LOAD_S, large_share=0.05) as stream:
        alive = list(routers(two))
        while time.monotonic() < ends:
            again = time.monotonic() + KILL_EVERY_S
            killed = kill(alive.pop(0))
            back_s.append(seconds_until_there(two, 1, alive, killed))
            alive += set(routers(two)) - set(alive)
            time.sleep(max(0.0, again - time.monotonic()))
    figure(f"one of two Routers killed every {KILL_EVERY_S} s, {len(back_s)} times: {stream}")
    back = f"a Router is back after {min(back_s):.1f} to {max(back_s):.1f} s"
    size = max(psutil.Process(pid).memory_info().rss for pid in alive) / 2**20
    figure(f"{back}, and takes {size:.0f} MiB; longest time without a 200: {stream.pause_s():.2f} s")
    assert set(stream.of("small")) <= ANSWERED_OR_BUSY, stream.unavailable
    assert set(stream.of("large")) <= {200, 429, 503, WITHOUT_ANSWER}
    assert not stream.strange


def embed(client):
    return client.unary("Embed/Embed").future(tei_wire.request("Embed/Embed", inputs=TEXT), timeout=30)


def test_grpc_calls_are_tried_again_on_another_router(two, figure):
    two.wait_until_idle()
    with tei_wire.connected(two.grpc_port) as client:
        calls = [embed(client) for _ in range(40)]
        time.sleep(0.2)  # they are at both Routers, none is answered
        kill(next(iter(routers(two))))
        codes = [call.code().name for call in calls]
        figure(f"a Router killed under 40 gRPC calls: {Counter(codes)}")
        assert set(codes) == {"OK"}
    wait_for_routers(two, 2)


def change(service, what):
    """Deploys, and returns once the new version runs alone."""
    before = set(routers(service))
    service.deploy()
    if what == "version":
        ends = time.monotonic() + 120
        while before & set(routers(service)):
            assert time.monotonic() < ends
            time.sleep(0.5)
    wait_for_routers(service, service.application["deployments"][0]["num_replicas"])


def test_a_redeployed_config_loses_nothing(two, figure):
    """A `user_config` applies in place; other settings of the Router are a new version of it."""
    router = two.application["deployments"][0]
    for what in ("user_config", "version"):
        two.wait_until_idle()
        with streaming(two.address, HALF_LOAD_S, large_share=0.05) as stream:
            if what == "user_config":
                router["user_config"]["slo_s"] = 2.5
            else:
                router["ray_actor_options"] = {"num_cpus": 0.05}
            change(two, what)
        figure(f"redeployed with a changed {what}: {stream}")
        assert set(stream.of("small")) | set(stream.of("large")) <= ANSWERED_OR_BUSY
        assert not stream.strange


def haproxy(service):
    """HAProxy's process that listens for clients."""
    for process in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            if service.port in ports:
                return process.pid
    return None


def test_a_killed_haproxy_comes_back(two, figure):
    two.wait_until_idle()
    with streaming(two.address, HALF_LOAD_S) as stream:
        time.sleep(1)
        killed = kill(haproxy(two))
        while not any(when > killed + 1 and status == 200 for when, status in list(stream.answers)):
            assert time.monotonic() < killed + 60
            time.sleep(0.2)
        time.sleep(3)
    figure(f"HAProxy killed: {stream.pause_s():.1f} s without service, {stream}")
    assert stream.pause_s() < 20
    assert stream.answers[-1][1] in ANSWERED_OR_BUSY
    assert not stream.strange


def test_the_only_router_dies(two, figure):
    """Last in this file. HTTP requests wait at Serve's own proxy, or get 503 in the route's shape."""
    two.application["deployments"][0]["num_replicas"] = 1
    two.deploy()
    wait_for_routers(two, 1)
    two.wait_until_idle()
    with tei_wire.connected(two.grpc_port) as client, streaming(two.address, HALF_LOAD_S) as stream:
        time.sleep(1)
        calls = [embed(client) for _ in range(4)]
        time.sleep(0.1)
        kill(next(iter(routers(two))))
        time.sleep(1)
        calls += [embed(client) for _ in range(4)]
        codes = {call.code().name for call in calls}
        wait_for_routers(two, 1)
    figure(f"the only Router killed: {stream.pause_s():.1f} s without a 200, {stream}; gRPC {codes}")
    assert set(stream.of("small")) <= {200, 429, 503}
    assert not stream.strange
    assert codes <= {"OK", "UNAVAILABLE"}
