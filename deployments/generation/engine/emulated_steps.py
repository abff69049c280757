"""A device that is not on anyone's desk: each step takes the time that a table says, and its tokens are true. Pure.

A token follows from all tokens before it by a rule that a test can compute (`following`). The device reads those tokens
from a cache of its own, block by block, as a model reads keys and values: an answer whose blocks were mixed up, lost or
written by another goes on with a wrong token.

Where a host is beside it, steps go layer by layer through the same `HybridSteps` as a model's. Accelerator and host
each do one thing after another, and are known by when they will have done all that was begun so far. The engine's
thread sleeps where a real one waits for them: what it does not wait for goes on beside it. Times are reckoned from the
ends of what was waited for, so that a sleep that lasts too long adds up to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.generation.engine.hybrid_steps import HybridSteps
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.step import Chunk, Computed, ComputeSeconds, Copy, Logits, Work, load_of
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime

_SURE = 100.0  # a logit beside which all others are nothing, whatever the temperature
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that all its powers differ
_BEFORE = 0.25  # of a layer's linear work, what comes before its attention


@dataclass(eq=False)
class EmulatedSteps:
    """Of a device with `blocks` blocks of cache whose steps take as long as `model` says, slept for real; and, with
    `host`, of one whose host has `num_cpu_blocks` more, and takes as long as it says.

    `noise`: standard deviation of a step's time, as a share of it. `sleep` and `clock` are those of virtual time, where
    a test has such.
    """

    model: StepTime
    blocks: int
    vocabulary: int
    noise: float = field(default=0.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    host: HostTime | None = field(default=None, kw_only=True)
    num_cpu_blocks: int = field(default=0, kw_only=True)
    sleep: Callable[[float], None] = field(default=time.sleep, kw_only=True)
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)

    def __post_init__(self) -> None:
        self._steps = HybridSteps(_Stages(self))

    def step(self, work: Work) -> Computed:
        """See `step.Steps`."""
        return self._steps.step(work)


class _Rows:
    """`hybrid_steps.Batch`."""

    ready_at = 0.0  # when the host will have computed its rows' attention in the layer that was begun

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = list(chunks)
        self.following: list[int] = []  # the token that comes next, of each chunk that is wanted
        self._sum_up()

    def keep(self, rows: Sequence[int]) -> None:
        self.chunks = [self.chunks[row] for row in rows]
        self.following = [self.following[row] for row in rows]
        self._sum_up()

    def _sum_up(self) -> None:
        self.load = load_of(self.chunks)
        own = [chunk for chunk in self.chunks if not chunk.on_host or len(chunk.ids) > 1]
        self.own = load_of(own)  # of it, what the accelerator attends
        self.hosts = load_of([chunk for chunk in self.chunks if chunk.on_host and len(chunk.ids) == 1])


class _Stages:
    """`hybrid_steps.Stages`."""

    def __init__(self, of: EmulatedSteps) -> None:
        self._of, self._host = of, of.host or HostTime(0.0, 0.0)
        self._caches = tuple(np.zeros((count, BLOCK), np.uint64) for count in (of.blocks, of.num_cpu_blocks))
        self._logits = np.zeros((0, of.vocabulary), np.float32)
        self._random, self._slow = np.random.default_rng(of.seed), 1.0
        self._now = 0.0  # of the engine's thread
        self._free_at = self._host_free_at = 0.0  # when accelerator and host will have done all that was begun
        self._begun_at = 0.0  # when the accelerator will have got to the attention of what was begun last
        self._accelerator_s = self._host_s = 0.0  # that all takes them which was begun, copies and waiting apart

    @property
    def layers(self) -> int:
        return self._host.layers

    def copy(self, copies: Sequence[Copy]) -> None:
        if self._of.noise:
            self._slow = max(0.0, 1 + self._of.noise * float(self._random.standard_normal()))
        self._now = self._free_at = self._begun_at = max(self._now, self._of.clock())
        for source, target, from_host, to_host in copies:
            self._caches[to_host][target] = self._caches[from_host][source]
            if from_host != to_host:
                self._free_at += self._slow * self._host.copy_token_s * BLOCK

    def batch(self, chunks: Sequence[Chunk]) -> _Rows:
        return _Rows(chunks)

    def begin(self, layer: int, batches: Sequence[_Rows]) -> None:
        if not layer:
            for batch in batches:
                for chunk in batch.chunks:
                    self._write(chunk)
                # Tokens are computed here, while the accelerator works, and not in `logits`, for which all wait.
                batch.following = [self._next(chunk) for chunk in batch.chunks if chunk.wanted]
        self._compute(_BEFORE * self._linear_s(batches))
        self._begun_at = self._free_at
        for batch in batches:
            if batch.hosts.rows:
                seconds = self._slow * self._host.seconds(batch.hosts.rows, batch.hosts.kv_tokens) / self.layers
                batch.ready_at = self._host_free_at = max(self._host_free_at, self._begun_at) + seconds
                self._host_s += seconds
        self._compute(self._of.model.attention_s(_sum(batch.own for batch in batches)) / self.layers)

    def end(self, layer: int, batches: Sequence[_Rows]) -> None:  # noqa: ARG002 - a model asks for it
        self._wait_until(max(batch.ready_at for batch in batches))
        self._compute((1 - _BEFORE) * self._linear_s(batches))

    def ready(self, batches: Sequence[_Rows]) -> Sequence[_Rows]:
        self._wait_until(self._begun_at)
        return [batch for batch in batches if batch.ready_at <= self._now]

    def wait(self, batches: Sequence[_Rows]) -> None:
        self._wait_until(min(batch.ready_at for batch in batches))

    def logits(self, batches: Sequence[_Rows]) -> Logits:
        tokens = [token for batch in batches for token in batch.following]
        if len(self._logits) < len(tokens):
            self._logits = np.zeros((len(tokens), self._of.vocabulary), np.float32)
        logits = self._logits[: len(tokens)]
        logits[:] = 0.0
        logits[range(len(tokens)), tokens] = _SURE
        self._wait_until(self._free_at)
        return logits

    def compute_s(self) -> ComputeSeconds:
        return ComputeSeconds(self._accelerator_s, self._host_s - max(0.0, self._host_free_at - self._now))

    def _linear_s(self, batches: Sequence[_Rows]) -> float:
        """In one layer."""
        return self._of.model.linear_s(_sum(batch.load for batch in batches)) / self.layers

    def _compute(self, seconds: float) -> None:
        """The accelerator computes for so long, behind all that was begun before."""
        self._free_at = max(self._free_at, self._now) + self._slow * seconds
        self._accelerator_s += self._slow * seconds

    def _wait_until(self, then: float) -> None:
        """Here, in the engine's thread."""
        self._now = max(self._now, then)
        if (left_s := self._now - self._of.clock()) > 0:
            self._of.sleep(left_s)

    def _write(self, chunk: Chunk) -> None:
        positions = np.arange(chunk.start, chunk.end)
        blocks = np.array(chunk.table, np.intp)[positions // BLOCK]
        self._caches[chunk.on_host][blocks, positions % BLOCK] = chunk.ids

    def _next(self, chunk: Chunk) -> int:
        table = list(chunk.table[: blocks_of(chunk.end)])
        return following(self._caches[chunk.on_host][table].reshape(-1)[: chunk.end], self._of.vocabulary)


def _sum(loads: Iterable[StepLoad]) -> StepLoad:
    return StepLoad(*(sum(parts) for parts in zip(*loads, strict=True)))


def following(ids: Sequence[int] | np.ndarray, vocabulary: int) -> int:
    """The token that comes after these: by a sum that counts every one of them, and its place."""
    tokens = np.asarray(ids).astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        places = _FACTOR * (np.arange(len(tokens), dtype=np.uint64) * np.uint64(2) + np.uint64(1))
        mixed = tokens * (places ^ (places >> np.uint64(29)))
        total = np.uint64(mixed.sum(dtype=np.uint64)) * _FACTOR
    return int((total >> np.uint64(32)) % np.uint64(vocabulary))
