"""Where an embedder replica answers the Routers that lease its places: `Leases` decides, this waits and looks.

Pure asyncio: whether a Router lives, and what becomes of a dead one's batches, are arguments.

An idle Router costs nothing: it keeps one `poll` open here, through which it is told what it has to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from deployments.leases import Ask, Depth, Leases, Order, Word

POLL_S = 10.0  # a poll without news ends then: a replica that shuts down waits for its calls
_ANSWER_S = 0.2  # a recall that is not answered by then is not waited for any more
_LOOK_S = 0.3  # nor is Ray's word on whether a silent Router lives
_TRIAL_S = 10.0  # so long after a trial's last question Routers may keep idle places again


@dataclass(slots=True, eq=False)
class _Question:
    """What is still missing after a first look, and the answer."""

    router: str
    asked: Ask
    missing: int
    granted: asyncio.Future[int]


@dataclass(slots=True, repr=False, eq=False)
class LeaseOffice:
    """All methods are called from the event loop's own thread. A Router never cancels its calls."""

    lives: Callable[[str], Awaitable[bool]]  # by the name of its actor
    orphan: Callable[[str], int]  # this Router is dead: drop its batches; how many of its queries still run
    leases: Leases = field(default_factory=Leases)
    _actors: dict[str, str] = field(default_factory=dict)
    _polls: dict[str, asyncio.Future[Order]] = field(default_factory=dict)
    _questions: list[_Question] = field(default_factory=list)
    _round: asyncio.Task[None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _silent: set[str] = field(default_factory=set)
    _looks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _trial_ends: asyncio.TimerHandle | None = None

    @property
    def calls(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """What Routers may call."""
        return {
            call.__name__: call
            for call in (
                self.join, self.ask, self.poll, self.give, self.tell_depth, self.look, self.leave, self.census,
            )
        }  # fmt: skip

    async def join(self, router: str, actor: str, depth: Depth, in_flight: int) -> Order:
        """A Router begins here, or begins anew. What it replaces may be dead: look at all others."""
        self._actors[router] = actor
        self._silent.discard(router)
        order = self.leases.join(router, depth, in_flight)
        self._end_poll(router)
        self._deliver()
        self._look(other for other in self.leases.routers if other != router)
        return order

    async def ask(self, router: str, asked: Ask) -> int:
        """Places granted now: from the free ones, else after a recall of what the others hold idle."""
        self._heard(router)
        if asked.trial_depth is not None:
            self._extend_trial()
        self.leases.tell_depth(router, asked.term, asked.depth, asked.back)
        granted = self.leases.ask(router, asked.term, asked.want, asked.trial_depth)
        self._deliver()
        question = _Question(router, asked, asked.want - granted, asyncio.get_running_loop().create_future())
        if question.missing and len(self.leases.routers) > 1:
            self._questions.append(question)
            if self._round is None:
                self._round = asyncio.create_task(self._answer_questions())
            return granted + await question.granted
        self._answer(question)
        return granted + question.granted.result()

    async def poll(self, router: str, word: Word) -> Order | None:
        """What the Router answers to the last order, and the next one; None: nothing for a while, please ask again.

        A Router that has no account here is told the term 0: it should join again.
        """
        if router not in self.leases.routers:
            return Order(0)
        self._heard(router)
        self.leases.hear(router, word)
        self._end_poll(router)
        poll: asyncio.Future[Order] = asyncio.get_running_loop().create_future()
        self._polls[router] = poll
        self._deliver()
        try:
            await asyncio.wait([poll], timeout=POLL_S)
        finally:
            if self._polls.get(router) is poll:
                del self._polls[router]
        if poll.done() and not poll.cancelled():
            return poll.result()
        self._look(other for other in self.leases.routers if other not in self._polls and other != router)
        return None

    async def give(self, router: str, term: int, count: int) -> None:
        self._heard(router)
        self.leases.give(router, term, count)
        self._deliver()

    async def tell_depth(self, router: str, term: int, depth: Depth) -> None:
        self._heard(router)
        self.leases.tell_depth(router, term, depth)
        self._deliver()

    async def look(self, router: str) -> None:
        """Elsewhere the Router has been told that it is alone: look whether the others live."""
        self._look(other for other in self.leases.routers if other != router)

    async def leave(self, router: str) -> None:
        """It shuts down, and has nothing here any more."""
        self._close(router, 0)

    async def census(self) -> dict[str, Any]:
        """Places of this replica that are held; and what each Router has in the pool, by its own word of just now (its
        last, where it is silent).
        """
        await self._wait_for(self.leases.ask_all())
        return {
            "held": {router: self.leases.held(router) for router in self.leases.routers},
            "most_held": self.leases.most_held,
            "trial_depth": self.leases.trial_depth,
            "routers": {
                router: {"in_flight": word.in_flight, "waiting": word.waiting}
                for router, word in self.leases.words().items()
            },
        }

    def end_lingering(self, queries: int) -> None:
        self.leases.end_lingering(queries)
        self._deliver()

    # --- recalls -----------------------------------------------------------------------------------------------------

    async def _answer_questions(self) -> None:
        """One recall for all questions that are open; those that come meanwhile are in the next."""
        try:
            while self._questions:
                questions, self._questions = self._questions, []
                wants: dict[str, int] = {}
                for question in questions:
                    wants[question.router] = wants.get(question.router, 0) + question.missing
                patient = all(question.asked.patient for question in questions)
                await self._wait_for(self.leases.recall(wants, gently=patient))
                for question in questions:
                    self._answer(question)
                self._deliver()
        finally:
            self._round = None

    def _answer(self, question: _Question) -> None:
        asked, missing = question.asked, question.missing
        granted = self.leases.answer(question.router, asked.term, missing, asked.trial_depth, patient=asked.patient)
        question.granted.set_result(granted)

    async def _wait_for(self, routers: Iterable[str]) -> None:
        """Until all have answered, or are dead; one that is only silent is not waited for long, and then not again."""
        self._deliver()
        loop = asyncio.get_running_loop()
        awaited = [router for router in routers if router not in self._silent]
        self._look(self._silent)
        ends = loop.time() + _ANSWER_S
        while not all(map(self.leases.answered, awaited)) and loop.time() < ends:
            self._news.clear()
            await _wait(self._news.wait(), ends - loop.time())
        silent = [router for router in awaited if not self.leases.answered(router)]
        self._silent.update(silent)
        looks = self._look(silent)
        if looks:
            await asyncio.wait(looks, timeout=_LOOK_S)

    def _look(self, routers: Iterable[str]) -> list[asyncio.Task[None]]:
        looks = []
        for router in list(routers):
            if router not in self._looks and router in self._actors:
                self._looks[router] = asyncio.create_task(self._close_if_dead(router))
                looks.append(self._looks[router])
        return looks

    async def _close_if_dead(self, router: str) -> None:
        try:
            if not await self.lives(self._actors[router]):
                self._close(router, self.orphan(router))
        finally:
            self._looks.pop(router, None)

    # --- news --------------------------------------------------------------------------------------------------------

    def _close(self, router: str, lingering: int) -> None:
        self.leases.close(router, lingering)
        self._actors.pop(router, None)
        self._silent.discard(router)
        self._end_poll(router)
        self._deliver()

    def _heard(self, router: str) -> None:
        self._silent.discard(router)

    def _end_poll(self, router: str) -> None:
        poll = self._polls.pop(router, None)
        if poll is not None and not poll.done():
            poll.cancel()

    def _deliver(self) -> None:
        """Tell each Router that listens what is new for it."""
        for router, poll in list(self._polls.items()):
            order = self.leases.take_order(router)
            if order is not None:
                poll.set_result(order)
                del self._polls[router]
        self._news.set()

    def _extend_trial(self) -> None:
        if self._trial_ends is not None:
            self._trial_ends.cancel()
        self._trial_ends = asyncio.get_running_loop().call_later(_TRIAL_S, self._end_trial)

    def _end_trial(self) -> None:
        self._trial_ends = None
        self.leases.end_trial()
        self._deliver()


async def _wait(waiting: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(waiting, timeout_s)
    except TimeoutError:
        return
