"""Settings and a cluster's nodes -> device and pools."""

import pytest

from deployments.errors import SettingsError
from serve_app.config.cluster_plan import (
    accelerator_options,
    cpu_options,
    cpu_parts,
    plan_models,
    plan_once_nodes_are_there,
    router_count,
)
from serve_app.config.models import Args
from serve_app.config.serve_deployments import bind_pools

NPU_NODE = {"Alive": True, "NodeID": "a", "Resources": {"CPU": 128, "NPU": 8}}
GPU_NODE = {"Alive": True, "NodeID": "b", "Resources": {"CPU": 48, "GPU": 2}}
CPU_NODE = {"Alive": True, "NodeID": "c", "Resources": {"CPU": 16}}
HEAD = {"Alive": True, "NodeID": "d", "Resources": {"memory": 1}}  # KubeRay: num-cpus 0
EMULATED = {"engine": "emulated", "emulated": {"alpha_s": 0.1, "beta_s": 0.2}}


def emulated(device, **more):
    return {"accelerator": {"device": device, **EMULATED, **more}, "cpu": EMULATED}


def shared(replicas_per_device, **more):
    return {"accelerator": {"replicas_per_device": replicas_per_device, **more}}


def plan(nodes, **args):
    return plan_models(Args({"model": {"id": "x"}, **args}), nodes)["x"]


@pytest.mark.parametrize(
    ("nodes", "args", "device", "replicas"),
    [
        ([HEAD, NPU_NODE, NPU_NODE], {}, "npu:0", {"accelerator": 16, "cpu": 2}),
        ([GPU_NODE], {}, "cuda:0", {"accelerator": 2, "cpu": 1}),
        ([GPU_NODE], {"cpu_overflow": False}, "cuda:0", {"accelerator": 2}),
        ([GPU_NODE], {"accelerator": {"replicas": 1}}, "cuda:0", {"accelerator": 1, "cpu": 1}),
        ([NPU_NODE, GPU_NODE], {}, "npu:0", {"accelerator": 8, "cpu": 2}),
        ([NPU_NODE, GPU_NODE], {"accelerator": {"device": "cuda"}}, "cuda:0", {"accelerator": 2, "cpu": 2}),
        ([GPU_NODE], {"accelerator": {"device": "none"}}, "none", {"cpu": 1}),
        ([CPU_NODE, CPU_NODE], {}, "none", {"cpu": 2}),
        ([CPU_NODE], {"cpu_overflow": False}, "none", {"cpu": 1}),
        ([CPU_NODE], {"accelerator": {"device": "cpu"}}, "cpu", {"accelerator": 1, "cpu": 1}),
        ([CPU_NODE], {"accelerator": EMULATED, "cpu": EMULATED}, "emulated", {"accelerator": 1, "cpu": 1}),
        ([HEAD, NPU_NODE], emulated("npu"), "npu:0", {"accelerator": 8, "cpu": 1}),
        ([GPU_NODE, CPU_NODE], emulated("cuda", replicas=1), "cuda:0", {"accelerator": 1, "cpu": 2}),
        ([NPU_NODE], emulated("auto"), "emulated", {"accelerator": 1, "cpu": 1}),
        ([NPU_NODE], emulated("cpu"), "emulated", {"accelerator": 1, "cpu": 1}),
        ([GPU_NODE, CPU_NODE], {"cpu": {"replicas": 1}}, "cuda:0", {"accelerator": 2, "cpu": 1}),
        ([GPU_NODE], shared(3), "cuda:0", {"accelerator": 6, "cpu": 1}),
        ([NPU_NODE], shared(2, replicas=15), "npu:0", {"accelerator": 15, "cpu": 1}),
    ],
)
def test_topology_follows_the_cluster_and_the_settings(nodes, args, device, replicas):
    found, topology = plan(nodes, **args)
    assert found == device
    assert dict(topology.replicas) == replicas


def several(*entries):
    return {"models": [{"model": {"id": f"m{index}"}, **entry} for index, entry in enumerate(entries)]}


ONE, CUDA, NONE, NPU = (
    *({"accelerator": {"replicas": 1}}, {"accelerator": {"device": "cuda"}}),
    *({"accelerator": {"device": "none"}}, {"accelerator": {"device": "npu"}}),
)
TWO_CPU = {"cpu": {"replicas": 2}}


@pytest.mark.parametrize(
    ("node", "args", "sentence"),
    [
        (CPU_NODE, NPU, "args.accelerator.device: the config asks for npu, but no node"),
        (GPU_NODE, NPU, "args.accelerator.device: the config asks for npu, but no node"),
        (CPU_NODE, emulated("npu"), "args.accelerator.device: the config asks for npu, but no node"),
        (NPU_NODE, emulated("npu", replicas=9), "args.accelerator.replicas: the config asks for 9, but there are 8"),
        (GPU_NODE, {"accelerator": {"replicas": 3}}, "args.accelerator.replicas: the config asks for 3, but there are"),
        (CPU_NODE, shared(2), "args.accelerator.replicas_per_device: no node has an accelerator"),
        (GPU_NODE, emulated("auto", replicas_per_device=2), "args.accelerator.replicas_per_device: an emulated device"),
        (GPU_NODE, shared(2, replicas=5), "args.accelerator.replicas: the config asks for 5, but there are 2 cuda dev"),
        (CPU_NODE, TWO_CPU, "args.cpu.replicas: the config asks for 2, but 1 machines hold 1"),
        (HEAD, {}, "args.accelerator.device: neither an accelerator nor a CPU instance is available"),
        (GPU_NODE, several(ONE, ONE, ONE), "args.models[2].accelerator.replicas: the config asks for 1, but there are"),
        (GPU_NODE, several({}, {}, CUDA), "args.models[2].accelerator.device: the config asks for cuda, but the"),
        (GPU_NODE, several({}, TWO_CPU), "args.models[1].cpu.replicas: the config asks for 2, but 1 machines hold 1"),
        (GPU_NODE, several({}, NPU), "args.models[1].accelerator.device: the config asks for npu, but no node"),
    ],
)
def test_what_the_cluster_lacks_is_said_by_its_key(node, args, sentence):
    with pytest.raises(SettingsError) as caught:
        plan_models(Args(args if "models" in args else {"model": {"id": "x"}, **args}), [node])
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(("cpus", "routers"), [((2,), 1), ((3.5,), 1), ((4,), 2), ((0, 2, 2), 2), ((128, 128), 2)])
def test_two_routers_where_there_are_cores_for_them(cpus, routers):
    assert router_count([{"Resources": {"CPU": cpu} if cpu else {}} for cpu in cpus]) == routers


class Cluster:
    """Another node joins each second."""

    def __init__(self, *nodes):
        self.nodes, self.now = nodes, 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def all_nodes(self):
        return list(self.nodes[: 1 + int(self.now)])


def plan_in(cluster, wait_s, **args):
    read = Args({"model": {"id": "x"}, "wait_for_nodes_s": wait_s, **args})
    nodes, plans = plan_once_nodes_are_there(read, cluster.all_nodes, cluster)
    return nodes, *plans["x"]


TWO_NODES = {"accelerator": {"device": "cuda", "replicas": 4}, "cpu": {"replicas": 2}}


def test_the_start_waits_for_the_nodes_that_are_asked_for():
    """A dead one does not count."""
    cluster = Cluster(HEAD, GPU_NODE, {**GPU_NODE, "Alive": False}, GPU_NODE, GPU_NODE)
    nodes, device, topology = plan_in(cluster, 60, **TWO_NODES)
    assert (nodes, device, cluster.now) == ([HEAD, GPU_NODE, GPU_NODE], "cuda:0", 3)
    assert dict(topology.replicas) == {"accelerator": 4, "cpu": 2}


@pytest.mark.parametrize(("wait_s", "found"), [(0, 0), (10, 2)])
def test_and_not_for_ever(wait_s, found):
    cluster = Cluster(HEAD, GPU_NODE)
    reason = f"the config asks for 4, but there are {found}" if found else "the config asks for cuda, but no node"
    with pytest.raises(SettingsError, match=reason):
        plan_in(cluster, wait_s, **TWO_NODES)
    assert cluster.now == wait_s


@pytest.mark.parametrize(
    ("device", "booked"),
    [("npu:0", {"resources": {"NPU": 1}}), ("cuda:0", {"num_gpus": 1}), ("cpu", {}), ("emulated", {})],
)
def test_a_replica_books_its_device(device, booked):
    assert accelerator_options(device) == {"ray_actor_options": {"num_cpus": 0.1, **booked}}


@pytest.mark.parametrize(("device", "resource"), [("npu:0", "NPU"), ("cuda:0", "GPU")])
@pytest.mark.parametrize(("each", "part"), [(1, 1), (2, 0.5), (3, 0.3333), (6, 0.1666)])
def test_replicas_that_share_a_device_book_a_part_of_it(device, resource, each, part):
    """Ray rounds to ten-thousandths: six times 0.1667 would be more than one device."""
    args = Args({"model": {"id": "x"}, **shared(each)})
    node = {**CPU_NODE, "Resources": {"CPU": 16, resource: 1}}
    plans = plan_models(args, [node])
    names, parts = args.deployments()["x"], cpu_parts(args.models, plans)
    _, bound = bind_pools(args.models["x"], plans["x"], [node], parts, names, replica=object)["accelerator"]
    booked = {"num_gpus": part} if resource == "GPU" else {"resources": {"NPU": part}}
    options = bound._bound_deployment.ray_actor_options
    assert plans["x"].device == device
    assert {key: options[key] for key in booked} == booked
    assert bound._bound_deployment.num_replicas == each


def test_the_overflow_may_stay_while_the_accelerator_changes_its_model():
    """Serve's own 20 s would end it before a larger model has started."""
    args = Args({"model": {"id": "x"}, "cpu_overflow": True})
    plans = plan_models(args, [GPU_NODE])
    names = args.deployments()["x"]
    bound = bind_pools(args.models["x"], plans["x"], [GPU_NODE], cpu_parts(args.models, plans), names, replica=object)
    configs = {pool: application._bound_deployment._deployment_config for pool, (_, application) in bound.items()}
    assert {pool: config.graceful_shutdown_timeout_s for pool, config in configs.items()} == {
        "accelerator": 20.0,
        "cpu": 620.0,
    }
    # An idle one frees its device at once: by Serve's own setting it would wait two seconds first.
    assert {config.graceful_shutdown_wait_loop_s for config in configs.values()} == {0.1}


# --- several models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "entries", "found"),
    [
        (GPU_NODE, [{}, {}], [("cuda:0", 1), ("cuda:0", 1)]),
        (NPU_NODE, [{}, {}, {}], [("npu:0", 3), ("npu:0", 3), ("npu:0", 2)]),
        (GPU_NODE, [{}, {}, {}], [("cuda:0", 1), ("cuda:0", 1), ("none", 0)]),
        (GPU_NODE, [{}, ONE], [("cuda:0", 1), ("cuda:0", 1)]),
        (NPU_NODE, [{}, ONE, NONE], [("npu:0", 7), ("npu:0", 1), ("none", 0)]),
        (CPU_NODE, [{}, {}], [("none", 0), ("none", 0)]),
        (CPU_NODE, [{"accelerator": {"device": "cpu"}}, {}], [("cpu", 1), ("none", 0)]),
        (GPU_NODE, [{}, shared(2)], [("cuda:0", 1), ("cuda:0", 2)]),
        (NPU_NODE, [{}, shared(2, replicas=3)], [("npu:0", 6), ("npu:0", 3)]),
    ],
)
def test_devices_are_divided_among_models(node, entries, found):
    plans = plan_models(Args(several(*entries)), [node]).values()
    assert [(plan.device, plan.topology.replicas.get("accelerator", 0)) for plan in plans] == found
    assert all(plan.topology.replicas["cpu"] == 1 for plan in plans)


@pytest.mark.parametrize(
    ("cpus", "shares", "booked"),
    [
        (2, [1.0], [1]),
        (1, [1.0], [0.5]),
        (128, [1.0], [96]),
        (2, [1.0, 1.0], [0.5, 0.5]),
        (2, [1.0, 1.0, 1.0], [0.5, 0.5, 0.5]),
        (2, [1.0] * 5, [0.3] * 5),
        (16, [2.0, 1.0], [8, 4]),
    ],
)
def test_what_all_models_book_together_fits_beside_the_framework(cpus, shares, booked):
    args = Args(several(*({"cpu": {"share": share}} for share in shares)))
    nodes = [{"Alive": True, "NodeID": "a", "Resources": {"CPU": cpus}}]
    parts = cpu_parts(args.models, plan_models(args, nodes))
    found = [
        cpu_options(settings, nodes, parts[name].share / sum(shares))["ray_actor_options"]["num_cpus"]
        for name, settings in args.models.items()
    ]
    assert found == booked
    assert sum(found) <= cpus - 0.2


def test_deployments_are_named_after_their_models():
    pools = {"accelerator": "AcceleratorEmbedder", "cpu": "CpuEmbedder"}
    assert Args({"model": {"id": "BAAI/bge"}}).deployments() == {"BAAI/bge": pools}
    args = Args({"models": [{"model": {"id": name}} for name in ("BAAI/bge", "m 1", "BAAI bge")]})
    names = ["CpuEmbedder-BAAI-bge", "CpuEmbedder-m-1", "CpuEmbedder-BAAI-bge-2"]
    assert [found["cpu"] for found in args.deployments().values()] == names
