"""A cluster of several nodes on this machine: who lands where, what stays on a node, and what a node's death does.

The head offers no CPU. `near` has an NPU and the Router, `far` an NPU, `plain` neither; the devices are emulated, and
Ray books them as it books real ones.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from calibration.load import burst, connect, request_bytes
from tests.kit.ray_nodes import cluster_for
from tests.kit.service import ROOT, by_depth, load_yaml

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(sys.platform != "linux", reason="each node has a loopback address of its own"),
]

# Slow at each query: the way of those for five replicas through one busy machine takes little beside it.
DEVICES = {"accelerator": {"alpha_s": 0.15, "beta_s": 0.4}, "cpu": {"alpha_s": 0.4, "beta_s": 0.5}}
DEPTHS = {"accelerator": 5, "cpu": 2}
# So long that the second or so by which a busy machine delays a burst of all replicas is a part of the depth only.
CALIBRATED_SLO_S = 3.0
TRUE = {"accelerator": 17, "cpu": 6}  # floor((3 - beta) / alpha)
TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


@pytest.fixture(scope="module")
def cluster():
    config = load_yaml("rehearsal.yaml")
    application = config["applications"][0]
    args, router = application["args"], application["deployments"][0]
    for pool, device in DEVICES.items():
        args[pool]["emulated"] = device
        router["user_config"][pool] = dict(device)
    by_depth(config, **DEPTHS)
    args["accelerator"] |= {"device": "npu", "replicas": 2}
    args["cpu"]["replicas"] = 3
    args["wait_for_nodes_s"] = 60.0
    router["ray_actor_options"] = {"num_cpus": 0.1, "resources": {"router": 0.01}}
    with cluster_for(config) as cluster:
        with ThreadPoolExecutor(1) as beside:
            deploying = beside.submit(cluster.type_deploy)  # before all workers are there, as on Kubernetes
            cluster.near, cluster.plain = cluster.add_node(2, NPU=1, router=1), cluster.add_node(2)
            cluster.far = cluster.add_node(2, NPU=1)
            deploying.result()
        cluster.wait_until_running()
        wait_for_replicas(cluster, accelerator=2, cpu=3)
        yield cluster


def wait_for_replicas(cluster, **counts):
    return cluster.wait_for(
        lambda pools: {name: pool["live_replicas"] for name, pool in pools.items()} == counts, what=f"{counts}"
    )


def queries(count):
    return [request_bytes({"input": f"{TEXT}{number}"}) for number in range(count)]


def outcome(replies):
    return Counter(reply.pool if reply.status == 200 else reply.status for reply in replies)


def placed(cluster):
    """The addresses of the nodes on which the replicas of each deployment run."""
    deployments = cluster.status()["applications"]["windve"]["deployments"]
    return {
        name: sorted(replica["node_ip"] for replica in deployment["replicas"] if replica["state"] == "RUNNING")
        for name, deployment in deployments.items()
    }


def addresses(*nodes):
    return sorted(node.address for node in nodes)


def test_one_replica_a_device_one_cpu_instance_a_node_and_none_at_the_head(cluster, figure):
    status = cluster.status()
    assert status["controller_info"]["node_ip"] == cluster.head.address
    assert [proxy["node_ip"] for proxy in status["proxies"].values()] == [cluster.head.address]
    found = placed(cluster)
    figure(f"placed: {found}")
    assert found == {
        "AcceleratorEmbedder": addresses(cluster.near, cluster.far),
        "CpuEmbedder": addresses(cluster.near, cluster.far, cluster.plain),
        "Router": addresses(cluster.near),
    }


def answered(cluster):
    """{(pool, address of the replica's node): queries}."""
    found = {}
    deployments = cluster.status()["applications"]["windve"]["deployments"].values()
    where = {replica["replica_id"]: replica["node_ip"] for told in deployments for replica in told["replicas"]}
    for name, pool in cluster.pools().items():
        for replica, told in pool["replicas"].items():
            found[name, where[replica]] = told["queries"]
    return found


def test_lone_queries_stay_on_the_routers_node_and_a_full_house_is_even(cluster, figure):
    before = answered(cluster)
    for query in queries(10):
        assert outcome(burst(cluster.address, [query])) == {"accelerator": 1}
    alone = answered(cluster)
    replies = burst(cluster.address, queries(24))
    full = answered(cluster)
    more = {key: alone[key] - before[key] for key in before}
    figure(f"10 lone queries: {more}; a burst of 24: {dict(outcome(replies))}")
    assert more == {key: 10 if key == ("accelerator", cluster.near.address) else 0 for key in before}
    assert outcome(replies) == {"accelerator": 10, "cpu": 6, 429: 8}
    assert {key: full[key] - alone[key] for key in alone} == {key: DEPTHS[key[0]] for key in alone}


async def load(address, clients, stop):
    """Clients that ask again and again; each reply, and each complaint."""
    connections = await connect(address, clients)
    replies = []

    async def ask(connection):
        while not stop.is_set():
            reply = await connection.ask(queries(1)[0], 30)
            replies.append(reply)
            if reply.status != 200:
                await asyncio.sleep(0.1)

    ended = await asyncio.gather(*map(ask, connections), return_exceptions=True)
    for connection in connections:
        connection.hang_up()
    return replies, [repr(error) for error in ended if error is not None]


def test_a_nodes_death_loses_no_request_and_another_node_takes_its_place(cluster, figure):
    async def kill_under_load():
        stop = asyncio.Event()
        loading = asyncio.create_task(load(cluster.address, 14, stop))
        (bulk,) = await connect(cluster.address, 1)
        texts = [f"{TEXT}{number}" for number in range(40)]
        whole = asyncio.create_task(bulk.ask(request_bytes({"input": texts}), 60))
        await asyncio.sleep(3)
        killed = await asyncio.to_thread(cluster.far.kill)
        shrunk_s = await asyncio.to_thread(wait_for_replicas, cluster, accelerator=1, cpu=2)
        await asyncio.sleep(4)
        stop.set()
        replies, broken = await loading
        reply = await whole
        bulk.hang_up()
        return killed, shrunk_s, replies, broken, reply

    killed, shrunk_s, replies, broken, bulk = asyncio.run(kill_under_load())
    slowest = max(reply.seconds for reply in replies)
    figure(
        f"a node of {killed} processes killed under 14 clients: {dict(outcome(replies))}, slowest {slowest:.2f} s, "
        f"broken {broken}; pools shrunk after {shrunk_s:.1f} s; 40 texts in one request beside it: {bulk.status}"
    )
    assert broken == []
    assert {reply.status for reply in replies} <= {200, 429}, {
        reply.body[:200] for reply in replies if reply.status > 429
    }
    assert all("retry-after" in reply.headers for reply in replies if reply.status == 429)
    assert slowest < 5
    assert bulk.status == 200
    assert len(bulk.json()["data"]) == 40

    replies = burst(cluster.address, queries(15))
    assert outcome(replies) == {"accelerator": 5, "cpu": 4, 429: 6}

    new = cluster.add_node(2, NPU=1)
    started = time.monotonic()
    wait_for_replicas(cluster, accelerator=2, cpu=3)
    figure(f"a node added: all replicas again {time.monotonic() - started:.1f} s after `ray start`")
    assert placed(cluster)["AcceleratorEmbedder"] == addresses(cluster.near, new)
    assert placed(cluster)["CpuEmbedder"] == addresses(cluster.near, cluster.plain, new)


def test_calibration_finds_depths_for_all_replicas(cluster, tmp_path, figure):
    token, dashboard = cluster.token_and_dashboard()
    config = tmp_path / "serve.yaml"
    config.write_text(cluster.file.read_text())
    started = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-m", "calibration", "--dashboard", dashboard, "--config", str(config), "--apply",
            "--slo", str(CALIBRATED_SLO_S), "--out", str(tmp_path / "report"),
        ],
        cwd=ROOT, env={**os.environ, **token, "COLUMNS": "200"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pools = cluster.pools()
    found = {name: pool["queue_depth"] for name, pool in pools.items()}
    seconds = time.monotonic() - started
    figure(f"calibrated on the cluster at {CALIBRATED_SLO_S} s: {found} a replica, true {TRUE}, {seconds:.0f} s")
    written = yaml.safe_load(config.read_text())["applications"][0]["deployments"][0]["user_config"]
    assert {name: written[name]["queue_depth"] for name in found} == found
    for name, depth in found.items():
        assert 0.4 * TRUE[name] <= depth <= TRUE[name]
    places = {name: pool["queue_depth"] * pool["live_replicas"] for name, pool in pools.items()}
    assert places == {"accelerator": 2 * found["accelerator"], "cpu": 3 * found["cpu"]}
    assert cluster.get("/info")["max_concurrent_requests"] == sum(places.values())
    replies = burst(cluster.address, queries(sum(places.values()) + 5))
    assert outcome(replies) == {**places, 429: 5}
