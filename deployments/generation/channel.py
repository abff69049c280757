"""A Router's end of a connection to a generating replica, and the generations that it follows there. Pure asyncio.

Tokens come with each step, whether the client reads them or not. A limited number of each generation is buffered here.
If a reader falls further behind, its generation is called off, so that it uses neither memory here nor a slot at the
replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deployments.errors import TimedOut
from deployments.generation.frames import (
    GenerationOffer,
    GenerationOffers,
    GenerationReport,
    NewToken,
    RefusedOffer,
    ScoredPrompt,
)
from deployments.generation.text.prompt_scores import PromptScores
from deployments.serving.connections import RouterChannel
from deployments.serving.frames import failure_of


class PendingGeneration:
    """A generation at one replica.

    `outcome`: a future. Its result is None once the generation is admitted, or the refusal; it raises ReplicaLost or
    EngineFailed. `tokens` returns the new tokens. `on_token` is called with each token when its frame comes. `unended`:
    the answers that have not ended. `cached`: tokens of the prompt that the replica's cache held. `scores`: of its
    prompt's tokens, complete before the first token comes; None if none were requested.
    """

    def __init__(self, number: int, answers: int, most_unread: int, on_token: Callable[[NewToken], None]) -> None:
        self.number, self.unended, self.cached = number, set(range(answers)), 0
        self._scored: list[tuple[int, PromptScores]] = []
        self.outcome: asyncio.Future[RefusedOffer | None] = asyncio.get_running_loop().create_future()
        self._most_unread, self._on_token = most_unread, on_token
        self._unread: list[NewToken] = []
        self._problem: Exception | None = None
        self._heard = asyncio.Event()

    @property
    def scores(self) -> PromptScores | None:
        if len(self._scored) > 1:
            self._scored = [(0, PromptScores.joined(self._scored))]
        return self._scored[0][1] if self._scored else None

    def score(self, some: ScoredPrompt) -> None:
        self._scored.append((some.start, some.scores))

    @property
    def has_failed(self) -> bool:
        return self._problem is not None

    async def tokens(self) -> list[NewToken]:
        """Wait for tokens. Returns all since the last call, at least one.

        Raises EngineFailed, ReplicaLost or TimedOut.
        """
        while not self._unread:
            if self._problem is not None:
                raise self._problem
            self._heard.clear()
            await self._heard.wait()
        unread, self._unread = self._unread, []
        return unread

    def decide(self, refused: RefusedOffer | None) -> None:
        """Note that it is admitted, or refused."""
        if not self.outcome.done():
            self.outcome.set_result(refused)

    def add(self, token: NewToken) -> None:
        if self._problem is not None:
            return
        self._on_token(token)
        self._unread.append(token)
        if len(self._unread) > self._most_unread:
            self._unread.clear()
            self.fail(
                TimedOut(
                    f"the client read the answer too slowly: more than {self._most_unread} tokens were waiting; "
                    "read it as it is streamed"
                )
            )
        self._heard.set()

    def fail(self, problem: Exception) -> None:
        """End the generation with an error. Earlier tokens can still be read."""
        self._problem = self._problem or problem
        self._heard.set()
        if not self.outcome.done():
            self.outcome.set_exception(problem)
            self.outcome.exception()  # retrieved, so that asyncio does not complain if nobody awaits it


class GenerationChannel(RouterChannel[GenerationOffers, PendingGeneration, GenerationReport]):
    """A Router's channel to a generating replica. See its base."""

    outgoing, incoming = GenerationOffers, GenerationReport

    def offer(
        self, offer: GenerationOffer, most_unread: int, on_token: Callable[[NewToken], None]
    ) -> PendingGeneration:
        """Give the offer a number and send it."""
        self._numbers += 1
        offer.number = self._numbers
        self._outgoing().offers.append(offer)
        pending = self.pending[self._numbers] = PendingGeneration(self._numbers, offer.answers, most_unread, on_token)
        return pending

    def stop(self, pending: PendingGeneration, answer: int) -> None:
        """Tell the replica to stop that answer."""
        if self.pending.get(pending.number) is pending:
            self._outgoing().stopped.append((pending.number, answer))
            self._end_answer(pending, answer)

    def hear(self, report: GenerationReport) -> None:
        self._on_report(report)
        for refused in report.refused:
            if (pending := self.pending.pop(refused.number, None)) is not None:
                pending.decide(refused)
        cached = dict(report.cached)
        for number in report.admitted:
            if (pending := self.pending.get(number)) is not None:
                pending.cached = cached.get(number, 0)
                pending.decide(None)
        self._take_scores(report)
        for token in report.tokens:
            if (pending := self.pending.get(token.number)) is not None:
                self._add(pending, token)
        for number, problem in report.failed:
            if (pending := self.pending.pop(number, None)) is not None:
                pending.fail(failure_of(report, number, problem))

    def _take_scores(self, report: GenerationReport) -> None:
        for scored in report.scored:
            if (pending := self.pending.get(scored.number)) is not None:
                pending.score(scored)

    def _add(self, pending: PendingGeneration, token: NewToken) -> None:
        pending.add(token)
        if pending.has_failed:
            self.call_off(pending)
        elif token.finish is not None:
            self._end_answer(pending, token.answer)

    def _end_answer(self, pending: PendingGeneration, answer: int) -> None:
        pending.unended.discard(answer)
        if not pending.unended:
            self.pending.pop(pending.number, None)
