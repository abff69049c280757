"""Generations at one device, their answers in the cache, and what a step computes of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from deployments.admission.fair_share import Tenant
from deployments.generation.scheduler.block_pool import blocks_of


@dataclass(slots=True, eq=False)
class Row:
    """One answer in the cache. `computed`: tokens whose keys and values are there; `length`: the prompt's tokens and
    those that were picked. `coming`: tokens that the running step computes. `parked`: its number while its
    next token takes several steps (`planner`).
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
        """Tokens that the answer may still get. At 0 it ends, whatever the last one is."""
        return self.generation.prompt_tokens + self.generation.most_tokens - self.length


@dataclass(slots=True, eq=False)
class Generation:
    """One that is offered: `due` is when its first token is, by the schedule's clock; `tpot_s` None promises no pace.
    `rows` are those of its answers that have not ended, once it is admitted. All of them are in the accelerator's
    cache, or all `on_host`. A caller adds fields of its own in a subclass, and offers no others.
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
    first_at: float | None = None  # when its first token was there
    never: bool = False  # where it was refused: an idle device would not have it in time either
    opens_s: float = 0.0  # where it was refused: seconds until it would be admitted, as it was predicted then
    predicted_s: float = 0.0  # from admission to its first token, as it was predicted then

    @property
    def order(self) -> tuple[bool, float]:
        """In which prompts are computed: bulk behind all others, the earliest due first."""
        return self.bulk, self.due

    @property
    def prompt_left(self) -> int:
        """Tokens of its prompt that no step has computed or computes."""
        return self.prompt_tokens - (self.rows[0].computed + self.rows[0].coming if self.rows else 0)

    @property
    def pace_s(self) -> float | None:
        """`tpot_s`, where one is promised."""
        return None if self.bulk else self.tpot_s

    @property
    def shared_blocks(self) -> int:
        """Those that the prompt fills, where several answers share them."""
        return blocks_of(self.prompt_tokens + 1) - 1 if self.answers > 1 else 0

    @property
    def row_blocks(self) -> int:
        """The most that one answer needs beside the shared ones. Its last token never is in the cache."""
        return blocks_of(self.prompt_tokens + self.most_tokens - 1) - self.shared_blocks

    @property
    def most_blocks(self) -> int:
        return self.shared_blocks + self.answers * self.row_blocks

    @property
    def needed_blocks(self) -> int:
        """The most that its rows need which have not ended."""
        return self.shared_blocks + len(self.rows) * self.row_blocks

    @property
    def held_blocks(self) -> int:
        tables = [len(row.table) for row in self.rows if row.table]
        return sum(tables) - self.shared_blocks * max(0, len(tables) - 1)


Batch = Literal[0, 1, 2]
FIRST: Batch = 0
SECOND: Batch = 1
PARKING: Batch = 2


class ScheduledChunk(NamedTuple):
    """Of a step: the `tokens` of a row that come behind its first `start`. `wanted`: they are followed by a token that
    is to be picked from their logits; at the end of a prompt, one for each answer of the generation. Host rows may be
    in the step's second batch, or park in it (`planner`).
    """

    row: Row
    start: int
    tokens: int
    wanted: bool
    batch: Batch = FIRST
