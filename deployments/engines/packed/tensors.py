"""A model's tensors by name, ready for a device: from a loaded transformers module, or straight from its files.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from deployments.models.weights import find_weights


class MissingWeight(KeyError):
    """A model's weights lack a tensor. The argument is its name."""


@dataclass(frozen=True, slots=True)
class Place:
    """The device and the number format in which a model computes."""

    device: torch.device
    dtype: torch.dtype


class Weights:
    """Tensors under a prefix, by the names of a state dict. `read` returns a tensor as it is stored. Callers get copies
    of it on the place.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor], place: Place) -> None:
        self._names, self._read, self.place = frozenset(names), read, place
        self._prefix = ""

    @classmethod
    def of_module(cls, module: Any, place: Place) -> Weights:
        """The weights of a loaded module, which may be changed afterwards."""
        state = module.state_dict()
        return cls(state, state.__getitem__, place)

    @classmethod
    def of_files(cls, folder: Path, place: Place) -> Weights:
        """The weights in a model's safetensors files. Each tensor is read on request and not kept. Its file is opened
        again each time, because data read from a file that stays open count as used memory.
        """
        holders: dict[str, Path] = {}
        for path in find_weights(folder):
            with safe_open(path, "pt") as opened:
                holders |= dict.fromkeys(opened.keys(), path)

        def read(name: str) -> torch.Tensor:
            with safe_open(holders[name], "pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor

        return cls(holders, read, place)

    def of_class(self, sizes: Mapping[str, torch.Size]) -> Weights:
        """The weights by the names of a class. Reading a missing one, or one of another size, raises MissingWeight."""

        def read(name: str) -> torch.Tensor:
            tensor = self._read(name) if name in self._names else None
            if tensor is None or tensor.shape != sizes[name]:
                raise MissingWeight(f"{name} of {list(sizes[name])} numbers")
            return tensor

        return Weights(sizes, read, self.place)

    def within(self, prefix: str) -> Weights:
        """The weights under `prefix` and a dot. An empty prefix changes nothing."""
        inner = Weights(self._names, self._read, self.place)
        inner._prefix = f"{self._prefix}{prefix}." if prefix else self._prefix
        return inner

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._names

    def has(self, prefix: str) -> bool:
        """Whether there is any tensor under that prefix."""
        return any(name.startswith(f"{self._prefix}{prefix}.") for name in self._names)

    def exact(self, name: str) -> torch.Tensor:
        """A tensor in float32, on its original device, for computations before `cast`. Raises MissingWeight."""
        if name not in self:
            raise MissingWeight(self._prefix + name)
        return self._read(self._prefix + name).detach().float()

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the place."""
        return tensor.detach().to(self.place.device, self.place.dtype, copy=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise MissingWeight(self._prefix + name)
        return self.cast(self._read(self._prefix + name))

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor, or None if there is none, such as a bias that a model lacks."""
        if name in self:
            return self[name]
        return None

    def joined(self, names: Sequence[str], scales: Sequence[float] = ()) -> torch.Tensor:
        """Concatenate tensors. With `scales`, multiply each by its scale; a single tensor is then split into equal
        parts. Raises MissingWeight.
        """
        if len(names) == 1 and not scales:
            return self[names[0]]
        parts = [self.exact(name) for name in names] if len(names) > 1 else self.exact(names[0]).chunk(len(scales))
        if scales:
            parts = [part if by == 1 else part * by for part, by in zip(parts, scales, strict=True)]
        return self.cast(torch.cat(parts))
