"""A cluster of several nodes on this machine: who lands where, what stays on a node, and what a node's death does.

The head offers no CPU. `near` has an NPU and the Router, `far` an NPU, `plain` neither; the devices are emulated, and
Ray books them as it books real ones.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from steady_load import streaming

from calibration.load import burst
from tests.kit.ray_nodes import cluster_for
from tests.kit.service import TEXT, by_depth, emulating, outcome, queries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each node has a loopback address of its own")

DEVICES = {"accelerator": {"alpha_s": 0.02, "beta_s": 3.0}, "cpu": {"alpha_s": 0.05, "beta_s": 3.0}}
DEPTHS = {"accelerator": 5, "cpu": 2}


@pytest.fixture(scope="module")
def cluster():
    config = by_depth(emulating(20.0, **DEVICES), **DEPTHS)
    application = config["applications"][0]
    args, router = application["args"], application["deployments"][0]
    args["accelerator"] |= {"device": "npu", "replicas": 2}
    args["cpu"]["replicas"] = 3
    router["num_replicas"] = 1  # whose node and whose answers the tests are about
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
    cluster.wait_for(
        lambda pools: {name: pool["live_replicas"] for name, pool in pools.items()} == counts, what=f"{counts}"
    )


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
    for query in queries(3):
        assert outcome(burst(cluster.address, [query])) == {"accelerator": 1}
    alone = answered(cluster)
    replies = burst(cluster.address, queries(24))
    full = answered(cluster)
    more = {key: alone[key] - before[key] for key in before}
    figure(f"3 lone queries: {more}; a burst of 24: {dict(outcome(replies))}")
    assert more == {key: 3 if key == ("accelerator", cluster.near.address) else 0 for key in before}
    assert outcome(replies) == {"accelerator": 10, "cpu": 6, 429: 8}
    assert {key: full[key] - alone[key] for key in alone} == {key: DEPTHS[key[0]] for key in alone}


def test_a_nodes_death_loses_no_request_and_another_node_takes_its_place(cluster, figure):
    """Six queries a second, of the seven or so that the devices take, and one request with 40 texts."""
    texts = {"input": [f"{TEXT}{number}" for number in range(40)]}
    with ThreadPoolExecutor(1) as beside, streaming(cluster.address, 6) as stream:
        bulk = beside.submit(cluster.ask, "/v1/embeddings", texts)
        time.sleep(3)
        killed, began = cluster.far.kill(), time.monotonic()
        wait_for_replicas(cluster, accelerator=1, cpu=2)
        shrunk_s = time.monotonic() - began
        time.sleep(4)
    figure(f"a node of {killed} processes killed: {stream}; the pools shrank after {shrunk_s:.1f} s")
    assert stream.of("small") <= {200, 429}, stream.refusals
    assert not stream.strange
    assert bulk.result().status == 200
    assert len(bulk.result().json()["data"]) == 40
    cluster.wait_until_idle()
    assert outcome(burst(cluster.address, queries(15))) == {"accelerator": 5, "cpu": 4, 429: 6}
    new = cluster.add_node(2, NPU=1)
    began = time.monotonic()
    wait_for_replicas(cluster, accelerator=2, cpu=3)
    figure(f"a node added: all replicas again {time.monotonic() - began:.1f} s after `ray start`")
    assert placed(cluster)["AcceleratorEmbedder"] == addresses(cluster.near, new)
    assert placed(cluster)["CpuEmbedder"] == addresses(cluster.near, cluster.plain, new)
