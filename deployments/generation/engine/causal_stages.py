"""Runs a causal language model half a layer at a time, with a host that computes the attention of some rows. Imports
torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Self

import torch

from deployments.engines.packed.tensors import Place
from deployments.generation.engine.cache import CachedAttention
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.engine.device_sampling import logits_of
from deployments.generation.engine.packed_step import StepLayout
from deployments.generation.engine.steps import DeviceLogits
from deployments.generation.scheduler.work import Chunk, ComputeSeconds, Copy
from deployments.generation.text.prompt_scores import PromptScores
from deployments.hardware.affinity import pin_thread

logger = logging.getLogger("ray.serve")

_CPU = torch.device("cpu")


class CausalBatch:
    """`hybrid_steps.Batch`. `x`, [tokens, width], holds the tokens of three kinds of chunks, in this order.

    - `_own`: chunks in the accelerator's cache.
    - `_long`: chunks of several tokens in the host's cache. The accelerator computes their attention.
    - `_ones`: host rows, of one token each. The host computes their attention.
    """

    attention: Future[torch.Tensor]  # of `_ones`, in the layer that was begun: [rows, heads * size]
    _qkv: torch.Tensor  # in that layer, [tokens, heads + 2 groups, size]
    _arriving: list[tuple[_Part, torch.Tensor]]  # the parts of it that are on their way to the host

    def __init__(self, model: CausalModel, chunks: Sequence[Chunk]) -> None:
        self._model, self.chunks = model, list(chunks)
        self._kept: torch.Tensor | None = None  # the rows of `attention` that are still wanted; None: all
        self._mixed: list[torch.Tensor] = []  # the attention of `_own` and `_long`, [tokens, heads * size]
        self._own: _Part | None
        self._long: _Part | None
        self._ones: _Part | None
        self._lay_out()
        self.x = torch.cat([model.embed(part.layout) for part in self._parts])

    def _lay_out(self) -> None:
        kinds: tuple[list[Chunk], ...] = ([], [], [])
        for chunk in self.chunks:
            kinds[0 if not chunk.on_host else 2 if len(chunk.ids) == 1 else 1].append(chunk)
        place = self._model.place
        on_host = Place(_CPU, place.dtype)
        found, end, lasts = [], 0, dict[int, range]()
        for chunks, stored in zip(kinds, (place, on_host, on_host), strict=True):
            found.append(_Part.of_chunks(self._model, chunks, end, stored) if chunks else None)
            for chunk in chunks:
                lasts[id(chunk)] = range(end + chunk.first_row, end + len(chunk.ids))
                end += len(chunk.ids)
        self._own, self._long, self._ones = found
        self._parts = [part for part in found if part is not None]
        rows = [row for chunk in self.chunks for row in lasts[id(chunk)]]
        self._last = torch.tensor(rows, dtype=torch.int64, device=place.device)

    @property
    def on_host(self) -> bool:
        return self._long is not None or self._ones is not None

    def rows(self, is_last: bool) -> int:
        """How many rows there are after that layer."""
        return len(self._last) if is_last else len(self.x)

    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            self.attention.cancel()
            return
        kept = torch.tensor(rows)
        self.x = self.x[kept.to(self.x.device)]
        self._kept = kept if self._kept is None else self._kept[kept]
        self.chunks = [self.chunks[row] for row in rows]
        self._lay_out()

    def send(self, layer: int, qkv: torch.Tensor) -> None:
        """Apply norm and rotation to query and key in `qkv`, [tokens, heads + 2 groups, size], and send the host's rows
        to the host.
        """
        self._qkv, self._arriving = qkv, []
        if self._own is not None:
            self._model.attention[layer].put(qkv[self._own.at], self._own.layout)
        for part in (self._long, self._ones):
            if part is not None:
                self._model.turned[layer].turn(qkv[part.at], part.layout)
                self._arriving.append((part, qkv[part.at].to(_CPU, non_blocking=qkv.is_cuda)))

    def hand_over(self, layer: int, host: HostAttention) -> None:
        """Put what has arrived at the host into its cache, and submit the attention of its rows to its thread."""
        attention = self._model.host_attention[layer]
        for part, qkv in self._arriving:
            attention.put(qkv, part.stored)
            if part is self._ones:
                self.attention, self._kept = host.submit(attention, qkv, part.stored), None
        self._arriving = []

    def attend(self, layer: int) -> None:
        """Compute attention on the accelerator."""
        self._mixed = []
        if self._own is not None:
            self._mixed.append(self._model.attention[layer].attend(self._qkv[self._own.at], self._own.layout))
        if self._long is not None:
            attention = self._model.host_attention[layer]
            self._mixed.append(attention.attend_elsewhere(self._qkv[self._long.at], self._long.stored))
        del self._qkv

    def behind(self, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the attention. Returns it, [tokens, heads * size], and `x`. In the last layer, they have only the
        tokens whose logits are wanted, in the order of the chunks.
        """
        mixed = self._mixed
        if self._ones is not None:
            found = self.attention.result()
            found = found if self._kept is None else found[self._kept]
            mixed = [*mixed, found.to(self.x.device, non_blocking=True)]
        self._mixed = []
        attended = joined(mixed)
        return (attended[self._last], self.x[self._last]) if is_last else (attended, self.x)


@dataclass(frozen=True, slots=True)
class _Part:
    """The chunks of one kind in a batch. `at`: where their tokens lie in the batch."""

    layout: StepLayout  # on the accelerator
    stored: StepLayout  # on the device that holds the cache
    at: slice

    @classmethod
    def of_chunks(cls, model: CausalModel, chunks: Sequence[Chunk], start: int, stored: Place) -> Self:
        place, block_size = model.place, model.cache.block_size
        layout = StepLayout.of_chunks(chunks, place, block_size)
        return cls(
            layout,
            layout if place.device == stored.device else StepLayout.of_chunks(chunks, stored, block_size),
            slice(start, start + layout.tokens),
        )


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the parts. A single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class BlockCopies:
    """Copies blocks within the caches and between them. On CUDA this runs layer by layer on a separate stream, and a
    layer waits only for its own copies. On other devices it runs at once.
    """

    def __init__(self, model: CausalModel) -> None:
        self._caches = model.cache.tensor, model.host_cache.tensor
        self._stream: torch.cuda.Stream | None = None
        if model.place.device.type == "cuda":
            self._stream = torch.cuda.Stream(model.place.device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []  # for each layer, the end of this step's copies

    def begin(self, copies: Sequence[Copy]) -> None:
        """Begin all copies that precede a step, in order. Those of the step before have ended."""
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
                for kind in range(2):  # keys, then values: each is contiguous
                    read, written = self._caches[from_host][layer, kind], self._caches[to_host][layer, kind]
                    written[target].copy_(read[source], non_blocking=self._stream is not None)

    def wait(self, layer: int, *, here: bool) -> None:
        """Make the accelerator wait for the copies of this layer. `here`: make this thread wait, too."""
        if self._copied:
            torch.cuda.current_stream().wait_event(self._copied[layer])
            if here:
                self._copied[layer].synchronize()


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
        self._stopwatch = Stopwatch(model.place.device)
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
    def logits(self, batches: Sequence[CausalBatch]) -> tuple[DeviceLogits, Sequence[PromptScores]]:
        x = torch.cat([batch.x for batch in batches]) if batches else torch.empty(0)
        chunks = [chunk for batch in batches for chunk in batch.chunks]
        if any(chunk.scoring is not None for chunk in chunks):
            logits, scores = self._model.scored(x, chunks)
            return self._logits(logits), scores
        return self._logits(self._model.head(x) if len(x) else torch.empty(0, self._model.vocabulary)), ()

    def compute_s(self) -> ComputeSeconds:
        return ComputeSeconds(self._stopwatch.seconds(), self._host.seconds)


class HostAttention:
    """A thread that computes attention to the host's cache, in the order of `submit`."""

    def __init__(self, cores: Sequence[int]) -> None:
        """`cores`: see `CausalStages`."""
        self.seconds = 0.0  # its computing time so far
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-attention")
        if cores:
            threads = torch.get_num_threads()
            self._thread.submit(self._bind, cores).result()
            torch.set_num_threads(threads)  # restores the number for threads that start later

    @staticmethod
    def _bind(cores: Sequence[int]) -> None:
        if problem := pin_thread(cores):
            logger.warning("the host's attention is not bound to cores: %s", problem)
        torch.get_num_threads()  # the first call in a thread resets it to the process's number, so make it here
        torch.set_num_threads(len(cores))

    def submit(self, attention: CachedAttention, qkv: torch.Tensor, layout: StepLayout) -> Future[torch.Tensor]:
        """Compute attention. `qkv`: [tokens, heads + 2 groups, size], with its norm and rotation applied. The future's
        result is [tokens, heads * size].
        """
        return self._thread.submit(self._attend, attention, qkv, layout)

    @torch.inference_mode()
    def _attend(self, attention: CachedAttention, qkv: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        began = time.perf_counter()
        try:
            return attention.attend(qkv, layout)
        finally:
            self.seconds += time.perf_counter() - began


class Stopwatch:
    """Adds up the seconds for which a device computes what is submitted between each `begin` and its `end`: on CUDA by
    events, on a CPU by the clock. On other devices, such as NPUs, they stay 0, which means untimed (`ComputeSeconds`):
    timing is untested there.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind, self._seconds = device.type, 0.0
        self._began: Any = None
        self._pieces: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> None:
        self._pieces.append((self._began, self._now()))

    def seconds(self) -> float:
        """The total so far. Waits until the device has done the last piece."""
        for began, ended in self._pieces:
            if self._kind == "cuda":
                ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000 if self._kind == "cuda" else ended - began
        self._pieces = []
        return self._seconds

    def _now(self) -> Any:
        if self._kind != "cuda":
            return time.perf_counter() if self._kind == "cpu" else 0.0
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
