"""A replica's generations: which Router offered each, where its tokens go, and the steps that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deployments.errors import EngineFailed
from deployments.generation.engine_thread import Found, StepWork
from deployments.generation.frames import GenerationOffer
from deployments.generation.request import Finish
from deployments.generation.scheduler.prefix_keys import PrefixKeys
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import FIRST, PARKING, SECOND, Generation, Row, ScheduledChunk
from deployments.generation.scheduler.work import Chunk, Scoring, Work
from deployments.generation.text.grammar import Grammars
from deployments.generation.text.logit_rules import rules_of
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import RowSamplers, Sampler
from deployments.models.tokenizer import TokenIds
from deployments.serving.planned_runs import Timed
from deployments.serving.sessions import RouterSession


@dataclass(slots=True, eq=False)
class GenerationSession(RouterSession):
    """A Router's session. `admitted` holds its generations by the numbers of their offers."""

    admitted: dict[int, OfferedGeneration] = field(default_factory=dict)
    called_off: set[int] = field(default_factory=set)  # numbers of offers that unread frames call off
    gone: bool = False  # its connection has ended


@dataclass(slots=True, eq=False)
class Answer:
    """One answer of a generation. `tokens`: those that were sent. `stopped`: nobody wants more of it."""

    number: int
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class OfferedGeneration(Generation):
    """A generation that a Router offered, and where its tokens go. `gone`: it was dropped."""

    session: GenerationSession
    offer: GenerationOffer
    each_answer: list[Answer]
    gone: bool = False

    def ids(self, chunk: ScheduledChunk) -> TokenIds:
        """Token ids of a chunk: a part of the prompt, or an answer's last token, which the running step may not have
        drawn yet; for a row that lost its blocks, a part of both.
        """
        prompt: TokenIds = self.offer.ids
        answer, ends = self.each_answer[chunk.row.number], chunk.start + chunk.tokens
        if ends <= len(prompt):
            return prompt[chunk.start : ends]
        if chunk.wanted and chunk.tokens == 1:
            return answer.sampler.last
        return np.concatenate([prompt, np.array(answer.tokens, np.int32)])[chunk.start : ends]

    def drawn_from(self, chunk: ScheduledChunk) -> Sequence[Answer]:
        """The answers that get a token from this chunk: all of them at the end of the prompt."""
        number, ends = chunk.row.number, chunk.start + chunk.tokens
        return self.each_answer if ends == self.prompt_tokens else self.each_answer[number : number + 1]

    def take(self, answer: Answer, token: int) -> Finish | None:
        """Count one more token of this answer. Returns why the answer has ended, or None."""
        answer.tokens.append(token)
        if isinstance(self.keys, PrefixKeys) and self.answers == 1:
            self.keys.add(token)
        if answer.sampler.ends_with(token):
            return "stop"
        return "length" if len(answer.tokens) == self.most_tokens else None


def sampler_of(offer: GenerationOffer, number: int, grammars: Grammars | None) -> Sampler:
    """The sampler of an offer's answer `number`. `grammars` may be None if no offer has a grammar."""
    rule = None
    if grammar := offer.sampling.grammar:
        assert grammars is not None
        rule = grammars.rule(grammar, offer.end_tokens)
    rules = rules_of(offer.sampling, offer.ids, offer.end_tokens, rule)
    return Sampler(offer.sampling, number, offer.end_tokens, rules)


def offered(row: Row) -> OfferedGeneration:
    """The row's generation. Only generations of this class are offered."""
    assert isinstance(row.generation, OfferedGeneration)
    return row.generation


@dataclass(slots=True, eq=False)
class Step:
    """A step that runs, or waits for the engine.

    - `wanted`: chunks that yield a token; `parked`: rows that may yield one, by their numbers.
    - `tell`: set for a probe or a planned step, which belongs to no generation; called with its time.
    - `found`: its result, once it has ended.
    - `forgotten`: ignore the result, because the generations were lost meanwhile.
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
        """A step of these chunks that begins at `at`, with what the scheduler has to tell the engine."""
        work = Work(
            [_chunk_of(chunk) for chunk in chunks if chunk.batch == FIRST],
            schedule.copies(),
            [_chunk_of(chunk) for chunk in chunks if chunk.batch == SECOND],
            [(chunk.row.parked, _chunk_of(chunk)) for chunk in chunks if chunk.row.parked is not None],
            schedule.called_off(),
            schedule.joins,
        )
        parked_rows = schedule.parked.items()
        parked = {number: ScheduledChunk(row, row.computed, 1, True, PARKING) for number, row in parked_rows}
        wanted = [chunk for chunk in chunks if chunk.wanted and chunk.batch != PARKING]
        samplers = [_samplers_of(chunk) for chunk in wanted]
        parked_samplers = {number: _samplers_of(chunk) for number, chunk in parked.items()}
        planned_s = schedule.planned_s  # without the learned slowdown, so that metrics show drift
        return cls(chunks, StepWork(work, samplers, parked_samplers), at, planned_s, wanted, parked)

    def scored(self, computed: Sequence[ScheduledChunk], found: Found) -> Iterator[tuple[ScheduledChunk, PromptScores]]:
        """The scores of those `computed` chunks that have any."""
        first = (chunk for chunk in self.chunks if chunk.batch == FIRST)
        pairs = zip(first, self.work.work.chunks, strict=True)
        asked = [chunk for chunk, sent in pairs if sent.scoring is not None and chunk in computed]
        return zip(asked, found.scores, strict=True)

    def computed(self, found: Found) -> tuple[list[ScheduledChunk], list[Row], bool]:
        """The chunks that were computed, the rows that were left out, and whether the step's time can be compared with
        its plan.

        It cannot if a chunk of a prompt was left out, or was scored. The plan counts a scored token as an answer's,
        which may cost several times as much (on a CPU such a step took 0.3 to 0.4 of the plan).
        """
        left_out = [chunk for chunk, picked in zip(self.wanted, found.picked, strict=False) if picked == []]
        computed = [chunk for chunk in self.chunks if chunk.batch != PARKING and chunk not in left_out]
        computed += [self.parked[number] for number in found.arrived]
        rows = [chunk.row for chunk in left_out]
        whole = not left_out or (bool(computed) and all(chunk.tokens == 1 for chunk in left_out))
        return computed, rows, whole and all(chunk.scoring is None for chunk in self.work.work.chunks)


def _chunk_of(chunk: ScheduledChunk) -> Chunk:
    """A scheduled chunk in the engine's terms."""
    row, generation = chunk.row, offered(chunk.row)
    scoring, alternatives = None, generation.offer.prompt_logprobs
    if row.is_scored and alternatives is not None:
        scoring = Scoring(generation.offer.ids[chunk.start + 1 :][: chunk.tokens], alternatives)
    return Chunk(generation.ids(chunk), chunk.start, tuple(row.table), chunk.wanted, generation.on_host, scoring)


def _samplers_of(chunk: ScheduledChunk) -> RowSamplers:
    """The samplers that draw from a chunk: at the end of a prompt, one for each answer."""
    generation = offered(chunk.row)
    return RowSamplers([answer.sampler for answer in generation.drawn_from(chunk)], generation.offer.logprobs)
