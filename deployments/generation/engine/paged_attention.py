"""Attention of all of a step's chunks to a cache in blocks, in one call of an accelerator's kernel. Imports torch.

When a replica starts, each way is tried on made-up chunks and compared with torch's plain operations. A way that fails
or is wrong is skipped, with a line in the log. Only `gathered` has run on a card; no way has run on an NPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.packed.attention import HeadLayout, varlen
from deployments.engines.packed.tensors import Place
from deployments.errors import first_line
from deployments.generation.engine.packed_step import StepLayout, sent
from deployments.generation.kernels.decode_kernel import DecodeRows
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.work import Chunk

logger = logging.getLogger("ray.serve")

# q [tokens, heads, size], keys and values [blocks, groups, block_size, size] -> [tokens, heads * size]
Paged = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StepLayout], torch.Tensor]

_FLASH_BLOCK = 256  # tokens: flash attention 2 reads blocks in place if this divides them (Dao-AILab, issue 828)
_HALF = (torch.bfloat16, torch.float16)
_NEAR = 0.03  # the largest RMS error, relative to the numbers' spread: half precision sums in another order


def block_size_for(place: Place, *, has_host: bool) -> int:
    """Tokens of a cache's blocks: so many that flash attention, where it is, reads them in place. Not run on a card
    yet. With a host, the C kernel reads them too, and small ones move sooner.
    """
    return _FLASH_BLOCK if _has_flash(place) and not has_host else BLOCK


def _has_flash(place: Place) -> bool:
    """Whether PyTorch has flash attention there. It is version 2 unless somebody activates another."""
    device = place.device
    return place.dtype in _HALF and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def paged_attention(heads: HeadLayout, place: Place, block_size: int, plain: Paged) -> Paged | None:
    """The first way of this device that agrees with `plain`. None if there is none."""
    if place.dtype not in _HALF:
        return None
    for way in _ways(heads, place):
        try:
            error = _error(way, plain, heads, place, block_size)
        except Exception as problem:  # noqa: BLE001 - whatever it is, there are other ways
            logger.info("attention by %s is not used: %s", way.__name__, first_line(problem))
            continue
        if error <= _NEAR:
            return way
        logger.warning("attention by %s is not used: its numbers are off by %.3g of their spread", way.__name__, error)
    return None


def _ways(heads: HeadLayout, place: Place) -> Iterator[Paged]:
    if _has_flash(place):
        yield by_tables
        yield gathered
    if place.device.type == "npu":
        yield _by_tables_on_npu(heads)


def _error(way: Paged, plain: Paged, heads: HeadLayout, place: Place, block_size: int) -> float:
    """The RMS error of a step's attention, relative to the spread of its numbers."""
    draw, device = torch.Generator().manual_seed(1), place.device
    tried = ((0, 40), (block_size + 4, 1), (0, block_size + 9), (2 * block_size, 30), (0, 1))  # (start, tokens)
    tables = np.random.default_rng(1).permutation(4 * len(tried)).reshape(len(tried), 4)
    chunks = [
        Chunk(np.zeros(tokens, np.int32), start, tuple(table[: blocks_of(start + tokens, block_size)].tolist()))
        for (start, tokens), table in zip(tried, tables, strict=True)
    ]
    step = StepLayout.of_chunks(chunks, place, block_size)
    stored = torch.randn(2, tables.size, heads.groups, block_size, heads.size, generator=draw)
    keys, values = stored.to(device, place.dtype)
    q = torch.randn(step.tokens, heads.heads, heads.size, generator=draw).to(device, place.dtype) / heads.size**0.5
    found, wanted = (attend(q, keys, values, step).float() for attend in (way, plain))
    return float((found - wanted).square().mean().sqrt() / wanted.std())


class PaddedRows:
    """Attention of a step's chunks of one token where no kernel reads blocks. Rows of about the same length are
    computed together, padded, with keys and values that are copied out of the blocks. Not run on a card yet.
    """

    def __init__(self, heads: HeadLayout) -> None:
        self._heads = heads
        self._rows: DecodeRows | None = None  # of this step, whose layers share `_parts`
        self._parts: list[tuple[torch.Tensor, ...]] = []

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: DecodeRows, mixed: torch.Tensor
    ) -> None:
        """See `DecodeKernel.attend`."""
        if rows is not self._rows:
            self._rows, self._parts = rows, list(_alike(rows, keys.shape[2], q.device))
        for tokens, *places in self._parts:
            mixed[tokens] = self._of(q[tokens], keys, values, *places)

    def fixed(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout) -> torch.Tensor:
        """`Paged` for a `FixedStep`: all rows together, padded to the longest that the step may have."""
        places = step.once("places", lambda: _places(step.ends[:, None], step.tables, keys.shape[2]))
        return self._of(q, keys, values, *places)

    def _of(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, *places: torch.Tensor
    ) -> torch.Tensor:
        """The attention of q, [rows, heads, size], to these `_places`: [rows, heads * size]."""
        k, v = (stored[blocks, :, places[0]].transpose(1, 2) for stored in (keys, values))
        own = q.reshape(len(q), self._heads.groups, -1, self._heads.size)
        return functional.scaled_dot_product_attention(own, k, v, places[1], scale=1.0).flatten(1)


def _alike(rows: DecodeRows, block_size: int, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Rows, longest first, whose blocks differ at most twofold: their tokens, and their `_places`."""
    powers = np.ceil(np.log2(-(-rows.lengths // block_size)))
    for power in np.unique(powers)[::-1]:
        own = np.flatnonzero(powers == power)
        most = blocks_of(int(rows.lengths[own[0]]), block_size)
        about = sent(np.column_stack([rows.tokens[own], rows.lengths[own], rows.tables[own, :most]]), device)
        tokens, lengths, tables = torch.split(about, [1, 1, most], 1)
        yield tokens[:, 0], *_places(lengths, tables, block_size)


def _places(
    lengths: torch.Tensor, tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rows with these lengths, [rows, 1], and block tables: the block of each position and the place in it, [rows,
    positions]; and whether the row sees the position, [rows, 1, 1, positions]. A row is padded with its own last token,
    because what others left in a block may be NaN.
    """
    positions = torch.arange(tables.shape[1] * block_size, device=tables.device)
    at = positions.minimum(lengths - 1)
    return tables.gather(1, at // block_size), at % block_size, (positions < lengths)[:, None, None]


def by_tables(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout) -> torch.Tensor:
    """Flash attention that reads the blocks in place (`_FLASH_BLOCK`)."""
    tables, ends = step.once("tables", lambda: (step.tables.int(), step.ends.int()))
    by_block = keys.transpose(1, 2), values.transpose(1, 2)
    longest = max(step.lengths), step.longest
    return varlen(q, *by_block, step.bounds, None, *longest, window=(-1, 0), seqused_k=ends, block_table=tables)


def gathered(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout) -> torch.Tensor:
    """Flash attention over keys and values that are copied out of their blocks first."""
    blocks, places, bounds = step.once("gathered", lambda: _all_before(step, keys.shape[2]))
    found = keys[blocks, :, places], values[blocks, :, places]
    return varlen(q, *found, step.bounds, bounds, max(step.lengths), step.longest, window=(-1, 0))


def _by_tables_on_npu(heads: HeadLayout) -> Paged:
    def by_tables_on_npu(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout) -> torch.Tensor:
        """Ascend's fused attention for inference, packed tokens (TND) over `Cache`'s blocks."""
        import torch_npu

        tables = step.once("tables", step.tables.int)
        hidden = step.once("hidden", lambda: torch.ones(2048, 2048, device=q.device).triu(1).bool())  # mode 3's mask
        found: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
            q.contiguous(),
            keys,
            values,
            num_heads=heads.heads,
            num_key_value_heads=heads.groups,
            input_layout="TND",
            scale_value=1.0,
            sparse_mode=3,
            atten_mask=hidden,
            actual_seq_lengths=np.cumsum(step.lengths).tolist(),
            actual_seq_lengths_kv=[chunk.end for chunk in step.chunks],
            block_table=tables,
            block_size=keys.shape[2],
        )[0]
        return found.flatten(1)

    return by_tables_on_npu


def _all_before(step: StepLayout, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each chunk, its tokens and all before them: their blocks and positions in the blocks, int64; and where each
    chunk's tokens begin, int32.
    """
    bounds, tokens = functional.pad(step.ends.cumsum(0), (1, 0)), sum(chunk.end for chunk in step.chunks)
    chunks, every = (torch.arange(count, device=bounds.device) for count in (step.queries, tokens))
    chunks = chunks.repeat_interleave(step.ends, output_size=tokens)
    places = every - bounds[chunks]
    return step.tables[chunks, places // block_size], places % block_size, bounds.int()
