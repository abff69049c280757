"""The emulated device: tokens in any work, with parked rows and moves; and what its steps take in virtual time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.hybrid_device import HybridDevice, HybridWork, SubBatch
from deployments.generation.engine.emulated_steps import EmulatedSteps, following
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.scheduler.work import Chunk, Copy, Scoring, Work, load_of
from deployments.generation.text.sampling import RowSamplers, Sampler, Sampling, log_shares, pick
from tests.kit.hybrid_worlds import EVENTS, World

MODEL = StepTime(0.02, 0.0005, 1e-6, 0.0005, 1e-8, 4)
HOST = HostTime(1e-4, 8e-6, 1e-6, layers=4)
VOCABULARY = 97


class Emulated(EmulatedSteps):
    """In virtual time."""

    layers = HOST.layers

    def __init__(self, host=HOST, **more):
        self.now, self.slept = 0.0, []
        super().__init__(
            MODEL, 8, VOCABULARY, host=host, num_cpu_blocks=8, sleep=self.on, clock=lambda: self.now, **more
        )

    def on(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def seconds(self, work):
        began = self.now
        self.step(work)
        return self.now - began


def prompt_of(length, seed):
    return np.random.default_rng([length, seed]).integers(5, VOCABULARY, length).tolist()


@settings(max_examples=30, deadline=None)
@given(EVENTS)
def test_in_any_work_each_token_follows_from_all_before_it(events):
    for ids, prompt in World(Emulated(), 6, 8).run(events, prompt_of):
        for at in range(prompt, len(ids)):
            assert ids[at] == following(ids[:at], VOCABULARY)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("alternatives", [0, 1, 3, 200])
def test_a_prompt_s_scores_are_those_of_its_logits(on_host, alternatives):
    """Its logits are 100 for one token and 0 for all others."""
    ids = np.array(prompt_of(300, 1), np.int32)
    for at in (40, 299):
        ids[at] = following(ids[:at], VOCABULARY)
    device, start, likely = Emulated(), 0, []
    for size in (1, 128, 171):
        behind = ids[start + 1 :][:size]
        chunk = Chunk(ids[start:][:size], start, (5, 1, 3), size == 171, on_host, Scoring(behind, alternatives))
        (scores,) = device.step(Work([chunk])).scores
        for at, token in enumerate(behind.tolist()):
            logits = np.zeros(VOCABULARY, np.float32)
            logits[following(ids[: start + at + 1], VOCABULARY)] = 100.0
            (picked,) = pick(logits, RowSamplers([Sampler(Sampling(0.0))], alternatives))
            assert tuple(zip(scores.ids[at, 1:], scores.logprobs[at, 1:], strict=True)) == picked.alternatives
            assert (scores.ids[at, 0], scores.logprobs[at, 0]) == (token, log_shares(logits)[token])
            assert scores.ranks[at] == 1 + (logits > logits[token]).sum()
            likely += [start + at + 1] if scores.ranks[at] == 1 else []
        start += size
    assert {40, 299} <= {*likely}


def rows(count, tokens, *, on_host=False):
    return [Chunk(np.zeros(1, np.int32), tokens - 1, (0,) * 99, on_host=on_host) for _ in range(count)]


def prompt(tokens, *, on_host=False):
    return [Chunk(np.zeros(tokens, np.int32), 0, (0,) * 99, wanted=False, on_host=on_host)]


def host_s(chunks, host=HOST):
    load = load_of(chunks)
    return host.seconds(load.rows, load.kv_tokens)


WORKS = {
    "one row": rows(1, 100),
    "rows and a prompt": rows(9, 700) + prompt(300),
    "a host's prompt": rows(2, 50) + prompt(90, on_host=True),
}


@pytest.mark.parametrize("host", [None, HOST])
@pytest.mark.parametrize("chunks", [name for name in WORKS if "host" not in name])
def test_alone_a_step_takes_what_the_table_says_in_one_sleep(chunks, host):
    device = Emulated(host)
    assert device.seconds(Work(WORKS[chunks])) == pytest.approx(MODEL.seconds(load_of(WORKS[chunks])))
    assert len(device.slept) == 1


@pytest.mark.parametrize("chunks", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize(("at_host", "tokens"), [(1, 90), (3, 800), (12, 2000)])
def test_one_batch_hides_host_rows_behind_the_accelerators_attention(chunks, at_host, tokens):
    """T = T_l0 + max(T_ga0, T_ca0)."""
    first = chunks + rows(at_host, tokens, on_host=True)
    attention_s = MODEL.attention_s(load_of(chunks, HOST.copy_token_s))  # with the copies of a host's prompt
    wanted = MODEL.linear_s(load_of(first)) + max(attention_s, host_s(first[len(chunks) :]))
    assert Emulated().seconds(Work(first)) == pytest.approx(wanted)


@pytest.mark.parametrize("layers", [4, 32])
@pytest.mark.parametrize(("host0", "host1"), [(0, 10), (2, 3), (4, 4), (9, 2), (1, 20)])
@pytest.mark.parametrize("tokens", [400, 3000])
def test_two_batches_take_neos_time(layers, host0, host1, tokens):
    """T = max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0), but for one layer's part at the ends, where it keeps to both
    inequalities; and where it does not, never longer.
    """
    host = HostTime(HOST.row_s, HOST.kv_token_s, layers=layers)
    chunks = rows(30, 700)
    zero, second = rows(host0, tokens, on_host=True), rows(host1, tokens, on_host=True)
    linear0_s, linear1_s = MODEL.linear_s(load_of(chunks + zero)), MODEL.linear_s(load_of(second))
    attention_s, host0_s, host1_s = MODEL.attention_s(load_of(chunks)), host_s(zero, host), host_s(second, host)
    formula = max(linear0_s, host1_s) + max(linear1_s + attention_s, host0_s)
    took = Emulated(host).seconds(Work(chunks + zero, second=second))
    if host1_s <= linear0_s and host0_s <= linear1_s + attention_s:
        assert took == pytest.approx(formula, rel=0.5 / layers)
    assert took >= max(linear0_s + attention_s + linear1_s, host0_s + host1_s) - 1e-9
    assert took <= formula * (1 + 1 / layers)


TOKENS = st.lists(st.integers(1, 5000), max_size=20)
STEP = st.tuples(
    TOKENS, st.tuples(st.integers(0, 300), st.booleans()), TOKENS, TOKENS, st.booleans(), st.integers(0, 2)
)


def each(lengths, *, on_host=False):
    return [chunk for tokens in lengths for chunk in rows(1, tokens, on_host=on_host)]


def sub_batch(chunks):
    batch = SubBatch()
    for chunk in chunks:
        batch = batch.with_piece(chunk.start, len(chunk.ids), on_host=chunk.on_host)
    return batch


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=10), st.lists(st.integers(1, 5000), max_size=3))
def test_it_agrees_with_the_benchmarks_device(steps, parked):
    """Which is written without this one's code, and has no engine. In the first step rows park."""
    device, other = Emulated(), HybridDevice(MODEL, HOST)
    for number, (own, (piece, there), zero, one, joins, copied) in enumerate(steps):
        parking = {} if number else dict(enumerate(parked))
        called_off = [0] if parked and number == 3 else []
        first = each(own) + (prompt(piece, on_host=there) if piece else []) + each(zero, on_host=True)
        second = [] if joins or parking else each(one, on_host=True)
        began, rest = device.now, (called_off, joins)
        parks = list(zip(parking, each(parking.values(), on_host=True), strict=True))
        ours = device.step(Work(first, [Copy(0, 1, to_host=True)] * copied, second, parks, *rest))
        batches = sub_batch(first), sub_batch(second)
        theirs = other.step(began, HybridWork(*batches, list(parking.items()), *rest, copied * BLOCK))
        assert device.now - began == pytest.approx(theirs.seconds)
        assert ours.arrived == theirs.arrived
        assert ours.compute_s == pytest.approx(theirs.compute_s)


def test_with_nothing_else_to_do_it_waits_for_the_first_row():
    device = Emulated()
    row = rows(1, 4000, on_host=True)
    device.step(Work([], parking=[(7, row[0])], joins=True))
    for layer in range(HOST.layers):
        assert device.step(Work([], joins=True)).arrived == ([7] if layer == HOST.layers - 1 else [])
    each_s = MODEL.linear_s(load_of(row)) + host_s(row)  # of each layer alone: nothing overlaps
    assert device.now == pytest.approx(each_s)
    assert sum(device.slept) == pytest.approx(device.now)


def test_a_block_takes_its_time_to_the_other_memory():
    device, chunks = Emulated(), rows(1, 100)
    copies = [Copy(0, 1), Copy(0, 2, to_host=True), Copy(1, 3, from_host=True)]
    assert device.seconds(Work(chunks, copies)) == pytest.approx(
        MODEL.seconds(load_of(chunks)) + 2 * BLOCK * HOST.copy_token_s
    )


def test_what_sleeps_too_long_does_not_add_up():
    device = Emulated()
    device.sleep = lambda seconds: device.on(seconds + 1e-3)
    first, second = rows(20, 700) + rows(3, 900, on_host=True), rows(3, 900, on_host=True)
    took = device.seconds(Work(first, second=second))
    waits = len(device.slept)
    assert waits > HOST.layers
    assert took == pytest.approx(Emulated().seconds(Work(first, second=second)), abs=1.1e-3)


def test_noise_is_the_steps_own():
    device, work = Emulated(noise=0.1, seed=3), Work(rows(1, 100))
    took = [device.seconds(work) / MODEL.seconds(load_of(work.chunks)) for _ in range(200)]
    assert np.mean(took) == pytest.approx(1, abs=0.03)
    assert np.std(took) == pytest.approx(0.1, abs=0.02)
