"""Several Routers share the depths of slow emulated devices, and die, stand still, change and are replaced under load.

`KILLS=30 make test TESTS=tests/e2e/test_routers.py` kills for longer.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import psutil
import pytest
from router_processes import get_info, wait_for_routers
from steady_load import WITHOUT_ANSWER, streaming

from calibration.load import Address, burst, connect
from deployments.serve_adapter import lost_router
from tests.kit import tei_wire
from tests.kit.service import TEXT, by_depth, emulating, outcome, queries, wait_until

DEVICES = {"accelerator": {"alpha_s": 0.02, "beta_s": 2.0}, "cpu": {"alpha_s": 0.1, "beta_s": 2.0}}
DEPTHS = {"accelerator": 20, "cpu": 8}  # of each replica
FULL = {"accelerator": 40, "cpu": 8, 429: 12}  # of 60 at once
ROUTERS = 3
HALF_LOAD_S, OVERLOAD_S = 8, 40  # queries a second
KILLS = int(os.environ.get("KILLS", "2"))
STOPPED_S = 10
GRPC_FROM = 9000  # Serve's own proxy listens for HTTP below, by default at 8500
ANSWERED_OR_BUSY = {200, 429}


@pytest.fixture(scope="module")
def three(shared):
    config = by_depth(emulating(20.0, **DEVICES), **DEPTHS)
    config["applications"][0]["deployments"][0]["num_replicas"] = ROUTERS
    service = shared.serve(config)
    wait_for_routers(service, ROUTERS)
    return service


def check_full(service, address=None):
    """A burst fills the queues, and at no replica there were ever more queries than its depth."""
    service.wait_until_idle()
    assert outcome(burst(address or service.address, queries(60))) == FULL
    for name, pool in service.pools().items():
        assert max(found["most_in_flight"] for found in pool["replicas"].values()) <= DEPTHS[name], name


def answered_by(address):
    """Queries that this Router's accelerator has answered."""
    replicas = get_info(address)["windve"]["pools"]["accelerator"]["replicas"].values()
    return sum(replica["queries"] for replica in replicas)


def test_the_bound_holds_in_a_burst_at_one_router_or_over_all_and_at_overload(three, figure):
    check_full(three, next(iter(three.routers().values())))
    before = {address: answered_by(address) for address in three.routers().values()}
    with streaming(three.address, OVERLOAD_S) as stream:
        time.sleep(8)
    answered = [answered_by(address) - count for address, count in before.items()]
    figure(f"{OVERLOAD_S} queries a second: {stream}; by Router {answered}")
    assert stream.of("small") == ANSWERED_OR_BUSY
    assert min(answered) > 0
    check_full(three)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def in_flight(address):
    """Of all Routers, as one of them knows it."""
    return sum(pool["in_flight"] for pool in get_info(address)["windve"]["pools"].values())


def test_clients_behind_the_proxy_do_not_notice_that_routers_die(three, figure):
    """The oldest one, again and again. Bodies above the proxy's buffer may be lost: it cannot send them again."""
    back_s = []
    with streaming(three.address, HALF_LOAD_S, large_share=0.05) as stream:
        alive = list(three.routers())
        for _ in range(KILLS):
            time.sleep(2)
            killed = kill(alive.pop(0))
            wait_for_routers(three, ROUTERS)
            back_s.append(time.monotonic() - killed)
            alive += set(three.routers()) - set(alive)
    size = max(psutil.Process(pid).memory_info().rss for pid in alive) / 2**20
    figure(f"one of {ROUTERS} Routers killed {KILLS} times: {stream}; without a 200 for {stream.pause_s():.1f} s")
    figure(f"a Router is back after {min(back_s):.1f} to {max(back_s):.1f} s, and takes {size:.0f} MiB")
    assert stream.of("small") <= ANSWERED_OR_BUSY, stream.refusals
    assert stream.of("large") <= {200, 429, 503, WITHOUT_ANSWER}
    assert not stream.strange
    check_full(three)


def embed(client):
    return client.unary("Embed/Embed").future(tei_wire.request("Embed/Embed", inputs=TEXT), timeout=60)


def test_grpc_calls_are_tried_again_on_another_router(three, figure):
    three.wait_until_idle()
    with tei_wire.connected(three.grpc_port) as client:
        calls = [embed(client) for _ in range(36)]
        three.wait_for(lambda pools: sum(pool["in_flight"] for pool in pools.values()) == 36)
        kill(next(iter(three.routers())))
        codes = Counter(call.code().name for call in calls)
    figure(f"a Router killed under 36 gRPC calls: {codes}")
    assert set(codes) == {"OK"}
    wait_for_routers(three, ROUTERS)


def test_a_router_that_stands_still_loses_nothing(three, figure):
    """SIGSTOP: what it had waiting runs, its answers wait for it, and the others have the queues to themselves."""
    three.wait_until_idle()
    (stopped, its), (_, other), _ = three.routers().items()

    async def stop_mid_burst():
        connections = await connect(its, 12)
        asked = [asyncio.create_task(c.ask(r)) for c, r in zip(connections, queries(12), strict=True)]
        await asyncio.to_thread(three.wait_for, lambda _: in_flight(other) == 12)
        os.kill(stopped, signal.SIGSTOP)
        try:
            ends, theirs = time.monotonic() + STOPPED_S, Counter()
            while time.monotonic() < ends:
                theirs += outcome(await asyncio.to_thread(burst, other, queries(12)))
        finally:
            os.kill(stopped, signal.SIGCONT)
        found = outcome(await asyncio.gather(*asked))
        for connection in connections:
            connection.hang_up()
        return found, theirs

    of_stopped, theirs = asyncio.run(stop_mid_burst())
    figure(f"SIGSTOP of a Router for {STOPPED_S} s: {dict(of_stopped)}; another meanwhile: {dict(theirs)}")
    assert of_stopped.keys() | theirs.keys() <= {"accelerator", "cpu"}
    wait_for_routers(three, ROUTERS)
    check_full(three)


@contextlib.contextmanager
def losing_nothing(service, figure, what):
    service.wait_until_idle()
    with streaming(service.address, HALF_LOAD_S, large_share=0.05) as stream:
        time.sleep(1)
        yield
        time.sleep(1)
    figure(f"{what}: {stream}")
    assert stream.of("small") | stream.of("large") <= ANSWERED_OR_BUSY
    assert not stream.strange


def depths_at(address):
    return {name: pool["queue_depth"] for name, pool in get_info(address)["windve"]["pools"].items()}


def test_new_depths_apply_in_place(three, figure):
    before = set(three.routers())
    replicas = {name: set(pool["replicas"]) for name, pool in three.pools().items()}
    with losing_nothing(three, figure, "depths halved by `serve deploy`, and restored"):
        for share, deploy in ((0.5, three.type_deploy), (1, three.deploy)):
            depths = {pool: int(share * depth) for pool, depth in DEPTHS.items()}
            by_depth(three.config, **depths)
            deploy()
            for address in three.routers().values():
                wait_until(lambda: depths_at(address) == depths, f"{depths} at {address}")  # noqa: B023
    assert set(three.routers()) == before
    assert {name: set(pool["replicas"]) for name, pool in three.pools().items()} == replicas
    check_full(three)


def test_another_version_of_the_routers_replaces_them(three, figure):
    before = set(three.routers())
    with losing_nothing(three, figure, "another version of the Routers"):
        three.application["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.05}
        three.deploy()
        wait_until(lambda: before.isdisjoint(three.routers()), "the end of the former Routers")
        wait_for_routers(three, ROUTERS)
    check_full(three)


def change_number(service, figure, count):
    with losing_nothing(service, figure, f"scaled to {count} Routers"):
        service.application["deployments"][0]["num_replicas"] = count
        service.deploy()
        wait_for_routers(service, count)
    check_full(service)


def serves_own_proxy(service):
    """Where HAProxy sends what no Router takes."""
    for process in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ProxyActor" in " ".join(process.cmdline()):
                for connection in process.net_connections("tcp"):
                    address = Address("127.0.0.1", connection.laddr.port)
                    if connection.status == psutil.CONN_LISTEN and address.port < GRPC_FROM:
                        with contextlib.suppress(OSError, ValueError, HTTPException):
                            get_info(address)
                            return address
    raise AssertionError("Serve's own proxy does not listen")


def test_serves_own_proxy_tells_a_router_that_died_from_one_that_failed(three, figure):
    three.wait_until_idle()
    routers = three.routers()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(burst, serves_own_proxy(three), queries(6))
        wait_until(lambda: in_flight(three.address) == 6, "six queries in flight")
        for pid in routers:
            kill(pid)
        found = outcome(asked.result())
    figure(f"all Routers killed under six queries at Serve's own proxy: {found}")
    assert found == {lost_router.STATUS: 6}
    wait_for_routers(three, ROUTERS)


def haproxy(service):
    """The process that listens for clients."""
    for process in psutil.Process(service.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            if service.port in ports:
                return process.pid
    return None


def test_a_killed_haproxy_comes_back(three, figure):
    three.wait_until_idle()
    with streaming(three.address, HALF_LOAD_S) as stream:
        time.sleep(1)
        killed = kill(haproxy(three))
        wait_until(lambda: any(when > killed + 1 and status == 200 for when, status in stream.answers), "an answer")
        time.sleep(2)
    figure(f"HAProxy killed: {stream.pause_s():.1f} s without service, {stream}")
    assert stream.answers[-1][1] in ANSWERED_OR_BUSY
    assert not stream.strange


def test_one_of_two_routers_dies_again_and_again_at_twice_what_devices_can_do(three, figure):
    """Each request is answered, or is told when to come back."""
    change_number(three, figure, 2)
    with streaming(three.address, OVERLOAD_S) as stream:
        alive = list(three.routers())
        for _ in range(KILLS):
            time.sleep(2)
            kill(alive.pop(0))
            wait_for_routers(three, 2)
            alive += set(three.routers()) - set(alive)
    figure(f"one of two Routers killed {KILLS} times at {OVERLOAD_S} queries a second: {stream}")
    figure(f"without a 200 for {stream.pause_s():.1f} s; refusals {dict(stream.refusals)}")
    assert {200, 429} <= stream.of("small") <= {200, 429, 503}
    assert not stream.strange
    check_full(three)


def test_the_only_router_dies(three, figure):
    """HTTP requests wait at Serve's own proxy, or get 503 in the route's shape."""
    change_number(three, figure, 1)
    with tei_wire.connected(three.grpc_port) as client, streaming(three.address, HALF_LOAD_S) as stream:
        time.sleep(1)
        calls = [embed(client) for _ in range(4)]
        kill(next(iter(three.routers())))
        time.sleep(1)
        calls += [embed(client) for _ in range(4)]
        codes = {call.code().name for call in calls}
        wait_for_routers(three, 1)
    figure(f"the only Router killed: {stream.pause_s():.1f} s without a 200, {stream}; gRPC {codes}")
    assert stream.of("small") <= {200, 429, 503}
    assert not stream.strange
    assert codes <= {"OK", "UNAVAILABLE"}
    change_number(three, figure, ROUTERS)
