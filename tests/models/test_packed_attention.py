"""Each way of attention against the formula, computed plainly: whichever is the quicker one on this machine."""

import numpy as np
import pytest
import torch

from deployments.engines.packed import attention
from deployments.engines.packed.attention import ALL, CAUSAL, HeadLayout, Reach, Ways
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.positions import alibi, alibi_slopes, relative_buckets
from deployments.engines.packed.tensors import Place
from tests.kit.packed_models import CPU, LENGTHS

BERT, GROUPED = HeadLayout(12, 12, 32), HeadLayout(8, 2, 32)
REACHES = {"all": ALL, "causal": CAUSAL, "window": Reach(20, 20), "causal window": Reach(29, 0)}


def buckets(heads):
    torch.manual_seed(1)
    return relative_buckets(torch.randn(32, heads))


BIASES = {"no bias": None, "alibi": alibi, "buckets": buckets}
WAYS = ("dense", "padded", "one_by_one", "by_padding")


def plain(qkv, lengths, heads, reach, bias):
    """In float64."""
    q, k, v = qkv.double().transpose(0, 1).split([heads.heads, heads.groups, heads.groups])
    k, v = (part.repeat_interleave(heads.heads // heads.groups, 0) for part in (k, v))
    found, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
        scores = q[:, here] @ k[:, here].transpose(1, 2)
        if bias is not None:
            distances = (columns - rows).flatten()
            scores += bias(distances).view(-1, length, length).double()
        if reach.before is not None:
            scores[:, columns < rows - reach.before] = -torch.inf
        if reach.after is not None:
            scores[:, columns > rows + reach.after] = -torch.inf
        found.append((scores.softmax(-1) @ v[:, here]).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(found)


def compare(run, lengths, heads, reach, bias, dtype=torch.float32):
    layout = Layout.of(np.array(lengths, np.int32), Place(CPU, dtype))
    torch.manual_seed(0)
    qkv = (torch.randn(layout.tokens + layout.spare, heads.total, heads.size) / 3).to(dtype)  # scores are about 1
    found = run(qkv, layout)
    assert found.shape == (layout.tokens + layout.spare, heads.heads * heads.size)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    wanted = plain(qkv[: layout.tokens], lengths, heads, reach, bias)
    torch.testing.assert_close(found[: layout.tokens].double(), wanted, **close)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("heads", [BERT, GROUPED], ids=["each", "grouped"])
def test_every_way_of_every_kind(heads, reach, bias, way):
    made = None if bias is None else bias(heads.heads)
    ways = Ways(heads, Place(CPU, torch.float32), reach, made)
    for lengths in ([70, 33, 4, 1], [40, 40], [1]):
        compare(getattr(ways, way), lengths, heads, reach, made)


@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_long_queries_in_blocks(reach):
    bias = alibi(8)
    ways = Ways(GROUPED, Place(CPU, torch.float32), reach, bias)
    for lengths in ([700, 513, 3], [600]):
        for way in (ways.one_by_one, ways.padded, ways.by_padding):
            compare(way, lengths, GROUPED, reach, bias)


@pytest.mark.parametrize("longest_dense", [0, 75, 512])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_by_length(monkeypatch, dtype, lengths, longest_dense):
    monkeypatch.setattr(attention, "longest_dense", lambda *_, **__: longest_dense)
    for reach in (ALL, CAUSAL, Reach(20, 20)):
        compare(attention.attention_for(BERT, Place(CPU, dtype), reach), lengths, BERT, reach, None, dtype)


def test_slopes_are_those_of_the_paper():
    assert alibi_slopes(8) == [2.0**-number for number in range(1, 9)]
    assert alibi_slopes(12)[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
