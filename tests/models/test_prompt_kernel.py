"""The C kernel of prompts' attention beside float64, in every form that this processor runs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import Cache
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.kernels.prompt_kernel import PromptKernel, forms, prompt_kernel
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk
from tests.kit.packed_models import EXACT

CPU = EXACT.device
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1 / 512, torch.float16: 1 / 2048}  # see test_decode_kernel
FORMS = [(form, dtype) for dtype in NEAR for form in forms(HeadLayout(1, 1, 32), dtype)]
pytestmark = pytest.mark.skipif(not FORMS, reason="not built: python setup.py build_ext --inplace")


def world(heads, chunks, dtype, spread=1.0, seed=0, block_size=BLOCK):
    """(the step's layout, queries, keys, values): chunks (start, tokens), their blocks anywhere. What lies behind the
    chunks in their blocks are no numbers.
    """
    random = torch.Generator().manual_seed(seed)
    counts = [blocks_of(start + tokens, block_size) for start, tokens in chunks]
    tables = torch.randperm(sum(counts), generator=random).split(counts)
    work = [
        Chunk(np.zeros(tokens, np.int32), start, tuple(table.tolist()))
        for (start, tokens), table in zip(chunks, tables, strict=True)
    ]
    layout = StepLayout.of_chunks(work, Place(CPU, dtype), block_size)
    stored = torch.randn(2, sum(counts), heads.groups, block_size, heads.size, generator=random)
    for chunk in work:
        stored[:, chunk.table[-1], :, (chunk.end - 1) % block_size + 1 :] = torch.nan
    q = torch.randn(layout.tokens, heads.heads, heads.size, generator=random) * spread * heads.size**-0.5
    return layout, q.to(dtype), *stored.to(dtype)


def attend(form, heads, layout, q, keys, values):
    mixed = torch.full((layout.tokens, heads.heads * heads.size), torch.nan, dtype=q.dtype)
    kernel = PromptKernel(form, heads)
    kernel.attend(q, keys, values, kernel.tiles(layout.chunks, layout.starts, layout.tables), mixed)
    return mixed


def exact(heads, layout, q, keys, values):
    """In float64, one chunk after the other."""
    parts = []
    for chunk, table, own in zip(layout.chunks, layout.tables, q.split(layout.lengths), strict=True):
        used = table[: blocks_of(chunk.end, keys.shape[2])]
        k, v = (of[used].double().transpose(0, 1).flatten(1, 2)[:, None, : chunk.end] for of in (keys, values))
        queries = own.double().view(len(own), heads.groups, -1, heads.size).permute(1, 2, 0, 3)
        hidden = torch.ones(len(own), chunk.end).triu(chunk.start + 1).bool()
        scores = (queries @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        parts.append((scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(len(own), -1))
    return torch.cat(parts)


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([16, 32, 48, 64, 80, 96, 128]),
    groups=st.integers(1, 3),
    shared=st.sampled_from([1, 2, 3, 4, 7]),
    chunks=st.lists(
        st.tuples(st.sampled_from([0, 1, 100, 127, 128, 129, 300]), st.integers(2, 300)), min_size=1, max_size=3
    ),
    spread=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**20),
    block_size=st.sampled_from([BLOCK, 2 * BLOCK]),
    threads=st.integers(1, 4),
)
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_each_form_is_float64s(form, dtype, size, groups, shared, chunks, spread, seed, block_size, threads):
    heads = HeadLayout(groups * shared, groups, size)
    form = form if form in forms(heads, dtype) else forms(heads, dtype)[0]
    layout, q, keys, values = world(heads, chunks, dtype, spread, seed, block_size)
    torch.set_num_threads(threads)
    wanted = exact(heads, layout, q, keys, values)
    largest = values.double().nan_to_num().abs().max() + wanted.abs().max()
    error = (attend(form, heads, layout, q, keys, values).double() - wanted).abs().max()
    assert error <= NEAR[dtype] * largest * max(1, spread / 4)


@pytest.mark.parametrize(("form", "dtype"), FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_shows(form, dtype, bad):
    """In the tokens that see it, and in their heads, alone."""
    heads = HeadLayout(4, 2, 32)
    layout, q, keys, values = world(heads, [(0, 200)], dtype)
    table = layout.chunks[0].table
    keys[table[1], 1, 10] = bad  # of token 138
    found = attend(form, heads, layout, q, keys, values).view(200, 4, 32)
    assert found[138:, 2:].isnan().all()
    assert found[:138].isfinite().all()
    assert found[:, :2].isfinite().all()


def test_memory_does_not_grow_with_the_text():
    """torch makes what comes out and nothing else: no mask, no copy of keys."""
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if not any(of.alias_info for of in function._schema.returns):  # no view
                made.append(result.numel())
            return result

    heads = HeadLayout(4, 2, 32)
    layout = world(heads, [(2000, 40), (7, 1)], torch.float32)[0]
    cache = Cache(1, heads, 17, EXACT, BLOCK)
    qkv = torch.randn(layout.tokens, heads.total, heads.size)
    with Made():
        cache.attention(0, heads).attend(qkv, layout)
    assert made == [41 * 4 * 32]


def test_torch_computes_what_the_kernel_does_not():
    heads = HeadLayout(4, 2, 64)
    assert prompt_kernel(heads, EXACT) is not None
    assert prompt_kernel(HeadLayout(4, 2, 24), EXACT) is None
    assert prompt_kernel(heads, Place(CPU, torch.float64)) is None
    assert prompt_kernel(heads, Place(torch.device("cuda"), torch.float32)) is None
    assert not {"amx", "avx512bf16"} & set(forms(HeadLayout(4, 2, 48), torch.bfloat16))
