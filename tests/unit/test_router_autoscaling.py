"""The CPUs of a cluster -> how many Routers; and which configs keep their own number."""

import pytest
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema

from deployments.serve_adapter.autoscaling import KeepUtilization
from serve_app.config.router_autoscaling import follow_load, router_autoscaling


@pytest.mark.parametrize(("cpus", "fewest", "most"), [(1, 1, 1), (3, 1, 1), (4, 2, 2), (16, 2, 8), (48, 2, 24)])
def test_from_two_routers_to_one_for_every_two_cpus(cpus, fewest, most):
    made = router_autoscaling(cpus)
    assert (made["min_replicas"], made["max_replicas"]) == (fewest, most)


def test_serve_takes_it():
    schema = DeploymentSchema(name="Router", num_replicas="auto", autoscaling_config=router_autoscaling(16))
    policy = AutoscalingConfig(**schema.model_dump(exclude_unset=True)["autoscaling_config"]).policy
    assert policy.get_policy().__name__ == KeepUtilization.__name__
    assert policy.policy_kwargs == {"target": 0.6}


@pytest.mark.parametrize("own", [{"num_replicas": 2}, {"autoscaling_config": {"min_replicas": 3, "max_replicas": 4}}])
def test_a_config_keeps_its_own_number(own):
    router = {"name": "Router", **own}
    follow_load([{"deployments": [router]}], 16)
    assert router == {"name": "Router", **own}


def test_a_config_without_one_follows_the_load():
    router, other = {"name": "Router"}, {"name": "Embedder"}
    follow_load([{"deployments": [other, router]}, {}], 16)
    assert router == {"name": "Router", "num_replicas": "auto", "autoscaling_config": router_autoscaling(16)}
    assert other == {"name": "Embedder"}
