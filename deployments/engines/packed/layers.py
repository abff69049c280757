"""The layers of transformers over packed tokens: products, norms, attention and MLP blocks. Imports torch.

`dense(weights, "a", "b")` and similar functions read tensors `a.weight`, `a.bias` by name. A missing bias is simply
left out. On a CPU, oneDNN fuses what follows a product (residual, activation, another product's result) into it; gelu
only if a race at start shows that this is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from deployments.engines.packed.attention import Attention, HeadLayout
from deployments.engines.packed.layout import Layout
from deployments.engines.packed.positions import Rotary
from deployments.engines.packed.tensors import Weights
from deployments.engines.races import is_quicker
from deployments.errors import first_line

logger = logging.getLogger("ray.serve")

ACTIVATIONS = {  # the config's name -> (oneDNN's name, its algorithm)
    "gelu": ("gelu", "none"),
    "gelu_fast": ("gelu", "tanh"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "swish": ("swish", ""),
}
_NONE = ("none", "")
_RACE_ROWS = 256
_FUSED = torch.ops.mkldnn

Layer = Callable[[torch.Tensor], torch.Tensor]  # [rows, width] -> [rows, width]
Block = Callable[[torch.Tensor, Layout], torch.Tensor]  # of tokens [tokens + spare, width]


class Dense:
    """A product with weights [out, in], which are laid out for the device once, followed by an activation."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None) -> None:
        self._fused = weight.device.type == "cpu" and _has_fused(weight.dtype)
        self._weight = _laid_out(weight) if self._fused else weight
        self._bias = bias
        self._activation = self._within = ACTIVATIONS[activation] if activation else _NONE
        if self._fused and self._activation[0] == "gelu":
            shape = (weight.shape[0], weight.shape[1])
            self._within = self._activation if is_quicker_fused(self._activation, weight.dtype, shape) else _NONE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused:
            y = _product(x, self._weight, self._bias, self._within)
            return y if self._within is self._activation else _activate(y, self._activation)
        return _activate(functional.linear(x, self._weight, self._bias), self._activation)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self._fused:
            return self._with(x, residual, "add")
        return functional.linear(x, self._weight, self._bias) + residual

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times `factor`, element by element."""
        if self._fused:
            return self._with(x, factor, "mul")
        return functional.linear(x, self._weight, self._bias).mul_(factor)

    def _with(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        y: torch.Tensor = _FUSED._linear_pointwise.binary(x, other, self._weight, self._bias, how)  # noqa: SLF001 - torch's
        return y


class Product(Protocol):
    """The interface of `Dense` without an activation."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...

    def floats(self, x: torch.Tensor) -> torch.Tensor: ...


class LayerNorm:
    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)


class RmsNorm:
    """Divides by the root mean square of the last dimension, which is summed in float32 (arXiv:1910.07467). The weight
    is [..., size], with a row for each head if there are several.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self._fused = weight.device.type != "cpu"  # torch's own takes two to seven times as long on a CPU

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fused and self.weight.dim() == 1:
            return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return (x * self._factor(x)).mul_(self.weight)

    def in_place(self, x: torch.Tensor) -> None:
        if self._fused:
            torch.mul(functional.rms_norm(x, (x.shape[-1],), None, self.eps), self.weight, out=x)
        else:
            x.mul_(self._factor(x)).mul_(self.weight)

    def _factor(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse root mean square, [..., 1]."""
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return length.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_().to(x.dtype)


class Mlp:
    """down(up(x)), with the activation in `up`."""

    def __init__(self, up: Layer, down: Product) -> None:
        self._up, self._down = up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._up(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._down.plus(self._up(x), residual)


class GatedMlp:
    """down(gate(x) * up(x)), with the activation in `gate` (arXiv:2002.05202)."""

    def __init__(self, gate: Dense, up: Dense, down: Dense) -> None:
        self._gate, self._up, self._down = gate, up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._up.times(x, self._gate(x)))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._down.plus(self._up.times(x, self._gate(x)), residual)


class HeadNorm(Protocol):
    """Normalizes query and key, [rows, heads + groups, size]."""

    def in_place(self, x: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Self-attention: one product for query, key and value; their norm by head and their rotation, if a model has them;
    the attention; and the output product. The scale is in the query's weights, or in its norm's.
    """

    heads: HeadLayout
    qkv: Product
    out: Product
    attention: Attention
    norm: HeadNorm | None = None
    rotary: Rotary | None = None

    def plus(self, x: torch.Tensor, residual: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The self-attention of `x` plus `residual`, for the wanted rows."""
        return self.out.plus(layout.pick(self.mix(self.project(x), layout)), layout.pick(residual))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Query, key and value, [tokens + spare, heads + 2 groups, size]."""
        return self.qkv(x).view(-1, self.heads.total, self.heads.size)

    def mix(self, qkv: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The attention of what `project` returned, [tokens + spare, heads * size]."""
        if self.norm is not None or self.rotary is not None:
            turned = qkv[:, : self.heads.heads + self.heads.groups]
            if self.norm is not None:
                self.norm.in_place(turned)
            if self.rotary is not None:
                self.rotary.turn(turned, layout)
        return self.attention(qkv, layout)


@dataclass(frozen=True, slots=True)
class PostNorm:
    """A block that normalizes after each sum, as in BERT."""

    attention: SelfAttention
    norm: Layer
    mlp: Mlp | GatedMlp
    last_norm: Layer

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = self.norm(self.attention.plus(x, x, layout))
        return self.last_norm(self.mlp.plus(x, x))


@dataclass(frozen=True, slots=True)
class PreNorm:
    """A block that normalizes before attention and MLP and, as in Gemma, perhaps after them, too. `norm` is None in the
    first block of a model whose embeddings are normalized already.

    `before` and `after` compute the parts before and after the attention, so that the attention can be computed
    elsewhere or later.
    """

    norm: Layer | None
    attention: SelfAttention
    mlp_norm: Layer
    mlp: Mlp | GatedMlp
    behind_attention: Layer | None = None
    behind_mlp: Layer | None = None

    def __call__(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        return self.after(layout.pick(self.attention.mix(self.before(x), layout)), layout.pick(x))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> query, key and value, [tokens, heads + 2 groups, size]."""
        return self.attention.project(x if self.norm is None else self.norm(x))

    def after(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The block's result, from the tokens `x`, or some of them, and their attention, [tokens, heads * size]."""
        if self.behind_attention is None:
            x = self.attention.out.plus(mixed, x)
        else:
            x = self.behind_attention(self.attention.out(mixed)).add_(x)
        del mixed  # free its memory for the MLP
        inner = self.mlp_norm(x)
        return self.mlp.plus(inner, x) if self.behind_mlp is None else self.behind_mlp(self.mlp(inner)).add_(x)


def dense(weights: Weights, *names: str, scales: Sequence[float] = (), activation: str | None = None) -> Dense:
    """The products of these names as one, concatenated, each times its scale."""
    return Dense(*weight_and_bias(weights, *names, scales=scales), activation)


def weight_and_bias(
    weights: Weights, *names: str, scales: Sequence[float] = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and bias of `dense`."""
    weight = weights.joined([f"{name}.weight" for name in names], scales)
    biases = [f"{name}.bias" for name in names]
    return weight, weights.joined(biases, scales) if any(one in weights for one in biases) else None


class Products(Protocol):
    """Creates a decoder's products."""

    def dense(self, weights: Weights, *names: str, scales: Sequence[float] = ()) -> Product:
        """See the function `dense`."""
        ...

    def gated(self, weights: Weights, gate: str, up: str, activation: str) -> Layer:
        """activation(gate(x)) * up(x)."""
        ...


class TorchProducts:
    """`Products` that torch computes."""

    def dense(self, weights: Weights, *names: str, scales: Sequence[float] = ()) -> Product:
        return dense(weights, *names, scales=scales)

    def gated(self, weights: Weights, gate: str, up: str, activation: str) -> Layer:
        gates, ups = dense(weights, gate, activation=activation), dense(weights, up)
        return lambda x: ups.times(x, gates(x))


def dense_qkv(weights: Weights, heads: HeadLayout, *names: str) -> Dense:
    """The product for query, key and value, with the attention's scale in the query's weights. A single name: one
    tensor holds all three.
    """
    return dense(weights, *names, scales=(heads.size**-0.5, 1.0, 1.0))


def dense_halves(weights: Weights, name: str, *activations: str | None) -> tuple[Dense, Dense]:
    """The products with a tensor's upper and lower half, each with its activation."""
    halves = weights[f"{name}.weight"].chunk(2)
    bias = weights.get(f"{name}.bias")
    biases = (None, None) if bias is None else bias.chunk(2)
    first, second = (Dense(*parts) for parts in zip(halves, biases, activations, strict=True))
    return first, second


def layer_norm(weights: Weights, name: str, eps: float) -> LayerNorm:
    return LayerNorm(weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)


def rms_norm(weights: Weights, name: str, eps: float, *, offset: float = 0.0) -> RmsNorm:
    """`offset`: added to the weight; 1 for Gemma."""
    return RmsNorm(weights.cast(weights.exact(f"{name}.weight") + offset), eps)


@cache
def _has_fused(dtype: torch.dtype) -> bool:
    """Whether oneDNN has fused products for this CPU in this number format, and torch still lets us call them: its
    functions are private. If not, torch's public product and activation compute.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    narrow = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    try:
        if dtype in narrow and not getattr(_FUSED, narrow[dtype])():
            return False
        x = torch.ones(2, 2, dtype=dtype)
        weight = _laid_out(x)
        y = _FUSED._linear_pointwise.binary(_product(x, weight, None, ("relu", "")), x, weight, None, "add")  # noqa: SLF001 - torch's
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        logger.warning("oneDNN's fused products are not used: %s", first_line(error))
        return False
    return bool((y == 5).all())


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: tuple[str, str] = _NONE
) -> torch.Tensor:
    """The product by oneDNN, with weights that are laid out for it."""
    name, algorithm = activation
    y: torch.Tensor = _FUSED._linear_pointwise.default(x, weight, bias, name, [], algorithm)  # noqa: SLF001 - torch's
    return y


def _laid_out(weight: torch.Tensor) -> torch.Tensor:
    laid_out: torch.Tensor = _FUSED._reorder_linear_weight(weight, None)  # noqa: SLF001 - torch's
    return laid_out


def _activate(y: torch.Tensor, activation: tuple[str, str]) -> torch.Tensor:
    """Apply an activation in place, which touches no new memory."""
    name, algorithm = activation
    if name == "gelu":
        return torch.ops.aten.gelu_(y, approximate=algorithm)  # type: ignore[no-any-return]
    if name == "swish":
        return functional.silu(y, inplace=True)
    return functional.relu_(y) if name == "relu" else y


@cache
def is_quicker_fused(activation: tuple[str, str], dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    """Whether, on this CPU, oneDNN's product with fused gelu is faster than the product followed by torch's gelu. On a
    CPU with AVX2, oneDNN's gelu took three times as long as torch's.
    """
    x = torch.ones(_RACE_ROWS, shape[1], dtype=dtype)
    weight, bias = _laid_out(torch.ones(shape, dtype=dtype)), torch.ones(shape[0], dtype=dtype)
    return is_quicker(
        lambda: _product(x, weight, bias, activation), lambda: _activate(_product(x, weight, bias), activation)
    )
