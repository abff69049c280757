"""A device that is not on anyone's desk: waits `alpha_s * n + beta_s`, answers unit vectors that mean nothing."""

from __future__ import annotations

import threading
import time
import zlib

import numpy as np

from deployments.engines import EngineInfo, Stopped, TokenBatch, Vectors
from deployments.model_files import ModelCard
from deployments.settings import EmulatedDevice


class EmulatedEngine:
    """Deterministic vectors (the same tokens give the same vector on every emulated device) after a true wait."""

    def __init__(self, card: ModelCard, device: EmulatedDevice) -> None:
        self._device = device
        self._random = np.random.default_rng(device.seed)
        self._waves = np.arange(1, card.dimension + 1, dtype=np.float32)
        self.info = EngineInfo(
            engine="emulated",
            device=f"emulated (alpha {device.alpha_s} s, beta {device.beta_s} s)",
            dtype="float32",
            dimension=card.dimension,
            emulated=True,
            why="accelerator and CPU are emulated: the vectors mean nothing",
        )

    def embed(self, batch: TokenBatch, stop: threading.Event) -> Vectors:
        ends = time.monotonic() + self._latency_s(len(batch))
        inputs = batch.ids if batch.each_token else batch.queries()
        seeds = np.array([zlib.crc32(one.tobytes()) % 9973 for one in inputs], dtype=np.float32)
        vectors: Vectors = np.cos(np.outer(seeds + 1, self._waves) * np.float32(1e-3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        if stop.wait(max(0.0, ends - time.monotonic())):
            raise Stopped
        return vectors

    def probe(self) -> None:
        """An emulated device is always there."""

    def _latency_s(self, queries: int) -> float:
        """Eq. 12, with seeded noise and outliers, scaled."""
        device = self._device
        latency_s = device.alpha_s * queries + device.beta_s
        if device.noise:
            latency_s *= max(0.0, 1 + device.noise * float(self._random.standard_normal()))
        if device.outlier_rate and self._random.random() < device.outlier_rate:
            latency_s *= device.outlier_factor * float(self._random.uniform(2 / 3, 4 / 3))
        return latency_s * device.time_scale
