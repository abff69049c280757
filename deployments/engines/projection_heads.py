"""The layers after transformer and pooling (`models.projections`), in float32. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from deployments.engines.micro_batches import Lengths
from deployments.engines.packed.model import pool_rows
from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard
from deployments.models.model_folder import bad_model
from deployments.models.outputs import TEXT, Output, Outputs
from deployments.models.projections import Projection, opened
from deployments.models.tokenizer_files import read_tokenizer

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class PooledEncoder(Protocol):
    """A transformer with its pooling or head, packed or padded."""

    padded: bool

    def __call__(self, ids: torch.Tensor, lengths: Lengths, *, each_token: bool = False) -> torch.Tensor: ...


class ProjectionHeads(torch.nn.Module):
    """Computes a model's outputs from its encoder's results."""

    def __init__(self, card: ModelCard) -> None:
        """Load the layers. Raises SettingsError if weights cannot be read."""
        super().__init__()
        self._pooling = card.pooling
        self._after = torch.nn.ModuleDict({output: Projected(some) for output, some in card.projections.items()})

    def text(self, pooled: torch.Tensor) -> torch.Tensor:
        """The output "text", [queries, numbers], from the pooled vectors, or whatever else the encoder returns."""
        return self._after["text"](pooled) if "text" in self._after else pooled

    def __call__(
        self, encoder: PooledEncoder, ids: torch.Tensor, lengths: Lengths, outputs: Outputs
    ) -> tuple[torch.Tensor, ...]:
        """Compute the rows of each output, float32 on the device: [queries, numbers] or [tokens, numbers]."""
        if outputs == TEXT:
            return (self.text(encoder(ids, lengths)),)
        states = encoder(ids, lengths, each_token=True)
        return tuple(self._answer(output, states, lengths) for output in outputs)

    def _answer(self, output: Output, states: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        if output == "text":
            bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
            return self.text(pool_rows(states, bounds.to(states.device), lengths.tolist(), self._pooling))
        if output == "tokens":
            return states
        rows: torch.Tensor = self._after[output](states)
        return functional.normalize(rows, dim=-1) if output == "multi_vector" else rows


class Projected(torch.nn.Module):
    """[rows, inputs of the first projection] -> float32 [rows, outputs of the last]. Without projections, rows pass
    unchanged.
    """

    def __init__(self, projections: Sequence[Projection]) -> None:
        """Load the weights. Raises SettingsError if some are missing, or their sizes differ from the model's files."""
        super().__init__()
        self._layers = torch.nn.ModuleList(map(_Layer, projections))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        for layer in self._layers:
            x = layer(x)
        return x


class _Layer(torch.nn.Module):
    def __init__(self, projection: Projection) -> None:
        super().__init__()
        tensors = _read(projection)
        self.weight = _fixed(tensors[projection.weight])
        self.bias = None if projection.bias is None else _fixed(tensors[projection.bias])
        self.residual = _fixed(tensors[projection.residual]) if projection.residual else None
        self._adds_input = projection.residual == ""
        self._activation = _ACTIVATIONS[projection.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._activation(functional.linear(x, self.weight, self.bias))
        if self.residual is not None:
            return y + functional.linear(x, self.residual)
        return y + x if self._adds_input else y


def _fixed(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.float(), requires_grad=False)


def _read(projection: Projection) -> dict[str, torch.Tensor]:
    if projection.words is not None:
        return {projection.weight: _difference(projection, projection.words)}
    sizes = {projection.weight: [projection.outputs, projection.inputs]}
    if projection.bias is not None:
        sizes[projection.bias] = [projection.outputs]
    if projection.residual:
        sizes[projection.residual] = [projection.outputs, projection.inputs]
    with opened(projection.file, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sizes}
    for name, size in sizes.items():
        if list(tensors[name].shape) != size:
            raise bad_model(f"{projection.file} has {list(tensors[name].shape)} numbers in {name}, not {size}")
    return tensors


def _difference(projection: Projection, words: tuple[str, str]) -> torch.Tensor:
    """A matrix's row for one token minus its row for another, [1, inputs]."""
    tokenizer = read_tokenizer(projection.file.parent)
    if tokenizer is None:
        raise bad_model(f"{projection.file.parent} holds no tokenizer.json, which says its words")
    rows = []
    with opened(projection.file, "pt") as file:
        matrix = file.get_slice(projection.weight)
        for word in words:
            number = tokenizer.token_to_id(word)
            if number is None:
                raise SettingsError("args.model.template", f"the model's tokenizer has no token {word!r}")
            rows.append(matrix[number : number + 1].float())
    difference: torch.Tensor = rows[0] - rows[1]
    return difference
