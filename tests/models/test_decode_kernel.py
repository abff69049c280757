"""The C kernel of decode attention beside float64, in every form that this processor runs."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import Cache
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.engine.paged_attention import PaddedRows
from deployments.generation.kernels.decode_kernel import DecodeKernel, _share, decode_kernel, forms
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk
from tests.kit.packed_models import EXACT

CPU = EXACT.device
NEAR = {  # bfloat16 and float16 round what comes out, AMX the weights of values too
    torch.float32: 1e-5,
    torch.bfloat16: 1 / 512,
    torch.float16: 1 / 2048,
}
built = pytest.mark.skipif(not forms(), reason="not built: python setup.py build_ext --inplace")


def world(heads, lengths, dtype, spread=1.0, seed=0, block_size=BLOCK):
    """(the step's layout, qkv, keys, values): one token of each sequence, their blocks anywhere."""
    place, random = Place(CPU, dtype), torch.Generator().manual_seed(seed)
    counts = [blocks_of(length, block_size) for length in lengths]
    anywhere = torch.randperm(sum(counts), generator=random)
    chunks = [
        Chunk(np.zeros(1, np.int32), length - 1, tuple(table.tolist()))
        for length, table in zip(lengths, anywhere.split(counts), strict=True)
    ]
    layout = StepLayout.of_chunks(chunks, place, block_size)
    stored = torch.randn(2, sum(counts), heads.groups, block_size, heads.size, generator=random).to(dtype)
    qkv = torch.randn(len(lengths), heads.total, heads.size, generator=random)
    qkv[:, : heads.heads] *= spread * heads.size**-0.5
    return layout, qkv.to(dtype), *stored


def exact(heads, layout, q, keys, values):
    """In float64, one sequence after the other."""
    mixed = torch.empty(len(layout.chunks), heads.heads * heads.size, dtype=torch.float64)
    for row, (chunk, table) in enumerate(zip(layout.chunks, layout.tables, strict=True)):
        k, v = (of[table].double().transpose(0, 1).flatten(1, 2)[:, : chunk.end] for of in (keys, values))
        queries = q[row].double().view(heads.groups, -1, heads.size)
        mixed[row] = ((queries @ k.transpose(1, 2)).softmax(-1) @ v).flatten()
    return mixed


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("lengths", [[1], [BLOCK, BLOCK + 1, 5 * BLOCK, 700, 3, 2], [40] * 5])
def test_padded_rows_are_float64s(dtype, lengths):
    heads = HeadLayout(6, 2, 16)
    layout, qkv, keys, values = world(heads, lengths, dtype)
    q = qkv[:, : heads.heads]
    mixed = torch.full((len(lengths), heads.heads * heads.size), torch.nan, dtype=dtype)
    kernel = PaddedRows(heads)
    kernel.attend(q, values, keys, layout.decoding, mixed)  # another layer
    kernel.attend(q, keys, values, layout.decoding, mixed)
    assert (mixed.double() - exact(heads, layout, q, keys, values)).abs().max() <= 4 * NEAR[dtype]
    assert len(kernel._parts) == len({np.ceil(np.log2(blocks_of(length, BLOCK))) for length in lengths})
    other = world(heads, lengths[:1], dtype)[0]
    kernel.attend(q[:1], keys, values, other.decoding, mixed[:1])
    assert (mixed[:1].double() - exact(heads, other, q[:1], keys, values)).abs().max() <= 4 * NEAR[dtype]


@built
@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 256]),
    groups=st.integers(1, 4),
    shared=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    dtype=st.sampled_from(list(NEAR)),
    spread=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**20),
    block_size=st.sampled_from([BLOCK, 2 * BLOCK]),
)
@pytest.mark.parametrize("form", forms())
def test_each_form_is_float64s(form, size, groups, shared, lengths, dtype, spread, seed, block_size):
    heads = HeadLayout(groups * shared, groups, size)
    layout, qkv, keys, values = world(heads, lengths, dtype, spread, seed, block_size)
    q = qkv[:, : heads.heads]
    mixed = torch.full((len(lengths), heads.heads * size), torch.nan, dtype=dtype)
    DecodeKernel(form, heads).attend(q, keys, values, layout.decoding, mixed)
    wanted = exact(heads, layout, q, keys, values)
    largest = values.double().abs().max() + wanted.abs().max()
    assert (mixed.double() - wanted).abs().max() <= NEAR[dtype] * largest * max(1, spread / 4)


@built
@pytest.mark.parametrize("form", forms())
def test_all_numbers_of_float16_are_read_and_written_as_torchs(form):
    """A query of zeros weighs tokens the same: what comes out is their mean in float32, rounded. Means of a number and
    the next one lie between both, half of them at the same distance from both.
    """
    numbers, heads = torch.arange(2**16), HeadLayout(1, 1, 256)
    layout = StepLayout.of_chunks([Chunk(np.zeros(1, np.int32), 3, (at,)) for at in range(256)], EXACT, BLOCK)
    keys, values = torch.zeros(2, 256, 1, BLOCK, 256, dtype=torch.float16)
    query, mixed = torch.zeros(256, 1, 256, dtype=torch.float16), torch.empty(256, 256, dtype=torch.float16)
    smallest_normal = torch.full_like(numbers, 1 << 10)
    for other in (numbers + 1, smallest_normal):
        for count in range(4):
            tokens = [numbers] * (4 - count) + [other] * count
            halves = [of.to(torch.int16).view(torch.float16).view(256, 256) for of in tokens]
            values[:, 0, :4] = torch.stack(halves, 1)
            DecodeKernel(form, heads).attend(query, keys, values, layout.decoding, mixed)
            wanted = (sum(of.float() for of in halves) / 4).half()
            torch.testing.assert_close(mixed, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", [PaddedRows, *(partial(DecodeKernel, form) for form in forms())])
def test_what_lies_behind_a_row_is_not_seen(kernel):
    """The rest of a block holds what was there before: here numbers that are none."""
    heads, lengths = HeadLayout(7, 1, 64), [1, 33, 130]
    layout, qkv, keys, values = world(heads, lengths, torch.float32)
    for length, all_blocks in zip(lengths, layout.tables, strict=True):
        table = all_blocks[: blocks_of(length, BLOCK)]
        for of in (keys, values):
            of[table[-1], :, (length - 1) % BLOCK + 1 :] = torch.nan
    mixed = torch.empty(len(lengths), 7 * 64)
    kernel(heads).attend(qkv[:, :7], keys, values, layout.decoding, mixed)
    torch.testing.assert_close(mixed.double(), exact(heads, layout, qkv[:, :7], keys, values), atol=1e-5, rtol=0)


@built
@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("lengths", [[700, 1, 300, 129, 128, 40, 999], [5000], [1024, 1025, 1], [4000, 60] * 3])
def test_threads_share_the_rows_and_long_rows_are_split(lengths, dtype, form):
    heads = HeadLayout(7, 1, 64)
    layout, qkv, keys, values = world(heads, lengths, dtype)
    wanted = exact(heads, layout, qkv[:, :7], keys, values)
    for count in (1, 3, 100):
        torch.set_num_threads(count)
        mixed = torch.full((len(lengths), 7 * 64), torch.nan, dtype=dtype)
        DecodeKernel(form, heads).attend(qkv[:, :7], keys, values, layout.decoding, mixed)
        assert (mixed.double() - wanted).abs().max() <= 4 * NEAR[dtype]


def test_there_are_parts_for_all_threads_and_none_where_there_are_many_rows():
    one, many = np.array([2**17]), np.full(32, 2048)
    for threads in (1, 2, 16, 48):
        assert 2 * -(-one // _share(one, 2, threads)) >= min(threads, 512)
        assert _share(many, 8, threads) >= 2048 or threads > 32 * 8 // 4
    assert _share(np.array([700]), 2, 48) == 512


@built
@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_shows(bad, dtype, form):
    heads = HeadLayout(4, 2, 32)
    layout, qkv, keys, values = world(heads, [3000, 70], dtype)
    keys[layout.tables[0, 7], 1, 10] = bad
    mixed = torch.empty(2, 4, 32, dtype=dtype)
    DecodeKernel(form, heads).attend(qkv[:, :4], keys, values, layout.decoding, mixed)
    assert mixed[0, 2:].isnan().all()
    assert mixed[0, :2].isfinite().all()
    assert mixed[1].isfinite().all()


@built
@pytest.mark.parametrize("dtype", NEAR)
def test_a_step_of_both_kinds_is_torchs(dtype):
    """Rows of one token and pieces of prompts, in any order, with the kernel and without."""
    heads, place = HeadLayout(14, 2, 64), Place(CPU, dtype)
    tokens = [1, 40, 1, 1, 200, 1]
    starts = [300, 0, 0, 127, 77, 128]
    tables = np.arange(18).reshape(6, 3)[::-1]
    chunks = [
        Chunk(np.zeros(count, np.int32), start, tuple(table.tolist()))
        for count, start, table in zip(tokens, starts, tables, strict=True)
    ]
    layout = StepLayout.of_chunks(chunks, place, BLOCK)
    qkv = torch.randn(layout.tokens + layout.spare, heads.total, heads.size)
    qkv[:, : heads.heads] *= heads.size**-0.5
    found = []
    for kernel in (decode_kernel(heads, place), None):
        torch.manual_seed(1)
        cache = Cache(1, heads, 18, place, BLOCK)
        cache.tensor.normal_()
        attention = cache.attention(0, heads)
        attention._kernel = kernel
        attention._prompts = None if kernel is None else attention._prompts
        found.append(attention(qkv.to(dtype), layout).float()[: layout.tokens])
    assert (found[0] - found[1]).abs().max() <= NEAR[dtype] * 8


def test_torch_computes_what_the_kernel_does_not():
    assert decode_kernel(HeadLayout(4, 2, 24), EXACT) is None
    assert decode_kernel(HeadLayout(4, 2, 64), Place(CPU, torch.float64)) is None
    assert decode_kernel(HeadLayout(4, 2, 64), Place(torch.device("cuda"), torch.float32)) is None
    for dtype in NEAR:
        assert (decode_kernel(HeadLayout(4, 2, 64), Place(CPU, dtype)) is not None) == bool(forms())
