"""A device that is not on anyone's desk: each step takes the time that a table says, and its tokens are true. Pure.

A token follows from all tokens before it by a rule that a test can compute (`following`). The device reads those tokens
from a cache of its own, block by block, as a model reads keys and values: an answer whose blocks were mixed up, lost or
written by another goes on with a wrong token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from deployments.generation.scheduling.blocks import BLOCK, blocks_of
from deployments.generation.scheduling.chunk import Chunk, Computed, Work, load_of
from deployments.generation.scheduling.step_time import StepTime

_SURE = 100.0  # a logit beside which all others are nothing, whatever the temperature
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that all its powers differ


class EmulatedSteps:
    """Of a device with `blocks` blocks of cache whose steps take as long as `model` says, slept for real.

    `noise`: standard deviation of a step's time, as a share of it.
    """

    def __init__(
        self,
        model: StepTime,
        blocks: int,
        vocabulary: int,
        *,
        noise: float = 0.0,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self._cache = np.zeros((blocks, BLOCK), np.uint64)
        self._logits = np.zeros((0, vocabulary), np.float32)
        self._vocabulary = vocabulary
        self._noise, self._random, self._sleep = noise, np.random.default_rng(seed), sleep

    def step(self, work: Work) -> Computed:
        """See `chunk.Steps`."""
        began = time.monotonic()
        chunks = work.chunks
        for copy in work.copies:
            self._cache[copy.target] = self._cache[copy.source]
        for chunk in chunks:
            self._write(chunk)
        wanted = [chunk for chunk in chunks if chunk.wanted]
        if len(self._logits) < len(wanted):
            self._logits = np.zeros((len(wanted), self._vocabulary), np.float32)
        logits = self._logits[: len(wanted)]
        logits[:] = 0.0
        for row, chunk in zip(logits, wanted, strict=True):
            row[self._next(chunk)] = _SURE
        seconds = self.model.seconds(load_of(chunks))
        if self._noise:
            seconds *= max(0.0, 1 + self._noise * float(self._random.standard_normal()))
        if (left_s := seconds - (time.monotonic() - began)) > 0:
            self._sleep(left_s)
        return Computed(logits)

    def _write(self, chunk: Chunk) -> None:
        positions = np.arange(chunk.start, chunk.end)
        blocks = np.array(chunk.table, np.intp)[positions // BLOCK]
        self._cache[blocks, positions % BLOCK] = chunk.ids

    def _next(self, chunk: Chunk) -> int:
        table = list(chunk.table[: blocks_of(chunk.end)])
        return following(self._cache[table].reshape(-1)[: chunk.end], self._vocabulary)


def following(ids: Sequence[int] | np.ndarray, vocabulary: int) -> int:
    """The token that comes after these: by a sum that counts every one of them, and its place."""
    tokens = np.asarray(ids).astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        places = _FACTOR * (np.arange(len(tokens), dtype=np.uint64) * np.uint64(2) + np.uint64(1))
        mixed = tokens * (places ^ (places >> np.uint64(29)))
        total = np.uint64(mixed.sum(dtype=np.uint64)) * _FACTOR
    return int((total >> np.uint64(32)) % np.uint64(vocabulary))
