"""The places of one embedder replica's queue, and which Router holds how many of them. Pure: no ray, no loop, no clock.

A replica owns its places and leases them to the Routers, which admit by what they hold. Two rules keep the bound: here
places count as held *before* the Router hears of them, and a Router stops counting on places *before* it gives them
back. So a message that is late, or lost with its Router, may hide a place, but never makes two of one.

A Router that is alone holds the queue as a whole (`sole`): it counts by itself, by whatever depths are in force there.
As soon as a second one joins, the first is told to share: it answers how many places it keeps, and until it has, nobody
else gets any. From then on each is granted what it asks for from what is free, after a recall of what the others hold
idle; and a Router that got less than it asked for, and has less than its fair share, gets places as others free them,
because those above their share are given a `ceiling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Depth(NamedTuple):
    """The depth in force at a Router, and how many it has had: words overtake each other, and the latest counts."""

    changes: int
    places: int


@dataclass(frozen=True, slots=True)
class Order:
    """What a Router is told. `term` numbers its account's beginnings: what belongs to an earlier one is void."""

    term: int
    sole: bool = False  # the queue as a whole is this Router's
    granted: int = 0  # places more than before
    share: int = 0  # its fair share now
    ceiling: int | None = None  # while it holds more than this it gives back what is idle
    exact: bool = False  # a trial is in force: it keeps no idle places, and each admission asks
    recall: int = 0  # a number to answer; 0: nothing to answer
    wanted: int = 0  # idle places that it should give back with the answer
    gently: bool = False  # half of the idle ones at most


@dataclass(frozen=True, slots=True)
class Word:
    """What a Router answers to an order: `given` back, or `keep` where it has been told to share; and what it has in
    the pool as a whole.
    """

    term: int
    depth: Depth
    recall: int = 0
    given: int = 0
    keep: int | None = None
    in_flight: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A Router's question for `want` places; `back` idle ones come back with it.

    Who is `patient` gets half of what is idle elsewhere, and does not stay short. `trial_depth` makes it a trial's
    question, to be answered by that depth in place of the one in force.
    """

    term: int
    depth: Depth
    want: int
    back: int = 0
    trial_depth: int | None = None
    patient: bool = False


@dataclass(slots=True)
class _Account:
    term: int
    depth: Depth
    held: int
    sole: bool = False
    parting: bool = False  # sole until it has answered that it shares
    asking: int = 0  # questions that are being answered: what it gets comes with the answer
    short: int = 0  # what it asked for and did not get
    short_since: int = 0  # in order of events
    ceiling: int | None = None
    granted: int = 0  # not told yet
    recall: int = 0  # the last one
    sent: int = 0  # the last one that was sent
    answered: int = 0  # the last one answered
    wanted: int = 0
    gently: bool = False
    told: Order | None = None
    word: Word | None = None

    @property
    def counts(self) -> bool:
        """Its Router counts places, and does not hold the queue as a whole."""
        return self.parting or not self.sole


def share_out(places: int, demands: Mapping[str, int], order: Sequence[str]) -> dict[str, int]:
    """`places` to those who demand them: as even as can be, and none gets more than its demand (max-min fair).

    What does not divide goes to the first of `order`.
    """
    shares = dict.fromkeys(demands, 0)
    left = max(0, places)
    open_ = [name for name in order if demands[name] > 0]
    while open_ and left >= len(open_):
        step = min(left // len(open_), *(demands[name] - shares[name] for name in open_))
        for name in open_:
            shares[name] += step
        left -= step * len(open_)
        open_ = [name for name in open_ if shares[name] < demands[name]]
    for name in open_[:left]:
        shares[name] += 1
    return shares


class Leases:
    """The accounts of all Routers at one replica."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._lingering = 0  # queries of dead Routers that the engine still runs
        self.trial_depth: int | None = None  # of the last question, while a trial is in force
        self._last_term = 0
        self._events = 0
        self.most_held = 0

    # --- what is -----------------------------------------------------------------------------------------------------

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(self._accounts)

    @property
    def depth(self) -> int:
        """While a new depth is on its way to the Routers, the smaller one holds."""
        return min((account.depth.places for account in self._accounts.values()), default=0)

    @property
    def total(self) -> int:
        """Places that are not free, those of a sole Router aside."""
        return self._lingering + sum(account.held for account in self._accounts.values())

    @property
    def on_trial(self) -> bool:
        return self.trial_depth is not None

    def held(self, router: str) -> int:
        account = self._accounts.get(router)
        return 0 if account is None else account.held

    def is_sole(self, router: str) -> bool:
        account = self._accounts.get(router)
        return account is not None and account.sole

    def free(self, limit: int | None = None) -> int:
        """Places that could be granted now; `limit` in place of the depth."""
        if any(account.sole for account in self._accounts.values()):
            return 0
        return max(0, (self.depth if limit is None else limit) - self.total)

    def answered(self, router: str) -> bool:
        """It has answered all that it was asked, or it is not here any more."""
        account = self._accounts.get(router)
        return account is None or account.answered == account.recall

    def words(self) -> dict[str, Word]:
        """What each Router said last."""
        return {router: account.word for router, account in self._accounts.items() if account.word is not None}

    # --- what Routers do ---------------------------------------------------------------------------------------------

    def join(self, router: str, depth: Depth, in_flight: int) -> Order:
        """A Router begins, or begins anew after its connection broke, with `in_flight` queries on this replica."""
        self._accounts.pop(router, None)
        account = self._accounts[router] = _Account(self._next_term(), depth, in_flight)
        for other in self._others(router):
            self._unmake_sole(other)
        account.short, account.short_since = depth.places, self._next_event()
        self._settle()
        order = self.take_order(router)
        assert order is not None
        return order

    def tell_depth(self, router: str, term: int, depth: Depth, back: int = 0) -> None:
        """The depth in force at a Router, which gives `back` places."""
        account = self._account(router, term)
        if account is not None and account.counts:
            account.depth = max(account.depth, depth)
            account.held -= back
            self._settle()

    def ask(self, router: str, term: int, want: int, trial_depth: int | None = None) -> int:
        """Places granted from those that are free. The question is open until `answer`.

        `trial_depth` makes it a trial's question: granted by that depth, and from now on nobody keeps idle places.
        """
        account = self._account(router, term)
        if account is None:
            return 0
        account.asking += 1
        if trial_depth is not None and not account.sole:
            self.trial_depth = trial_depth
            self._settle()
        return self._grant(account, want, trial_depth)

    def answer(
        self, router: str, term: int, missing: int, trial_depth: int | None = None, *, patient: bool = False
    ) -> int:
        """The end of a question that lacked `missing` places: those of them that are free now. For the rest the Router
        stays short, up to its fair share, unless it is `patient`.
        """
        account = self._account(router, term)
        if account is None:
            return 0
        account.asking -= 1
        granted = self._grant(account, missing, trial_depth)
        if not patient and not account.sole:
            if not account.short:
                account.short_since = self._next_event()
            account.short = missing - granted
        self._settle()
        return granted

    def _grant(self, account: _Account, want: int, limit: int | None) -> int:
        granted = min(want, self.free(limit))
        self._hold(account, granted)
        return granted

    def give(self, router: str, term: int, count: int) -> None:
        account = self._account(router, term)
        if account is not None and account.counts:
            account.held -= count
            self._settle()

    def recall(self, wants: Mapping[str, int], *, gently: bool = False) -> list[str]:
        """Ask the Routers that want nothing to give back what those want who do. Returns whose answers to wait for."""
        total = sum(wants.values())
        deepest = max((account.depth.places for account in self._accounts.values()), default=0)
        asked = []
        for router, account in self._accounts.items():
            if account.answered != account.recall:  # still to answer: to share, or an earlier recall
                asked.append(router)
            elif router not in wants and (account.held or account.depth.places < deepest):  # it stands in the way
                self._recall(account, min(account.held, total), gently=gently)
                asked.append(router)
        return asked

    def ask_all(self) -> list[str]:
        """Have each Router say what it has. Returns whose answers to wait for."""
        for account in self._accounts.values():
            self._recall(account, 0)
        return list(self._accounts)

    def hear(self, router: str, word: Word) -> None:
        """What a Router says with each poll."""
        account = self._account(router, word.term)
        if account is None:
            return
        account.word = word
        account.depth = max(account.depth, word.depth)
        if word.keep is not None and account.parting:
            account.sole = account.parting = False
            self._hold(account, word.keep)
        elif not account.sole:
            account.held -= word.given
        account.answered = max(account.answered, word.recall)
        self._settle()

    def close(self, router: str, lingering: int = 0) -> None:
        """The Router is dead or has left; `lingering` of its queries run on here, and count until `end_lingering`."""
        if self._accounts.pop(router, None) is not None:
            self._lingering += lingering
            self._settle()

    def end_lingering(self, queries: int) -> None:
        self._lingering -= queries
        self._settle()

    def end_trial(self) -> None:
        self.trial_depth = None
        self._settle()

    def take_order(self, router: str) -> Order | None:
        """What the Router has to be told that it has not been told yet."""
        account = self._accounts[router]
        told = account.told
        recall = account.recall if account.recall > account.sent else 0
        sole = account.sole and not account.parting
        exact = self.on_trial and not sole
        state = (account.term, sole, account.ceiling, exact)
        if told and state == (told.term, told.sole, told.ceiling, told.exact) and not (account.granted or recall):
            return None
        order = Order(
            account.term,
            sole=sole,
            granted=account.granted,
            share=self._shares()[router],
            ceiling=account.ceiling,
            exact=exact,
            recall=recall,
            wanted=account.wanted,
            gently=account.gently,
        )
        account.granted = account.wanted = 0
        account.sent = account.recall
        account.told = order
        return order

    # --- how it is decided -------------------------------------------------------------------------------------------

    def _account(self, router: str, term: int) -> _Account | None:
        account = self._accounts.get(router)
        return account if account is not None and account.term == term else None

    def _others(self, router: str) -> Iterable[_Account]:
        return [account for name, account in self._accounts.items() if name != router]

    def _next_term(self) -> int:
        self._last_term += 1
        return self._last_term

    def _next_event(self) -> int:
        self._events += 1
        return self._events

    def _recall(self, account: _Account, wanted: int, *, gently: bool = False) -> None:
        account.recall += 1
        account.wanted = max(account.wanted, wanted)
        account.gently = gently

    def _hold(self, account: _Account, more: int) -> None:
        account.held += more
        self.most_held = max(self.most_held, self.total)

    def _unmake_sole(self, account: _Account) -> None:
        """It holds all until it has answered how much it keeps."""
        if account.sole and not account.parting:
            account.parting = True
            account.held = 0  # what it gives back before its answer arrives makes this negative
            account.term = self._next_term()
            self._recall(account, 0)

    def _shares(self) -> dict[str, int]:
        """Fair shares by what each Router holds and lacks. What does not divide stays with who holds it; where there
        are fewer places than Routers, it goes to the one that has been short for longest, so that they take turns.
        """
        depth = self.depth
        demands = {
            name: depth if account.sole else account.held + account.short for name, account in self._accounts.items()
        }
        names = sorted(self._accounts, key=lambda name: self._accounts[name].short_since)
        scarce = depth < sum(1 for demand in demands.values() if demand)
        keeping = sorted(names, key=lambda name: -self._accounts[name].held)
        waiting = sorted(names, key=lambda name: not self._accounts[name].short)
        return share_out(depth, demands, waiting if scarce else keeping)

    def _settle(self) -> None:
        """Free places to those who are short and below their share; ceilings to those above, while anybody is."""
        if len(self._accounts) == 1 and not self._lingering:
            (account,) = self._accounts.values()
            self._make_sole(account)
            return
        if any(account.sole for account in self._accounts.values()):
            return
        shares = self._shares()
        for name in sorted(self._accounts, key=lambda name: self._accounts[name].short_since):
            account = self._accounts[name]
            if account.short and not account.asking and not self.on_trial:
                more = min(account.short, max(0, shares[name] - account.held), self.free())
                account.granted += more
                account.short -= more
                self._hold(account, more)
            if account.held >= shares[name] or self.on_trial:
                account.short = 0
        lacking = sum(shares[name] - account.held for name, account in self._accounts.items() if account.short)
        lacking = max(0, lacking - self.free()) + max(0, self.total - self.depth)
        for name, account in self._accounts.items():
            if self.on_trial:
                account.ceiling = 0
            elif lacking and account.held > shares[name]:
                account.ceiling = max(shares[name], account.held - lacking)
            else:
                account.ceiling = None

    def _make_sole(self, account: _Account) -> None:
        if not account.sole or account.parting:
            account.term = self._next_term()
            account.sole, account.parting = True, False
            account.short = account.granted = account.wanted = 0
            account.answered = account.recall
            account.ceiling = None
            self.trial_depth = None
