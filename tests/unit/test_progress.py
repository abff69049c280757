"""What is said of an application that does not come up."""

import pytest

from serve_app.config.models import Args
from serve_app.local.progress import Reporter, deployment_models, lacking, waits


@pytest.mark.parametrize(
    ("asked", "there", "free", "words"),
    [
        ({"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 0.8}, "1 CPU: the cluster has 2, 1.2 are taken; set cpu.num_cpus"),
        ({"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 0.9}, "1 CPU: the cluster has 1, 0.1 is taken; set cpu.num_cpus"),
        ({"CPU": 1.0}, {"CPU": 2.0}, {}, "1 CPU: the cluster has 2, 2 are taken; set cpu.num_cpus"),  # Ray leaves out 0
        ({"CPU": 0.1, "GPU": 1}, {"CPU": 8, "GPU": 1}, {"CPU": 7}, "1 GPU: the cluster has 1, 1 is taken; set acc"),
        ({"CPU": 96.0}, {"CPU": 64.0}, {"CPU": 64.0}, "96 CPU: the cluster has 64, 0 is taken; set cpu.num_cpus"),
        ({"NPU": 1}, {"CPU": 8}, {"CPU": 8}, "1 NPU: the cluster has 0, 0 is taken"),
        ({"CPU": 0.8}, {"CPU": 2.0}, {"CPU": 0.7999999999}, None),
        ({}, {}, {}, None),
    ],
)
def test_what_is_lacking(asked, there, free, words):
    found = lacking(asked, there, free)
    assert found == words if words is None else found.startswith(words)


def deployment(cpus, *replicas):
    found = [{"state": state, **({"pid": pid} if pid != "unset" else {})} for state, pid in replicas]
    return {"required_resources": {"CPU": cpus}, "replicas": found}


def application(status="DEPLOYING", **deployments):
    return {"status": status, "deployments": {name: deployment(*about) for name, about in deployments.items()}}


ARGS = {"one": Args({"model": {"id": "m1"}}), "two": Args({"models": [{"model": {"id": "m2"}}]})}


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ({"one": application("RUNNING", CpuEmbedder=(1, ("RUNNING", 7)))}, []),
        ({"one": application()}, ["the application one is loading: Ray imports it and checks the nodes"]),
        (
            {"one": application(CpuEmbedder=(1, ("STARTING", None)), Router=(0.1, ("RUNNING", 7)))},
            ["CpuEmbedder of m1 waits for 1 CPU: the cluster has 2, 1.2 are taken; set cpu.num_cpus"],
        ),
        (
            {"one": application(CpuEmbedder=(0.5, ("STARTING", "unset")))},
            ["CpuEmbedder of m1 waits for Ray to start its process"],
        ),
        (
            {
                "one": application(CpuEmbedder=(1, ("STARTING", 8)), Router=(0.1, ("STARTING", 9))),
                "two": application(**{"CpuEmbedder-m2": (0.5, ("RUNNING", 3), ("STARTING", None))}),
            },
            [
                "CpuEmbedder of m1 starts: it loads the model and warms up",
                "Router starts",
                "CpuEmbedder-m2 of m2 waits for Ray to start its process",
            ],
        ),
    ],
)
def test_each_deployment_that_has_not_started(found, lines):
    assert list(waits(found, deployment_models(ARGS), {"CPU": 2.0}, {"CPU": 0.8})) == lines


def test_it_is_said_after_ten_seconds_and_every_thirty():
    said = []
    reporter = Reporter(said.append, lambda: ["a CPU"], now=100.0)
    for second in range(100, 185):
        reporter.tick(second + 0.5)
    assert said == [f"waiting for {seconds} s: a CPU" for seconds in (10, 40, 70)]
