"""A replica that generates, without Ray: the product's StepLoop and StepScheduler, an emulated device, virtual time."""

import asyncio
import dataclasses
import itertools
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from benchmarks.simulation.virtual_time import virtual
from deployments.errors import EngineFailed, Unavailable
from deployments.generation.engine.emulated_steps import following, followings
from deployments.generation.engine.steps import Computed
from deployments.generation.frames import GenerationOffer, GenerationOffers
from deployments.generation.offered import OfferedGeneration
from deployments.generation.planned_steps import PlannedStep
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.learning import Learning
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.step_loop import StepLoop
from deployments.generation.text.model_card import GenerationCard
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Sampling
from deployments.models.model_files import ModelCard
from tests.kit.generation_replicas import VOCABULARY, Device, answer_to

MODEL = StepTime(0.02, 0.0005, 1e-6, 0.0005, 1e-8, 4)
QUICK = HostTime(row_s=1e-4, kv_token_s=1e-6, copy_token_s=1e-6, layers=3)
SLOW = HostTime(row_s=0.03, kv_token_s=1e-6, copy_token_s=1e-6, layers=3)  # a row's attention hides behind no step
SETTINGS = {"router": "r", "ttft_s": 2.0, "tpot_s": 0.1, "bulk_share": 0.5, "model": None, "host": None}
BLOCKS = 64


class Router:
    """One connection: keeps what it is told."""

    def __init__(self, stepper, name="r"):
        self.stepper, self.numbers = stepper, itertools.count(1)
        self.unsent, self.hung_up = 0, False
        self.frames, self.tokens, self.finished, self.failed, self.refused, self.admitted = [], {}, {}, {}, {}, set()
        self.broken, self.suspect = [], []
        self.tell(settings={**SETTINGS, "router": name})

    def tell(self, **what):
        self.stepper.receive(self, GenerationOffers.decode(b"".join(GenerationOffers(**what).encode())))

    def ask(self, ids, most_tokens=8, left_s=2.0, **more):
        number = next(self.numbers)
        more = {"sampling": Sampling(0.0), "tpot_s": 0.1, **more}
        self.tell(offers=[GenerationOffer(number, left_s, np.array(ids, np.int32), most_tokens, **more)])
        return number

    def send(self, report):
        self.frames.append(report)
        self.admitted.update(report.admitted)
        self.refused |= {one.number: one for one in report.refused}
        self.failed |= dict(report.failed)
        self.broken += report.broken
        self.suspect += report.suspect
        for token in report.tokens:
            number, answer, picked, finish = astuple(token)
            assert (number, answer) not in self.finished
            self.tokens.setdefault((number, answer), []).append(picked.id)
            if finish:
                self.finished[number, answer] = finish

    def hang_up(self):
        self.hung_up = True


def world(host=None, blocks=BLOCKS, model=MODEL, **more):
    device = Device(model, blocks, host)
    schedule = StepScheduler(model, StepPolicy(2.0, 0.1), blocks, host=host)
    loop = asyncio.get_running_loop()
    return StepLoop(schedule, device.compute, clock=loop.time, **more), device


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def nothing_is_reserved(stepper):
    state = stepper.state()
    host = state.host
    free = host is None or (host.free_blocks, host.rows, host.parked) == (host.blocks, 0, 0)
    return free and (stepper.in_flight, state.free_blocks, state.rows, state.waiting) == (0, BLOCKS, 0, 0)


async def answers_again(stepper, router):
    """Nothing is left of what failed: a new prompt is answered, and then nothing is reserved."""
    number = router.ask(prompt(10, 9), 5)
    await stepper.drained()
    assert router.tokens[number, 0] == answer_to(prompt(10, 9), 5)
    assert nothing_is_reserved(stepper)


async def test_tokens_come_with_as_many_alternatives_as_are_asked_for():
    stepper, _ = world()
    router = Router(stepper)
    router.ask(prompt(10), answers=3, sampling=Sampling(1.0, seed=7), logprobs=2)
    await stepper.drained()
    for picked in [token.picked for frame in router.frames for token in frame.tokens]:
        assert len(picked.alternatives) == 2
        assert picked.alternatives[0] == (picked.id, picked.logprob)


async def test_a_step_is_composed_while_the_one_before_runs_and_begins_as_that_ends():
    stepper, device = world()
    router = Router(stepper)
    began, composed, step, compute = [], [], device.steps.step, stepper._compute
    device.steps.step = lambda work: began.append(device.time()) or step(work)
    stepper._compute = lambda *step: composed.append(stepper.now()) or compute(*step)
    number = router.ask(prompt(10, 1), 40)
    await stepper.drained()
    assert all(0.0005 < at - when < 0.005 for at, when in zip(began[1:], composed[1:], strict=True))
    assert stepper.schedule.steps == 40  # no step too many: its length was known
    assert router.tokens[number, 0] == answer_to(prompt(10, 1), 40)


async def test_an_answer_that_has_ended_is_left_out_of_the_step_that_was_composed_meanwhile():
    stepper, device = world()
    router = Router(stepper)
    computed, step = [], device.steps.step
    device.steps.step = lambda work: computed.append(len(work.chunks)) or step(work)
    whole = answer_to(prompt(10, 1), 30)
    sooner = router.ask(prompt(10, 1), 30, end_tokens=(whole[5],))
    longer = router.ask(prompt(10, 2), 30)
    await stepper.drained()
    assert router.tokens[sooner, 0] == whole[:6]
    assert router.tokens[longer, 0] == answer_to(prompt(10, 2), 30)
    assert sum(len(work.work.chunks) for work in device.works) == 6 + 30 + 1
    assert sum(computed) == 6 + 30
    last = router.ask(prompt(10, 1), 30, end_tokens=(whole[5],))
    before = len(computed)
    await stepper.drained()
    assert router.tokens[last, 0] == whole[:6]
    assert len(computed) == before + 6  # nothing was left of the seventh
    assert stepper.schedule.learning.slowdown == pytest.approx(1.0, rel=0.01)
    assert nothing_is_reserved(stepper)


@pytest.mark.parametrize("how", ["raises", "gives no numbers"])
async def test_of_what_a_step_failed_for_nothing_is_in_the_step_that_was_composed_meanwhile(how):
    stepper, device = world()
    router = Router(stepper)
    computed, step = [], device.steps.step

    def broken(work):
        found = step(work)
        computed.append([chunk.start for chunk in work.chunks])
        if len(computed) > 1:
            return found
        if how == "raises":
            raise RuntimeError("out of memory")
        return Computed(found.logits * np.nan)

    device.steps.step = broken
    lost = router.ask(prompt(10, 1), 30, answers=2)
    other = router.ask(prompt(10, 3), 5)
    await asyncio.sleep(0.022)
    assert (len(computed), len(device.works), len(device.works[1].work.chunks)) == (1, 2, 3)
    await stepper.drained()
    assert set(router.failed) == {lost}
    assert router.tokens[other, 0] == answer_to(prompt(10, 3), 5)
    assert computed == [[0], [0], [0], [10], [11], [12], [13]]  # the third: of nobody's
    assert nothing_is_reserved(stepper)


async def test_tokens_of_one_step_come_in_one_frame_of_each_router():
    stepper, device = world()
    routers = [Router(stepper, name) for name in "ab"]
    for router in routers:
        for seed in range(4):
            router.ask(prompt(10, seed), most_tokens=10)
    await stepper.drained()
    for router in routers:
        with_tokens = [frame for frame in router.frames if frame.tokens]
        assert len(with_tokens) <= len(device.works)
        assert max(len(frame.tokens) for frame in with_tokens) == 4


async def test_a_client_that_goes_frees_its_place_within_a_step():
    stepper, device = world()
    router = Router(stepper)
    kept, gone = router.ask(prompt(10, 1), 40), router.ask(prompt(200, 2), 40)
    await asyncio.sleep(0.3)
    assert len(device.works[-1].work.chunks) == 2
    before = len(device.works)
    router.tell(called_off=[gone])
    assert stepper.in_flight == 1
    await asyncio.sleep(0)
    assert router.frames[-1].state.rows == 1
    await asyncio.sleep(0.1)
    assert all(len(work.work.chunks) == 1 for work in device.works[before:])
    assert stepper.state().free_blocks == BLOCKS - 1
    had = len(router.tokens[gone, 0])
    await stepper.drained()
    assert len(router.tokens[gone, 0]) == had
    assert router.tokens[kept, 0] == answer_to(prompt(10, 1), 40)
    assert nothing_is_reserved(stepper)


@pytest.mark.parametrize("where", ["told", "picked", "counted", "accounted", "composed"])
async def test_an_error_beside_the_step_ends_what_was_admitted_with_a_sentence_each(monkeypatch, where):
    stepper, device = world(on_failure=lambda error: f"it failed: {error}")
    router, other = Router(stepper, "a"), Router(stepper, "b")
    lost = [router.ask(prompt(10, seed), most_tokens=30) for seed in range(3)]
    others = other.ask(prompt(10, 7), most_tokens=30)
    await asyncio.sleep(0.2)
    broken = Mock(side_effect=LookupError("a bug"))
    of, name, instead = {
        "told": (stepper, "_on_step", broken),
        "picked": (OfferedGeneration, "take", broken),
        "counted": (device.steps, "step", lambda work: Computed(np.zeros((1, VOCABULARY), np.float32))),
        "accounted": (StepScheduler, "ended", broken),
        "composed": (StepScheduler, "next_step", broken),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(of, name, instead)
        await stepper.drained()
    assert set(router.failed) == set(lost)
    assert set(other.failed) == {others}
    assert all(where == "counted" or one == "it failed: a bug" for one in router.failed.values())
    assert sum(len(frame.failed) for frame in [*router.frames, *other.frames]) == 4
    assert not router.finished
    assert nothing_is_reserved(stepper)
    assert stepper.running_s == 0
    await answers_again(stepper, router)


async def test_numbers_that_are_none_end_their_generation_alone():
    stepper, device = world()
    router = Router(stepper)
    good, bad = router.ask(prompt(10, 1), 5), router.ask(prompt(30, 2), 5)
    step, factors = device.steps.step, np.array([[1], [np.nan]], np.float32)  # the first step is of one alone
    device.steps.step = lambda work: Computed(step(work).logits * factors[: len(work.chunks)])
    await stepper.drained()
    assert router.failed == {bad: "the engine gave no finite numbers for this prompt"}
    assert len(router.tokens[good, 0]) == 5
    assert nothing_is_reserved(stepper)


# --- steps that fail --------------------------------------------------------------------------------------------------

BAD = VOCABULARY - 1  # a token


async def test_an_engine_that_fails_whatever_it_is_given_has_prompts_answered_elsewhere():
    stepper, device = world()
    router, other = Router(stepper, "a"), Router(stepper, "b")
    runs = router.ask(prompt(10, 1), 30)
    await asyncio.sleep(0.1)
    device.broken = RuntimeError("no kernel")
    lost, others = router.ask(prompt(10, 2)), other.ask(prompt(10, 3))
    await stepper.drained()
    assert (set(router.failed), set(other.failed)) == ({runs, lost}, {others})
    assert (router.broken, other.broken) == ([lost], [others])  # tokens of the first have come: it is over
    assert stepper.problem == "no kernel"
    device.broken = None
    await answers_again(stepper, router)
    assert stepper.problem is None


async def test_a_bad_prompt_by_itself_is_told_its_own_error():
    stepper, device = world()
    device.bad = BAD
    router = Router(stepper)
    bad = router.ask([BAD] * 10)
    await stepper.drained()
    assert (router.failed, router.broken, router.suspect) == ({bad: "a bad prompt"}, [], [])
    assert [chunk.ids.size for work in device.works for chunk in work.work.chunks if chunk.start == 0] == [10, 4]
    assert stepper.problem is None
    assert nothing_is_reserved(stepper)


async def test_prompts_beside_a_bad_one_may_be_answered_elsewhere_and_those_behind_it_are_answered():
    stepper, device = world()
    device.bad = BAD
    router = Router(stepper)
    first = router.ask([token % BAD for token in prompt(300, 1)], 6)
    beside, bad = router.ask(prompt(10, 2)), router.ask([BAD] * 10)
    async with asyncio.timeout(1):
        while not stepper._failed:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
    behind = router.ask([token % BAD for token in prompt(10, 3)], 6)
    await stepper.drained()
    assert set(router.failed) == {first, beside, bad}
    assert (router.broken, router.suspect) == ([], [beside, bad])  # tokens of the first have come
    assert (behind, 0) in router.finished
    assert stepper.problem is None
    assert nothing_is_reserved(stepper)


async def test_a_prompt_that_was_not_in_the_step_that_failed_is_not_blamed():
    stepper, device = world()
    device.bad = BAD
    router = Router(stepper)
    begun = router.ask([token % BAD for token in prompt(500, 1)], left_s=6.0)
    await asyncio.sleep(0.001)
    bad = router.ask([BAD] * 500, left_s=0.9)  # it is due first, and fills a step
    await stepper.drained()
    assert [len(work.work.chunks) for work in device.works[:2]] == [1, 1]
    assert (set(router.failed), router.suspect, router.broken) == ({begun, bad}, [begun], [])


async def test_a_step_that_fails_while_no_block_is_free_ends_nothing_else():
    stepper, device = world(blocks=2)
    device.bad = BAD
    router = Router(stepper)
    bad = router.ask([BAD] * 100)
    await asyncio.sleep(0.001)
    router.tell(called_off=[bad])
    others = [router.ask([token % BAD for token in prompt(100, seed)], 5) for seed in (1, 2)]
    await stepper.drained()
    assert [router.tokens.get((one, 0)) for one in others] == [
        answer_to([token % BAD for token in prompt(100, seed)], 5) for seed in (1, 2)
    ]
    assert router.failed == {}


async def test_a_step_without_numbers_is_no_sign_that_the_engine_is_well():
    stepper, device = world()
    router = Router(stepper)
    step, device.steps.step = device.steps.step, lambda work: Computed(step(work).logits * np.nan)
    device.problem = RuntimeError("no kernel")
    for seed in (1, 2):
        router.ask(prompt(10, seed))
        await stepper.drained()
        assert stepper.problem == "the engine gave no finite numbers"


@pytest.mark.parametrize("how", ["raises", "gives no numbers"])
async def test_a_probe_says_whether_the_model_runs(how):
    stepper, device = world(on_failure=lambda error: f"it failed: {error}")
    await stepper.probe()
    assert stepper.running_s == 0
    if how == "raises":
        device.broken = RuntimeError("no kernel")
    else:
        step, device.steps.step = device.steps.step, lambda work: Computed(step(work).logits * np.nan)
    with pytest.raises(EngineFailed, match="it failed: no kernel" if how == "raises" else "no finite numbers"):
        await stepper.probe()


async def test_a_probe_disturbs_no_answer():
    stepper, _ = world()
    router = Router(stepper)
    number = router.ask(prompt(300, 1), 20)
    for _ in range(10):
        await asyncio.sleep(0.02)
        await stepper.probe()
    await stepper.drained()
    assert router.tokens[number, 0] == answer_to(prompt(300, 1), 20)


async def test_prompts_of_a_step_that_failed_do_not_wait_for_an_engine_that_hangs():
    stepper, device = world()
    router = Router(stepper)
    device.problem = RuntimeError("out of memory")
    lost = router.ask(prompt(10, 1))
    await asyncio.sleep(0.001)
    device.slow = 1000.0
    await asyncio.sleep(5.0)
    assert stepper.running_s > 4.9
    assert not router.failed
    await asyncio.sleep(0.1)
    assert (router.failed, router.broken) == ({lost: "out of memory"}, [lost])
    assert "within 5 s" in stepper.problem
    device.slow = 1.0
    await asyncio.sleep(30.0)
    assert stepper.problem is None  # it was slow
    await answers_again(stepper, router)


async def test_an_answer_that_is_stopped_while_tokens_of_nobodys_run_ends_with_the_next_step():
    stepper, device = world()
    router = Router(stepper)
    device.problem = RuntimeError("out of memory")
    router.ask(prompt(10, 1))
    kept = router.ask(prompt(10, 3), 40, answers=2)
    async with asyncio.timeout(1):
        while not router.tokens.get((kept, 0)):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
    assert [step.tell is not None for step in stepper._steps] == [True]
    router.tell(stopped=[(kept, 0)])
    await asyncio.sleep(0.1)
    assert stepper.state().rows == 1
    await stepper.drained()
    assert router.tokens[kept, 1] == answer_to(prompt(10, 3), 40)
    assert nothing_is_reserved(stepper)


async def test_what_is_offered_while_tokens_of_nobodys_run_comes_behind_them():
    stepper, _ = world()
    router, left_s = Router(stepper), 0.03
    first = router.ask(prompt(10, 1), 1, left_s)
    await stepper.drained()
    probe = asyncio.get_running_loop().create_task(stepper.probe())
    await asyncio.sleep(0)
    second = router.ask(prompt(10, 2), 1, left_s)
    await probe
    assert first in router.admitted
    assert not router.refused[second].never


async def test_what_nobody_could_have_in_time_is_refused_for_good_with_the_longest_prompt():
    stepper, _ = world()
    router = Router(stepper)
    number = router.ask(prompt(5000), most_tokens=2)
    await asyncio.sleep(0.1)
    refused = router.refused[number]
    assert refused.never
    assert 1000 < refused.longest < 5000
    later = router.ask(prompt(refused.longest), most_tokens=2)
    await stepper.drained()
    assert router.finished[later, 0] == "length"


async def test_more_than_there_is_room_for_is_refused_and_room_is_told():
    stepper, _ = world()
    router, other = Router(stepper, "a"), Router(stepper, "b")
    numbers = [router.ask(prompt(500, seed), most_tokens=100) for seed in range(40)]
    waits = other.ask(prompt(500, 99), most_tokens=100)
    await asyncio.sleep(0.05)
    refused = [number for number in numbers if number in router.refused]
    assert refused
    assert len(router.admitted) + len(refused) == len(numbers)
    assert not router.refused[refused[0]].never
    assert waits in other.refused
    assert other.frames[-1].state.opens_s > 0
    router.tell(called_off=sorted(router.admitted))
    await asyncio.sleep(0)
    assert other.frames[-1].state.opens_s == 0
    assert nothing_is_reserved(stepper)


@pytest.fixture
def one_offer_a_turn(monkeypatch):
    """Of the event loop."""
    monkeypatch.setattr("deployments.generation.step_loop._READS_S", 0.0)


def many(first, count):
    """Offers of so many, the first with this number."""
    sampling = Sampling(0.0)
    return [GenerationOffer(first + at, 2.0, np.array([at], np.int32), 4, sampling, tpot_s=0.1) for at in range(count)]


@pytest.mark.usefixtures("one_offer_a_turn")
async def test_while_hundreds_of_offers_are_looked_at_steps_run_and_routers_are_told(monkeypatch):
    stepper, device = world()
    router, other = Router(stepper, "a"), Router(stepper, "b")
    await asyncio.sleep(0)
    offered, offer = [], stepper.schedule.offer
    monkeypatch.setattr(type(stepper.schedule), "offer", lambda _, *what: offered.append(what[1]) or offer(*what))
    router.tell(offers=many(1, 40))
    router.tell(called_off=[3, 30], asks=True)
    late, lost = other.ask([1]), Router(stepper, "c")
    lost.tell(offers=many(1, 5))
    for _ in range(10):
        await asyncio.sleep(0)
    assert device.works
    assert 1 < len(offered) < 30
    assert 1 in router.admitted
    assert late not in other.admitted  # behind those that came before
    seen = [report.seen for report in router.frames]
    assert seen[-1] == 1  # the settings: all further ones wait
    stepper.gone(lost)
    await stepper.drained()
    assert len(offered) == 40 - 2 + 1  # two were called off before; the lost Router's are never looked at
    assert router.admitted == set(range(1, 41)) - {3, 30}
    assert late in other.admitted
    assert not lost.admitted
    assert router.frames[-1].seen == 3
    assert list(router.finished.values()) == ["length"] * 38
    assert nothing_is_reserved(stepper)


@pytest.mark.usefixtures("one_offer_a_turn")
async def test_what_nobody_wants_any_more_does_not_wait_behind_hundreds_of_offers():
    stepper, _ = world()
    router, other = Router(stepper, "a"), Router(stepper, "b")
    gone, kept = router.ask(prompt(10, 1), 40), router.ask(prompt(10, 2), 40, answers=2)
    await asyncio.sleep(0.3)
    other.tell(offers=many(1, 20))
    router.tell(called_off=[gone], stopped=[(kept, 0)])
    assert stepper._inbox
    had = {answer: len(tokens) for answer, tokens in router.tokens.items()}
    assert set(router.stepper._sessions[router].admitted) == {kept}
    await stepper.drained()
    assert {answer: len(tokens) for answer, tokens in router.tokens.items()} == {**had, (kept, 1): 40}
    assert len(other.finished) == 20
    assert nothing_is_reserved(stepper)


@pytest.mark.usefixtures("one_offer_a_turn")
async def test_who_waited_until_it_was_too_late_is_told_to_come_back_after_as_long(monkeypatch):
    stepper, _ = world()
    router = Router(stepper)
    offer, took = stepper.schedule.offer, []

    def slow(_, now, generation):
        took.append(0.1)
        return offer(now, generation)

    monkeypatch.setattr(type(stepper.schedule), "offer", slow)
    monkeypatch.setattr(stepper, "now", lambda: asyncio.get_running_loop().time() + sum(took))
    router.tell(offers=many(1, 40))
    for _ in range(50):
        await asyncio.sleep(0)
    late = [router.refused[number] for number in range(22, 41)]
    assert router.admitted
    assert not any(one.never for one in late)
    assert all(one.opens_s >= 2.0 for one in late)


async def test_a_frame_that_cannot_be_read_ends_its_connection_alone(monkeypatch):
    stepper, _ = world()
    router, other = Router(stepper, "a"), Router(stepper, "b")
    ours = other.ask([1, 2])
    monkeypatch.setattr(stepper, "_configure", lambda *_: 1 / 0)
    router.tell(offers=many(1, 3), settings=SETTINGS)
    await stepper.drained()
    assert (router.hung_up, other.hung_up) == (True, False)
    assert (ours, 0) in other.finished
    assert nothing_is_reserved(stepper)


@pytest.mark.parametrize("how", ["gone", "again", "unread"])
async def test_a_router_that_is_lost_takes_its_generations_along(how):
    stepper, _ = world()
    router, other = Router(stepper, "a"), Router(stepper, "b")
    router.ask(prompt(10, 1), most_tokens=60)
    number = other.ask(prompt(10, 2), most_tokens=20)
    await asyncio.sleep(0.2)
    if how == "gone":
        stepper.gone(router)
    elif how == "again":
        Router(stepper, "a")
    else:
        router.unsent = 2**30
        await asyncio.sleep(0.1)
    assert stepper.in_flight == 1
    assert router.hung_up == (how != "gone")
    await stepper.drained()
    assert other.tokens[number, 0] == answer_to(prompt(10, 2), 20)
    assert nothing_is_reserved(stepper)


@pytest.mark.parametrize("how", ["gone", "failed"])
async def test_answers_that_a_router_or_a_step_broke_off_are_no_proof_that_answers_are_short(how):
    stepper, device = world()
    router = Router(stepper)
    for seed in range(8):
        router.ask(prompt(10, seed), most_tokens=250)
    await asyncio.sleep(0.5)
    assert stepper.state().rows == 8
    if how == "gone":
        stepper.gone(router)
    else:
        device.problem = RuntimeError("out of memory")
    await stepper.drained()
    assert stepper.schedule.room.lengths.mean(500) == 500
    assert nothing_is_reserved(stepper)


async def test_what_steps_were_to_take_is_told_without_what_was_learned_since():
    told = []
    stepper, _ = world(on_step=lambda *step: told.append(step))
    stepper.schedule.learning.slowdown = 1.5
    Router(stepper).ask(prompt(40), most_tokens=1)
    await stepper.drained()
    ((rows, tokens, _, planned_s),) = told
    assert (rows, tokens) == (1, 40)
    assert planned_s == pytest.approx(MODEL.seconds(StepLoad().with_chunk(0, 40)))


async def test_settings_put_a_model_in_force_until_they_withdraw_it():
    stepper, _ = world(HostCache(QUICK, 64))
    router, schedule = Router(stepper), stepper.schedule
    schedule.learning.slowdown = 4.0
    router.tell(settings={**SETTINGS, "ttft_s": 1.5})  # says nothing of the model
    assert (schedule.policy.ttft_s, schedule.learning.slowdown) == (1.5, 4.0)
    other, host = StepTime(0.08, 0.002, 4e-6, 0.002, 4e-8, 4), HostTime(0.5, 1e-6, 0.0, 3)
    router.tell(settings={**SETTINGS, "model": [*dataclasses.astuple(other)], "host": [0.5, 1e-6, 0.0, 3]})
    assert (schedule.model, schedule.host.time) == (other, host)
    assert schedule.learning == schedule.scatter == Learning(calibrated=True)
    router.tell(settings=SETTINGS)
    assert (schedule.model, schedule.host.time) == (MODEL, QUICK)
    assert schedule.learning == Learning()


@pytest.mark.parametrize("more", [{}, {"of": "a later version"}])
async def test_a_router_of_a_neighbouring_version_sends_more_or_fewer_settings(more):
    stepper, _ = world(HostCache(QUICK, 64))
    router, schedule = Router(stepper), stepper.schedule
    later = [7.0] if more else []
    router.tell(settings={"router": "r", "ttft_s": 1.5, "model": [0.1, 0.0, 0.0, 0.0, 0.0, 4, *later], **more})
    assert (schedule.policy.ttft_s, schedule.policy.tpot_s) == (1.5, SETTINGS["tpot_s"])
    assert (schedule.model, schedule.host.time) == (StepTime(0.1, 0.0, 0.0, 0.0, 0.0, 4), QUICK)
    router.tell(settings={**SETTINGS, "host": [0.5, 1e-6, 0.0, 3, *later], **more})
    assert schedule.host.time == HostTime(0.5, 1e-6, 0.0, 3)


# --- planned steps ----------------------------------------------------------------------------------------------------

CARD = GenerationCard(
    ModelCard("m", None, None, "qwen2", 8, VOCABULARY, 4096, "last", False, False, False, 1, 1),
    (),
    Sampling(),
    None,
    {},
)
PLANNED = [PlannedStep(4, 256), PlannedStep(0, 0, [(512, 300)]), PlannedStep(40, 100, [(0, 128), (0, 9)])]


def works(*planned):
    return [one.work(BLOCKS, CARD) for one in planned]


def told(schedule):
    """All that it has learned."""
    learned = (schedule.learning, schedule.scatter, schedule.room.lengths)
    return (*map(repr, learned), schedule.steps, repr(schedule.state(1000.0)))


async def test_planned_steps_are_timed_once_what_runs_has_ended_and_nothing_is_admitted_or_learned():
    device_s = []
    stepper, _ = world(on_step=lambda *step: device_s.append(step))
    router = Router(stepper)
    loop = asyncio.get_running_loop()
    runs = router.ask(prompt(10, 1), most_tokens=20)
    await asyncio.sleep(0.1)
    timing = loop.create_task(stepper.planned.time([*works(*PLANNED), None], 3))
    await asyncio.sleep(0.01)
    assert router.frames[-1].state.opens_s > 5  # others are asked first
    early = router.ask(prompt(10, 2))
    await asyncio.sleep(0)
    assert (router.refused[early].never, router.refused[early].why) == (False, "a calibration is measuring this device")
    assert 5 < router.refused[early].opens_s <= 15
    while stepper.in_flight:  # noqa: ASYNC110 - planned steps follow, without a pause
        await asyncio.sleep(0.001)
    assert router.tokens[runs, 0] == answer_to(prompt(10, 1), 20)
    before, steps = told(stepper.schedule), len(device_s)
    late = router.ask(prompt(10, 3))
    found = await timing
    assert late in router.refused
    assert 0 < router.refused[late].opens_s <= 5
    for took, planned in zip(found[:-1], PLANNED, strict=True):
        assert [one.seconds for one in took] == pytest.approx([MODEL.seconds(planned.load)] * 3)
        assert [one.host_s for one in took] == [0.0] * 3
    assert found[-1] is None
    await asyncio.sleep(0)
    assert (router.frames[-1].state.opens_s, len(device_s)) == (0, steps)
    assert nothing_is_reserved(stepper)
    assert told(stepper.schedule) == before
    asked = [(router.ask(prompt(length, length), most_tokens=12), length) for length in (9, 128, 400)]
    await stepper.drained()
    for number, length in asked:
        assert router.tokens[number, 0] == answer_to(prompt(length, length), 12)


@pytest.mark.parametrize(("answers", "bulk", "most"), [(1, False, 503), (2, False, 247), (1, True, 247)])
async def test_an_answer_without_a_maximum_is_shortened_to_what_can_be_promised(answers, bulk, most):
    """4 blocks of 128 tokens, of which bulk may take half, hold the prompt's 10 tokens and the answers, but not
    their last tokens.
    """
    stepper, _ = world(blocks=4)
    router, asked = Router(stepper), {"answers": answers, "bulk": bulk, "tpot_s": None if bulk else 0.1}
    above = router.ask(prompt(10), most + 1, **asked)
    await asyncio.sleep(0)
    assert router.refused[above].never
    number = router.ask(prompt(10), 10**6, may_shorten=True, **asked)
    await stepper.drained()
    assert [len(router.tokens[number, answer]) for answer in range(answers)] == [most] * answers
    assert set(router.finished.values()) == {"length"}
    assert stepper.in_flight == 0
    few = router.ask(prompt(10), 5, may_shorten=True, **asked)
    await stepper.drained()
    assert len(router.tokens[few, 0]) == 5


async def test_a_promised_pace_shortens_an_answer_without_a_maximum_too():
    stepper, device = world()
    device.steps.model = dataclasses.replace(MODEL, kv_token_s=2e-4)
    router = Router(stepper)
    router.tell(settings={**SETTINGS, "model": [*dataclasses.astuple(device.steps.model)]})
    number = router.ask(prompt(10), 5000, may_shorten=True)
    await stepper.drained()
    most = len(router.tokens[number, 0])
    assert 500 < most < 1000
    above = router.ask(prompt(10), 2 * most)
    await asyncio.sleep(0)
    assert router.refused[above].never


async def test_planned_steps_end_after_some_seconds_and_the_rest_is_left_out():
    stepper, device = world()
    device.steps.model = StepTime(1.5, 0, 0, 0, 0)
    assert await stepper.planned.time(works(*PLANNED), 3) == [[(pytest.approx(1.5), 0.0)] * 3]
    device.steps.model = StepTime(40, 0, 0, 0, 0)
    assert await stepper.planned.time(works(*PLANNED), 3) == [[(pytest.approx(40), 0.0)]]
    Router(stepper).ask(prompt(5))
    assert stepper.in_flight == 1


async def test_planned_steps_wait_for_what_runs_no_longer_than_they_say():
    stepper, _ = world()
    router = Router(stepper)
    number = router.ask(prompt(10, 1), most_tokens=1000)
    with pytest.raises(Unavailable, match=r"did not end within 10 s"):
        await stepper.planned.time(works(*PLANNED), 1)
    assert router.ask(prompt(10, 2)) not in router.refused
    assert stepper.in_flight == 2
    await stepper.drained()
    assert router.tokens[number, 0] == answer_to(prompt(10, 1), 1000)


@pytest.mark.parametrize("after_s", [0.01, 0.5])
async def test_when_nobody_waits_for_planned_steps_any_more_the_replica_goes_on(after_s):
    stepper, device = world()
    router = Router(stepper)
    router.ask(prompt(10, 1), most_tokens=10)
    timing = asyncio.get_running_loop().create_task(stepper.planned.time(works(*PLANNED), 20))
    await asyncio.sleep(after_s)
    with pytest.raises(Unavailable, match="another calibration"):
        await stepper.planned.time(works(*PLANNED), 1)
    timing.cancel()
    await asyncio.sleep(0)
    number = router.ask(prompt(10, 2))
    assert stepper.in_flight == 1 + (after_s < 0.1)
    await stepper.drained()
    assert router.tokens[number, 0] == answer_to(prompt(10, 2), 8)
    ran = len(device.works)
    await asyncio.sleep(10)
    assert len(device.works) == ran


async def test_a_planned_step_that_fails_is_told_to_who_planned_it():
    stepper, device = world(on_failure=lambda error: f"it failed: {error}")
    device.problem = RuntimeError("out of memory")
    with pytest.raises(EngineFailed, match="it failed: out of memory"):
        await stepper.planned.time(works(*PLANNED), 1)
    router = Router(stepper)
    number = router.ask(prompt(10, 2))
    await stepper.drained()
    assert router.tokens[number, 0] == answer_to(prompt(10, 2), 8)


def test_what_does_not_fit_a_replica():
    bounds = 10, 300, 1000  # blocks, tokens of a step, context
    assert PlannedStep(5, 255).fits(*bounds)
    assert not PlannedStep(5, 256).fits(*bounds)
    assert PlannedStep(5, 511).fits(*bounds, block_size=256) > PlannedStep(5, 512).fits(*bounds, block_size=256)
    assert PlannedStep(0, 0, [(0, 256), (500, 44)]).fits(*bounds)
    assert not PlannedStep(1, 0, [(0, 256), (500, 44)]).fits(*bounds)
    assert not PlannedStep(0, 0, [(901, 100)]).fits(*bounds)
    assert not PlannedStep(1, 1000).fits(*bounds)
    assert PlannedStep(1, 999).fits(*bounds)


# --- with a host ------------------------------------------------------------------------------------------------------


async def crowded(stepper, tokens=20, bulk=30, others=8):
    """More than the accelerator's cache holds, and what was admitted of it: {number: (its prompt, tokens)}."""
    router, asked = Router(stepper), {}
    for seed in range(bulk + others):
        ids, most = prompt(300 + 10 * (seed % 7), seed), tokens + 5 * (seed % 9)
        more = {"bulk": True, "tpot_s": None} if seed < bulk else {}
        asked[router.ask(ids, most, **more)] = ids, most
        await asyncio.sleep(0.02)
    return router, {number: one for number, one in asked.items() if number in router.admitted}


def are_right(router, asked):
    return all(router.tokens[number, 0] == answer_to(*one) for number, one in asked.items())


@pytest.mark.parametrize(("time", "mode"), [(QUICK, "pipelined"), (SLOW, "asynchronous")])
async def test_answers_of_the_host_are_right_in_each_mode(time, mode):
    stepper, _ = world(HostCache(time, 64))
    router, asked = await crowded(stepper)
    await stepper.drained()
    assert are_right(router, asked)
    host = stepper.state().host
    assert stepper.schedule.host.steps[mode] > 5
    assert host.tokens > 10
    assert host.moved[0] > 0
    assert host.gained > 0
    assert nothing_is_reserved(stepper)


@pytest.mark.parametrize("how", ["called off", "stopped", "gone", "failed"])
async def test_who_goes_while_an_answer_is_on_its_way_disturbs_no_other(how):
    stepper, device = world(HostCache(SLOW, 64), on_failure=lambda error: f"it failed: {error}")
    router, asked = await crowded(stepper)
    parked = stepper.schedule.host.parked
    async with asyncio.timeout(60):
        while len(parked) < 3:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
    waits = list(parked.items())[:: 1 if how == "failed" else 2]
    numbers, left = {number for number, _ in waits}, {row.generation.offer.number for _, row in waits}
    if how == "called off":
        router.tell(called_off=list(left))
    elif how == "stopped":
        router.tell(stopped=[(number, 0) for number in left])
    elif how == "gone":
        stepper.gone(router)
        left = asked.keys()
    else:
        device.problem = RuntimeError("out of memory")
    await stepper.drained()
    Router(stepper, "another").ask(prompt(10))
    await stepper.drained()
    assert numbers <= {number for work in device.works for number in work.work.called_off}
    assert set(router.failed.values()) == ({"it failed: out of memory"} if how == "failed" else set())
    assert left <= router.failed.keys() or how != "failed"
    assert are_right(router, {number: asked[number] for number in asked.keys() - left - router.failed.keys()})
    assert nothing_is_reserved(stepper)


def tokens_of(work):
    return sum(len(chunk.ids) for chunk in [*work.chunks, *work.second, *(chunk for _, chunk in work.parking)])


@pytest.mark.parametrize("bulk", [0, 2])
@virtual
async def test_answers_that_lose_their_blocks_go_on_as_if_nothing_had_happened(bulk):
    """All become longer than was learned: eight blocks are too few for the four of each. The last ones wait."""
    stepper, device = world(blocks=8)
    room, router = stepper.schedule.room, Router(stepper)
    for _ in range(500):
        room.lengths.ended(2, 500)
        room.bulk_lengths.ended(2, 500)
    asked = {}
    for number in range(4):
        ids, is_bulk = prompt(100, number), number < bulk
        asked[router.ask(ids, 300, bulk=is_bulk, tpot_s=None if is_bulk else 0.1)] = answer_to(ids, 300)
    await stepper.drained()
    assert router.admitted == asked.keys()
    assert {number: router.tokens[number, 0] for number in asked} == asked
    assert stepper.schedule.preemptions > 1
    assert sum(len(chunk.ids) for work in device.works for chunk in work.work.chunks) < 2 * 4 * 400
    assert {number for number, _ in list(router.finished)[:2]} == {*list(asked)[bulk : bulk + 2]}  # who ranks first
    assert (room.free, room.reserved, stepper.in_flight, stepper.schedule.preempted) == (8, 0, 0, [])


def scores_of(router, number):
    """As the Router's channel joins them."""
    scored = (one for report in router.frames for one in report.scored if one.number == number)
    return PromptScores.joined((one.start, one.scores) for one in scored)


def are_emulated(scores, ids):
    """Whether these are an emulated device's: it is sure of one token behind each."""
    sure = followings(ids[:-1], VOCABULARY)
    likeliest = scores.ids[:, 1] if scores.ids.shape[1] > 1 else sure
    found = scores.ids[:, 0].tolist(), likeliest.tolist(), scores.logprobs[:, 0].tolist()
    return found == (ids[1:], sure.tolist(), [0.0 if one == two else -100.0 for one, two in zip(ids[1:], sure)])  # noqa: B905


@pytest.mark.parametrize("length", [1, 2, 129, 900])
@pytest.mark.parametrize("on_host", [False, True])
@virtual
async def test_a_prompt_s_scores_come_before_its_first_token_and_make_nobody_late(length, on_host):
    """Beside answers that have a pace. A scored token costs 20 times as much as another one of a prompt, so that one of
    900 is computed in many steps. What is on the host is copied there.
    """
    costly = dataclasses.replace(MODEL, row_s=20 * MODEL.prompt_token_s)
    host = {"host": HostCache(QUICK, 64), "blocks": 8} if on_host else {}
    stepper, device = world(**host, model=costly)
    router, times = Router(stepper), {}
    send = router.send

    def timed(report):
        for token in report.tokens:
            times.setdefault(token.number, []).append(stepper.now())
        send(report)

    router.send = timed
    asked = {router.ask(prompt(90, seed), 60): prompt(90, seed) for seed in range(4)}
    ids = prompt(length, 9)
    ids[-1] = following(ids[:-1], VOCABULARY) if length > 1 else ids[-1]  # one hit
    number = router.ask(ids, 3, bulk=True, tpot_s=None, answers=2, prompt_logprobs=2)
    await stepper.drained()
    first, scored = (
        [at for at, report in enumerate(router.frames) if any(one.number == number for one in getattr(report, part))]
        for part in ("tokens", "scored")
    )
    assert scored[-1] == first[0]  # in the same frame, from which a Router takes the scores first
    whole = scores_of(router, number)
    assert are_emulated(whole, ids)
    assert whole.ranks.tolist() == [1 if one == two else 2 for one, two in whole.ids[:, :2].tolist()]
    assert [router.tokens[number, answer] for answer in (0, 1)] == [answer_to(ids, 3)] * 2
    assert {one: router.tokens[one, 0] for one in asked} == {one: answer_to(ids, 60) for one, ids in asked.items()}
    for one in asked:
        first, *later = times[one]
        assert all(at <= first + 0.1 * number + 1e-9 for number, at in enumerate(later, 1))
    scored = [work for work in device.works if any(one.scoring is not None for one in work.work.chunks)]
    assert any(one.on_host for work in scored for one in work.work.chunks) == on_host
    assert len(scored) > length / 300


@virtual
async def test_a_prompt_that_loses_its_blocks_is_scored_again():
    """It is computed token by token, and answers beside it need its blocks."""
    stepper, _ = world(blocks=10)
    stepper.schedule.policy = dataclasses.replace(stepper.schedule.policy, max_num_batched_tokens=4)
    router, ids = Router(stepper), prompt(380, 9)
    for _ in range(500):
        stepper.schedule.room.lengths.ended(2, 500)
    number = router.ask(ids, 1, bulk=True, tpot_s=None, prompt_logprobs=0)
    asked = {router.ask(prompt(100, seed), 300, left_s=20.0): prompt(100, seed) for seed in range(3)}
    await stepper.drained()
    assert router.admitted == {*asked, number}
    scored = [some.start for report in router.frames for some in report.scored]
    assert len(scored) > len(set(scored))
    assert are_emulated(scores_of(router, number), ids)
    assert router.tokens[number, 0] == answer_to(ids, 1)


@virtual
async def test_how_slow_the_device_is_is_not_learned_from_scores():
    """They cost less than is planned for them. Others' promises would be broken."""
    stepper, device = world()
    router, device.slow = Router(stepper), 0.3
    router.ask(prompt(900), 1, bulk=True, tpot_s=None, prompt_logprobs=1)
    await stepper.drained()
    assert stepper.schedule.learning.slowdown == 1.0
    router.ask(prompt(900), 1)
    await stepper.drained()
    assert stepper.schedule.learning.slowdown < 1.0


@virtual
async def test_scores_that_are_no_numbers_end_only_their_prompt(monkeypatch):
    stepper, device = world()
    router, step = Router(stepper), device.steps.step
    other = router.ask(prompt(10), 30)

    def broken(work):
        computed = step(work)
        for scores in computed.scores:
            scores.logprobs[:] = np.nan
        return computed

    monkeypatch.setattr(device.steps, "step", broken)
    number = router.ask(prompt(20, 1), 1, bulk=True, tpot_s=None, prompt_logprobs=1)
    await stepper.drained()
    assert router.failed == {number: "the engine gave no finite numbers for this prompt"}
    assert router.tokens.keys() == {(other, 0)}  # its only token would end it, as if it had all scores
    assert router.tokens[other, 0] == answer_to(prompt(10), 30)
    await answers_again(stepper, router)


@pytest.mark.parametrize("length", [10, 100])
@virtual
async def test_a_scored_prompt_whose_client_leaves_fails_nobody_though_parked_rows_need_its_step(length):
    """It is alone on the accelerator. Its last step is composed, and then has nobody's prompt, but computes it."""
    stepper, _ = world(host=HostCache(QUICK, 64), blocks=3)
    stepper.schedule.policy = dataclasses.replace(stepper.schedule.policy, max_num_batched_tokens=64)
    router, compute, left = Router(stepper), stepper._compute, []
    asked = {router.ask(prompt(500, seed), 60, bulk=True, tpot_s=None): prompt(500, seed) for seed in range(3)}
    await asyncio.sleep(1.5)
    number = router.ask(prompt(length, 9), 1, bulk=True, tpot_s=None, prompt_logprobs=0)

    def leaves(step, ended):
        if any(chunk.scoring is not None and chunk.wanted for chunk in step.work.chunks):
            left.append((len(step.work.chunks), step.work.joins))
            asyncio.get_running_loop().call_soon(lambda: router.tell(called_off=[number]))
        compute(step, ended)

    stepper._compute = leaves
    await stepper.drained()
    assert (left, router.failed) == ([(1, True)], {})
    assert {one: router.tokens[one, 0] for one in asked} == {one: answer_to(ids, 60) for one, ids in asked.items()}
    assert (number, 0) not in router.tokens


HOSTS = st.one_of(st.none(), st.tuples(st.sampled_from([QUICK, SLOW]), st.sampled_from([8, 64])))
OFFER = st.tuples(
    st.sampled_from([1, 100, 127, 128, 129, 256, 700]),
    st.sampled_from([1, 2, 12, 140]),
    st.sampled_from([1, 1, 2, 5]),
    st.booleans(),
    st.sampled_from([0, 3, 30, 500]),  # its end token comes after so many others
    st.sampled_from([None, b"a", b"a", b"b"]),  # who shares its blocks
    st.booleans(),  # it continues the last answer
)
EVENTS = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(st.just("offer"), OFFER),
            st.tuples(st.just("offer"), OFFER),
            st.tuples(
                st.sampled_from(["call off", "stop", "at once"]), st.tuples(st.integers(0, 20), st.integers(0, 4))
            ),
            st.tuples(st.sampled_from(["gone", "again", "fails"]), st.none()),
        ),
        st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3]),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(EVENTS, st.booleans(), st.sampled_from([7, 100, 2048]), HOSTS)
@virtual
async def test_whatever_routers_say_every_answer_ends_and_follows_from_its_prompt(
    happens, short, max_num_batched_tokens, host
):
    """`short`: it has learned that answers are short, and admits more than the longest would fit."""
    stepper, device = world(host and HostCache(*host))
    stepper.schedule.policy = StepPolicy(2.0, 0.1, max_num_batched_tokens)
    for _ in range(500 * short):
        stepper.schedule.room.lengths.ended(2, 500)
    router = Router(stepper)
    routers, asked, left, last = [router], {}, set(), []
    for (what, how), wait_s in happens:
        numbers = sorted(number for of, number in asked if of is router)
        if what == "offer":
            length, most, answers, bulk, sooner, scope, continues = how
            ids = [*last, *prompt(length, len(asked))] if continues and len(last) < 500 else prompt(length, most)
            right = answer_to(ids, most)
            ends = tuple(right[sooner : sooner + 1])
            right = answer_to(ids, most, ends)
            more = {"answers": answers, "bulk": bulk, "tpot_s": None if bulk else 0.1, "end_tokens": ends}
            number, last = router.ask(ids, most, cache_scope=scope, **more), [*ids, *right]
            asked[router, number] = right, answers, "stop" if right[-1:] == [*ends] else "length"
        elif what in ("gone", "again"):
            left |= {(router, number, answer) for number in numbers for answer in range(5)}
            if what == "gone":
                stepper.gone(router)
            router = Router(stepper)
            routers.append(router)
        elif what == "fails":
            device.problem = RuntimeError("out of memory")
        elif what == "at once":  # offered and called off in one turn
            number = next(router.numbers)
            ids = np.arange(1, dtype=np.int32)
            router.tell(offers=[GenerationOffer(number, 2.0, ids, 5, Sampling(0.0))], called_off=[number])
            left.add((router, number, 0))
        elif numbers:
            number, answer = numbers[how[0] % len(numbers)], how[1]
            if what == "call off":
                left |= {(router, number, one) for one in range(5)}
                router.tell(called_off=[number])
            elif router.tokens.get((number, answer)):  # who stops it has read something of it
                left.add((router, number, answer))
                router.tell(stopped=[(number, answer)])
        await asyncio.sleep(wait_s)
    await stepper.drained()
    await asyncio.sleep(0.01)
    for (of, number), (right, answers, finish) in asked.items():
        for answer in range(answers):
            tokens = of.tokens.get((number, answer), [])
            assert tokens == right[: len(tokens)]
            whole = of.finished.get((number, answer)) == finish
            assert whole == (len(tokens) == len(right))
            assert whole or number in of.failed or number in of.refused or (of, number, answer) in left
    assert not any((of, number) not in asked for of in routers for number, _ in of.tokens)
    assert nothing_is_reserved(stepper)
    assert stepper.schedule.room._blocks.free == BLOCKS
    assert all(tokens_of(work.work) <= max_num_batched_tokens for work in device.works)
