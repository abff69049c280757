"""Products of a step's rows with a model's weights on a CPU, by `decode_products.c` if it was built at installation.
Imports torch.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn import functional

from deployments.engines.packed.layers import ACTIVATIONS, Layer, Product, Products, TorchProducts, weight_and_bias
from deployments.engines.packed.tensors import Place, Weights
from deployments.engines.races import is_quicker
from deployments.generation.kernels import native

logger = logging.getLogger("ray.serve")

_NAME = "decode_products"
_COLUMNS, _PAD = 32, 32  # as in the C file
_SHARES = 16  # shares of a product's blocks per thread, so that all threads end at about the same time
_SHARE_BYTES = 2**20  # the most of a share: it must stay in a core's cache while row after row is multiplied
_RACE_WIDTH, _RACE_INNER, _RACE_LAYERS = 1024, 4096, 4  # more weights than a core's caches hold
_RACE_ROWS = (1, 8, 32, 1, 8, 32, 128)  # steps with running answers, and one with a prompt


class _Product(ctypes.Structure):
    """`struct product` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "residual", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "outputs", "x_stride", "is_gated")),
        *((name, ctypes.c_int64) for name in ("dtype", "y_dtype")),
        *((name, ctypes.c_int64) for name in ("blocks", "share", "next")),
    )


class PackedProducts:
    """`Products` by one form of the kernel."""

    def __init__(self, form: str) -> None:
        self._form = form

    def dense(self, weights: Weights, *names: str, scales: Sequence[float] = ()) -> Product:
        weight, bias = weight_and_bias(weights, *names, scales=scales)
        return PackedDense(self._form, weight, biases=(bias,))

    @staticmethod
    def computes(activation: str) -> bool:
        """Whether gated products with this activation are computed here; if not, by torch."""
        return ACTIVATIONS[activation] == ACTIVATIONS["silu"]

    def gated(self, weights: Weights, gate: str, up: str, activation: str) -> Layer:
        if not self.computes(activation):
            return TorchProducts().gated(weights, gate, up, activation)
        (gates, gate_bias), (ups, up_bias) = (weight_and_bias(weights, name) for name in (gate, up))
        return PackedDense(self._form, gates, ups, biases=(gate_bias, up_bias))


class PackedDense:
    """A product with weights [outputs, width], float32 or bfloat16, which are packed once. With two weights of the same
    shape, a gate's and another's, it is silu(gate(x)) * up(x).
    """

    def __init__(self, form: str, *weights: torch.Tensor, biases: tuple[torch.Tensor | None, ...] = ()) -> None:
        """`form`: one of `forms` for the weights' dtype. `biases`: for each weight, [outputs] or None."""
        self._run = native.function(_NAME, form)
        self._outputs, self._dtype = len(weights[0]), weights[0].dtype
        self._gated = len(weights) > 1
        self._weights = _packed(weights)
        self._bias = None
        if any(bias is not None for bias in biases):
            added = [torch.zeros(self._outputs, 1) if bias is None else bias.float().unsqueeze(1) for bias in biases]
            self._bias = _in_blocks(added).contiguous()
        self._width = self._weights[0].numel() // _COLUMNS
        self._most = max(1, _SHARE_BYTES // self._weights[0].nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, None)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`."""
        return self._multiply(x, residual.contiguous())

    def floats(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float32, not rounded to the weights' dtype."""
        return self._multiply(x, None, torch.float32)

    def _multiply(
        self, x: torch.Tensor, residual: torch.Tensor | None, y_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if x.shape[1] < self._width:
            x = functional.pad(x, (0, self._width - x.shape[1]))
        elif x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(x.shape[0], self._outputs, dtype=y_dtype or self._dtype)
        threads, blocks = torch.get_num_threads(), len(self._weights)
        work = _Product(
            x.data_ptr(),
            self._weights.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            self._width,
            self._outputs,
            x.stride(0),
            self._gated,
            native.DTYPES[self._dtype],
            native.DTYPES[y.dtype],
            blocks,
            max(1, min(self._most, blocks // (threads * _SHARES))),
        )
        native.on_threads()(self._run, ctypes.byref(work), min(threads, blocks))
        return y


def products_for(place: Place) -> Products:
    """The faster products on this machine: torch's or the kernel's best form."""
    if (
        place.device.type != "cpu"
        or not forms(place.dtype)
        or not is_quicker_packed(place.dtype, torch.get_num_threads())
    ):
        return TorchProducts()
    return PackedProducts(forms(place.dtype)[0])


@cache
def is_quicker_packed(dtype: torch.dtype, threads: int) -> bool:  # noqa: ARG001 - another race for each number
    """Whether the kernel's best form is faster than torch on this CPU, in a race over a few layers."""
    shapes = dict.fromkeys(("gate.weight", "up.weight"), (_RACE_INNER, _RACE_WIDTH))
    shapes["down.weight"] = (_RACE_WIDTH, _RACE_INNER)
    weights = Weights(shapes, lambda name: torch.zeros(shapes[name]), Place(torch.device("cpu"), dtype))
    inputs = [torch.ones(rows, _RACE_WIDTH, dtype=dtype) for rows in _RACE_ROWS]

    def layers(products: Products) -> Callable[[], None]:
        made = [
            (products.gated(weights, "gate", "up", "silu"), products.dense(weights, "down"))
            for _ in range(_RACE_LAYERS)
        ]

        def run() -> None:
            for x in inputs:
                for gated, down in made:
                    down.plus(gated(x), x)

        return run

    best = forms(dtype)[0]
    quicker = is_quicker(layers(PackedProducts(best)), layers(TorchProducts()))
    logger.info("products of answers in %s: %s", dtype, f"the form {best}" if quicker else "torch's, which are faster")
    return quicker


def forms(dtype: torch.dtype) -> list[str]:
    """The forms that this processor runs for a dtype, best first."""
    if dtype not in {torch.float32, torch.bfloat16}:
        return []
    found = native.forms(_NAME)
    return found if dtype == torch.bfloat16 else [form for form in found if form not in {"amx", "avx512bf16"}]


def _packed(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The weights for the kernel: [blocks, width, COLUMNS], or in bfloat16 [blocks, width / 2, COLUMNS, 2]."""
    blocks = _in_blocks(weights)
    if blocks.dtype == torch.bfloat16:
        blocks = functional.pad(blocks, (0, -blocks.shape[2] % _PAD))
        blocks = blocks.view(*blocks.shape[:2], -1, 2)
    blocks = blocks.transpose(1, 2)
    return native.empty(blocks.shape, blocks.dtype).copy_(blocks)


def _in_blocks(weights: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Weights [outputs, width] each -> [blocks, COLUMNS, width]. Each block has equally many outputs of each weight."""
    columns = _COLUMNS // len(weights)
    padded = (functional.pad(weight, (0, 0, 0, -len(weight) % columns)) for weight in weights)
    return torch.cat([weight.reshape(-1, columns, weight.shape[1]) for weight in padded], 1)
