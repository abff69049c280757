"""What a replica measures at its start: other work on the machine must not make it look slow, or without limit."""

import random

import pytest

from deployments.embedding.replica import measure
from deployments.embedding.scheduler.cost_model import CostModel

MINILM, LARGE, GPU = (0.0085, 0.005), (0.15, 0.1), (0.0004, 0.004)  # alpha, beta


class Machine:
    """Runs on a machine that is busy for `busy_s`: the replica that this one replaces ends. The first run of a size
    allocates its memory.
    """

    def __init__(self, alpha_s, beta_s, seed=0, busy_s=0.0, delay_s=0.0, share=0.0):
        self.model, self.random = CostModel.of_curve(alpha_s, beta_s), random.Random(seed)
        self.busy_s, self.delay_s, self.share = busy_s, delay_s, share
        self.now, self.seen = 0.0, []

    def run(self, lengths):
        took_s = self.model.beta_s + self.model.work(lengths)
        took_s *= self.random.uniform(1.0, 1.05) + 0.5 * (lengths not in self.seen)
        if self.now < self.busy_s:
            took_s *= 1 + self.random.random() * self.share
            took_s += self.random.expovariate(1 / self.delay_s) if self.delay_s else 0.0
        self.seen.append(lengths)
        self.now += took_s
        return took_s

    def capacity(self, **how):
        """Over the true one, with an SLO of a second."""
        found = measure(self.run, lambda: self.now, 512, **how)
        return (1 - found.beta_s) / found.alpha_s * self.model.alpha_s / (1 - self.model.beta_s)


@pytest.mark.parametrize("curve", [MINILM, LARGE, GPU])
def test_an_idle_machine_is_measured_as_it_is_within_seconds(curve):
    machine = Machine(*curve)
    assert machine.capacity() == pytest.approx(1.0, abs=0.06)
    assert machine.now < 13.0


@pytest.mark.parametrize("curve", [MINILM, LARGE, GPU])
@pytest.mark.parametrize("busy", [{"delay_s": 0.3}, {"delay_s": 0.1, "share": 2.0}], ids=["stalls", "a share"])
def test_processes_that_end_beside_it_hardly_count(curve, busy):
    """The faster of two runs of each size in turn made a capacity of 0.2 to 900,000 times the true one, with stalls."""
    found = sorted(Machine(*curve, seed, busy_s=1.5, **busy).capacity() for seed in range(100))
    assert found[2] > 0.5
    assert found[97] < 1.5
    assert found[-1] < 10


def test_a_machine_that_stays_busy_does_not_hold_up_the_start():
    for seed in range(20):
        machine = Machine(*MINILM, seed, busy_s=1e9, delay_s=0.3)
        assert machine.capacity() < 10
        assert machine.now < 14.0


def test_an_emulated_device_needs_one_run_of_a_size():
    machine = Machine(*GPU)
    machine.capacity(exact=True)
    assert len(machine.seen) == 6


def test_no_text_is_longer_than_the_model_takes():
    machine = Machine(*MINILM)
    measure(machine.run, lambda: machine.now, 64)
    assert max(max(lengths) for lengths in machine.seen) == 64
