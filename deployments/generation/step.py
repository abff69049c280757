"""A step of a replica, and whose generations it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deployments.errors import EngineFailed
from deployments.generation.frames import GenerationOffer
from deployments.generation.request import Finish
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import FIRST, PARKING, SECOND, Generation, Row, ScheduledChunk
from deployments.generation.scheduler.step import Chunk, Work
from deployments.generation.step_run import Found, StepWork
from deployments.generation.step_timing import Timed
from deployments.generation.text.sampling import RowSamplers, Sampler
from deployments.models.tokenizer import TokenIds
from deployments.serving.sessions import RouterSession


@dataclass(slots=True, eq=False)
class GenerationSession(RouterSession):
    """`admitted`: by their offers' numbers."""

    admitted: dict[int, OfferedGeneration] = field(default_factory=dict)
    called_off: set[int] = field(default_factory=set)  # numbers of offers, by frames that have not been read
    gone: bool = False  # nobody reads its frames any more


@dataclass(slots=True, eq=False)
class Answer:
    """One answer of a generation. `tokens`: that Routers were told. `stopped`: nobody wants more of it."""

    number: int
    sampler: Sampler
    tokens: int = 0
    stopped: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class OfferedGeneration(Generation):
    """A generation that a Router offered, and where its tokens go. `gone`: nobody waits for it any more."""

    session: GenerationSession
    offer: GenerationOffer
    each_answer: list[Answer]
    gone: bool = False

    def ids(self, chunk: ScheduledChunk) -> TokenIds:
        """Of a chunk: of the prompt, or the last token of an answer, which may not be known yet."""
        prompt: TokenIds = self.offer.ids
        if chunk.start < len(prompt):
            return prompt[chunk.start : chunk.start + chunk.tokens]
        return self.each_answer[chunk.row.number].sampler.last

    def drawn_from(self, chunk: ScheduledChunk) -> Sequence[Answer]:
        """Those that get a token of it: at the end of the prompt all."""
        number = chunk.row.number
        return self.each_answer if chunk.start < self.prompt_tokens else self.each_answer[number : number + 1]

    def take(self, answer: Answer, token: int) -> Finish | None:
        """One token more of this answer; why it has ended, if it has."""
        answer.tokens += 1
        if answer.sampler.ends_with(token):
            return "stop"
        return "length" if answer.tokens == self.most_tokens else None


def offered(row: Row) -> OfferedGeneration:
    """Whose row it is: no others were offered."""
    assert isinstance(row.generation, OfferedGeneration)
    return row.generation


def chunk_of(chunk: ScheduledChunk) -> Chunk:
    """What a scheduled chunk asks of the engine."""
    row = chunk.row
    return Chunk(offered(row).ids(chunk), chunk.start, tuple(row.table), chunk.wanted, row.generation.on_host)


def samplers_of(chunk: ScheduledChunk) -> RowSamplers:
    """Who draws of a chunk: at the end of a prompt, one token for each answer."""
    generation = offered(chunk.row)
    return RowSamplers([answer.sampler for answer in generation.drawn_from(chunk)], generation.offer.logprobs)


@dataclass(slots=True, eq=False)
class Step:
    """One that runs. `wanted`: chunks of which a token comes; `parked`: rows of which one may, by their numbers.
    `tell`: it is nobody's; called with what it took. `found`: it has ended. `forgotten`: nobody knows any more whose it
    is.
    """

    chunks: Sequence[ScheduledChunk]
    work: StepWork
    began: float
    planned_s: float
    wanted: Sequence[ScheduledChunk] = ()
    parked: Mapping[int, ScheduledChunk] = field(default_factory=dict)
    tell: Callable[[Timed | EngineFailed], None] | None = None
    found: Found | BaseException | None = None
    forgotten: bool = False

    @classmethod
    def of(cls, schedule: StepScheduler, chunks: Sequence[ScheduledChunk], at: float) -> Step:
        """The step of these chunks, which begins then, and what the schedule has to tell the engine with it."""
        work = Work(
            [chunk_of(chunk) for chunk in chunks if chunk.batch == FIRST],
            schedule.copies(),
            [chunk_of(chunk) for chunk in chunks if chunk.batch == SECOND],
            [(chunk.row.parked, chunk_of(chunk)) for chunk in chunks if chunk.row.parked is not None],
            schedule.called_off(),
            schedule.joins,
        )
        parked_rows = schedule.parked.items()
        parked = {number: ScheduledChunk(row, row.computed, 1, True, PARKING) for number, row in parked_rows}
        wanted = [chunk for chunk in chunks if chunk.wanted and chunk.batch != PARKING]
        samplers = [samplers_of(chunk) for chunk in wanted]
        parked_samplers = {number: samplers_of(chunk) for number, chunk in parked.items()}
        planned_s = schedule.planned_s  # without what was learned, so that drift is seen
        return cls(chunks, StepWork(work, samplers, parked_samplers), at, planned_s, wanted, parked)

    def computed(self, found: Found) -> tuple[list[ScheduledChunk], bool]:
        """The chunks that were computed. And whether the step's time is that of its plan: no chunk of a prompt was left
        out.
        """
        left_out = [chunk for chunk, picked in zip(self.wanted, found.picked, strict=False) if picked == []]
        computed = [chunk for chunk in self.chunks if chunk.batch != PARKING and chunk not in left_out]
        computed += [self.parked[number] for number in found.arrived]
        return computed, not left_out or (bool(computed) and all(chunk.tokens == 1 for chunk in left_out))
