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
            assert k.shape[1] % 256 == 0  # flash attention 2 refuses others
            keys, values = (stored[block_table[number]].flatten(0, 1)[: seqused_k[number]] for stored in (k, v))
        count = end - start
        assert count <= max_q
        assert len(keys) <= max_k
        seen = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
        rows = [one.transpose(0, 1)[None] for one in (q[start:end], keys, values)]
        mixed = functional.scaled_dot_product_attention(*rows, seen, scale=1.0, enable_gqa=True)
        found.append(mixed[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize(("way", "block_size"), [(paged.by_tables, 256), (paged.gathered, 256), (paged.gathered, 128)])
def test_a_kernel_is_told_what_its_documentation_asks_for(monkeypatch, way, block_size):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    assert paged._error(way, plain(HEADS), HEADS, HALF, block_size) < 0.01


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "has_host", "tokens"),
    [("cuda", torch.bfloat16, (8, 0), False, 256), ("cuda", torch.float16, (9, 0), False, 256),
     ("cuda", torch.bfloat16, (8, 0), True, 128), ("cuda", torch.float32, (8, 0), False, 128),
     ("cuda", torch.float16, (7, 5), False, 128), ("cpu", torch.bfloat16, None, False, 128)],
)  # fmt: skip
def test_blocks_are_as_large_as_flash_attention_needs(monkeypatch, device, dtype, capability, has_host, tokens):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert paged.block_size_for(Place(torch.device(device), dtype), has_host=has_host) == tokens


def test_pytorch_2_11_copies_keys_out_of_their_blocks(monkeypatch):
    """Its function knows neither blocks nor `enable_gqa`."""

    def older(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size):
        return flash(q, k, v, bounds_q, bounds_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    assert paged._error(paged.gathered, plain(HEADS), HEADS, HALF, 256) < 0.01
    with pytest.raises(TypeError, match="seqused_k"):
        paged._error(paged.by_tables, plain(HEADS), HEADS, HALF, 256)


def test_pinned_memory_is_unpinned_before_it_is_freed(monkeypatch):
    """What CUDA has pinned and not unpinned, it refuses to pin again: "already mapped" (712)."""
    pinned = set()

    runtime = SimpleNamespace(cudaHostRegister=lambda at, *_: pinned.add(at), cudaHostUnregister=pinned.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    cache = Cache(1, HEADS, 2, HALF, 128, pinned=True)
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
    assert paged.paged_attention(HEADS, HALF, 128, plain(HEADS)) is right
    assert "attention by refuses is not used: Paged KV cache block size must be divisible by 256" in caplog.text
    assert "attention by errs is not used: its numbers are off by" in caplog.text
    monkeypatch.setattr(paged, "_ways", lambda *_: iter([refuses]))
    assert paged.paged_attention(HEADS, HALF, 128, plain(HEADS)) is None


def test_full_precision_and_cpus_have_none():
    assert paged.paged_attention(HEADS, Place(torch.device("cpu"), torch.float32), 128, plain(HEADS)) is None
    assert paged.paged_attention(HEADS, HALF, 128, plain(HEADS)) is None


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: its kernels over a cache in blocks are not run"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cuda_device_has_one_that_is_right(dtype):
    place = Place(torch.device("cuda"), dtype)
    way = paged.paged_attention(HEADS, place, paged.block_size_for(place, has_host=False), plain(HEADS))
    assert (way is not None) == (torch.cuda.get_device_capability() >= (8, 0))
