"""A causal language model half a layer at a time, and its host, which computes the attention of rows. Imports torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Self

import torch

from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import CachedAttention
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.device_sampling import logits_of
from deployments.generation.engine.step import StepLayout
from deployments.generation.scheduling.chunk import Chunk, ComputeSeconds, Copy, DeviceLogits, Logits
from deployments.hardware.affinity import pin_thread

logger = logging.getLogger("ray.serve")

_CPU = torch.device("cpu")


class CausalStages:
    """`hybrid_steps.Stages` of a model that has a cache in the host's memory.

    The engine's thread calls all methods. On CUDA it tells the accelerator what to compute, and waits only for numbers
    that it needs itself: the queries, keys and values of the host's rows. It alone writes into the host's cache; the
    host's thread only reads there, so attention that nobody wants any more does no harm. Blocks are copied from cache
    to cache on a CUDA stream of their own.
    """

    def __init__(self, model: CausalModel, cores: Sequence[int] = ()) -> None:
        """`cores`: to which the host's attention is bound, a thread each; else it has as many threads as torch."""
        self._model, self._logits = model, logits_of(model.place.device)
        self._host = _Host(cores)
        self._copies = _Copies(model)
        self._work = _DeviceWork() if model.place.device.type == "cuda" else _Work()
        self._arrived: torch.cuda.Event | None = None  # what the last `begin` had to bring to the host
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
        self._work.begin()
        qkv = self._model.layers[layer].before(_joined([batch.x for batch in batches]))
        for batch, own in zip(batches, torch.split(qkv, [len(batch.x) for batch in batches]), strict=True):
            batch.send(layer, own)
        if self._arrived is None:
            self._hand_over(layer, batches)
        else:
            self._arrived.record()
        for batch in batches:
            batch.attend(layer)
        self._work.end()
        if self._arrived is not None and on_host:
            self._arrived.synchronize()  # while the accelerator computes its attention
            self._hand_over(layer, batches)

    def _hand_over(self, layer: int, batches: Sequence[CausalBatch]) -> None:
        for batch in batches:
            batch.hand_over(layer, self._host)

    @torch.inference_mode()
    def end(self, layer: int, batches: Sequence[CausalBatch]) -> None:
        is_last = layer == self.layers - 1
        mixed, x = (_joined(parts) for parts in zip(*(batch.behind(is_last) for batch in batches), strict=True))
        self._work.begin()
        if len(x):
            x = self._model.layers[layer].after(mixed, x)
        self._work.end()
        for batch, own in zip(batches, torch.split(x, [batch.rows(is_last) for batch in batches]), strict=True):
            batch.x = own if batch is batches[0] else own.clone()  # one that parks keeps no others alive

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
        return ComputeSeconds(self._work.seconds(), self._host.seconds)


class CausalBatch:
    """`hybrid_steps.Batch`. `x`, [tokens, width], has the tokens of three kinds of chunks, one kind behind the other:
    `_own` of the accelerator's cache; `_long`, chunks of several tokens whose cache the host has, but whose attention
    the accelerator computes; `_ones`, host rows: one token each, whose attention the host computes.
    """

    attention: Future[torch.Tensor]  # of `_ones`, in the layer that was begun: [rows, heads * size]
    _qkv: torch.Tensor  # in that layer, [tokens, heads + 2 groups, size]
    _arriving: list[tuple[_Part, torch.Tensor]]  # of it, what the host gets

    def __init__(self, model: CausalModel, chunks: Sequence[Chunk]) -> None:
        self._model, self._chunks = model, list(chunks)
        self._kept: torch.Tensor | None = None  # rows of `attention` that are still wanted, if not all
        self._mixed: list[torch.Tensor] = []  # [tokens, heads * size], of the first two
        self._own: _Part | None
        self._long: _Part | None
        self._ones: _Part | None
        self._lay_out()
        self.x = torch.cat([model.embed(part.layout.chunks, part.layout) for part in self._parts])

    def _lay_out(self) -> None:
        kinds: tuple[list[Chunk], ...] = ([], [], [])
        for chunk in self._chunks:
            kinds[0 if not chunk.on_host else 2 if len(chunk.ids) == 1 else 1].append(chunk)
        place = self._model.place
        on_host = Place(_CPU, place.dtype)
        found, end, lasts = [], 0, {}
        for chunks, stored in zip(kinds, (place, on_host, on_host), strict=True):
            found.append(_Part.of_chunks(chunks, end, place, stored) if chunks else None)
            for chunk in chunks:
                end += len(chunk.ids)
                lasts[id(chunk)] = end - 1
        self._own, self._long, self._ones = found
        self._parts = [part for part in found if part is not None]
        wanted = [lasts[id(chunk)] for chunk in self._chunks if chunk.wanted]
        self._last = torch.tensor(wanted, dtype=torch.int64, device=place.device)

    @property
    def on_host(self) -> bool:
        return self._long is not None or self._ones is not None

    def rows(self, is_last: bool) -> int:
        """How many there are behind that layer."""
        return len(self._last) if is_last else len(self.x)

    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            self.attention.cancel()
            return
        kept = torch.tensor(rows)
        self.x = self.x[kept.to(self.x.device)]
        self._kept = kept if self._kept is None else self._kept[kept]
        self._chunks = [self._chunks[row] for row in rows]
        self._lay_out()

    def send(self, layer: int, qkv: torch.Tensor) -> None:
        """Turn query and key of [tokens, heads + 2 groups, size]; those of the host's rows are sent to it."""
        self._qkv, self._arriving = qkv, []
        if self._own is not None:
            self._model.attention[layer].put(qkv[self._own.at], self._own.layout)
        for part in (self._long, self._ones):
            if part is not None:
                self._model.turned[layer].turn(qkv[part.at], part.layout)
                self._arriving.append((part, qkv[part.at].to(_CPU, non_blocking=qkv.is_cuda)))

    def hand_over(self, layer: int, host: _Host) -> None:
        """What has arrived at the host is put into its cache; the attention of its rows goes to its thread."""
        attention = self._model.host_attention[layer]
        for part, qkv in self._arriving:
            attention.put(qkv, part.stored)
            if part is self._ones:
                self.attention, self._kept = host.submit(attention, qkv, part.stored), None
        self._arriving = []

    def attend(self, layer: int) -> None:
        """On the accelerator."""
        self._mixed = []
        if self._own is not None:
            self._mixed.append(self._model.attention[layer].attend(self._qkv[self._own.at], self._own.layout))
        if self._long is not None:
            attention = self._model.host_attention[layer]
            self._mixed.append(attention.attend_elsewhere(self._qkv[self._long.at], self._long.stored))
        del self._qkv

    def behind(self, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention, [tokens, heads * size], which is waited for, and `x`. In the last layer only those of the
        tokens whose logits are wanted, in the order of the chunks.
        """
        mixed = self._mixed
        if self._ones is not None:
            found = self.attention.result()
            found = found if self._kept is None else found[self._kept]
            mixed = [*mixed, found.to(self.x.device, non_blocking=True)]
        self._mixed = []
        attended = _joined(mixed)
        return (attended[self._last], self.x[self._last]) if is_last else (attended, self.x)


@dataclass(frozen=True, slots=True)
class _Part:
    """The chunks of one kind in a batch; `at`: where their tokens are in it."""

    layout: StepLayout  # at the accelerator
    stored: StepLayout  # where the cache is
    at: slice

    @classmethod
    def of_chunks(cls, chunks: Sequence[Chunk], start: int, place: Place, stored: Place) -> Self:
        layout = StepLayout.of_chunks(chunks, place)
        layout.spare = 0  # others may follow
        return cls(
            layout,
            layout if place.device == stored.device else StepLayout.of_chunks(chunks, stored),
            slice(start, start + layout.tokens),
        )


class _Host:
    """One thread that computes attention to the host's cache, in the order in which it is asked for."""

    def __init__(self, cores: Sequence[int]) -> None:
        self.seconds = 0.0  # so far
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-attention")
        if cores:
            threads = torch.get_num_threads()
            self._thread.submit(self._bind, cores).result()
            torch.set_num_threads(threads)  # of threads that begin later

    @staticmethod
    def _bind(cores: Sequence[int]) -> None:
        if problem := pin_thread(cores):
            logger.warning("The host's attention runs on any core: %s", problem)
        torch.get_num_threads()  # whoever asks first in a thread sets them to the process's number
        torch.set_num_threads(len(cores))

    def submit(self, attention: CachedAttention, qkv: torch.Tensor, layout: StepLayout) -> Future[torch.Tensor]:
        return self._thread.submit(self._attend, attention, qkv, layout)

    @torch.inference_mode()
    def _attend(self, attention: CachedAttention, qkv: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        began = time.perf_counter()
        try:
            return attention.attend(qkv, layout)
        finally:
            self.seconds += time.perf_counter() - began


class _Work:
    """Seconds of pieces of work, one behind the other, which are done when they end."""

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        return self._seconds


class _DeviceWork(_Work):
    """The same where the CUDA device is told of them, and does them later."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun = _timed()

    def begin(self) -> None:
        self._begun = _timed()
        self._begun.record()

    def end(self) -> None:
        self._pieces.append((self._begun, _timed()))
        self._pieces[-1][1].record()

    def seconds(self) -> float:
        """Of all, which it waits for."""
        if self._pieces:
            self._pieces[-1][1].synchronize()  # they end in their order
        self._seconds += sum(began.elapsed_time(ended) for began, ended in self._pieces) / 1000
        self._pieces = []
        return self._seconds


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Copies:
    """Copies of blocks, within the caches and between them, layer by layer, so that a layer waits for its own alone:
    on CUDA on a stream of their own, elsewhere at once.
    """

    def __init__(self, model: CausalModel) -> None:
        self._caches = model.cache.tensor, model.host_cache.tensor
        self._stream: torch.cuda.Stream | None = None
        if model.place.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.place.device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []  # of each layer, in this step

    def begin(self, copies: Sequence[Copy]) -> None:
        """All that come before a step, in their order; those of the step before have ended."""
        self._copied = []
        if self._stream is None:
            self._copy(copies, range(len(self._caches[0])))
            return
        self._stream.synchronize()
        if copies:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for layer in range(len(self._caches[0])):
                    self._copy(copies, [layer])
                    self._copied.append(self._stream.record_event())

    def _copy(self, copies: Sequence[Copy], layers: Iterable[int]) -> None:
        for layer in layers:
            for source, target, from_host, to_host in copies:
                for kind in range(2):  # keys, then values: each lies in one piece
                    read, written = self._caches[from_host][layer, kind], self._caches[to_host][layer, kind]
                    written[target].copy_(read[source], non_blocking=self._stream is not None)

    def wait(self, layer: int, *, here: bool) -> None:
        """For those of this layer: the accelerator, and `here` this thread too."""
        if self._copied:
            torch.cuda.current_stream().wait_event(self._copied[layer])
            if here:
                self._copied[layer].synchronize()


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
