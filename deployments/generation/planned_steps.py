"""Steps that nobody asked for, of texts that mean nothing: how long they take says what a step costs. A replica runs
some at its start, and a calibration plans others. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deployments.generation.blocks import blocks_of
from deployments.generation.chunk import Chunk
from deployments.generation.generation_card import GenerationCard
from deployments.generation.sampling import Sampler
from deployments.generation.step_time import StepLoad
from deployments.generation.stepper import Drawn, StepWork


class PlannedStep(NamedTuple):
    """`rows` answers get one token more, each behind `cached` tokens; and of each of the `chunks`, (start, tokens),
    so many tokens of a prompt are computed, behind its first `start`.
    """

    rows: int = 0
    cached: int = 0
    chunks: Sequence[tuple[int, int]] = ()

    @property
    def load(self) -> StepLoad:
        """A chunk of one token is a row: it costs what one costs."""
        load = StepLoad(self.rows, self.rows * (self.cached + 1))
        for start, tokens in self.chunks:
            load = load.with_row(start + 1) if tokens == 1 else load.with_chunk(start, tokens)
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
        return StepWork(chunks, (), [Drawn([Sampler(card.defaults)], None) for _ in chunks])
