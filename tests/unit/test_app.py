"""Settings and a cluster's nodes -> device and pools."""

from __future__ import annotations

import pytest

from deployments.errors import SettingsError
from deployments.settings import Settings
from serve_app.app import _accelerator_options, plan_application, plan_when_there

NPU_NODE = {"Alive": True, "NodeID": "a", "Resources": {"CPU": 128, "NPU": 8}}
GPU_NODE = {"Alive": True, "NodeID": "b", "Resources": {"CPU": 48, "GPU": 2}}
CPU_NODE = {"Alive": True, "NodeID": "c", "Resources": {"CPU": 16}}
HEAD = {"Alive": True, "NodeID": "d", "Resources": {"memory": 1}}  # KubeRay: num-cpus 0
EMULATED = {"engine": "emulated", "emulated": {"alpha_s": 0.1, "beta_s": 0.2}}


def emulated(device, **more):
    return {"accelerator": {"device": device, **EMULATED, **more}, "cpu": EMULATED}


def plan(nodes, **args):
    return plan_application(Settings.parse({"model": {"id": "x"}, **args}), nodes)


@pytest.mark.parametrize(
    ("nodes", "args", "device", "replicas"),
    [
        ([HEAD, NPU_NODE, NPU_NODE], {}, "npu:0", {"accelerator": 16, "cpu": 2}),
        ([GPU_NODE], {}, "cuda:0", {"accelerator": 2, "cpu": 1}),
        ([GPU_NODE], {"heterogeneous": False}, "cuda:0", {"accelerator": 2}),
        ([GPU_NODE], {"accelerator": {"replicas": 1}}, "cuda:0", {"accelerator": 1, "cpu": 1}),
        ([NPU_NODE, GPU_NODE], {}, "npu:0", {"accelerator": 8, "cpu": 2}),
        ([NPU_NODE, GPU_NODE], {"accelerator": {"device": "cuda"}}, "cuda:0", {"accelerator": 2, "cpu": 2}),
        ([GPU_NODE], {"accelerator": {"device": "none"}}, "none", {"cpu": 1}),
        ([CPU_NODE, CPU_NODE], {}, "none", {"cpu": 2}),
        ([CPU_NODE], {"heterogeneous": False}, "none", {"cpu": 1}),
        ([CPU_NODE], {"accelerator": {"device": "cpu"}}, "cpu", {"accelerator": 1, "cpu": 1}),
        ([CPU_NODE], {"accelerator": EMULATED, "cpu": EMULATED}, "emulated", {"accelerator": 1, "cpu": 1}),
        ([HEAD, NPU_NODE], emulated("npu"), "npu:0", {"accelerator": 8, "cpu": 1}),
        ([GPU_NODE, CPU_NODE], emulated("cuda", replicas=1), "cuda:0", {"accelerator": 1, "cpu": 2}),
        ([NPU_NODE], emulated("auto"), "emulated", {"accelerator": 1, "cpu": 1}),
        ([NPU_NODE], emulated("cpu"), "emulated", {"accelerator": 1, "cpu": 1}),
        ([GPU_NODE, CPU_NODE], {"cpu": {"replicas": 1}}, "cuda:0", {"accelerator": 2, "cpu": 1}),
    ],
)
def test_topology_follows_the_cluster_and_the_settings(nodes, args, device, replicas):
    found, topology = plan(nodes, **args)
    assert found == device
    assert dict(topology.replicas) == replicas


@pytest.mark.parametrize(
    ("nodes", "args", "sentence"),
    [
        ([CPU_NODE], {"accelerator": {"device": "npu"}}, "args.accelerator.device: npu was asked for, but no node"),
        ([GPU_NODE], {"accelerator": {"device": "npu"}}, "args.accelerator.device: npu was asked for, but no node"),
        ([CPU_NODE], emulated("npu"), "args.accelerator.device: npu was asked for, but no node"),
        ([NPU_NODE], emulated("npu", replicas=9), "args.accelerator.replicas: 9 were asked for, but the cluster has 8"),
        ([GPU_NODE], {"accelerator": {"replicas": 3}}, "args.accelerator.replicas: 3 were asked for, but the cluster"),
        ([CPU_NODE], {"cpu": {"replicas": 2}}, "args.cpu.replicas: 2 were asked for, but 1 machines take 1"),
        ([HEAD], {}, "args.accelerator.device: neither an accelerator nor a CPU instance is available"),
    ],
)
def test_what_the_cluster_lacks_is_refused(nodes, args, sentence):
    with pytest.raises(SettingsError) as caught:
        plan(nodes, **args)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("device", "booked"),
    [("npu:0", {"resources": {"NPU": 1}}), ("cuda:0", {"num_gpus": 1}), ("cpu", {}), ("emulated", {})],
)
def test_a_replica_books_its_device(device, booked):
    assert _accelerator_options(device) == {"ray_actor_options": {"num_cpus": 0.1, **booked}}


def watch(args, changes):
    """What is planned where the cluster changes as `changes` says, {second: nodes}; and after how many seconds."""
    seconds = 0

    def look():
        return changes[max(second for second in changes if second <= seconds)]

    def sleep(duration):
        nonlocal seconds
        seconds += duration

    _, (_, topology) = plan_when_there(Settings.parse({"model": {"id": "x"}, **args}), look, sleep)
    return dict(topology.replicas), seconds


@pytest.mark.parametrize(
    ("args", "changes", "replicas", "after_s"),
    [
        ({}, {0: [CPU_NODE]}, {"cpu": 1}, 0),
        ({}, {0: [HEAD, NPU_NODE], 1: [HEAD, NPU_NODE, NPU_NODE]}, {"accelerator": 8, "cpu": 1}, 0),
        ({}, {0: [HEAD], 20: [HEAD, CPU_NODE], 24: [HEAD, CPU_NODE, NPU_NODE]}, {"accelerator": 8, "cpu": 2}, 29),
        (
            {"accelerator": {"replicas": 16}},
            {0: [HEAD, NPU_NODE], 60: [HEAD, NPU_NODE, NPU_NODE]},
            {"accelerator": 16, "cpu": 2},
            65,
        ),
    ],
)
def test_workers_that_come_after_the_head_are_waited_for(args, changes, replicas, after_s):
    assert watch(args, changes) == (replicas, after_s)


def test_what_never_comes_is_refused_after_five_minutes_and_at_once_where_the_head_is_a_worker_too():
    for nodes, after_s in [([HEAD], 300), ([HEAD, CPU_NODE], 300), ([CPU_NODE], 0)]:
        slept = []
        settings = Settings.parse({"model": {"id": "x"}, "accelerator": {"device": "npu"}})
        with pytest.raises(SettingsError, match="npu was asked for, but no node of the cluster has"):
            plan_when_there(settings, lambda nodes=nodes: nodes, slept.append)
        assert sum(slept) == after_s
