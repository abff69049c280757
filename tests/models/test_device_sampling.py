"""Tokens drawn on the device, and by the kernel, are numpy's. Torch's CPU stands in for an accelerator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from deployments.generation.engine import device_sampling
from deployments.generation.engine.device_sampling import TorchLogits, logits_of
from deployments.generation.kernels.draw_kernel import HostLogits
from deployments.generation.text.logit_rules import rules_of
from deployments.generation.text.sampling import RowSamplers, Sampler, Sampling, pick

KINDS = ("plain", "plain", "alike", "level", "masked", "nan", "-inf", "inf")
TEMPERATURES = (0.0, 5e-324, 1e-30, 0.3, 1.0, 1.0, 50.0, 1e9, 1e300)
TOP_K, TOP_P = (0, 0, 1, 7, 1024, 1100, 10_000), (1e-6, 0.05, 0.5, 0.95, 0.9999, 1.0, 1.0)


def some_rows(random, count):
    """(kind of logits, what is asked for, answers, logprobs) each."""
    for _ in range(count):
        temperature, top_k, top_p = (random.choice(of).item() for of in (TEMPERATURES, TOP_K, TOP_P))
        min_p = random.choice([0.0, 0.0, 0.02, 0.5]).item()
        asked = Sampling(temperature, top_k, top_p, int(random.integers(1000)), min_p)
        named = int(random.choice([-1, -1, 0, 1, 5, 20]))
        yield str(random.choice(KINDS)), asked, int(random.integers(1, 4)), None if named < 0 else named


def row_of(kind, random, vocabulary):
    row = (random.standard_normal(vocabulary) * random.choice([0.01, 3.0, 30.0])).astype(np.float32)
    if kind == "alike":  # as of a head in bfloat16
        row = torch.from_numpy(row).bfloat16().float().numpy()
    elif kind == "level":
        row[:] = row[0]
    elif kind == "masked":
        row[random.random(vocabulary) < 0.9] = -np.inf
        row[random.integers(vocabulary)] = 1.0
    elif kind == "nan":
        row[random.integers(vocabulary)] = np.nan
    elif kind != "plain":
        row[random.integers(vocabulary) if kind == "inf" else slice(None)] = float(kind)
    return row


def samplers_of(rows):
    return [
        RowSamplers([Sampler(asked, answer) for answer in range(answers)], named) for _, asked, answers, named in rows
    ]


def ids(picked):
    return [[one.id, *(token for token, _ in one.alternatives)] for one in picked]


def logprobs(picked):
    return [[one.logprob, *(known for _, known in one.alternatives)] for one in picked]


def on_device(logits):
    return TorchLogits(torch.from_numpy(logits))


@pytest.mark.parametrize(("draws", "at_once"), [(on_device, 2**22), (on_device, 5000), (HostLogits, 0)])
def test_tokens_are_those_of_numpy(monkeypatch, draws, at_once):
    monkeypatch.setattr(device_sampling, "_AT_ONCE", at_once)

    @settings(max_examples=100, deadline=None)
    @given(
        vocabulary=st.sampled_from([1, 3, 50, 1500, 4000, 20_000]), seed=st.integers(0, 2**32), count=st.integers(1, 40)
    )
    def run(vocabulary, seed, count):
        random = np.random.default_rng(seed)
        rows = list(some_rows(random, count))
        logits = np.stack([row_of(kind, random, vocabulary) for kind, *_ in rows])
        here, there = samplers_of(rows), samplers_of(rows)
        found = draws(logits).pick(there)
        for (kind, *_), row, ours, theirs, picked in zip(rows, logits, here, there, found, strict=True):
            wanted = pick(row, ours)
            assert (picked is None) == (wanted is None) == (kind in {"nan", "-inf", "inf"})
            if wanted is not None:
                assert ids(picked) == ids(wanted)
                if ours.logprobs is None:
                    assert picked == wanted
                else:
                    np.testing.assert_allclose(logprobs(picked), logprobs(wanted), rtol=1e-5, atol=1e-5)
                assert [each.random() for each in ours.samplers] == [each.random() for each in theirs.samplers]

    run()


def test_rows_with_rules_are_drawn_on_the_host_and_others_are_not():
    logits = torch.from_numpy((np.random.default_rng(1).standard_normal((3, 50)) * 3).astype(np.float32))
    asked = Sampling(0.7, logit_bias=((7, 100.0),), seed=3)

    def samplers():
        plain = [RowSamplers([Sampler(Sampling(seed=seed))], 2) for seed in (1, 2)]
        return [
            plain[0],
            RowSamplers([Sampler(asked, one, (), rules_of(asked, [], ())) for one in (0, 1)], 2),
            plain[1],
        ]

    found = TorchLogits(logits).pick(samplers())
    assert [one.id for one in found[1]] == [7, 7]
    wanted = [pick(row.numpy(), one) for row, one in zip(logits, samplers(), strict=True)]
    assert [ids(row) for row in found] == [ids(row) for row in wanted]


def test_float32_draws_no_token_that_cannot_come():
    """A random number next to 1 becomes 1 there."""

    class Last(Sampler):
        def random(self):
            return 1 - 2**-53

    logits = np.full((3, 3000), -np.inf, np.float32)
    logits[:, 5:900] = np.random.default_rng(0).standard_normal(895) * 3
    samplers = [RowSamplers([Last(Sampling(top_k=top_k))], None) for top_k in (0, 2000, 3)]
    all_, many, few = TorchLogits(torch.from_numpy(logits), torch.float32).pick(samplers)
    assert np.isfinite(logits[0, [all_[0].id, many[0].id]]).all()
    assert few[0].id == np.argsort(-logits[2], kind="stable")[2]


def test_float32_draws_these_as_float64_does():
    logits = np.random.default_rng(0).standard_normal((60, 3000)).astype(np.float32) * 3
    asked = [Sampling(seed=1), Sampling(0.5, 1500, 1.0, 2), Sampling(1.5, 0, 0.99, 3)] * 20
    here, there = ([RowSamplers([Sampler(one)], 4) for one in asked] for _ in range(2))
    found = TorchLogits(torch.from_numpy(logits), torch.float32).pick(there)
    wanted = [pick(row, samplers) for row, samplers in zip(logits, here, strict=True)]
    assert [ids(one) for one in found] == [ids(one) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(logprobs(one), logprobs(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asked", [Sampling(0.0), Sampling(), Sampling(top_k=50, top_p=0.9)], ids=str)
def test_nothing_waits_for_the_device_before_the_copy_to_the_host(asked):
    """Fake tensors have no numbers: whoever asks for one fails."""
    with FakeTensorMode():
        logits = TorchLogits(torch.zeros(2, 5000))
        draws = [device_sampling.Draw.of(row, Sampler(asked), 5, 5000) for row in range(2)]
        lines = logits._batch_lines(draws, 1024, 5)
        assert lines.shape == (2, 14)
        with pytest.raises(RuntimeError):
            logits.pick([RowSamplers([Sampler(asked)], 5)] * 2)


def test_all_tokens_are_sorted_only_where_the_likeliest_are_too_few(monkeypatch):
    counts, likeliest = [], device_sampling.likeliest

    def counted(logits, count):
        counts.append((len(logits), count))
        return likeliest(logits, count)

    monkeypatch.setattr(device_sampling, "likeliest", counted)
    logits = TorchLogits(torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 3)
    few, many = Sampling(top_p=0.9), Sampling(9.0, top_p=0.9)
    logits.pick([RowSamplers([Sampler(asked)], None) for asked in (few, many, few)])
    assert counts == [(3, 1024), (1, 5000)]


def test_rows_and_how_to_draw_from_them_are_as_many():
    with pytest.raises(ValueError, match="2 rows of logits, and how to draw from 1"):
        TorchLogits(torch.zeros(2, 9)).pick([RowSamplers([Sampler(Sampling())], None)])


def test_a_device_is_trusted_that_draws_as_numpy_does(monkeypatch, caplog):
    cpu, logits = torch.device("cpu"), torch.randn(2, 9)
    assert device_sampling._problem(cpu) is None
    assert logits_of(cpu)(logits).logits.tolist() == logits.tolist()
    assert logits_of(torch.device("meta"))(logits).logits.tolist() == logits.tolist()  # it has no numbers
    assert "sampling tokens on the host, not on meta" in caplog.text
    monkeypatch.setattr(device_sampling, "_problem", lambda _: None)
    assert isinstance(logits_of(torch.device("meta"))(logits), TorchLogits)


def test_a_device_that_draws_others_is_found_out(monkeypatch):
    largest = torch.Tensor.max  # on this device it finds the smallest
    monkeypatch.setattr(torch.Tensor, "max", lambda of, *given, **more: largest(-of, *given, **more))
    assert device_sampling._problem(torch.device("cpu")) == "it draws other tokens"
