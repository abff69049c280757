"""Generations at one device, their answers in the cache, and the chunks that a step computes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.generation.scheduler.block_pool import blocks_of


@dataclass(slots=True, eq=False)
class Row:
    """One answer in the cache. `computed`: tokens whose keys and values are there. `length`: tokens of the prompt and
    picked ones. `coming`: tokens that the running step computes. `parked`: its number while its next token takes
    several steps (`planner`).
    """

    generation: Generation
    number: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    length: int = 0
    coming: int = 0
    parked: int | None = None

    @property
    def picked(self) -> int:
        """Tokens of the answer so far."""
        return self.length - self.generation.prompt_tokens

    @property
    def left(self) -> int:
        """Tokens that the answer may still get. At 0 it ends, whatever the last token is."""
        return self.generation.prompt_tokens + self.generation.most_tokens - self.length

    @property
    def to_compute(self) -> int:
        """Tokens that must be in the cache for the next one: of the prompt, and of the answer so far."""
        return self.length or self.generation.prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Whether the next tokens to compute are scored. Those that are computed again after a first token are not."""
        return self.generation.scored and not self.length

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key for what is computed next: by when the next token is due, bulk behind all others."""
        generation = self.generation
        if generation.first_at is None:
            return generation.order
        if generation.pace_s is None:
            return generation.bulk, math.inf
        return False, generation.first_at + self.picked * generation.pace_s

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The sort key for who keeps its blocks: those admitted first, bulk behind all others."""
        return self.generation.bulk, self.generation.age, self.number


@dataclass(slots=True, eq=False)
class Generation:
    """An offered or admitted generation. `due`: when its first token is due, on the scheduler's clock. `tpot_s`: None
    promises no pace. `rows`: once admitted, its answers that have not ended. All rows are in the accelerator's cache,
    or all are `on_host`. A caller that adds fields in a subclass offers only generations of that class.

    `keys`: of its full blocks (`PrefixKeys`), which grow with its only answer; empty: its blocks are not found again.
    `cached`: tokens of its prompt that the cache held when it was offered, full blocks, never all. `scored`: the log
    probabilities of its prompt's tokens are wanted; it is bulk, and without `keys`.
    """

    prompt_tokens: int
    most_tokens: int
    due: float
    tpot_s: float | None = None
    answers: int = 1
    bulk: bool = False
    tenant: Tenant | None = None
    rows: list[Row] = field(default_factory=list)
    on_host: bool = False
    age: int = 0  # how many were admitted before it
    first_at: float | None = None  # when it got its first token
    predicted_s: float = 0.0  # from admission to its first token, as predicted at admission
    keys: Sequence[bytes] = ()
    cached: int = 0
    scored: bool = False

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key for computing prompts: earliest due first, bulk behind all others."""
        return self.bulk, self.due

    @property
    def prompt_left(self) -> int:
        """Tokens of its prompt that no step has computed or is computing."""
        return self.prompt_tokens - (self.rows[0].computed + self.rows[0].coming if self.rows else self.cached)

    @property
    def pace_s(self) -> float | None:
        """The promised `tpot_s`. None: no pace is promised."""
        return None if self.bulk else self.tpot_s

    def shared_blocks(self, block_size: int) -> int:
        """Blocks filled by the prompt, if several answers share them; else 0."""
        return self.prompt_tokens // block_size if self.answers > 1 else 0

    def row_blocks(self, block_size: int) -> int:
        """The most blocks that one answer needs besides the shared ones. Its last token is never in the cache."""
        return blocks_of(self.prompt_tokens + self.most_tokens - 1, block_size) - self.shared_blocks(block_size)

    def most_blocks(self, block_size: int) -> int:
        return self.shared_blocks(block_size) + self.answers * self.row_blocks(block_size)

    def needed_blocks(self, block_size: int) -> int:
        """The most blocks that its remaining rows need."""
        return self.shared_blocks(block_size) + len(self.rows) * self.row_blocks(block_size)

    def held_blocks(self) -> int:
        return len(set(chain.from_iterable(row.table for row in self.rows)))


Batch = Literal[0, 1, 2]
FIRST: Batch = 0
SECOND: Batch = 1
PARKING: Batch = 2


class ScheduledChunk(NamedTuple):
    """A part of a step: `tokens` tokens of a row after its first `start`. `wanted`: the next token is picked from their
    logits; at the end of a prompt, one for each answer of the generation. Host rows may be in the step's second batch,
    or park in it (`planner`).
    """

    row: Row
    start: int
    tokens: int
    wanted: bool
    batch: Batch = FIRST
