"""First tokens and paces are kept for any arrivals: the product's schedule on devices in virtual time."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.comparisons.generation import CASES, Certain, served, told_of, with_maximum
from benchmarks.simulation.step_world import Arrival, StepDevice, StepWorld, mixed
from deployments.admission.fair_share import Tenant
from deployments.admission.starvation import SHARE
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepTime

ACCELERATOR = StepTime(0.03, 2.6e-4, 2.2e-7, 2.6e-4, 1e-8, 96)
CPU = StepTime(0.04, 8e-4, 4.4e-7, 8e-4, 3e-8, 32)
PURE_KV = StepTime(0.001, 0.0, 2e-6, 1e-4, 0.0, 0)
WEIGHTS = StepTime(0.045, 0.0, 0.0, 1e-5, 0.0, 8)
SECONDS = 30.0


@st.composite
def arrivals(draw):
    """Bursts and streams of any lengths, some with several answers, some bulk, some that continue others."""
    out, at = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        at += draw(st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.2, 1.0, 4.0]))
        prompt = draw(st.sampled_from([1, 10, 100, 128, 300, 1000, 4000]))
        most = draw(st.sampled_from([1, 2, 10, 100, 500]))
        tokens = draw(st.lists(st.integers(1, most), min_size=1, max_size=draw(st.sampled_from([1, 1, 4]))))
        same = draw(st.sampled_from([1, 1, 3, 10]))
        bulk, talk = draw(st.sampled_from([False, False, False, True])), draw(st.sampled_from([None, 1, 2]))
        out += [Arrival(at, prompt, most, tuple(tokens), bulk, talk=talk)] * same
    return out


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    arrivals(),
    st.sampled_from([ACCELERATOR, CPU, PURE_KV, WEIGHTS]),
    st.sampled_from(
        [
            StepPolicy(2.0, 0.1),
            StepPolicy(0.5, 0.06),
            StepPolicy(0.1, 0.05),
            StepPolicy(0.15, 0.04),
            StepPolicy(0.2, 0.05),
            StepPolicy(10.0, 0.3, max_num_batched_tokens=512),
        ]
    ),
    st.sampled_from([40, 200, 2000]),
)
def test_whatever_is_admitted_is_in_time_on_a_device_that_runs_as_predicted(come, model, policy, blocks):
    schedule = StepScheduler(model, policy, blocks)
    sent = StepWorld([StepDevice("one", model, schedule)], policy).run(come)
    admitted = [one for one in sent if one.device]
    assert not [one for one in admitted if not one.arrival.bulk and not one.in_time]
    assert all(one.counts == dict(enumerate(one.arrival.tokens)) for one in admitted)
    state = schedule.state(0.0)
    assert (state.free_blocks, state.rows, state.waiting) == (blocks, 0, 0)


def test_a_first_token_that_is_promised_within_three_steps_is_in_time():
    """Found by the property above: the first step was as long as it may be, and left too little time for the second."""
    policy = StepPolicy(0.1, 0.05)
    running = [Arrival(0.0, 1000, 2, (2,), bulk=True), Arrival(0.2, 100, 500, (297, 323, 143, 225))]
    schedule = StepScheduler(ACCELERATOR, policy, 200)
    sent = StepWorld([StepDevice("one", ACCELERATOR, schedule)], policy).run(
        [*running, *[Arrival(5.66, 100, 2, (2,))] * 2]
    )
    assert all(one.in_time for one in sent if one.device and not one.arrival.bulk)


def test_short_prompts_that_are_due_together_end_in_one_step():
    """Found likewise: with a margin, a step of them was too long, and so each had one of its own."""
    policy = StepPolicy(0.2, 0.05)
    come = [*[Arrival(0.0, 300, 1)] * 10, *[Arrival(0.01, 10, 2, (2,), bulk=True)] * 10, *[Arrival(0.01, 10, 1)] * 10]
    sent = StepWorld([StepDevice("one", ACCELERATOR, StepScheduler(ACCELERATOR, policy, 200))], policy).run(come)
    admitted = [one for one in sent if one.device and not one.arrival.bulk]
    assert len(admitted) > 4
    assert all(one.in_time for one in admitted)


def test_prompts_that_a_step_has_time_for_but_no_room_are_in_time():
    """On a quick device: what is computed at once has a bound that counts tokens."""
    policy = StepPolicy(2.0, 0.1)
    schedule = StepScheduler(WEIGHTS, policy, 2000)
    sent = StepWorld([StepDevice("one", WEIGHTS, schedule)], policy).run([Arrival(0.0, 4000, 1)] * 50)
    admitted = [one for one in sent if one.device]
    assert len(admitted) > 10
    assert all(one.in_time for one in admitted)


@pytest.mark.parametrize("bursts", [False, True], ids=["Poisson", "bursts"])
@pytest.mark.parametrize("rate", [4, 12])
def test_a_noisy_device_is_in_time_and_nearly_as_good_as_one_that_knows_all(rate, bursts):
    pools, come = CASES["accelerator"], mixed(rate, SECONDS, bursts=bursts)
    told = told_of(served(pools, come, noise=0.03), SECONDS)
    known = [one._replace(most_tokens=max(one.tokens)) for one in come]
    bound = told_of(served(pools, known, certain=True), SECONDS)
    assert told["late"] <= 0.005
    # Each deadline that cuts a step short makes one more; `forecast` counts one of these.
    assert bound["late"] <= (0.015 if bursts else 0.005)
    # Of a burst the bound knows which answers are short, and so serves more of those that come late in it.
    assert told["tokens"] >= (0.85 if bursts else 0.9) * bound["tokens"]


def test_a_device_that_becomes_slower_keeps_nearly_all_it_has_promised():
    come = mixed(8, SECONDS)
    told = told_of(served(CASES["accelerator"], come, noise=0.03, slow_from=10.0), SECONDS)
    assert told["late_pace"] == 0
    assert told["late"] <= 0.03


class Drawing:
    """A device whose steps draw each row's token in so many seconds that its schedule does not know of."""

    def __init__(self, row_s):
        self._row_s = row_s

    def seconds(self, load):
        return CPU.seconds(load) + self._row_s * load.rows


@pytest.mark.parametrize("learns", [True, False])
def test_draws_that_no_calibration_measured_make_nobody_late_because_replicas_learn_them(learns):
    """0.4 ms: `top_p` of 152,000 words on flat logits, on two cores."""
    policy, come = StepPolicy(2.0, 0.1), mixed(6, 20.0, bursts=True)
    schedule = StepScheduler(CPU, policy, 2000, *(() if learns else (Certain(), Certain())))
    told = told_of(StepWorld([StepDevice("one", Drawing(0.0004), schedule)], policy).run(come), 20.0)
    assert told["late"] == 0 if learns else told["late"] > 0.1


def share(sent):
    """That is admitted."""
    return sum(one.device is not None for one in sent) / len(sent)


def test_long_prompts_are_admitted_half_as_often_as_all_where_there_is_three_times_too_much():
    sent = served(CASES["accelerator"], mixed(14.4, 2 * SECONDS), noise=0.03)
    assert share([one for one in sent if one.arrival.prompt_tokens > 1000]) >= SHARE * share(sent)
    assert told_of(sent, SECONDS)["late"] <= 0.005


def test_a_quiet_tenant_is_served_beside_one_that_asks_for_ten_times_as_much():
    capacity, seconds = 4.8, 2 * SECONDS
    loud = [one._replace(tenant=Tenant("loud")) for one in mixed(20 / 11 * capacity, seconds, bursts=True, seed=10)]
    quiet = [one._replace(tenant=Tenant("quiet")) for one in mixed(2 / 11 * capacity, seconds, seed=11)]
    come = sorted([*loud, *quiet], key=lambda one: one.at)
    sent = served(CASES["accelerator"], come, noise=0.03)
    quiets = [one for one in sent if one.arrival.tenant.name == "quiet"]
    assert all(one.in_time for one in sent if one.device)
    assert share(quiets) >= 0.99
    unnamed = served(CASES["accelerator"], [one._replace(tenant=None) for one in come], noise=0.03)
    assert share(unnamed) < share(quiets)
    assert told_of(sent, seconds)["tokens"] >= 0.78 * told_of(unnamed, seconds)["tokens"]


def test_who_allows_long_answers_and_gets_short_ones_is_served_as_if_it_had_allowed_short_ones():
    told = {most: told_of(with_maximum(most, 90.0)[0], 90.0) for most in (256, 4096)}
    assert [one["late"] for one in told.values()] == [0.0, 0.0]
    assert told[4096]["tokens"] >= 0.9 * told[256]["tokens"]


@pytest.mark.parametrize(("most", "times", "late"), [(4096, 4.0, 0), (1024, 1e9, 15)])
def test_what_becomes_longer_than_learned_loses_its_blocks_and_ends(most, times, late):
    """The cache holds 33 answers of 1,024 tokens, and there are 50 when all become so long: the others wait."""
    sent, preempted = with_maximum(most, 90.0, times)
    admitted = [one for one in sent if one.device]
    assert all(one.counts == dict(enumerate(one.arrival.tokens)) for one in admitted)
    assert sum(not one.in_time for one in admitted) <= late
    assert preempted > 5 or not late


def test_bulk_takes_what_room_is_left():
    come = mixed(3, SECONDS)
    bulk = [Arrival(0.1 * number, 500, 100, (100,), bulk=True) for number in range(200)]
    alone = told_of(served(CASES["accelerator"], come, noise=0.03), SECONDS)
    sent = served(CASES["accelerator"], sorted([*come, *bulk]), noise=0.03)
    others = told_of([one for one in sent if not one.arrival.bulk], SECONDS)
    done = [one for one in sent if one.arrival.bulk and one.device]
    assert others["late"] <= 0.005
    assert others["goodput"] >= 0.9 * alone["goodput"]
    assert len(done) > 20
    assert all(one.counts == {0: 100} for one in done)
