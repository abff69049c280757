"""In virtual time, over a device that goes layer by layer: what a host beside the accelerator takes part in is in time,
and there is more of it.
"""

import random

import pytest

from benchmarks.simulation.hybrid_device import HybridDevice
from benchmarks.simulation.step_world import StepDevice, StepWorld, mixed
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepTime

POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.2)
SECONDS = 120


def sent_to(name, num_cpu_blocks, rate, *, bursts, bulk, blocks=None):
    """A stream of mixed prompts and answers, of which a share is bulk."""
    device = EMULATED_ACCELERATORS[name]
    host = HostCache(device.host_time, num_cpu_blocks) if num_cpu_blocks else None
    schedule = StepScheduler(device.step_time, POLICY, blocks or device.blocks, host=host)
    hybrid = HybridDevice(device.step_time, device.host_time)
    draw = random.Random(4)
    arrivals = [one._replace(bulk=draw.random() < bulk) for one in mixed(rate, SECONDS, bursts=bursts, seed=5)]
    world = StepWorld([StepDevice("accelerator", device.step_time, schedule, noise=0.02, hybrid=hybrid)], POLICY)
    return world.run(arrivals), schedule


def in_time(sent):
    """Tokens of paced answers that were in time."""
    return sum(sum(one.counts.values()) for one in sent if one.in_time and not one.arrival.bulk)


@pytest.mark.parametrize(("bursts", "bulk"), [(False, 0.5), (True, 0.0)])
def test_what_is_admitted_beside_a_host_is_in_time_and_there_is_more_of_it(bursts, bulk):
    """An accelerator of little memory, by APEX's first machine: 31 blocks beside the weights."""
    alone, _ = sent_to("apex-t4-llama-2-7b", 0, 1.5, bursts=bursts, bulk=bulk)
    beside, schedule = sent_to("apex-t4-llama-2-7b", 600, 1.5, bursts=bursts, bulk=bulk)
    paced = [one for one in beside if one.device and not one.arrival.bulk]
    late = sum(one.late_first or one.late_pace for one in paced)
    assert len(paced) > 40
    assert late <= max(1, 0.005 * len(paced))
    assert in_time(beside) > 1.15 * in_time(alone)
    assert schedule.host.gained > 0
    assert all(one.last_at for one in beside if one.device)  # all that was admitted has ended


@pytest.mark.parametrize("bursts", [False, True])
def test_prompts_that_are_due_do_not_wait_in_steps_that_are_short_for_rows_of_the_host(bursts):
    """A small cache, and three times as many requests as are admitted."""
    step_time, host_time = StepTime(0.03, 2e-4, 1e-6, 2e-4, 1e-8, 32), HostTime(1e-4, 1e-6, 1e-6, 32)
    policy = StepPolicy(ttft_s=2.0, tpot_s=0.1)
    schedule = StepScheduler(step_time, policy, 48, host=HostCache(host_time, 512))
    hybrid = HybridDevice(step_time, host_time)
    world = StepWorld([StepDevice("accelerator", step_time, schedule, noise=0.02, hybrid=hybrid)], policy)
    admitted = [one for one in world.run(mixed(16, 60, bursts=bursts, seed=5)) if one.device]
    assert len(admitted) > 200
    assert schedule.host.tokens > 5000
    assert sum(one.late_first or one.late_pace for one in admitted) <= 0.005 * len(admitted)


def test_first_tokens_are_in_time_where_all_prompts_go_to_the_host():
    """Each chunk of a prompt copies all keys and values before it to the accelerator."""
    sent, schedule = sent_to("apex-t4-llama-2-7b", 600, 1.5, bursts=True, bulk=0.1, blocks=1)
    paced = [one for one in sent if one.device and not one.arrival.bulk]
    assert len(paced) > 40
    assert not any(one.late_first or one.late_pace for one in paced)
    assert schedule.learning.slowdown < 1.1  # copies are in the plan: no step takes longer


def test_where_the_cache_is_large_enough_a_host_changes_nothing():
    alone, _ = sent_to("l4-llama-3.1-8b", 0, 1.0, bursts=True, bulk=0.0)
    beside, schedule = sent_to("l4-llama-3.1-8b", 600, 1.0, bursts=True, bulk=0.0)
    assert in_time(beside) == in_time(alone)
    assert schedule.host.tokens == 0
