"""Draws tokens from logits in the host's memory, by `token_draws.c` if it was built at installation, else in numpy.
Imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from deployments.generation.kernels import native
from deployments.generation.text.sampling import Numbers, Picked, RowSamplers, pick

_NAME = "token_draws"
_SCRATCH = 5  # as in the C file
_DRAW = np.dtype(
    [
        *((name, np.uintp) for name in ("logits", "known")),
        *((name, np.int64) for name in ("top_k", "named")),
        *((name, np.float64) for name in ("temperature", "top_p", "random", "below")),
        ("token", np.int64),
        *((name, np.uintp) for name in ("logprobs", "ids")),
    ]
)  # `struct draw` of the C file


class _Draws(ctypes.Structure):
    """`struct draws` of the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("each", "scratch")),
        *((name, ctypes.c_int64) for name in ("count", "vocabulary", "next", "threads")),
    )


class HostLogits:
    """`steps.DeviceLogits`: `logits`, float32 [rows, vocabulary], in the host's memory. Draws run on torch's threads,
    each on one. They are the same whatever else is drawn beside them.
    """

    def __init__(self, logits: Numbers) -> None:
        self.logits = np.ascontiguousarray(logits)

    def pick(self, samplers: Sequence[RowSamplers]) -> list[list[Picked] | None]:
        """See `sampling.pick`. Raises ValueError unless there is one of `samplers` per row."""
        if len(samplers) != len(self.logits):
            raise ValueError(f"{len(self.logits)} rows of logits, and how to draw from {len(samplers)}")
        if not native.library(_NAME):
            return [pick(row, of) for row, of in zip(self.logits, samplers, strict=True)]
        drawn = iter(self._drawn(samplers))
        found = [[next(drawn) for _ in of.samplers] for of in samplers]
        return [None if None in row else [one for one in row if one is not None] for row in found]

    def _drawn(self, samplers: Sequence[RowSamplers]) -> list[Picked | None]:
        """A token for each sampler. None if its logits are not finite, or its rules leave no token."""
        vocabulary = self.logits.shape[1]
        of_each = [
            (row, of.logprobs, one) for row, of in zip(self.logits, samplers, strict=True) for one in of.samplers
        ]
        if not of_each:
            return []
        most = min(vocabulary, max(named or 0 for _, named, _ in of_each))
        logprobs, ids = np.empty((len(of_each), 1 + most), np.float32), np.empty((len(of_each), most), np.int32)
        altered = [one.altered(row) for row, _, one in of_each]  # they stay in memory while tokens are drawn
        draws = np.zeros(len(of_each), _DRAW)
        for at, (row, named, one) in enumerate(of_each):
            asked = one.asked
            draws[at] = (
                altered[at].ctypes.data,
                row.ctypes.data,
                asked.top_k if 0 < asked.top_k < vocabulary else vocabulary,
                -1 if named is None else min(named, vocabulary),
                asked.temperature,
                asked.top_p,
                one.random() if asked.temperature else 0.0,
                asked.below,
                -1,
                logprobs[at].ctypes.data,
                ids[at].ctypes.data,
            )
        threads = min(torch.get_num_threads(), len(draws))
        scratch = np.empty((threads, _SCRATCH, vocabulary), np.int32)
        work = _Draws(draws.ctypes.data, scratch.ctypes.data, len(draws), vocabulary, 0, 0)
        run = native.function(_NAME, "draw")
        if threads > 1:
            native.on_threads()(run, ctypes.byref(work), threads)
        else:
            run(ctypes.byref(work))
        return [
            None if token < 0 else _picked(token, named, *known)
            for token, (_, named, _), *known in zip(draws["token"].tolist(), of_each, logprobs, ids, strict=True)
        ]


def _picked(
    token: int, named: int | None, logprobs: Numbers, ids: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> Picked:
    if named is None:
        return Picked(token)
    own, *others = logprobs[: 1 + named].tolist()
    return Picked(token, own, tuple(zip(ids[:named].tolist(), others, strict=True)))
