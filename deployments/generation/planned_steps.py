"""Planned steps: steps with meaningless tokens that measure how long steps take. A replica runs some at its start, and
a calibration requests others. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deployments.generation.engine.factory import StepEngine
from deployments.generation.engine.steps import Steps
from deployments.generation.engine_thread import StepWork
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.scheduler.work import Chunk, Copy, Work
from deployments.generation.text.model_card import GenerationCard
from deployments.generation.text.sampling import RowSamplers, Sampler

_WARM_UP_S = 3.0
_FEWEST_STEPS = 5
_WARM_UP_STEPS = (  # rows, cached tokens of each, prompt tokens
    (1, 32, 0), (0, 0, 128), (1, 512, 0), (8, 64, 0), (0, 0, 512), (8, 1024, 0), (32, 128, 0), (8, 64, 128),
    (0, 0, 1024), (32, 1024, 0), (64, 64, 0), (16, 256, 512),
)  # fmt: skip
_HOST_STEPS = ((1, 32), (8, 512), (1, 1024), (8, 64), (32, 128), (4, 2048), (32, 1024))  # rows, tokens of each
_COPIED = (0, 2, 8, 32)  # blocks


class PlannedStep(NamedTuple):
    """A planned step.

    - `rows`: answers that get one more token, each after `cached` tokens.
    - `chunks`: (start, tokens): pieces of prompts, each after the prompt's first `start` tokens.
    - `host_rows`: more such answers, whose keys and values the host holds.
    - `copied`: how many blocks are copied to the host before the step, and as many back.
    """

    rows: int = 0
    cached: int = 0
    chunks: Sequence[tuple[int, int]] = ()
    host_rows: int = 0
    copied: int = 0

    @property
    def load(self) -> StepLoad:
        """The accelerator's load. It reads no cache for the host's rows."""
        load = StepLoad(self.rows + self.host_rows, self.rows * (self.cached + 1))
        for start, tokens in self.chunks:
            load = load.with_piece(start, tokens)
        return load

    @property
    def host_load(self) -> StepLoad:
        return StepLoad(self.host_rows, self.host_rows * (self.cached + 1))

    @property
    def copied_tokens(self) -> int:
        return 2 * BLOCK * self.copied

    @property
    def tokens(self) -> int:
        return self.rows + self.host_rows + sum(tokens for _, tokens in self.chunks)

    @property
    def asks_host(self) -> bool:
        return bool(self.host_rows or self.copied)

    def seconds(self, step: StepTime, host: HostTime | None) -> float:
        """How long it takes by these models. The host computes attention at the same time as the accelerator."""
        if host is None:
            return step.seconds(self.load)
        attention_s = max(step.attention_s(self.load), host.seconds(*self.host_load[:2]))
        return step.linear_s(self.load) + attention_s + host.copy_token_s * self.copied_tokens

    def fits(
        self, blocks: int, max_num_batched_tokens: int, context: int, num_cpu_blocks: int = 0, block_size: int = BLOCK
    ) -> bool:
        """Whether it fits into the caches, into one step and into the model's context."""
        ends = [start + tokens for start, tokens in self.chunks]
        longest = max([*ends, self.cached + 1 if self.rows or self.host_rows else 0])
        each = blocks_of(self.cached + 1, block_size)
        taken = self.rows * each + sum(blocks_of(end, block_size) for end in ends)
        here, there = max(taken, self.copied), max(self.host_rows * each, self.copied)
        return (
            here <= blocks and there <= num_cpu_blocks and self.tokens <= max_num_batched_tokens and longest <= context
        )

    def work(self, blocks: int, card: GenerationCard, num_cpu_blocks: int = 0, block_size: int = BLOCK) -> StepWork:
        """The step's work for an engine with these numbers of blocks, of `block_size` tokens. It overwrites any blocks,
        so call it only while the cache holds nothing of use. If there are too few blocks, sequences share some. Tokens
        are picked with the model's default sampling.
        """
        random, chunks = np.random.default_rng(0), []
        for room, on_host, pieces in (
            (blocks, False, [*[(self.cached, 1)] * self.rows, *self.chunks]),
            (num_cpu_blocks, True, [(self.cached, 1)] * self.host_rows),
        ):
            taken = 0
            for start, tokens in pieces:
                count = blocks_of(start + tokens, block_size)
                table = [(taken + place) % room for place in range(count)]
                taken += count
                ids = random.integers(0, card.model.vocab_size, tokens).astype(np.int32)
                chunks.append(Chunk(ids, start, table, on_host=on_host))
        copies = [Copy(block, block, to_host=True) for block in range(self.copied)]
        copies += [Copy(block, block, from_host=True) for block in range(self.copied)]
        return StepWork(Work(chunks, copies), [RowSamplers([Sampler(card.defaults)], None) for _ in chunks])


def measure(engine: StepEngine, card: GenerationCard) -> StepTime:
    """Measure a few steps for some seconds. Returns a model of a step's time to use until calibration."""
    if engine.model is not None:
        return engine.model
    steps: list[tuple[StepLoad, float]] = []
    ends = time.monotonic() + _WARM_UP_S
    for rows, cached, prompt in _WARM_UP_STEPS:
        chunks = [(0, min(prompt, card.context))] if prompt else []
        planned = PlannedStep(rows, min(cached, card.context - 1), chunks)
        work = planned.work(engine.blocks, card, block_size=engine.block_size)
        steps.append((planned.load, min(_seconds(engine.steps, work)[0] for _ in range(2))))
        if time.monotonic() > ends and len(steps) >= _FEWEST_STEPS:
            break
    return StepTime.fit(steps)


def measure_host(engine: StepEngine, card: GenerationCard) -> HostTime | None:
    """Measure the host's attention, and copies between the caches, likewise. None if the host holds no blocks."""
    if not engine.num_cpu_blocks:
        return None
    if engine.host is not None:
        return engine.host
    attention: list[tuple[StepLoad, float]] = []
    ends = time.monotonic() + _WARM_UP_S
    for rows, cached in _HOST_STEPS:
        planned = PlannedStep(cached=min(cached, card.context - 1), host_rows=rows)
        work = planned.work(engine.blocks, card, engine.num_cpu_blocks)
        attention.append((planned.host_load, min(_seconds(engine.steps, work)[1] for _ in range(2))))
        if time.monotonic() > ends and len(attention) >= _FEWEST_STEPS:
            break
    copying = [PlannedStep(1, copied=count) for count in _COPIED if count <= min(engine.blocks, engine.num_cpu_blocks)]
    works = [one.work(engine.blocks, card) for one in copying]
    without_s, *took_s = (min(_seconds(engine.steps, work)[0] for _ in range(3)) for work in works)
    copies = [(one.copied_tokens, with_s - without_s) for one, with_s in zip(copying[1:], took_s, strict=True)]
    return HostTime.fit(attention, copies, engine.layers)


def _seconds(steps: Steps, work: StepWork) -> tuple[float, float]:
    """Seconds of the step, and of the host's attention in it."""
    began = time.perf_counter()
    found = work.run(steps)
    return time.perf_counter() - began, found.compute_s.host_s
