"""Several Router replicas share the depths: counts at the clients and at the engines, over emulated devices."""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections import Counter

import pytest
from router_processes import get_info, routers, wait_for_routers

from benchmarks.kit.arrivals import burst
from calibration.load import Connection, connect, request_bytes
from tests.kit.service import by_depth, load_yaml

pytestmark = pytest.mark.alone

DEPTHS = {"accelerator": 40, "cpu": 8}
SLOWER = 4  # no batch ends while a burst still arrives
ROUTERS = 3
HAMMERED_S = 10
STOPPED_S = 10
FULL = {"accelerator": 40, "cpu": 8, 429: 52}  # of 100 at once
TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


@pytest.fixture(scope="module")
def three(shared):
    config = load_yaml("rehearsal.yaml")
    application = config["applications"][0]
    router = application["deployments"][0]
    router["num_replicas"] = ROUTERS
    for pool in DEPTHS:
        application["args"][pool]["emulated"]["time_scale"] = SLOWER
        del router["user_config"][pool]
    service = shared.serve(by_depth(config, **DEPTHS))
    wait_for_routers(service, ROUTERS)
    return service


def queries(count):
    return [request_bytes({"input": f"{TEXT}{number}"}) for number in range(count)]


def outcome(replies):
    return Counter(reply.pool if reply.status == 200 else reply.status for reply in replies)


def most_in_flight(service):
    """What the replicas have counted: {pool: the most queries that were at one of its replicas at once}."""
    return {
        name: max(found["most_in_flight"] for found in pool["replicas"].values())
        for name, pool in service.pools().items()
    }


def check_bound(service):
    assert all(most <= DEPTHS[pool] for pool, most in most_in_flight(service).items()), most_in_flight(service)


def test_a_burst_at_one_router_fills_the_queues(three, figure):
    for address in routers(three).values():
        three.wait_until_idle()
        replies = burst(address, queries(100))
        slowest_busy = max(reply.seconds for reply in replies if reply.status == 429)
        figure(f"burst of 100 at one of {ROUTERS} Routers: {dict(outcome(replies))}, busy {slowest_busy:.3f} s")
        assert outcome(replies) == FULL
    check_bound(three)


def test_a_burst_over_all_routers_fills_the_queues_and_no_more(three, figure):
    three.wait_until_idle()
    replies = burst(three.address, queries(100))
    figure(f"burst of 100 through the proxy: {dict(outcome(replies))}")
    assert outcome(replies) == FULL
    check_bound(three)


def hammer(address, enough, clients, results):
    """One client process: so many connections that ask again and again until it is `enough`."""

    async def run():
        connections = await connect(address, clients)
        statuses = Counter()

        async def ask(connection):
            new = False
            while not enough.is_set():
                try:
                    reply = await connection.ask(queries(1)[0])
                except (OSError, EOFError):
                    # The proxy closes kept connections when its servers change; HTTP clients try a new one, once.
                    if new:
                        statuses["broken"] += 1
                        return
                    connection.hang_up()
                    connection, new = await Connection.open(address), True
                    continue
                new = False
                expected = reply.status in {200, 429}
                statuses[reply.status if expected else f"{reply.status} {reply.body[:300]!r}"] += 1
                if reply.status != 200:
                    await asyncio.sleep(0.1)
            connection.hang_up()

        await asyncio.gather(*map(ask, connections))
        return statuses

    results.put(asyncio.run(run()))


@contextlib.contextmanager
def hammering(address, processes=4, clients=25):
    """Client processes beside what is done meanwhile; their statuses are in the counter once it is left."""
    context = multiprocessing.get_context("fork")
    results, enough = context.Queue(), context.Event()
    started = [context.Process(target=hammer, args=(address, enough, clients, results)) for _ in range(processes)]
    for process in started:
        process.start()
    statuses = Counter()
    try:
        yield statuses
    finally:
        enough.set()
    for _ in started:
        statuses.update(results.get(timeout=120))
    for process in started:
        process.join()


def answered_by(address):
    """Queries that this Router's accelerators have answered."""
    pool = get_info(address)["windve"]["pools"]["accelerator"]
    return sum(replica["queries"] for replica in pool["replicas"].values())


def test_the_bound_holds_while_several_processes_hammer(three, figure):
    three.wait_until_idle()
    before = {address: answered_by(address) for address in routers(three).values()}
    with hammering(three.address) as statuses:
        time.sleep(HAMMERED_S)
    answered = [answered_by(address) - count for address, count in before.items()]
    told = f"{dict(statuses)}; by Router {answered}; {most_in_flight(three)}"
    figure(f"4 processes, 100 clients, {HAMMERED_S} s: {told}")
    assert set(statuses) == {200, 429}
    assert min(answered) > 0
    check_bound(three)


def test_what_a_killed_router_had_waiting_is_dropped_and_the_others_lose_nothing(three, figure):
    three.wait_until_idle()
    (dying, its), (_, other), (_, third) = routers(three).items()

    async def kill_mid_burst():
        connections = [await connect(address, 12) for address in (its, other, third)]
        asking = [
            [asyncio.create_task(c.ask(r)) for c, r in zip(some, queries(12), strict=True)] for some in connections
        ]
        await asyncio.sleep(0.5)
        os.kill(dying, signal.SIGKILL)
        lost = await asyncio.gather(*asking[0], return_exceptions=True)
        replies = [reply for some in asking[1:] for reply in await asyncio.gather(*some)]
        for connection in itertools.chain(*connections):
            connection.hang_up()
        return lost, replies

    lost, replies = asyncio.run(kill_mid_burst())
    assert all(isinstance(one, Exception) for one in lost)
    assert {reply.status for reply in replies} == {200}
    after = burst(other, queries(100))
    figure(f"kill -9 of a Router: the others' queries {dict(outcome(replies))}; a burst then {dict(outcome(after))}")
    assert outcome(after) == FULL
    wait_for_routers(three, ROUTERS)
    three.wait_until_idle()
    assert outcome(burst(three.address, queries(100))) == FULL
    check_bound(three)


KILLS, KILL_EVERY_S = 3, 6


def test_clients_behind_the_proxy_do_not_notice_that_routers_die(three, figure):
    """Bodies below the proxy's buffer: it sends them to another Router."""
    three.wait_until_idle()
    with hammering(three.address, processes=2, clients=10) as statuses:
        for _ in range(KILLS):
            time.sleep(KILL_EVERY_S / 2)
            os.kill(next(iter(routers(three))), signal.SIGKILL)
            time.sleep(KILL_EVERY_S / 2)
            wait_for_routers(three, ROUTERS)
    figure(f"{KILLS} of {ROUTERS} Routers killed under load, one by one: {dict(statuses)}")
    assert set(statuses) <= {200, 429}
    three.wait_until_idle()
    assert outcome(burst(three.address, queries(100))) == FULL


def test_a_router_that_stands_still_for_ten_seconds_loses_nothing(three, figure):
    """SIGSTOP: what it had waiting runs, its answers wait for it, and the others have the queues to themselves."""
    three.wait_until_idle()
    (stopped, its), (_, other), _ = routers(three).items()

    async def stop_mid_burst():
        connections = [await connect(address, 12) for address in (its, other)]
        asking = [asyncio.create_task(c.ask(r)) for c, r in zip(connections[0], queries(12), strict=True)]
        await asyncio.sleep(0.5)
        os.kill(stopped, signal.SIGSTOP)
        try:
            ends, theirs = time.monotonic() + STOPPED_S, Counter()
            while time.monotonic() < ends:
                theirs += outcome(await asyncio.gather(*(c.ask(queries(1)[0]) for c in connections[1])))
        finally:
            os.kill(stopped, signal.SIGCONT)
        replies = await asyncio.gather(*asking)
        for connection in itertools.chain(*connections):
            connection.hang_up()
        return replies, theirs

    replies, theirs = asyncio.run(stop_mid_burst())
    figure(f"SIGSTOP of a Router for {STOPPED_S} s: {dict(outcome(replies))}; another meanwhile: {dict(theirs)}")
    assert {reply.status for reply in replies} == {200}
    assert set(theirs) <= {"accelerator", "cpu"}
    wait_for_routers(three, ROUTERS)
    three.wait_until_idle()
    assert outcome(burst(three.address, queries(100))) == FULL


def wait_for_depths(address, depths, timeout_s=30):
    ends = time.monotonic() + timeout_s
    while {name: pool["queue_depth"] for name, pool in get_info(address)["windve"]["pools"].items()} != depths:
        assert time.monotonic() < ends, f"{depths} are not in force at {address}"
        time.sleep(0.1)


def test_new_values_under_load_lose_nothing(three, figure):
    """`serve deploy` in place: half the places, and all of them again."""
    with hammering(three.address, processes=2, clients=30) as statuses:
        for share in (0.5, 1):
            for pool, depth in DEPTHS.items():
                three.router[pool]["queue_depth"] = int(share * depth)
            three.deploy()
            for address in routers(three).values():
                wait_for_depths(address, {pool: int(share * depth) for pool, depth in DEPTHS.items()})
    figure(f"depths halved and restored under load of three Routers: {dict(statuses)}")
    assert set(statuses) == {200, 429}
    three.wait_until_idle()
    assert outcome(burst(three.address, queries(100))) == FULL


def scale(service, count):
    service.application["deployments"][0]["num_replicas"] = count
    service.deploy()
    wait_for_routers(service, count)


def test_scaling_in_place_under_load(three, figure):
    """Last in this file: three, one, three, one."""
    for count in (1, ROUTERS, 1):
        with hammering(three.address, processes=2, clients=30) as statuses:
            time.sleep(2)
            scale(three, count)
            time.sleep(2)
        figure(f"scaled to {count} Routers under load: {dict(statuses)}")
        assert set(statuses) == {200, 429}
        three.wait_until_idle()
        assert outcome(burst(three.address, queries(100))) == FULL
