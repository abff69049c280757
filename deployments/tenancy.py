"""How a Router leases the places of one pool: it joins, listens, asks, and gives back. Pure asyncio.

A Router that is alone holds everything, and nothing of this runs while queries come. Of several, each admits by the
places it holds, and asks only when these run out.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.holdings import ALL, Holding, Holdings
from deployments.leases import Ask, Depth, Order, Word
from deployments.queue_manager import QueueManager

_PATIENCE_S = 0.8  # an owner that takes longer hangs: its answer counts when it comes
_FIRST_DRY_S, _LAST_DRY_S = 0.01, 0.1  # nobody asks again so soon after an answer that fell short
_SHORT_S, _PROTECTED_S = 1.0, 0.5  # places that come within the one after a refusal are kept for the other
_MOST_DRY = 8  # owners that had none, and a round ends: in a large pool where all is taken it would ask them all
_AMPLE_SHARE = 1 / 8  # of what is held: when less is free, more is asked for in the background


class Call(Protocol):
    """Calls the lease office of a replica. Returns None where it is not reached."""

    def __call__(self, replica: str, what: str, *words: Any) -> Coroutine[Any, Any, Any]: ...


@dataclass(slots=True, eq=False)
class _Claim:
    """Whether somebody still waits for what is granted."""

    reserves: bool
    open: bool = True


@dataclass(slots=True, repr=False, eq=False)
class Tenancy:
    """One pool's. All methods are called from the event loop's own thread."""

    pool: str
    router: str
    actor: str  # the Router's own, by which an owner looks whether it lives
    call: Call
    queue: QueueManager
    holdings: Holdings
    on_change: Callable[[], None]  # places have come, or may be asked for again
    on_doubt: Callable[[str], None]  # this replica does not know us, or is not reached
    trial_depth: int | None = None
    asks: int = 0  # since the start
    _polls: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _errands: set[asyncio.Task[Any]] = field(default_factory=set)
    _dry_s: float = 0.0
    _dry: asyncio.TimerHandle | None = None
    _short_until: float = 0.0
    _protected: int = 0
    _giving: bool = False
    _asking_ahead: bool = False
    _replacing: bool = False

    # --- which replicas, which depths --------------------------------------------------------------------------------

    async def join(self, replica: str) -> bool:
        """Whether it answered: from now on its places count."""
        order = await self.call(
            replica, "join", self.router, self.actor, self.holdings.depth, self.holdings.out(replica)
        )
        if order is None:
            return False
        self.holdings.join(replica, order)
        self._polls[replica] = self._spawn(self._listen(replica, self.holdings.replicas[replica]))
        return True

    def drop(self, replica: str) -> None:
        """It has gone, or is in doubt."""
        self.holdings.replicas.pop(replica, None)
        poll = self._polls.pop(replica, None)
        if poll is not None and poll is not asyncio.current_task():
            poll.cancel()

    def leave(self) -> None:
        """The Router shuts down."""
        for replica in list(self.holdings.replicas):
            self._spawn(self.call(replica, "leave", self.router))
            self.drop(replica)

    def set_depth(self, depth: int) -> None:
        self.holdings.depth = Depth(self.holdings.depth.changes + 1, depth)
        self._set_whole()
        for replica, holding in self.holdings.replicas.items():
            if not holding.sole:
                self._spawn(self.call(replica, "tell_depth", self.router, holding.term, self.holdings.depth))

    def set_trial(self, depth: int | None) -> None:
        """The trial's depth for this pool; None: this Router has no trial depths in force."""
        self.trial_depth = depth
        self.holdings.trial = depth is not None
        self._set_whole()

    def _set_whole(self) -> None:
        self.holdings.whole = max(self.holdings.depth.places, self.trial_depth or 0)
        self.update()

    # --- what the queue manager goes by ------------------------------------------------------------------------------

    def update(self) -> None:
        """Places, depths or replicas have changed."""
        holdings = self.holdings
        if not holdings.shared:
            self.queue.set_places(self.pool, None)
        else:
            admits, exact = holdings.admits, holdings.exact
            more = self._dry is None and (exact or holdings.places < self.queue.capacity_of(self.pool))
            ample = ALL
            if more and not exact and not self._asking_ahead:
                ample = admits - max(1, int(admits * _AMPLE_SHARE))
            self.queue.set_places(self.pool, admits, more=more, exact=exact, ample=ample)
            self.released()
            if self._dry is None and not self._replacing and holdings.lacking:
                self._replacing = True
                self._spawn(self._replace())
        self.on_change()

    def released(self) -> None:
        """Places have come free: those above a ceiling go back, in one message for all of this turn of the loop."""
        if not self._giving and self.holdings.shared and self.holdings.owes:
            self._giving = True
            asyncio.get_running_loop().call_soon(self._give, context=contextvars.Context())

    def _give(self) -> None:
        self._giving = False
        owed = self.holdings.owed(self._protected)
        for replica, term, count in owed:
            self._spawn(self.call(replica, "give", self.router, term, count))
        if owed:
            self.update()

    # --- listening ---------------------------------------------------------------------------------------------------

    async def _listen(self, replica: str, holding: Holding) -> None:
        word = self.holdings.word(holding.term)
        while self.holdings.replicas.get(replica) is holding:
            order = await self.call(replica, "poll", self.router, word)
            if self.holdings.replicas.get(replica) is not holding:
                return
            if order is None:
                word = self.holdings.word(holding.term)
            elif not order.term:
                self.on_doubt(replica)
                return
            else:
                word = self._obey(replica, holding, order)

    def _obey(self, replica: str, holding: Holding, order: Order) -> Word:
        was_sole = holding.sole
        if order.granted and order.term == holding.term:
            self._protect(order.granted)
        word = self.holdings.obey(replica, order, protected=self._protected)
        if holding.sole and not was_sole:
            for other, theirs in self.holdings.replicas.items():
                if not theirs.sole:
                    self._spawn(self.call(other, "look", self.router))
        if order.granted:
            self._wet()
        else:
            self.update()
        return word

    def _protect(self, places: int) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._short_until:
            self._protected += places
            loop.call_later(_PROTECTED_S, self._unprotect, places, context=contextvars.Context())

    def _unprotect(self, places: int) -> None:
        self._protected -= places
        self.released()

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, want: int, *, patient: bool = False) -> int:
        """Up to `want` places more, for whoever comes first. `patient`: half of what is idle elsewhere will do."""
        want = min(want, self.queue.capacity_of(self.pool) - self.holdings.places)
        got = await self._ask_all(want, None, patient, _Claim(reserves=False))
        if got < want:
            self._run_dry()
            if not patient:
                self._short_until = asyncio.get_running_loop().time() + _SHORT_S
        elif want > 0:
            self._dry_s = 0.0
        self.update()
        return got

    async def claim(self, want: int, *, trial: bool) -> int:
        """Up to `want` places for certain queries, reserved until `settle`; by the depth of the trial or in force."""
        claim = _Claim(reserves=True)
        got = await self._ask_all(want, (self.trial_depth or 0) if trial else None, False, claim)
        claim.open = False
        if got < want and not trial:
            self._run_dry()
        return got

    def settle(self, places: int) -> None:
        """So many places are reserved no more: queries have taken them, or they go back."""
        self.holdings.reserved -= places
        self.update()

    def ask_ahead(self, want: int | None = None) -> None:
        """In the background, before places run out."""
        if not self._asking_ahead and self.holdings.shared and not self.holdings.exact and self._dry is None:
            self._asking_ahead = True
            self.update()
            self._spawn(self._ask_ahead(want or max(1, self.queue.capacity_of(self.pool) // 8)))

    async def _replace(self) -> None:
        """Places for queries whose replica has gone with theirs."""
        try:
            lacking = self.holdings.lacking
            if await self._ask_all(lacking, None, False, _Claim(reserves=False)) < lacking:
                self._run_dry()
        finally:
            self._replacing = False
            self.update()

    async def _ask_ahead(self, want: int) -> None:
        try:
            await self.ask(want, patient=True)
        finally:
            self._asking_ahead = False
            self.update()

    async def _ask_all(self, want: int, trial_depth: int | None, patient: bool, claim: _Claim) -> int:
        """Ask one owner, then two, then four at a time, or as many as places are missing: each for an even part."""
        untried = [replica for replica, holding in self.holdings.replicas.items() if not holding.sole]
        most = len(untried) if claim.reserves else _MOST_DRY  # a trial asks all
        start = self.asks % max(1, len(untried))  # in turn: not always the same few
        untried = untried[start:] + untried[:start]
        untried.sort(key=lambda replica: self.holdings.replicas[replica].dry)
        got, width, dry = 0, 1, 0
        while got < want and untried and dry < most:
            several = min(len(untried), max(width, want - got), most)
            part = -(-(want - got) // several)
            asked = {self._spawn(self._ask(r, part, trial_depth, patient, claim)): r for r in untried[:several]}
            done, _ = await asyncio.wait(asked, timeout=_PATIENCE_S)
            full = [asked[task] for task in done if task.result() == part]
            got += sum(task.result() for task in done)
            dry += several - sum(1 for task in done if task.result())
            untried = untried[several:] + full
            width *= 2
        return got

    async def _ask(self, replica: str, want: int, trial_depth: int | None, patient: bool, claim: _Claim) -> int:
        holding = self.holdings.replicas.get(replica)
        if holding is None:
            return 0
        back = 0
        if self.holdings.exact:
            back = self.holdings.idle_at(replica)
            holding.held -= back
        term = holding.term
        self.asks += 1
        granted = await self.call(
            replica, "ask", self.router, Ask(term, self.holdings.depth, want, back, trial_depth, patient)
        )
        if not granted or self.holdings.replicas.get(replica) is not holding or holding.term != term:
            return 0
        holding.held += granted
        holding.dry = granted < want
        if claim.reserves and claim.open:
            self.holdings.reserved += granted
        self.update()
        return int(granted)

    def _run_dry(self) -> None:
        self._dry_s = min(max(2 * self._dry_s, _FIRST_DRY_S), _LAST_DRY_S)
        if self._dry is not None:
            self._dry.cancel()
        self._dry = asyncio.get_running_loop().call_later(self._dry_s, self._wet, context=contextvars.Context())

    def _wet(self) -> None:
        if self._dry is not None:
            self._dry.cancel()
            self._dry = None
        self.update()

    def _spawn(self, errand: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """In an empty context: the call must not be cancelled with the HTTP request that happens to be at hand."""
        task = asyncio.get_running_loop().create_task(errand, context=contextvars.Context())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task
