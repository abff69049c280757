"""A replica's generations: which Router offered each, and where its tokens go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deployments.generation.frames import GenerationOffer
from deployments.generation.request import Finish
from deployments.generation.scheduler.sequences import Generation, Row, ScheduledChunk
from deployments.generation.text.sampling import Sampler
from deployments.models.tokenizer import TokenIds
from deployments.serving.sessions import RouterSession


@dataclass(slots=True, eq=False)
class GenerationSession(RouterSession):
    """A Router's session. `admitted` holds its generations by the numbers of their offers."""

    admitted: dict[int, OfferedGeneration] = field(default_factory=dict)
    called_off: set[int] = field(default_factory=set)  # numbers of offers that unread frames call off
    gone: bool = False  # its connection has ended


@dataclass(slots=True, eq=False)
class Answer:
    """One answer of a generation. `tokens`: how many were sent. `stopped`: nobody wants more of it."""

    number: int
    sampler: Sampler
    tokens: int = 0
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
        drawn yet.
        """
        prompt: TokenIds = self.offer.ids
        if chunk.start < len(prompt):
            return prompt[chunk.start : chunk.start + chunk.tokens]
        return self.each_answer[chunk.row.number].sampler.last

    def drawn_from(self, chunk: ScheduledChunk) -> Sequence[Answer]:
        """The answers that get a token from this chunk: all of them at the end of the prompt."""
        number = chunk.row.number
        return self.each_answer if chunk.start < self.prompt_tokens else self.each_answer[number : number + 1]

    def take(self, answer: Answer, token: int) -> Finish | None:
        """Count one more token of this answer. Returns why the answer has ended, or None."""
        answer.tokens += 1
        if answer.sampler.ends_with(token):
            return "stop"
        return "length" if answer.tokens == self.most_tokens else None


def offered(row: Row) -> OfferedGeneration:
    """The row's generation. Only generations of this class are offered."""
    assert isinstance(row.generation, OfferedGeneration)
    return row.generation
