"""BERT and its kin (RoBERTa, XLM-RoBERTa) over packed tokens: no padding but in a CPU's attention. Imports torch.

The layers are the model's own weights, ready for the device: query, key and value as one product, the attention's scale
folded into the query's weights, and on a CPU what follows a product (residual, activation) fused into it by oneDNN,
gelu only where that is quicker. Which attention is quicker there, a race at start decides, too. Computes what
`PooledModel` computes; the engine compares the two at start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.passes import Lengths
from deployments.models.model_files import ModelCard
from deployments.models.pairs import TYPE

_KINDS = {"bert", "camembert", "roberta", "xlm-roberta"}
_ACTIVATIONS = {  # the model's word for it -> (oneDNN's name, its algorithm)
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
_NONE = ("none", "")
_RACE_ROWS, _RACES = 256, 7
_DENSE_LENGTHS = (75, 128, 256, 512)  # tokens; the scores of longer queries would not stay in the caches
_DENSE_TOKENS = 1024  # of a pass
_SHORT = 48  # tokens; of so short queries it is quicker to pad many than to call the kernel for each
_ROWS = 32  # oneDNN prepares a product anew for each number of rows that it has not met
_FUSED = torch.ops.mkldnn


def unsupported(transformer: Any) -> str | None:
    """Why this transformers model cannot run packed, or None."""
    config = transformer.config
    if config.model_type not in _KINDS:
        return f"{config.model_type} models have no packed form here"
    if config.hidden_act not in _ACTIVATIONS:
        return f"the activation {config.hidden_act} has no packed form here"
    if getattr(config, "is_decoder", False) or getattr(config, "position_embedding_type", None) not in {
        None,
        "absolute",
    }:
        return "a decoder, or relative positions, have no packed form here"
    return None


@dataclass(slots=True)
class Layout:
    """Where the queries of one pass lie in its packed tokens, computed once and used by every layer."""

    queries: int
    longest: int
    ragged: bool
    tokens: int
    spare: int  # rows past the last token that only make the products' shapes few
    bounds: torch.Tensor  # int32 [queries + 1]: where each begins, and the end
    lengths: list[int]
    rows: torch.Tensor | None = None  # int64 [queries * longest]: the padded form's rows among the packed ones
    back: torch.Tensor | None = None  # int64 [tokens]: the packed rows among the padded ones
    bias: torch.Tensor | None = None  # [queries, 1, 1, longest]: 0, or -inf where a query has ended

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device, dtype: torch.dtype, *, padded: bool) -> Layout:
        longest = int(lengths.max())
        bounds = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        tokens = int(bounds[-1])
        layout = cls(
            queries=len(lengths),
            longest=longest,
            ragged=int(lengths.min()) != longest,
            tokens=tokens,
            spare=-tokens % _ROWS if device.type == "cpu" else 0,
            bounds=torch.from_numpy(bounds).to(device, non_blocking=True),
            lengths=lengths.tolist(),
        )
        if padded and layout.ragged:
            columns = np.arange(longest)
            valid = columns < lengths[:, None]
            rows = np.where(valid, bounds[:-1, None] + columns, bounds[:-1, None])
            layout.rows = torch.from_numpy(rows.reshape(-1)).to(device)
            layout.back = torch.from_numpy(np.pad(np.flatnonzero(valid), (0, layout.spare))).to(device)
            bias = np.where(valid, np.float32(0), np.float32(-np.inf))[:, None, None, :]
            layout.bias = torch.from_numpy(bias).to(device, dtype)
        return layout

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] -> [queries, longest, ...]; what a query lacks is some other finite row of its own."""
        packed = packed[: self.tokens] if self.rows is None else packed.index_select(0, self.rows)
        return packed.view(self.queries, self.longest, *packed.shape[1:])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[queries, longest, width] -> [tokens + spare, width]."""
        flat = padded.reshape(self.queries * self.longest, -1)
        if self.back is not None:
            return flat.index_select(0, self.back)
        return self.add_spare(flat)

    def add_spare(self, packed: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> [tokens + spare, width]."""
        return functional.pad(packed, (0, 0, 0, self.spare)) if self.spare else packed


Cast = Callable[[torch.Tensor], torch.Tensor]  # a weight as the device wants it
Head = Callable[[torch.Tensor, Layout], torch.Tensor]  # [tokens, width] -> float32 [queries, numbers]
Attention = Callable[[torch.Tensor, Layout], torch.Tensor]  # [tokens, 3, heads, size] -> [tokens, heads * size]


def _dense(qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Two batched products with the softmax between them, which on some CPUs beat the fused kernel on short queries."""
    heads, size = qkv.shape[2:]
    n, longest = layout.queries, layout.longest
    q, k, v = layout.pad(qkv).permute(2, 0, 3, 1, 4).reshape(3, n * heads, longest, size)
    scores = torch.bmm(q, k.transpose(1, 2))
    if layout.bias is not None:
        scores.view(n, heads, longest, longest).add_(layout.bias)
    shares = scores.softmax(-1, dtype=torch.float32).to(qkv.dtype)  # in bfloat16 it is slower, and coarser
    mixed = torch.bmm(shares, v).view(n, heads, longest, size).transpose(1, 2)
    return layout.unpad(mixed.reshape(n, longest, heads * size))


def _fused_padded(qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
    """All queries through the fused kernel at once, padded inside the attention only."""
    q, k, v = layout.pad(qkv).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=layout.bias, scale=1.0)
    return layout.unpad(mixed.transpose(1, 2).flatten(2))


def _one_by_one(qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Each query alone through the fused kernel, which wants a batch: without one torch takes a slow way round it."""
    mixed = [
        functional.scaled_dot_product_attention(q, k, v, scale=1.0).squeeze(0).transpose(0, 1)
        for q, k, v in (
            one.permute(1, 2, 0, 3).unsqueeze(1).unbind(0) for one in torch.split(qkv[: layout.tokens], layout.lengths)
        )
    ]
    return layout.add_spare(torch.cat(mixed).flatten(1))


def _by_length(longest_dense: int, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
    """For CPUs."""
    if layout.longest <= longest_dense:
        return _dense(qkv, layout)
    if layout.ragged and layout.longest > _SHORT:
        return _one_by_one(qkv, layout)
    return _fused_padded(qkv, layout)


@cache
def _longest_dense(dtype: torch.dtype, heads: int, size: int) -> int:
    """Up to how many tokens a query `_dense` is quicker than the fused kernel on this CPU; 0 where it never is."""
    quicker = 0
    for length in _DENSE_LENGTHS:
        lengths = np.full(_DENSE_TOKENS // length, length, np.int32)
        layout = Layout.of(lengths, torch.device("cpu"), dtype, padded=False)
        qkv = torch.ones(layout.tokens + layout.spare, 3, heads, size, dtype=dtype)
        if not _is_quicker(partial(_dense, qkv, layout), partial(_fused_padded, qkv, layout)):
            break
        quicker = length
    return quicker


def _varlen_cuda(qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Flash attention over queries of different lengths, nothing padded. Needs half precision, and Ampere or newer."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = qkv.unbind(1)
    bounds, longest = layout.bounds, layout.longest
    mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=1.0)
    assert isinstance(mixed, torch.Tensor)  # not asked for anything beside
    return mixed.flatten(1)


def _varlen_npu(qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Ascend's fused attention in its layout for packed tokens (TND). Not run yet: no NPU was at hand."""
    import torch_npu

    q, k, v = (part.contiguous() for part in qkv.unbind(1))
    ends = np.cumsum(layout.lengths).tolist()
    mixed: torch.Tensor = torch_npu.npu_fusion_attention(
        q, k, v, qkv.shape[2], "TND", scale=1.0, actual_seq_qlen=ends, actual_seq_kvlen=ends
    )[0]
    return mixed.flatten(1)


def _is_quicker(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether `one` takes no longer than `other`, taking turns; the quickest of a few counts."""
    seconds = [float("inf"), float("inf")]
    with torch.inference_mode():
        for _ in range(_RACES):
            for which, run in enumerate((one, other)):
                started = time.perf_counter()
                run()
                seconds[which] = min(seconds[which], time.perf_counter() - started)
    return seconds[0] <= seconds[1]


def _choose_attention(device: torch.device, dtype: torch.dtype, heads: int, size: int) -> tuple[Attention, int]:
    """The attention, and the tokens of the longest query for which it may pad."""
    half = dtype in {torch.bfloat16, torch.float16}
    if device.type == "cpu":
        longest_dense = _longest_dense(dtype, heads, size)
        return partial(_by_length, longest_dense), max(longest_dense, _SHORT)
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        return _varlen_cuda, 0
    if device.type == "npu" and half:
        return _varlen_npu, 0
    return _fused_padded, sys.maxsize


def _has_fused(dtype: torch.dtype) -> bool:
    """Whether oneDNN has this CPU's products, with what follows them, in this number format."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    narrow = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in narrow or bool(getattr(_FUSED, narrow[dtype])())


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: tuple[str, str] = _NONE
) -> torch.Tensor:
    """oneDNN's, of weights that are laid out for it."""
    name, algorithm = activation
    y: torch.Tensor = _FUSED._linear_pointwise.default(x, weight, bias, name, [], algorithm)  # noqa: SLF001 - torch's
    return y


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    laid_out: torch.Tensor = _FUSED._reorder_linear_weight(weight, None)  # noqa: SLF001 - torch's
    return laid_out


def _gelu_after(y: torch.Tensor, algorithm: str) -> torch.Tensor:
    """In place: no memory is touched for the first time."""
    return torch.ops.aten.gelu_(y, approximate=algorithm)  # type: ignore[no-any-return]


@cache
def _is_quicker_fused(activation: tuple[str, str], dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    """Whether oneDNN is quicker with gelu in the product than with torch's after it, on this CPU: on one with AVX2 its
    gelu took three times as long as torch's.
    """
    x = torch.ones(_RACE_ROWS, shape[1], dtype=dtype)
    weight, bias = _laid_out(torch.ones(shape, dtype=dtype)), torch.ones(shape[0], dtype=dtype)
    return _is_quicker(
        lambda: _product(x, weight, bias, activation),
        lambda: _gelu_after(_product(x, weight, bias), activation[1]),
    )


class _Dense:
    """A product with a model's weights, laid out for the device once, and the activation behind it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, activation: str | None = None) -> None:
        self._fused = weight.device.type == "cpu" and _has_fused(weight.dtype)
        self._weight = _laid_out(weight) if self._fused else weight
        self._bias = bias
        self._activation = self._within = _ACTIVATIONS[activation] if activation else _NONE
        if self._fused and self._activation[0] == "gelu":
            shape = (weight.shape[0], weight.shape[1])
            self._within = self._activation if _is_quicker_fused(self._activation, weight.dtype, shape) else _NONE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        name, algorithm = self._activation
        if self._fused:
            y = _product(x, self._weight, self._bias, self._within)
            return y if self._within is self._activation else _gelu_after(y, algorithm)
        y = functional.linear(x, self._weight, self._bias)
        if name == "gelu":
            return functional.gelu(y, approximate=algorithm)
        return functional.relu(y) if name == "relu" else y

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._fused:
            y: torch.Tensor = _FUSED._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")  # noqa: SLF001
            return y
        return functional.linear(x, self._weight, self._bias) + residual


class _Norm:
    def __init__(self, norm: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._weight, self._bias, self._eps = cast(norm.weight), cast(norm.bias), norm.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)


class _Layer:
    def __init__(self, layer: Any, heads: int, activation: str, cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        attention, self._heads = layer.attention, heads
        parts = [attention.self.query, attention.self.key, attention.self.value]
        size = parts[0].weight.shape[0] // heads
        scales = [size**-0.5, 1.0, 1.0]
        self._size = size
        self._qkv = _Dense(
            cast(torch.cat([part.weight * scale for part, scale in zip(parts, scales, strict=True)])),
            cast(torch.cat([part.bias * scale for part, scale in zip(parts, scales, strict=True)])),
        )
        self._out = dense_of(attention.output.dense, cast)
        self._norm = _Norm(attention.output.LayerNorm, cast)
        self._up = dense_of(layer.intermediate.dense, cast, activation)
        self._down = dense_of(layer.output.dense, cast)
        self._last_norm = _Norm(layer.output.LayerNorm, cast)

    def __call__(self, x: torch.Tensor, attention: Attention, layout: Layout) -> torch.Tensor:
        qkv = self._qkv(x).view(-1, 3, self._heads, self._size)
        x = self._norm(self._out.plus(attention(qkv, layout), x))
        return self._last_norm(self._down.plus(self._up(x), x))


def dense_of(linear: Any, cast: Cast, activation: str | None = None) -> _Dense:
    return _Dense(cast(linear.weight), cast(linear.bias), activation)


def norm_of(norm: Any, cast: Cast) -> _Norm:
    return _Norm(norm, cast)


class PackedBert:
    """(ids int32 [tokens], lengths [queries]) -> float32 [queries, dimension]: pooled and not normalised, or what
    `head` makes of the tokens; or the vector of each token, [tokens, dimension].
    """

    padded = False

    def __init__(
        self,
        card: ModelCard,
        transformer: Any,
        dtype: torch.dtype,
        device: torch.device,
        *,
        head: Callable[[Cast], Head] | None = None,
        token_types: bool = False,
    ) -> None:
        """`transformer` holds the exact float32 weights; they are copied. It must not be `unsupported`.

        `head` builds what comes instead of pooling; `token_types`: the ids carry them.
        """

        def cast(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().to(device, dtype, copy=True)

        self._head = None if head is None else head(cast)
        config, embeddings = transformer.config, transformer.embeddings
        first = config.pad_token_id + 1 if "roberta" in config.model_type or config.model_type == "camembert" else 0
        self._device, self._dtype, self._pooling = device, dtype, card.pooling
        heads = config.num_attention_heads
        self._attention, self._longest_padded = _choose_attention(device, dtype, heads, config.hidden_size // heads)
        self._words = cast(embeddings.word_embeddings.weight)
        self._positions = cast(
            embeddings.position_embeddings.weight[first:] + embeddings.token_type_embeddings.weight[0]
        )
        types = embeddings.token_type_embeddings.weight
        self._second = cast(embeddings.position_embeddings.weight[first:] + types[1]) if token_types else None
        self._norm = _Norm(embeddings.LayerNorm, cast)
        self._layers = [_Layer(layer, heads, config.hidden_act, cast) for layer in transformer.encoder.layer]

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor:
        padded = int(lengths.max()) <= self._longest_padded
        layout = Layout.of(lengths, self._device, self._dtype, padded=padded)
        positions = torch.cat([self._positions[:length] for length in layout.lengths])
        if self._second is not None:
            is_second = ids >= TYPE
            ids = torch.where(is_second, ids - TYPE, ids)
            second = torch.cat([self._second[:length] for length in layout.lengths])
            positions = torch.where(is_second[:, None], second, positions)
        x = layout.add_spare(self._norm(functional.embedding(ids, self._words) + positions))
        for layer in self._layers:
            x = layer(x, self._attention, layout)
        x = x[: layout.tokens]
        if each_token:
            return x.float()
        return self._pool(x, layout) if self._head is None else self._head(x, layout)

    def _pool(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        if self._pooling == "cls":
            return x.index_select(0, layout.bounds[:-1]).float()
        if self._pooling == "last":
            return x.index_select(0, layout.bounds[1:] - 1).float()
        if not layout.ragged:
            return x.view(layout.queries, layout.longest, -1).mean(1, dtype=torch.float32)
        return torch.stack([one.mean(0, dtype=torch.float32) for one in torch.split(x, layout.lengths)])
