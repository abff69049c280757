"""Accelerators' kernels over a cache in blocks: what they are told, held against torch's plain operations."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.tensors import Place
from deployments.generation.engine import paged_attention as paged
from deployments.generation.engine.cache import Cache, plain

HEADS = HeadLayout(6, 2, 32)
HALF = Place(torch.device("cpu"), torch.bfloat16)


def flash(
    q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k=None, block_table=None
):
    """torch's varlen_attn by its documentation: what it says of shapes, ends and tables, computed plainly."""
    assert (scale, window_size, enable_gqa) == (1.0, (-1, 0), True)
    assert bounds_q.dtype == torch.int32
    found = []
    for number, (start, end) in enumerate(zip(bounds_q.tolist(), bounds_q.tolist()[1:])):  # noqa: B905 - pairs
        if block_table is None:
            assert bounds_k.dtype == torch.int32
            own = slice(*bounds_k[number : number + 2].tolist())
            keys, values = k[own], v[own]
        else:
            assert block_table.dtype == seqused_k.dtype == torch.int32
            keys, values = (stored[block_table[number]].flatten(0, 1)[: seqused_k[number]] for stored in (k, v))
        count = end - start
        assert count <= max_q
        assert len(keys) <= max_k
        seen = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
        rows = [one.transpose(0, 1)[None] for one in (q[start:end], keys, values)]
        mixed = functional.scaled_dot_product_attention(*rows, seen, scale=1.0, enable_gqa=True)
        found.append(mixed[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("way", [paged.by_tables, paged.gathered])
def test_a_kernel_is_told_what_its_documentation_asks_for(monkeypatch, way):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    assert paged._error(way, plain(HEADS), HEADS, HALF) < 0.01


def test_pytorch_2_11_copies_keys_out_of_their_blocks(monkeypatch):
    """Its function knows neither blocks nor `enable_gqa`."""

    def older(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size):
        return flash(q, k, v, bounds_q, bounds_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    assert paged._error(paged.gathered, plain(HEADS), HEADS, HALF) < 0.01
    with pytest.raises(TypeError, match="seqused_k"):
        paged._error(paged.by_tables, plain(HEADS), HEADS, HALF)


def test_pinned_memory_is_unpinned_before_it_is_freed(monkeypatch):
    """What CUDA has pinned and not unpinned, it refuses to pin again: "already mapped" (712)."""
    pinned = set()

    runtime = SimpleNamespace(cudaHostRegister=lambda at, *_: pinned.add(at), cudaHostUnregister=pinned.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    cache = Cache(1, HEADS, 2, HALF, pinned=True)
    assert pinned == {cache.tensor.data_ptr()}
    del cache
    assert not pinned


def test_the_first_way_that_works_and_is_right_is_taken(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "ray.serve")

    def refuses(*_):
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nand more")

    def errs(q, keys, values, step):
        return plain(HEADS)(q, keys, values.roll(1, 0), step)

    right = plain(HEADS)
    monkeypatch.setattr(paged, "_ways", lambda *_: iter([refuses, errs, right]))
    assert paged.paged_attention(HEADS, HALF, plain(HEADS)) is right
    assert "attention by refuses is not used: Paged KV cache block size must be divisible by 256" in caplog.text
    assert "attention by errs is not used: its numbers are off by" in caplog.text
    monkeypatch.setattr(paged, "_ways", lambda *_: iter([refuses]))
    assert paged.paged_attention(HEADS, HALF, plain(HEADS)) is None


def test_full_precision_and_cpus_have_none():
    assert paged.paged_attention(HEADS, Place(torch.device("cpu"), torch.float32), plain(HEADS)) is None
    assert paged.paged_attention(HEADS, HALF, plain(HEADS)) is None


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: its kernels over a cache in blocks are not run"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cuda_device_has_one_that_is_right(dtype):
    place = Place(torch.device("cuda"), dtype)
    way = paged.paged_attention(HEADS, place, plain(HEADS))
    assert (way is not None) == (torch.cuda.get_device_capability() >= (8, 0))
