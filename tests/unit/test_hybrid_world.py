"""The product's schedule with a host, over an accelerator and a host that are calculated layer by layer."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from deployments.generation.scheduling.host_side import Host
from deployments.generation.scheduling.hybrid_plan import ACCELERATOR, ASYNCHRONOUS, MODES, PIPELINED
from deployments.generation.scheduling.step_policy import StepPolicy
from deployments.generation.scheduling.step_schedule import StepSchedule
from deployments.generation.scheduling.step_time import HostTime, StepTime
from tests.kit.simulation.hybrid_device import HybridDevice
from tests.kit.simulation.step_world import Arrival, StepDevice, StepWorld

TIMES = StepTime(0.04, 1e-4, 2e-6, 1e-4, 1e-8, 64)
POLICY = StepPolicy(4.0, 0.5)


def device(host: HostTime, blocks: int, host_blocks: int, policy: StepPolicy = POLICY) -> StepDevice:
    schedule = StepSchedule(TIMES, policy, blocks, host=Host(host, host_blocks))
    return StepDevice("one", TIMES, schedule, noise=0.03, hybrid=HybridDevice(TIMES, host))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    out, at = [], 0.0
    for _ in range(draw(st.integers(1, 20))):
        at += draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 4.0]))
        prompt = draw(st.sampled_from([1, 10, 127, 128, 300, 900]))
        most = draw(st.sampled_from([1, 2, 10, 60]))
        tokens = draw(st.lists(st.integers(1, most), min_size=1, max_size=draw(st.sampled_from([1, 1, 3]))))
        out += [Arrival(at, prompt, most, tuple(tokens), draw(st.booleans()))] * draw(st.sampled_from([1, 3, 8]))
    return out


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(arrivals(), st.sampled_from([1e-6, 1e-5, 1e-4]), st.sampled_from([0, 8, 40]), st.sampled_from([1, 8]))
def test_whatever_is_admitted_gets_all_of_its_tokens(
    come: list[Arrival], kv_token_s: float, blocks: int, layers: int
) -> None:
    one = device(HostTime(1e-4, kv_token_s, 1e-5, layers), blocks, 60)
    sent = StepWorld([one], POLICY).run(come)
    assert all(each.counts == dict(enumerate(each.arrival.tokens)) for each in sent if each.device)
    assert not one.schedule.parked
    state = one.schedule.state(0.0)
    assert (state.rows, state.waiting) == (0, 0)
    assert one.schedule.host is not None
    assert one.schedule.room.reserved == one.schedule.host.room.reserved == 0


@pytest.mark.parametrize(
    ("modes", "bulk", "mode"),
    [
        (frozenset({ACCELERATOR}), False, ACCELERATOR),
        (MODES, False, PIPELINED),
        (frozenset({PIPELINED}), True, PIPELINED),
        (frozenset({ASYNCHRONOUS}), True, ASYNCHRONOUS),
    ],
)
def test_a_host_that_is_as_fast_helps(modes: frozenset[str], mode: str, *, bulk: bool) -> None:
    policy = StepPolicy(20.0, 1.0, bulk_share=1.0, modes=modes)
    one = device(HostTime(1e-4, 2e-6, 1e-5, 4), 40, 400, policy)
    world = StepWorld([one], policy)
    arrivals = iter(lambda: Arrival(0.0, 200, 50, (50,), bulk), None)
    modes_seen = [one.mode for _, _ in zip(world.saturated(arrivals), range(100), strict=False)]
    assert mode in modes_seen
    assert (one.came.compute_s.host_s > 0) == (mode != ACCELERATOR)
