"""Steps that nobody asked for, of texts that mean nothing: how long they take says what a step costs. A replica runs
some at its start, and a calibration plans others. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deployments.generation.engine.generation_engines import StepEngine
from deployments.generation.scheduling.blocks import blocks_of
from deployments.generation.scheduling.chunk import Chunk, Steps, Work
from deployments.generation.scheduling.step_time import StepLoad, StepTime
from deployments.generation.stepper import Drawn, StepWork
from deployments.generation.text.generation_card import GenerationCard
from deployments.generation.text.sampling import Sampler

_WARM_UP_S = 3.0
_FEWEST_STEPS = 5
_WARM_UP_STEPS = (  # rows, tokens that each has in the cache, tokens of a prompt beside
    (1, 32, 0), (0, 0, 128), (1, 512, 0), (8, 64, 0), (0, 0, 512), (8, 1024, 0), (32, 128, 0), (8, 64, 128),
    (0, 0, 1024), (32, 1024, 0), (64, 64, 0), (16, 256, 512),
)  # fmt: skip


class PlannedStep(NamedTuple):
    """`rows` answers get one token more, each behind `cached` tokens; and of each of the `chunks`, (start, tokens),
    so many tokens of a prompt are computed, behind its first `start`.
    """

    rows: int = 0
    cached: int = 0
    chunks: Sequence[tuple[int, int]] = ()

    @property
    def load(self) -> StepLoad:
        load = StepLoad(self.rows, self.rows * (self.cached + 1))
        for start, tokens in self.chunks:
            load = load.with_piece(start, tokens)
        return load

    @property
    def tokens(self) -> int:
        return self.rows + sum(tokens for _, tokens in self.chunks)

    def fits(self, blocks: int, step_tokens: int, context: int) -> bool:
        """Whether the cache, one step and the model hold it."""
        ends = [start + tokens for start, tokens in self.chunks]
        longest = max([*ends, self.cached + 1 if self.rows else 0])
        taken = self.rows * blocks_of(self.cached + 1) + sum(map(blocks_of, ends))
        return taken <= blocks and self.tokens <= step_tokens and longest <= context

    def work(self, blocks: int, card: GenerationCard) -> StepWork:
        """For an engine with so many blocks, of which it takes any: nothing of use may be there. Where they are too
        few, sequences share some. Tokens are picked as the model's own files say.
        """
        random, taken, chunks = np.random.default_rng(0), 0, []
        for start, tokens in [*[(self.cached, 1)] * self.rows, *self.chunks]:
            count = blocks_of(start + tokens)
            table = [(taken + place) % blocks for place in range(count)]
            taken += count
            ids = random.integers(0, card.model.vocab_size, tokens).astype(np.int32)
            chunks.append(Chunk(ids, start, table))
        return StepWork(Work(chunks), [Drawn([Sampler(card.defaults)], None) for _ in chunks])


def measure(engine: StepEngine, card: GenerationCard) -> StepTime:
    """A first model of a step's time, from a few steps in some seconds, before anything learned or calibrated."""
    if engine.model is not None:
        return engine.model
    steps: list[tuple[StepLoad, float]] = []
    ends = time.monotonic() + _WARM_UP_S
    for rows, cached, prompt in _WARM_UP_STEPS:
        chunks = [(0, min(prompt, card.context))] if prompt else []
        planned = PlannedStep(rows, min(cached, card.context - 1), chunks)
        work = planned.work(engine.blocks, card)
        steps.append((planned.load, min(_seconds(engine.steps, work) for _ in range(2))))
        if time.monotonic() > ends and len(steps) >= _FEWEST_STEPS:
            break
    return StepTime.fit(steps)


def _seconds(steps: Steps, work: StepWork) -> float:
    began = time.perf_counter()
    work.run(steps)
    return time.perf_counter() - began
