"""How full the queues are -> how many replicas; and what the settings make of it for Serve."""

from types import SimpleNamespace

import pytest
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.serve_adapter.autoscaling import UTILIZATION, KeepUtilization
from serve_app.config.cluster_plan import plan_models
from serve_app.config.models import Args
from serve_app.config.serve_deployments import how_many

GPU_NODE = {"Alive": True, "NodeID": "b", "Resources": {"CPU": 48, "GPU": 2}}


def context(fills, replicas, target=None):
    return SimpleNamespace(
        current_num_replicas=replicas,
        target_num_replicas=target or replicas,
        aggregated_metrics=None if fills is None else {UTILIZATION: dict(enumerate(fills))},
    )


@pytest.mark.parametrize(
    ("fills", "replicas", "wanted"),
    [
        ([0.7, 0.7], 2, 2),
        ([1.0, 1.0], 2, 2.857),  # full: as many more as bring it back to the target
        ([0.35, 0.35], 2, 1),
        ([0.0], 1, 0),  # Serve keeps its minimum
        ([0.7], 2, 2),  # the second has not told yet
        ([0.2, 1.2], 2, 2),
    ],
)
def test_as_many_as_hold_the_queries_at_the_target(fills, replicas, wanted):
    assert KeepUtilization(0.7)(context(fills, replicas))[0] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("fills", [None, []])
def test_without_a_word_from_the_replicas_nothing_changes(fills):
    assert KeepUtilization(0.7)(context(fills, 1, target=3))[0] == 3


SCALED = {"min": 1, "max": 8, "target_utilization": 0.5, "upscale_delay_s": 0.0, "downscale_delay_s": 60.0}


def settings(**accelerator):
    return Args({"model": {"id": "x"}, "accelerator": accelerator})


def test_serve_is_told_the_policy_with_its_bounds_and_delays():
    args = settings(replicas=SCALED)
    told, topology = args.models["x"], plan_models(args, [GPU_NODE])["x"].topology
    assert topology.replicas[ACCELERATOR] == 1
    config = how_many(told, ACCELERATOR, topology)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas) == (1, 8)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 60)
    assert how_many(told, CPU, topology) == {"num_replicas": 1}


def test_serve_applies_it():
    """Serve's own wrapper around what its controller makes of our module: bounds aside, delays and rounding."""
    policy = AutoscalingPolicy(
        policy_function="deployments.serve_adapter.autoscaling:KeepUtilization", policy_kwargs={"target": 0.5}
    )
    config = AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=0, policy=policy)
    made = policy.get_policy()
    decide = _apply_autoscaling_config(made(**policy.policy_kwargs) if isinstance(made, type) else made)
    full = context([1.0, 1.0], 2)
    full.config, full.policy_state, full.total_num_requests = config, {}, 0
    assert decide(full)[0] == 4


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        ({"min": 3, "max": 2}, "args.accelerator.replicas: max (2) is less than min (3)"),
        ({"min": 1, "max": 2, "target": 0.5}, "args.accelerator.replicas.target: there is no such setting"),
        ({"min": 1}, "args.accelerator.replicas.max: missing"),
        ({"min": 1, "max": 2, "target_utilization": 1.5}, "args.accelerator.replicas.target_utilization: should be"),
        ("many", "args.accelerator.replicas: should be"),
        (0, "args.accelerator.replicas: should be"),
    ],
)
def test_bad_bounds_are_refused_by_name(replicas, sentence):
    with pytest.raises(SettingsError) as caught:
        settings(replicas=replicas)
    assert str(caught.value).startswith(sentence)


def test_the_fewest_must_be_there():
    with pytest.raises(SettingsError, match=r"args.accelerator.replicas: the config asks for 3, but there are 2"):
        plan_models(settings(replicas={"min": 3, "max": 4}), [GPU_NODE])
