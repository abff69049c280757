"""Runs a causal language model half a layer at a time, with a host that computes the attention of some rows. Imports
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for

import torch

from deployments.generation.engine.block_copies import BlockCopies
from deployments.generation.engine.causal_batch import CausalBatch, joined
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.device_sampling import logits_of
from deployments.generation.engine.host_attention import HostAttention
from deployments.generation.engine.steps import DeviceLogits, Logits
from deployments.generation.engine.stopwatch import stopwatch_for
from deployments.generation.scheduler.work import Chunk, ComputeSeconds, Copy


class CausalStages:
    """`hybrid_steps.Stages` for a model that has a cache in the host's memory.

    The engine's thread calls all methods. On CUDA it submits work to the accelerator, and waits only for numbers that
    it needs itself: the queries, keys and values of the host's rows. Only this thread writes to the host's cache. The
    host's thread only reads it, so abandoned attention does no harm. Blocks are copied between the caches on a separate
    CUDA stream.
    """

    def __init__(self, model: CausalModel, cores: Sequence[int] = ()) -> None:
        """`cores`: the host's attention runs one thread on each. Empty: it has as many threads as torch."""
        self._model, self._logits = model, logits_of(model.place.device)
        self._host = HostAttention(cores)
        self._copies = BlockCopies(model)
        self._stopwatch = stopwatch_for(model.place.device)
        self._arrived: torch.cuda.Event | None = None  # set when the last `begin`'s data have reached the host
        if model.place.device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def layers(self) -> int:
        return len(self._model.layers)

    @torch.inference_mode()
    def copy(self, copies: Sequence[Copy]) -> None:
        self._copies.begin(copies)

    @torch.inference_mode()
    def batch(self, chunks: Sequence[Chunk]) -> CausalBatch:
        return CausalBatch(self._model, chunks)

    @torch.inference_mode()
    def begin(self, layer: int, batches: Sequence[CausalBatch]) -> None:
        on_host = any(batch.on_host for batch in batches)
        self._copies.wait(layer, here=on_host)
        self._stopwatch.begin()
        qkv = self._model.layers[layer].before(joined([batch.x for batch in batches]))
        for batch, own in zip(batches, torch.split(qkv, [len(batch.x) for batch in batches]), strict=True):
            batch.send(layer, own)
        if self._arrived is None:
            self._hand_over(layer, batches)
        else:
            self._arrived.record()
        for batch in batches:
            batch.attend(layer)
        self._stopwatch.end()
        if self._arrived is not None and on_host:
            self._arrived.synchronize()  # meanwhile the accelerator computes its attention
            self._hand_over(layer, batches)

    def _hand_over(self, layer: int, batches: Sequence[CausalBatch]) -> None:
        for batch in batches:
            batch.hand_over(layer, self._host)

    @torch.inference_mode()
    def end(self, layer: int, batches: Sequence[CausalBatch]) -> None:
        is_last = layer == self.layers - 1
        mixed, x = (joined(parts) for parts in zip(*(batch.behind(is_last) for batch in batches), strict=True))
        self._stopwatch.begin()
        if len(x):
            x = self._model.layers[layer].after(mixed, x)
        self._stopwatch.end()
        for batch, own in zip(batches, torch.split(x, [batch.rows(is_last) for batch in batches]), strict=True):
            batch.x = own if batch is batches[0] else own.clone()  # a parked batch must not keep others' memory alive

    def ready(self, batches: Sequence[CausalBatch]) -> Sequence[CausalBatch]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [batch for batch in batches if batch.attention.done()]

    def wait(self, batches: Sequence[CausalBatch]) -> None:
        wait_for([batch.attention for batch in batches], return_when=FIRST_COMPLETED)

    @torch.inference_mode()
    def logits(self, batches: Sequence[CausalBatch]) -> Logits | DeviceLogits:
        x = torch.cat([batch.x for batch in batches]) if batches else torch.empty(0)
        return self._logits(self._model.head(x) if len(x) else torch.empty(0, self._model.vocabulary))

    def compute_s(self) -> ComputeSeconds:
        return ComputeSeconds(self._stopwatch.seconds(), self._host.seconds)
