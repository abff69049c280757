"""Positional encodings: rotations of query and key, or a bias of the scores by distance.

Imports torch. The scalings of rotary frequencies are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from deployments.engines.packed.layout import Layout
from deployments.engines.packed.tensors import Place

_BY_LENGTH = {"longrope"}  # scalings with which a query's result depends on the longest query in its batch


class Rotary:
    """Rotates pairs of numbers of query and key by an angle that grows with the position (arXiv:2104.09864). The pairs
    are numbers i and i + n / 2 of the n rotated numbers of a head.
    """

    def __init__(self, frequencies: torch.Tensor, factor: float, place: Place) -> None:
        """`frequencies`: [n / 2], in radians per token. `factor`: scales the rotated numbers."""
        self._frequencies, self._factor, self._place = frequencies.float().cpu(), factor, place
        self._table = torch.empty(0, 2 * len(frequencies))

    def turn(self, heads: torch.Tensor, layout: Layout) -> None:
        """Rotate [tokens + spare, heads, size] in place."""
        cos, sin = self.angles(layout).unsqueeze(1).chunk(2, -1)
        half = cos.shape[-1]
        first, second = heads[..., :half], heads[..., half : 2 * half]
        first_by_sin, second_by_sin = first * sin, second * sin
        first.mul_(cos).sub_(second_by_sin)
        second.mul_(cos).add_(first_by_sin)

    def angles(self, layout: Layout) -> torch.Tensor:
        """For each token, n / 2 cosines and then n / 2 sines, [tokens + spare, n]."""
        return layout.once((self, "angles"), lambda: layout.add_spare(layout.firsts(self._table_of(layout.longest))))

    def _table_of(self, positions: int) -> torch.Tensor:
        """A table for at least `positions` positions, [positions, n]."""
        table = self._table
        if len(table) < positions:
            angles = torch.outer(torch.arange(1 << (positions - 1).bit_length()).float(), self._frequencies)
            table = torch.cat([angles.cos(), angles.sin()], 1) * self._factor
            self._table = table = table.to(self._place.device, self._place.dtype)  # assigned once: others may read it
        return table


def rotary_of(config: Any, place: Place, kind: str | None = None) -> Rotary:
    """The rotation of a transformers config. `kind`: a layer's type, if each type has its own."""
    config.standardize_rope_params()
    stated = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if stated["rope_type"] == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Rotary(stated["rope_theta"] ** -(torch.arange(0, size, 2).float() / size), 1.0, place)
    frequencies, factor = _scalings()[stated["rope_type"]](config, None, layer_type=kind)
    return Rotary(frequencies, factor, place)


def unsupported_rotary(config: Any) -> str | None:
    """Why a transformers config's rotations have no packed form, or None."""
    config.standardize_rope_params()
    stated = config.rope_parameters
    for one in (stated, *(value for value in stated.values() if isinstance(value, dict))):
        if one.get("rope_type") in _BY_LENGTH:
            return f"rotary positions of the type {one['rope_type']} have no packed form here"
        if one.get("rope_type", "default") not in {"default", *_scalings()}:
            return f"rotary positions of the type {one['rope_type']} are unknown to this version of transformers"
        if one.get("partial_rotary_factor", 1.0) != 1.0:  # some classes use it, others ignore it
            return "rotary positions of a part of each head have no packed form here"
    return None


def _scalings() -> Mapping[str, Callable[..., Any]]:
    """The scalings of rotary frequencies by name, from a table that transformers may move: then there is none."""
    try:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    except ImportError:
        return {}
    return cast("Mapping[str, Callable[..., Any]]", ROPE_INIT_FUNCTIONS)


def alibi(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A bias of -slope * distance, with a slope for each head (arXiv:2108.12409, symmetric)."""
    slopes = torch.tensor(alibi_slopes(heads))
    return lambda distances: -slopes[:, None] * distances.abs()


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 i / heads) if `heads` is a power of two. Otherwise the slopes of the next lower power, and every other one
    of the next higher power.
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (number + 1) / whole) for number in range(whole)]
    return slopes if whole == heads else slopes + alibi_slopes(2 * whole)[::2][: heads - whole]


def relative_buckets(table: torch.Tensor, most_distance: int = 128) -> Callable[[torch.Tensor], torch.Tensor]:
    """A learned bias, float32 [buckets, heads] (arXiv:1910.10683, bidirectional). Half of the buckets are for keys
    after the query. In each half, near distances have a bucket each, and those up to `most_distance` share the others
    logarithmically.
    """

    def bias(distances: torch.Tensor) -> torch.Tensor:
        half = len(table) // 2
        near = half // 2
        away = distances.abs()
        far = near + (torch.log(away.clamp(min=1) / near) / math.log(most_distance / near) * (half - near)).long()
        buckets = torch.where(away < near, away, far.clamp(max=half - 1)) + half * (distances > 0)
        return table[buckets].T

    return bias
