"""An emulated device for generation: each step takes the time of a model, and its tokens can be checked. Pure.

A token follows from all tokens before it by a rule that a test can compute (`following`). The device reads those tokens
from its own cache, block by block, as a model reads keys and values. So if an answer's blocks are mixed up, lost or
overwritten by another, the answer continues with a wrong token.

With a host, steps go layer by layer through the same `HybridSteps` as a real model's. Accelerator and host each do one
thing at a time, and each is represented by the time at which it will have done everything begun so far. The engine's
thread sleeps where it would wait for a real device; everything else goes on in parallel. Times are counted from the
planned end of each wait, so sleeps that last too long do not accumulate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deployments.generation.engine.hybrid_steps import HybridSteps
from deployments.generation.engine.steps import Computed, Logits
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.scheduler.work import Chunk, ComputeSeconds, Copy, Scoring, Work, load_of
from deployments.generation.text.prompt_scores import PromptScores

_SURE = 100.0  # a logit that dominates all others at any temperature
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that all its powers differ
_BEFORE = 0.25  # the share of a layer's linear work that precedes its attention


@dataclass(eq=False)
class EmulatedSteps:
    """The steps of a device with `blocks` cache blocks. They really take as long as `model` says. With `host`, its host
    has `num_cpu_blocks` more blocks, and takes as long as `host` says.

    `noise`: standard deviation of a step's time, as a share of it. `sleep` and `clock`: a test may pass virtual time.
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
        """See `steps.Steps`."""
        return self._steps.step(work)


class _Rows:
    """`hybrid_steps.Batch`."""

    ready_at = 0.0  # when the host will have computed its rows' attention in the layer that was begun

    def __init__(self, chunks: Sequence[Chunk], copy_token_s: float) -> None:
        self.chunks, self._copy_token_s = list(chunks), copy_token_s
        self.following: list[int] = []  # the next token of each wanted chunk
        self.scores: list[PromptScores] = []
        self._sum_up()

    def keep(self, rows: Sequence[int]) -> None:
        self.chunks = [self.chunks[row] for row in rows]
        self.following = [self.following[row] for row in rows]
        self._sum_up()

    def _sum_up(self) -> None:
        self.load = load_of(self.chunks)
        own = [chunk for chunk in self.chunks if not chunk.on_host or len(chunk.ids) > 1]
        self.own = load_of(own, self._copy_token_s)  # the part of it whose attention the accelerator computes
        self.hosts = load_of([chunk for chunk in self.chunks if chunk.on_host and len(chunk.ids) == 1])


class _Stages:
    """`hybrid_steps.Stages`."""

    def __init__(self, of: EmulatedSteps) -> None:
        self._of, self._host = of, of.host or HostTime(0.0, 0.0)
        self._caches = tuple(np.zeros((count, BLOCK), np.uint64) for count in (of.blocks, of.num_cpu_blocks))
        self._logits = np.zeros((0, of.vocabulary), np.float32)
        self._random, self._slow = np.random.default_rng(of.seed), 1.0
        self._now = 0.0  # the engine thread's time
        self._free_at = self._host_free_at = 0.0  # when accelerator and host will have done everything begun
        self._begun_at = 0.0  # when the accelerator will reach the attention of the last `begin`
        self._accelerator_s = self._host_s = 0.0  # computing time of everything begun, without copies and waits

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
        return _Rows(chunks, self._host.copy_token_s)

    def begin(self, layer: int, batches: Sequence[_Rows]) -> None:
        if not layer:
            for batch in batches:
                for chunk in batch.chunks:
                    self._write(chunk)
                # Tokens are computed here, while the accelerator works, and not in `logits`, for which all wait.
                batch.following = [self._next(chunk) for chunk in batch.chunks if chunk.wanted]
                batch.scores = [self._scores(chunk, chunk.scoring) for chunk in batch.chunks if chunk.scoring]
        self._compute(_BEFORE * self._linear_s(batches))
        self._begun_at = self._free_at
        for batch in batches:
            if batch.hosts.rows:
                seconds = self._slow * self._host.seconds(batch.hosts.rows, batch.hosts.kv_tokens) / self.layers
                batch.ready_at = self._host_free_at = max(self._host_free_at, self._begun_at) + seconds
                self._host_s += seconds
        self._compute(self._of.model.attention_s(_sum(batch.own for batch in batches)) / self.layers)

    def end(self, layer: int, batches: Sequence[_Rows]) -> None:  # noqa: ARG002 - a real model needs it
        self._wait_until(max(batch.ready_at for batch in batches))
        self._compute((1 - _BEFORE) * self._linear_s(batches))

    def ready(self, batches: Sequence[_Rows]) -> Sequence[_Rows]:
        self._wait_until(self._begun_at)
        return [batch for batch in batches if batch.ready_at <= self._now]

    def wait(self, batches: Sequence[_Rows]) -> None:
        self._wait_until(min(batch.ready_at for batch in batches))

    def logits(self, batches: Sequence[_Rows]) -> tuple[Logits, Sequence[PromptScores]]:
        tokens = [token for batch in batches for token in batch.following]
        if len(self._logits) < len(tokens):
            self._logits = np.zeros((len(tokens), self._of.vocabulary), np.float32)
        logits = self._logits[: len(tokens)]
        logits[:] = 0.0
        logits[range(len(tokens)), tokens] = _SURE
        self._wait_until(self._free_at)
        return logits, [scores for batch in batches for scores in batch.scores]

    def compute_s(self) -> ComputeSeconds:
        return ComputeSeconds(self._accelerator_s, self._host_s - max(0.0, self._host_free_at - self._now))

    def _linear_s(self, batches: Sequence[_Rows]) -> float:
        """Seconds of linear work in one layer."""
        return self._of.model.linear_s(_sum(batch.load for batch in batches)) / self.layers

    def _compute(self, seconds: float) -> None:
        """Let the accelerator compute for so long, after everything begun before."""
        self._free_at = max(self._free_at, self._now) + self._slow * seconds
        self._accelerator_s += self._slow * seconds

    def _wait_until(self, then: float) -> None:
        """Sleep in the engine's thread until that time."""
        self._now = max(self._now, then)
        if (left_s := self._now - self._of.clock()) > 0:
            self._of.sleep(left_s)

    def _write(self, chunk: Chunk) -> None:
        positions = np.arange(chunk.start, chunk.end)
        blocks = np.array(chunk.table, np.intp)[positions // BLOCK]
        self._caches[chunk.on_host][blocks, positions % BLOCK] = chunk.ids

    def _next(self, chunk: Chunk) -> int:
        return following(self._before(chunk), self._of.vocabulary)

    def _before(self, chunk: Chunk) -> np.ndarray:
        """All tokens up to the chunk's end, as the cache holds them."""
        table = list(chunk.table[: blocks_of(chunk.end, BLOCK)])
        return self._caches[chunk.on_host][table].reshape(-1)[: chunk.end]

    def _scores(self, chunk: Chunk, scoring: Scoring) -> PromptScores:
        """By the logits of `logits`: one token is sure. All others are equally unlikely; lower ids come first."""
        words = self._of.vocabulary
        sure = followings(self._before(chunk), words)[chunk.start :][: len(scoring.following), None]
        others = np.arange(min(words - 1, scoring.alternatives))[None, :]
        best = np.concatenate([sure, others + (others >= sure)], 1)[:, : scoring.alternatives]
        ids = np.concatenate([scoring.following[:, None], best], 1).astype(np.int32)
        hit = ids == sure
        return PromptScores(
            ids, np.where(hit, 0.0, -_SURE).astype(np.float32), np.where(hit[:, 0], 1, 2).astype(np.int32)
        )


def _sum(loads: Iterable[StepLoad]) -> StepLoad:
    return StepLoad(*(sum(parts) for parts in zip(*loads, strict=True)))


def following(ids: Sequence[int] | np.ndarray, vocabulary: int) -> int:
    """The token that follows these, by a sum that depends on each of them and its position."""
    return int(followings(ids, vocabulary)[-1])


def followings(ids: Sequence[int] | np.ndarray, vocabulary: int) -> npt.NDArray[np.int64]:
    """The token that follows each of these and all before it."""
    tokens = np.asarray(ids).astype(np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        places = _FACTOR * (np.arange(len(tokens), dtype=np.uint64) * np.uint64(2) + np.uint64(1))
        mixed = tokens * (places ^ (places >> np.uint64(29)))
        totals = mixed.cumsum(dtype=np.uint64) * _FACTOR
    return ((totals >> np.uint64(32)) % np.uint64(vocabulary)).astype(np.int64)
