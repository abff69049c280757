"""Steps on an accelerator and its host beside transformers: tokens in any mix of batches, parked rows and moves."""

import os
import threading
import time

import pytest
import torch
from hypothesis import given, settings

from deployments.engines.packed.layers import TorchProducts
from deployments.engines.packed.tensors import Weights
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.causal_stages import CausalStages, Stopwatch
from deployments.generation.engine.hybrid_steps import HybridSteps
from deployments.generation.kernels.decode_kernel import forms
from deployments.generation.scheduler.work import Work
from tests.kit.causal_models import causal, check, prompt_of
from tests.kit.hybrid_worlds import EVENTS, FIRST, PARKING, SECOND, World
from tests.kit.packed_models import EXACT

LAYERS, BLOCKS, HOST_BLOCKS = 3, 6, 8
FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.fixture(scope="module", params=FAMILIES)
def own(request):
    """transformers' model."""
    return causal(request.param, num_hidden_layers=LAYERS)


def hybrid(own, *, kernel=True):
    model = CausalModel(own.config, Weights.of_module(own, EXACT), BLOCKS, TorchProducts(), num_cpu_blocks=HOST_BLOCKS)
    if not kernel:
        for attention in model.host_attention:
            attention._kernel = None
    return model


class Steps(HybridSteps):
    layers = LAYERS

    def __init__(self, model, cores=()):
        super().__init__(CausalStages(model, cores))


@pytest.mark.parametrize(
    ("own", "kernel"), [*((family, True) for family in FAMILIES), ("llama", False)], indirect=["own"]
)
def test_in_any_work_each_is_as_if_alone(own, kernel):
    if kernel and not forms():
        pytest.skip("not built")
    model = hybrid(own, kernel=kernel)

    @settings(max_examples=20, deadline=None)
    @given(EVENTS)
    def run(events):
        world = World(Steps(model), BLOCKS, HOST_BLOCKS)
        for ids, prompt in world.run(events, prompt_of):
            if len(ids) > prompt:
                check(own, ids, prompt)

    run()


def decoding(model, rows):
    """A world in which so many rows of the host have had their prompts computed."""
    world = World(Steps(model), BLOCKS, HOST_BLOCKS)
    for name in range(rows):
        world.join(name, prompt_of(3 + name), on_host=True)
    world.step(dict.fromkeys(range(rows), (9, FIRST)))
    return world


def all_right(own, world):
    ended = list(world.end())
    for ids, prompt in ended:
        check(own, ids, prompt)
    return ended


@pytest.fixture
def gate(own, monkeypatch):
    """(a model, what the host's attention in its second layer waits for)."""
    model, opened = hybrid(own), threading.Event()
    attention = model.host_attention[1]
    attend = attention.attend

    def when_opened(*given):
        assert opened.wait(30)
        return attend(*given)

    monkeypatch.setattr(attention, "attend", when_opened)
    yield model, opened
    opened.set()


def test_nobody_waits_for_a_row_on_its_way(own, gate):
    model, opened = gate
    world = decoding(model, 4)
    world.join("other", prompt_of(7))
    world.step({0: (1, PARKING), 1: (1, PARKING), 2: (1, PARKING), 3: (1, PARKING), "other": (9, FIRST)})
    assert world.step({}, joins=True).arrived == []  # it waits for the first layer's, and they go on to the second
    for _ in range(LAYERS):
        computed = world.step({"other": (1, FIRST)}, joins=True)
        assert (len(computed.logits.logits), computed.arrived) == (1, [])
    world.leave(0)
    world.step({"other": (1, FIRST)}, joins=True)
    world.leave(2)
    opened.set()
    assert world.steps.step(Work([], called_off=world.called_off, joins=False)).arrived == []
    world.called_off = []
    numbers = [world.at[name].parked for name in (1, 3)]
    arrived = []
    for _ in range(LAYERS - 1):
        arrived += world.step({}, joins=True).arrived
    assert arrived == numbers
    assert len(all_right(own, world)) == 3


@pytest.mark.parametrize("role", [FIRST, SECOND, PARKING])
def test_an_error_in_the_hosts_thread_is_the_steps(own, monkeypatch, role):
    model = hybrid(own)
    world = decoding(model, 2)
    world.step({0: (1, PARKING)})
    world.steps._stages._host._thread.submit(int).result()  # it has computed that row's attention

    def fails(*_):
        raise MemoryError("none is left")

    with monkeypatch.context() as patch:
        patch.setattr(model.host_attention[0], "attend", fails)
        if role == PARKING:  # the next step meets it
            world.step({1: (1, role)}, joins=True)
        with pytest.raises(MemoryError, match="none is left"):
            world.step({} if role == PARKING else {1: (1, role)}, joins=True)
    world.at[0].parked = world.at[1].parked = None
    world.leave(0)
    world.leave(1)
    assert world.steps.step(Work([], called_off=[1, 2], joins=True)).arrived == []
    world.join("next", prompt_of(9), on_host=True)
    for _ in range(3):
        world.step({"next": (9, FIRST)})
    assert len(all_right(own, world)) == 1


def test_it_says_how_long_accelerator_and_host_computed(own):
    world = decoding(hybrid(own), 2)
    assert world.step({0: (1, FIRST), 1: (1, SECOND)}).compute_s.host_s > 0
    world.move(0)
    world.leave(1)
    began = time.perf_counter()
    compute_s = world.step({0: (1, FIRST)}).compute_s
    assert compute_s.host_s == 0
    assert 0 < compute_s.accelerator_s < time.perf_counter() - began


def test_where_submitting_work_takes_no_time_it_is_not_timed():
    """Else the accelerator would be taken for quicker than it is, and the host for slower."""
    for device, is_timed in ((torch.device("cpu"), True), (torch.device("privateuseone"), False)):  # such is an NPU
        watch = Stopwatch(device)
        watch.begin()
        watch.end()
        assert (watch.seconds() > 0) == is_timed


def test_attention_is_bound_to_the_cores_that_it_is_given(own):
    core, threads = min(os.sched_getaffinity(0)), torch.get_num_threads()
    steps = Steps(hybrid(own), [core])
    host = steps._stages._host
    assert host._thread.submit(os.sched_getaffinity, 0).result() == {core}
    assert host._thread.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == threads
