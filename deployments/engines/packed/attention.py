"""Attention over packed tokens: which tokens attend to each other, and the fastest way to compute it on a device.

On a CPU a race at start decides: two products with a softmax in between, or torch's fused kernel for all queries
together or for each. On CUDA it is flash attention over queries of different lengths or, with a bias on the scores, the
fused kernel over padded queries. Imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.packed.fixed_layout import FixedLayout
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.tensors import Place
from deployments.engines.races import is_quicker

_DENSE_LENGTHS = (75, 128, 256, 512)  # tokens; the scores of longer queries would not stay in the caches
_DENSE_TOKENS = 1024  # tokens in a pass of the race
_SHORT = 48  # tokens; for queries this short, padding is faster than calling the kernel for each
_BLOCK = 256  # rows of masked scores at a time, to limit the memory of the mask
_PADDED = 1024  # tokens; masked scores of longer queries are computed in blocks on every device
_COMPRESSED = 2048  # size of the mask that Ascend's fused attention takes for causal and windowed attention alike

# [tokens + spare, heads + 2 groups, size]: query (with the scale in it), key, value -> [tokens + spare, heads * size]
Attention = Callable[[torch.Tensor, Layout], torch.Tensor]
Bias = Callable[[torch.Tensor], torch.Tensor]  # int64 [distances], key minus query -> float32 [heads, distances]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """`heads` of the query; `groups` of key and value (if fewer, several heads share one); `size`: numbers in each."""

    heads: int
    groups: int
    size: int

    @property
    def total(self) -> int:
        return self.heads + 2 * self.groups


@dataclass(frozen=True, slots=True)
class Reach:
    """How many tokens before and after itself a token attends to. None: all of them."""

    before: int | None = None
    after: int | None = None

    def within(self, tokens: int) -> Reach:
        """The reach among `tokens` tokens. A window that is wide enough becomes None."""
        return Reach(*(None if side is None or side >= tokens - 1 else side for side in (self.before, self.after)))

    def sees(self, distances: torch.Tensor) -> torch.Tensor:
        """Whether a query attends to keys at these distances. Negative: the key comes first."""
        seen = torch.ones_like(distances, dtype=torch.bool)
        if self.before is not None:
            seen &= distances >= -self.before
        if self.after is not None:
            seen &= distances <= self.after
        return seen


ALL, CAUSAL = Reach(), Reach(after=0)


class Ways:
    """Several ways to compute one kind of attention. Each is an `Attention`. `bias` depends only on the distance of key
    and query, so that one row of numbers covers every length.
    """

    def __init__(self, heads: HeadLayout, place: Place, reach: Reach = ALL, bias: Bias | None = None) -> None:
        self.heads, self.place, self.reach, self.bias = heads, place, reach, bias
        self._by_distance = torch.empty(0)

    def is_causal(self, tokens: int) -> bool:
        """Whether the scores among `tokens` tokens have a causal mask and nothing else."""
        return self.bias is None and self.reach.within(tokens) == CAUSAL

    def _is_plainly_causal(self, layout: Layout) -> bool:
        return self.is_causal(layout.longest) and layout.hidden is None

    def is_masked(self, tokens: int) -> bool:
        """Whether anything is added to the scores of a query of `tokens` tokens."""
        return self.bias is not None or self.reach.within(tokens) != ALL

    def added(self, rows: slice, columns: slice) -> torch.Tensor:
        """What is added to these scores of a query, [heads or 1, rows, columns]."""
        width = columns.stop - columns.start
        table = self._distances(max(rows.stop, columns.stop))
        zero = table.shape[1] // 2
        here = table[:, zero + columns.start - (rows.stop - 1) : zero + columns.stop - rows.start]
        return here.unfold(1, width, 1).flip(1)

    def _distances(self, tokens: int) -> torch.Tensor:
        """The bias by distance, and -inf out of reach, [heads or 1, 2 n - 1] for some n of at least `tokens`."""
        table = self._by_distance
        if table.dim() < 2 or table.shape[1] < 2 * tokens - 1:
            most = 1 << (tokens - 1).bit_length()
            distances = torch.arange(1 - most, most)
            made = torch.zeros(1, len(distances)) if self.bias is None else self.bias(distances)
            hidden = ~self.reach.sees(distances).to(made.device)
            table = made.masked_fill(hidden, -torch.inf).to(self.place.device, self.place.dtype)
            self._by_distance = table  # assigned once: other passes may be reading it
        return table

    def _among(self, layout: Layout) -> torch.Tensor:
        """What is added to the scores of the longest query, [heads or 1, longest, longest]."""
        whole = slice(0, layout.longest)
        return layout.once((self, "among"), lambda: self.added(whole, whole))

    def _mask(self, layout: Layout) -> torch.Tensor | None:
        """The mask for the fused kernel, [queries or 1, heads or 1, longest or 1, longest]. None if it needs none."""
        masked = self.is_masked(layout.longest) and not self._is_plainly_causal(layout)
        among = self._among(layout) if masked else None
        looks_ahead = self.reach.after != 0 or layout.hidden is not None
        ended = layout.ended() if looks_ahead else None  # masks what comes after a query's last token
        if among is None or ended is None:
            return ended if among is None else among[None]
        return layout.once((self, "mask"), lambda: among + ended)

    def dense(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Two batched products with a softmax in between: on some CPUs the fastest way for short queries."""
        heads, groups, size = self.heads.heads, self.heads.groups, self.heads.size
        n, longest = layout.queries, layout.longest
        q, k, v = (part.reshape(n * groups, -1, size) for part in _parts(layout.pad(qkv).transpose(1, 2), self.heads))
        scores = torch.bmm(q, k.transpose(1, 2))
        by_head = scores.view(n, heads, longest, longest)
        if self.is_masked(longest):
            by_head.add_(self._among(layout))
        if self.reach.after != 0 and (ended := layout.ended()) is not None:
            by_head.add_(ended)
        shares = scores.softmax(-1, dtype=torch.float32).to(qkv.dtype)  # bfloat16 would be slower and less precise
        mixed = torch.bmm(shares, v).view(n, heads, longest, size).transpose(1, 2)
        return layout.unpad(mixed.reshape(n, longest, heads * size))

    def padded(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """All queries through the fused kernel at once, padded inside the attention only."""
        q, k, v = _parts(layout.pad(qkv).transpose(1, 2), self.heads)
        mixed = self._fused(q, k, v, self._mask(layout), causal=self._is_plainly_causal(layout))
        return layout.unpad(mixed.transpose(1, 2).flatten(2))

    def one_by_one(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Each query alone through the fused kernel, as a batch of one: without a batch, torch takes a slow path."""
        mixed = []
        for one in torch.split(qkv[: layout.tokens], layout.lengths):
            q, k, v = _parts(one.transpose(0, 1).unsqueeze(0), self.heads)
            length = len(one)
            if self.is_masked(length) and not self.is_causal(length):
                found = torch.cat([self._block(q, k, v, rows) for rows in _blocks(length)], 2)
            else:
                found = self._fused(q, k, v, None, causal=self.is_causal(length))
            mixed.append(found.squeeze(0).transpose(0, 1))
        return layout.add_spare(torch.cat(mixed).flatten(1))

    def _block(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: slice) -> torch.Tensor:
        """These rows of one query, with the keys to which any of them attends."""
        before, after, length = self.reach.before, self.reach.after, q.shape[2]
        first = 0 if before is None else max(0, rows.start - before)
        end = length if after is None else min(length, rows.stop + after)
        added = self.added(rows, slice(first, end))[None]
        return self._fused(q[:, :, rows], k[:, :, first:end], v[:, :, first:end], added, causal=False)

    def _fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=1.0, enable_gqa=self.heads.heads != self.heads.groups
        )

    def varlen_cuda(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Flash attention over queries of different lengths, without padding. Needs half precision, an Ampere or newer
        GPU, and no bias.
        """
        q, k, v = _parts(qkv, self.heads)
        bounds, longest, reach = layout.bounds, layout.longest, self.reach.within(layout.longest)
        window = _or_all(reach.before), _or_all(reach.after)
        return varlen(q, k, v, bounds, bounds, longest, longest, window=window)

    def varlen_npu(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Ascend's fused attention in its layout for packed tokens (TND). Not run yet, because no NPU was at hand."""
        import torch_npu

        q, k, v = (part.contiguous() for part in _parts(qkv, self.heads))
        ends = np.cumsum(layout.lengths).tolist()
        reach, masked = self.reach.within(layout.longest), {}
        if reach != ALL:  # mode 3 is causal, mode 4 a band; both take this mask of hidden tokens
            hidden = layout.once("hidden", lambda: torch.ones(_COMPRESSED, _COMPRESSED, device=q.device).triu(1).bool())
            masked = {"atten_mask": hidden, "sparse_mode": 3 if reach == CAUSAL else 4}
            if reach != CAUSAL:
                far = layout.longest
                masked |= {"pre_tockens": far if reach.before is None else reach.before}
                masked |= {"next_tockens": far if reach.after is None else reach.after}
        mixed: torch.Tensor = torch_npu.npu_fusion_attention(
            q, k, v, self.heads.heads, "TND", scale=1.0, actual_seq_qlen=ends, actual_seq_kvlen=ends, **masked
        )[0]
        return mixed.flatten(1)

    def as_one(self, qkv: torch.Tensor, layout: FixedLayout) -> torch.Tensor:
        """All queries as one, with a mask between them. Its time grows with the square of the pass's tokens, but its
        shapes do not depend on the queries.
        """
        q, k, v = _parts(qkv.transpose(0, 1)[None], self.heads)
        mask = layout.once((self, "between"), lambda: self._between(layout))
        return self._fused(q, k, v, mask, causal=False)[0].transpose(0, 1).flatten(1)

    def _between(self, layout: FixedLayout) -> torch.Tensor:
        """What is added to the scores of all tokens, [1, heads or 1, tokens, tokens]."""
        table = self._distances(layout.longest)
        layout.held.append(table)
        starts, positions = layout.starts(), layout.positions.long()
        added = table[:, positions - positions[:, None] + table.shape[1] // 2]
        return added.masked_fill_(starts != starts[:, None], -torch.inf)[None]

    def for_layout(self, quickest: Attention, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The fastest way, or one that can mask hidden tokens, or one of fixed shapes."""
        if layout.hidden is not None:
            return self.padded(qkv, layout)
        if isinstance(layout, FixedLayout) and quickest != self.varlen_cuda:
            return self.as_one(qkv, layout)
        return quickest(qkv, layout)

    def by_length(self, longest_dense: int, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Attention on CPUs, by the lengths of the queries."""
        if layout.longest <= longest_dense:
            return self.dense(qkv, layout)
        if layout.longest > _SHORT and (layout.ragged or self._wants_blocks(layout.longest, _BLOCK)):
            return self.one_by_one(qkv, layout)
        return self.padded(qkv, layout)

    def by_padding(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Attention on devices without a kernel for packed queries."""
        if self._wants_blocks(layout.longest, _PADDED):
            return self.one_by_one(qkv, layout)
        return self.padded(qkv, layout)

    def _wants_blocks(self, tokens: int, longest: int) -> bool:
        return tokens > longest and self.is_masked(tokens) and not self.is_causal(tokens)


def _parts(qkv: torch.Tensor, heads: HeadLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [any, heads + 2 groups, ...] into query, key and value."""
    q, k, v = torch.split(qkv, [heads.heads, heads.groups, heads.groups], 1)
    return q, k, v


def varlen(q: torch.Tensor, k: torch.Tensor, *others: Any, window: tuple[int, int], **blocks: Any) -> torch.Tensor:
    """Flash attention by torch over queries of different lengths, [tokens, heads * size], with scale 1. `others`: the
    values, the bounds of queries and of keys, and the largest length of each. `blocks`: which blocks hold the keys.

    PyTorch 2.11 does not know blocks (TypeError), and takes fewer key heads without being told.
    """
    from torch.nn.attention import varlen as module

    function: Callable[..., Any] = module.varlen_attn
    if "enable_gqa" in _arguments(function):
        blocks["enable_gqa"] = q.shape[-2] != k.shape[-2]
    mixed = function(q, k, *others, scale=1.0, window_size=window, **blocks)
    assert isinstance(mixed, torch.Tensor)  # no additional outputs were requested
    return mixed.flatten(1)


@cache
def _arguments(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def _or_all(side: int | None) -> int:
    return -1 if side is None else side


def attention_for(heads: HeadLayout, place: Place, reach: Reach = ALL, bias: Bias | None = None) -> Attention:
    """The fastest way on that place."""
    ways = Ways(heads, place, reach, bias)
    return partial(ways.for_layout, _quickest(ways))


def _quickest(ways: Ways) -> Attention:
    heads, place, reach, bias, kind = ways.heads, ways.place, ways.reach, ways.bias, ways.place.device.type
    if kind == "cpu":
        return partial(ways.by_length, longest_dense(heads, place.dtype, reach, biased=bias is not None))
    if bias is None and place.dtype in {torch.bfloat16, torch.float16}:
        if kind == "cuda" and torch.cuda.get_device_capability(place.device) >= (8, 0):
            return ways.varlen_cuda
        if kind == "npu":
            return ways.varlen_npu
    return ways.by_padding


@cache
def longest_dense(heads: HeadLayout, dtype: torch.dtype, reach: Reach, *, biased: bool) -> int:
    """The longest query, in tokens, for which `dense` is faster than the fused kernel on this CPU. 0: it never is."""

    def zeros(distances: torch.Tensor) -> torch.Tensor:
        return torch.zeros(heads.heads, len(distances))

    place = Place(torch.device("cpu"), dtype)
    ways, quicker = Ways(heads, place, reach, zeros if biased else None), 0
    for length in _DENSE_LENGTHS:
        layout = Layout.of(np.full(_DENSE_TOKENS // length, length, np.int32), place)
        qkv = torch.ones(layout.tokens + layout.spare, heads.total, heads.size, dtype=dtype)
        if not is_quicker(partial(ways.dense, qkv, layout), partial(ways.padded, qkv, layout)):
            break
        quicker = length
    return quicker
