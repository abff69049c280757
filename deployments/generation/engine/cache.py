"""The cache of keys and values of all sequences, and the attention to it. Imports torch."""

from __future__ import annotations

import weakref
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.packed.attention import HeadLayout
from deployments.engines.packed.layers import RmsNorm
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.positions import Rotary
from deployments.engines.packed.tensors import Place
from deployments.generation.engine.packed_step import FixedStep, StepLayout
from deployments.generation.engine.paged_attention import PaddedRows, Paged, by_tables, paged_attention
from deployments.generation.kernels import native
from deployments.generation.kernels.decode_kernel import DecodeKernel, decode_kernel
from deployments.generation.kernels.prompt_kernel import PromptKernel, prompt_kernel
from deployments.generation.kernels.row_kernels import turn_kernel
from deployments.generation.scheduler.block_pool import blocks_of


class Ways(NamedTuple):
    """`fixed` computes each `FixedStep`. `paged` computes all chunks of other steps, if there is one. Otherwise
    `kernel` computes chunks of one token and `prompts` longer ones, where there are these, and torch the others.
    """

    kernel: DecodeKernel | PaddedRows | None = None
    paged: Paged | None = None
    fixed: Paged | None = None
    prompts: PromptKernel | None = None


class Cache:
    """Memory for `blocks` blocks, allocated once: [layers, 2 (keys, values), blocks, groups, block_size, size]."""

    def __init__(
        self, layers: int, heads: HeadLayout, blocks: int, place: Place, block_size: int, *, pinned: bool = False
    ) -> None:
        """`pinned`: use page-locked memory of the host, which a CUDA device can copy asynchronously."""
        shape = (layers, 2, blocks, heads.groups, block_size, heads.size)
        on_cpu = place.device.type == "cpu"
        empty = (
            native.empty(shape, place.dtype) if on_cpu else torch.empty(shape, device=place.device, dtype=place.dtype)
        )
        self.tensor = empty.zero_()
        if pinned and blocks:  # pinned in place, because torch's pinned memory rounds up to a power of two
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            pointer = self.tensor.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(pointer, self.tensor.nbytes, 0))
            # Before the memory is freed: CUDA refuses to pin what lies there next, as "already mapped".
            weakref.finalize(self, runtime.cudaHostUnregister, pointer).atexit = False
        paged = None if on_cpu else paged_attention(heads, place, block_size, plain(heads))
        kernel = decode_kernel(heads, place) if on_cpu or paged is not None else PaddedRows(heads)
        self.blocks, self.block_size, self.reads_in_place = blocks, block_size, paged is by_tables
        fixed = by_tables if paged is by_tables else PaddedRows(heads).fixed
        self._ways = Ways(kernel, paged, fixed, prompt_kernel(heads, place))

    def attention(self, layer: int, heads: HeadLayout, turned: Turned | None = None) -> CachedAttention:
        return CachedAttention(heads, *self.tensor[layer], turned=turned, ways=self._ways)


class Turned:
    """The norm of query and key, if a model has one, and their rotation by position."""

    def __init__(self, heads: HeadLayout, norm: RmsNorm | None, rotary: Rotary, place: Place) -> None:
        self._heads, self._norm, self._rotary = heads, norm, rotary
        self._kernel = turn_kernel(heads, norm, place)

    def put(self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout) -> None:
        """Apply norm and rotation to `qkv`, [tokens + spare, heads + 2 groups, size], in place, and put keys and values
        into the cache.
        """
        if self._kernel is not None:
            self._kernel.turn(qkv, self._rotary.angles(step), keys, values, step.slots)
            return
        self.turn(qkv, step)
        put(self._heads, qkv, keys, values, step)

    def turn(self, qkv: torch.Tensor, step: StepLayout) -> None:
        """Apply norm and rotation in place, without the cache."""
        turned = qkv[:, : self._heads.heads + self._heads.groups]
        if self._norm is not None:
            self._norm.in_place(turned)
        self._rotary.turn(turned, step)


def put(heads: HeadLayout, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout) -> None:
    """Put the keys and values of `qkv`, [tokens + spare, heads + 2 groups, size], into the cache."""
    blocks, places = step.slots
    keys[blocks, :, places], values[blocks, :, places] = torch.split(qkv[: step.tokens, heads.heads :], heads.groups, 1)


def plain(heads: HeadLayout) -> Paged:
    """Attention by torch's operations, chunk by chunk."""
    return lambda q, keys, values, step: CachedAttention(heads, keys, values).attend(q, step)


class CachedAttention:
    """The attention of one layer: puts keys and values of a step's tokens into the cache, and lets each token attend to
    its sequence up to itself.
    """

    def __init__(
        self,
        heads: HeadLayout,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        turned: Turned | None = None,
        ways: Ways | None = None,
    ) -> None:
        """`turned`: the norm and rotation of query and key. `ways`: None has torch compute all chunks."""
        self._heads, self._keys, self._values, self._turned = heads, keys, values, turned
        self._kernel, self._paged, self._fixed, self._prompts = ways or Ways()

    def __call__(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        step = cast("StepLayout", layout)
        self.put(qkv, step)
        return step.add_spare(self.attend(qkv, step))

    def put(self, qkv: torch.Tensor, step: StepLayout) -> None:
        """Put the keys and values of `qkv`, [tokens + spare, heads + 2 groups, size], into the cache."""
        if self._turned is None:
            put(self._heads, qkv, self._keys, self._values, step)
        else:
            self._turned.put(qkv, self._keys, self._values, step)

    def attend(self, qkv: torch.Tensor, step: StepLayout) -> torch.Tensor:
        """The attention to what was put, [tokens, heads * size]. Reads only the queries of `qkv`."""
        heads = self._heads
        q = qkv[: step.tokens, : heads.heads]
        paged = self._fixed if isinstance(step, FixedStep) else self._paged
        if paged is not None:
            return paged(q, self._keys, self._values, step)
        mixed = torch.empty(step.tokens, heads.heads * heads.size, dtype=qkv.dtype, device=qkv.device)
        if self._kernel is not None and len(step.decoding.tokens):
            self._kernel.attend(q, self._keys, self._values, step.decoding, mixed)
        if (prompts := self._prompts) is not None and len(step.decoding.tokens) < len(step.chunks):
            tiles = step.once(("tiles", prompts), lambda: prompts.tiles(step.chunks, step.starts, step.tables))
            prompts.attend(q, self._keys, self._values, tiles, mixed)
        ways = (self._kernel is None, self._prompts is None)
        for number, rows in step.once(("torch's", *ways), lambda: self._for_torch(step)):
            chunk = step.chunks[number]
            table = step.tables[number, : blocks_of(chunk.end, self._keys.shape[2])]
            keys, values = (self._of(table, chunk.end, stored) for stored in (self._keys, self._values))
            mixed[rows] = self._attend(q[rows], keys, values, chunk.start)
        return mixed

    def attend_elsewhere(self, qkv: torch.Tensor, step: StepLayout) -> torch.Tensor:
        """The same, on the device of `qkv`. Copies the keys and values before each chunk to that device."""
        heads, parts = self._heads, []
        for chunk, table, own in zip(step.chunks, step.tables, torch.split(qkv, step.lengths), strict=True):
            q, *new = torch.split(own, [heads.heads, heads.groups, heads.groups], 1)
            before = table[: blocks_of(chunk.start, self._keys.shape[2])]
            keys, values = (
                torch.cat([self._of(before, chunk.start, stored).to(qkv.device), one.transpose(0, 1)[None]], 2)
                for stored, one in zip((self._keys, self._values), new, strict=True)
            )
            parts.append(self._attend(q, keys, values, chunk.start))
        return torch.cat(parts)

    def _for_torch(self, step: StepLayout) -> list[tuple[int, slice]]:
        """The chunks that no kernel computes: their indices, and where their tokens lie."""
        ends = np.cumsum(step.lengths).tolist()
        found = enumerate(zip(ends, step.lengths, strict=True))
        missing = (self._kernel is None, self._prompts is None)
        return [(at, slice(end - count, end)) for at, (end, count) in found if missing[count > 1]]

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        """Attention of one sequence: queries [tokens, heads, size] from position `start` on, keys and values
        [1, groups, start + tokens, size] -> [tokens, heads * size].
        """
        tokens, groups, size = len(q), self._heads.groups, self._heads.size
        # The heads that share keys are rows of one product: [groups, heads / groups * tokens, size].
        rows = q.view(tokens, groups, -1, size).permute(1, 2, 0, 3).reshape(1, groups, -1, size)
        mask = None
        if tokens > 1:
            seen = torch.ones(tokens, start + tokens, dtype=torch.bool, device=rows.device).tril(start)
            mask = seen.repeat(rows.shape[2] // tokens, 1)
        mixed = functional.scaled_dot_product_attention(rows, keys, values, mask, scale=1.0)
        return mixed.view(groups, -1, tokens, size).permute(2, 0, 1, 3).reshape(tokens, -1)

    @staticmethod
    def _of(table: torch.Tensor, tokens: int, stored: torch.Tensor) -> torch.Tensor:
        """The keys or values of a sequence's first `tokens` tokens, [1, groups, tokens, size]."""
        blocks = stored.index_select(0, table).transpose(0, 1)
        return blocks.reshape(1, blocks.shape[0], -1, blocks.shape[-1])[:, :, :tokens]
