"""Norms and rotations in C beside torch's own operations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.layers import RmsNorm
from deployments.engines.packed.positions import Rotary
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import Cache, Turned
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.kernels import native
from deployments.generation.kernels.row_kernels import NormKernel, kernel_norm, turn_kernel
from deployments.generation.scheduler.work import Chunk
from tests.kit.packed_models import EXACT

CPU = EXACT.device
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1 / 64}  # of numbers of about 1; torch rounds to bfloat16 on the way
built = pytest.mark.skipif(native.library("decode_rows") is None, reason="not built: python setup.py build_ext")


@built
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), lanes=st.integers(1, 60), spread=st.sampled_from([1e-3, 1.0, 1e3]))
@pytest.mark.parametrize("dtype", NEAR)
def test_a_norm_is_float64s(dtype, rows, lanes, spread):
    random = torch.Generator().manual_seed(rows)
    x = spread * torch.randn(rows, 2 * 16 * lanes, generator=random)
    x = x.to(dtype)[:, : 16 * lanes]
    norm = RmsNorm(torch.rand(16 * lanes, generator=random).to(dtype), 1e-6)
    wanted = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    found = NormKernel(norm)(x).double()
    assert (found - wanted).abs().max() <= NEAR[dtype] / 2 * max(1, wanted.abs().max())


@pytest.mark.parametrize("weight", [(32,), (6, 32)])
@pytest.mark.parametrize("dtype", NEAR)
def test_torchs_own_norm_is_the_same(dtype, weight):
    """On other devices than CPUs it is one kernel."""
    random = torch.Generator().manual_seed(1)
    norm = RmsNorm(torch.rand(weight, generator=random).to(dtype), 1e-6)
    x = torch.randn(7, 9, 32, generator=random).to(dtype)[:, :6]
    wanted = norm(x)
    norm._fused = True
    torch.testing.assert_close(norm(x), wanted)
    norm.in_place(x)
    torch.testing.assert_close(x, wanted)


@built
@pytest.mark.parametrize(("with_norm", "block_size"), [(True, 128), (False, 128), (True, 256)])
@pytest.mark.parametrize("heads", [HeadLayout(14, 2, 64), HeadLayout(4, 4, 32), HeadLayout(8, 2, 96)])
@pytest.mark.parametrize("dtype", NEAR)
def test_what_attention_gets_is_torchs(dtype, heads, with_norm, block_size):
    """Query, key and value, in place and in the cache, of rows of one token and pieces of prompts."""
    place, random = Place(CPU, dtype), torch.Generator().manual_seed(0)
    rotary = Rotary(10_000.0 ** -(torch.arange(0, heads.size, 2) / heads.size), 1.0, place)
    weight = torch.rand(heads.heads + heads.groups, heads.size, generator=random).to(dtype)
    norm = RmsNorm(weight, 1e-6) if with_norm else None
    chunks = [
        Chunk(np.zeros(count, np.int32), start, table)
        for count, start, table in [(1, 300, (4, 0, 3)), (150, 0, (5, 2)), (1, 0, (1,)), (3, 126, (7, 6))]
    ]
    step = StepLayout.of_chunks(chunks, place, block_size)
    qkv = torch.randn(step.tokens + step.spare, heads.total, heads.size, generator=random).to(dtype)
    found = []
    for in_c in (True, False):
        mine, cache, turned = qkv.clone(), Cache(1, heads, 8, place, block_size), Turned(heads, norm, rotary, place)
        if not in_c:
            turned._kernel = None
        turned.put(mine, *cache.tensor[0], step)
        found.append((mine[: step.tokens].float(), cache.tensor.float()))
    for mine, torchs in zip(*found, strict=True):
        assert (mine - torchs).abs().max() <= NEAR[dtype] * torchs.abs().max()
    assert found[0][1].count_nonzero() == 2 * step.tokens * heads.groups * heads.size


def test_torch_computes_what_the_kernels_do_not():
    norm = RmsNorm(torch.ones(24), 1e-6)
    assert kernel_norm(norm) is norm
    assert turn_kernel(HeadLayout(4, 2, 48), None, EXACT) is None
    assert turn_kernel(HeadLayout(4, 2, 64), None, Place(torch.device("cuda"), torch.float32)) is None
    assert turn_kernel(HeadLayout(4, 2, 64), None, Place(CPU, torch.float16)) is None
