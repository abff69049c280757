"""An emulated device: waits for `run_seconds`, and answers meaningless unit vectors."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from deployments.engines import EngineInfo, Queries, Stopped, TokenBatch, Vectors
from deployments.engines.micro_batches import Lengths
from deployments.models.model_files import ModelCard
from deployments.models.outputs import Output
from deployments.settings import EmulatedDevice

_ALPHA_TOKENS = 75  # tokens of a query that takes `alpha_s`, as in the paper


def run_seconds(device: EmulatedDevice, lengths: Lengths) -> float:
    """Seconds of a run of queries of these lengths by Eq. 12, `alpha_s * C + beta_s`, where a query of n tokens counts
    as n / 75. Noise, outliers, drift and `time_scale` come on top.
    """
    tiles = -(-len(lengths) // device.tile_queries)
    queries = tiles * device.tile_queries
    work_s = device.alpha_s * queries * float(np.mean(lengths)) / _ALPHA_TOKENS
    return device.beta_s + work_s * (1 + device.curvature * work_s)


class EmulatedEngine:
    """Answers after a real wait. The same tokens give the same vector on every emulated device."""

    def __init__(self, card: ModelCard, device: EmulatedDevice, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self._started = clock()
        self._random = np.random.default_rng(device.seed)
        self._waves = np.arange(1, card.dimension + 1, dtype=np.float32)
        self.micro_batch_tokens = (device.micro_batch_queries or 0) * _ALPHA_TOKENS
        self.info = EngineInfo(
            engine="emulated",
            device=f"emulated (alpha {device.alpha_s} s, beta {device.beta_s} s)",
            dtype="float32",
            dimension=card.dimension,
            emulated=True,
            why="accelerator and CPU are emulated: the vectors mean nothing",
        )

    def passes(self, batch: TokenBatch, stop: threading.Event) -> Iterator[tuple[Queries, tuple[Vectors, ...]]]:
        """Yield all queries at the end of the run, or `micro_batch_queries` at a time: after `beta_s` and their share,
        by tokens, of the remaining time.
        """
        started = self._clock()
        factor = self._factor(started)
        total_s = run_seconds(self._device, batch.lengths)
        step = self._device.micro_batch_queries or len(batch)
        done = np.cumsum(batch.lengths) / len(batch.ids)  # the share of the work that is done when each query ends
        for first in range(0, len(batch), step):
            queries = np.arange(first, min(first + step, len(batch)))
            chosen = batch.select(queries)
            vectors = tuple(self._vectors(chosen, output) for output in batch.outputs)  # no part of the device's time
            end_s = self._device.beta_s + (total_s - self._device.beta_s) * float(done[queries[-1]])
            left_s = started + end_s * factor - self._clock()
            if stop.wait(left_s) if left_s > 0 else stop.is_set():
                raise Stopped
            yield queries, vectors

    def bound_passes(self, tokens: int) -> None:
        """Does nothing: the settings determine the passes."""

    def probe(self) -> None:
        """Does nothing: an emulated device never fails."""

    def _vectors(self, batch: TokenBatch, output: Output) -> Vectors:
        inputs = batch.queries() if output == "text" else batch.ids
        seeds = np.array([zlib.crc32(one.tobytes()) % 9973 for one in inputs], dtype=np.float32)
        vectors: Vectors = np.cos(np.outer(seeds + 1, self._waves) * np.float32(1e-3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def _factor(self, now: float) -> float:
        """The factor on the time of a run that starts now: seeded noise and outliers, drift, and `time_scale`."""
        device = self._device
        factor = device.time_scale
        if device.noise:
            factor *= max(0.0, 1 + device.noise * float(self._random.standard_normal()))
        if device.outlier_rate and self._random.random() < device.outlier_rate:
            factor *= device.outlier_factor * float(self._random.uniform(2 / 3, 4 / 3))
        if now - self._started >= device.drift_after_s * device.time_scale:
            factor *= device.drift
        return factor
