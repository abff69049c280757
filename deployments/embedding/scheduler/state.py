"""A queue's policy and queries, and the state that a replica reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from deployments.admission.fair_share import Account, Tenant


@dataclass(frozen=True, slots=True)
class Policy:
    """The promise and the admission rule in force.

    - `max_batch_fraction`: the share of a run's most work that tenants over their share may use while tenants under
      their share send queries.
    - `depth`: with `admission: depth`, the most queries in flight; with `deadline`, a limit on the work of one run
      (depth * alpha). None: no limit. 0 closes the queue.
    """

    slo_s: float
    admission: Literal["deadline", "depth"] = "deadline"
    depth: int | None = None
    bulk_share: float = 0.5
    max_batch_fraction: float = 1.0


@dataclass(slots=True, eq=False)
class ScheduledQuery:
    """An offered query. `due` is its deadline on the scheduler's clock, in s. Callers may add fields in a subclass Q;
    the scheduler then returns queries of that class.
    """

    tokens: int
    due: float
    deferrable: bool = False
    bulk: bool = False
    tenant: Tenant | None = None
    account: Account | None = None  # the tenant's, from admission on
    cost: float = 0.0
    # Set at admission. `passed` compares the prediction with what happens.
    admitted_at: float = field(init=False, repr=False)
    predicted_s: float = field(init=False, repr=False)  # from admission to the end of the work ahead, and its own


Q = TypeVar("Q", bound=ScheduledQuery)


class ReplicaState(NamedTuple):
    """A replica's state, as reported to Routers. Times are seconds from now.

    - `opens_s`: until a query of the mean cost would be admitted (0: now, inf: closed).
    - `free_s`: until everything that it holds is done.
    - `bulk_room`: room for bulk queries, in planned device seconds.
    - `slowdown`: a run takes about this many times what `model` says. The beta_s in `model` is the learned one.
    """

    opens_s: float
    free_s: float
    bulk_room: float
    in_flight: int
    waiting: int
    most: int  # the most in flight at once since the start
    runs: int  # since the start
    model: Sequence[float]  # query_s, token_s, token2_s, beta_s
    slowdown: float
    margin: float
    refusals: Sequence[int]  # full, never, closed
    # Under contention between tenants: `over_share` names the tenants over their share, to whom `opens_s` applies.
    # `under_share_opens_s` applies to all others.
    under_share_opens_s: float = 0.0
    over_share: Sequence[str] = ()
    routers: int = 1  # connected to it
    depth: int | None = None  # the limit in force; None if it goes by its own model
    # Room by predicted finish, in planned device seconds. `opens_cost`: the room at `opens_s`; 0: for a query of any
    # cost. From then on, it grows by a second in `slowdown` seconds; `room_grows`: it does so now. `room`: the room
    # now. `reserve`: even a shorter query needs this much room.
    opens_cost: float = 0.0
    room: float = 0.0
    reserve: float = 0.0
    room_grows: bool = False

    def room_after(self, seconds: float) -> float:
        """The room so many seconds later."""
        if seconds < self.opens_s and not self.room_grows:
            return self.room
        return max(self.room, self.opens_cost + (seconds - self.opens_s) / self.slowdown)

    def closed_for(self, seconds: float) -> ReplicaState:
        """The state of a replica that admits nothing for so long, to nobody."""
        opens_s, free_s = max(self.opens_s, seconds), max(self.free_s, seconds)
        closed = self._replace(opens_s=opens_s, free_s=free_s, bulk_room=0.0, over_share=(), under_share_opens_s=0.0)
        return closed._replace(opens_cost=0.0, room=0.0, reserve=0.0, room_grows=False)


@dataclass(slots=True)
class Refusals:
    """Queries refused since the start, by reason."""

    full: int = 0  # no room before their deadlines
    never: int = 0  # it would not end in time on an idle device either
    closed: int = 0
