"""What goes into the queue of a device, and what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from deployments.admission.fair_share import Account, Tenant


@dataclass(frozen=True, slots=True)
class Policy:
    """The promise and the rule in force.

    - `max_batch_fraction`: of the most work of a run, what tenants over their share have of each run while there are
      others; None: by the device's beta.
    - `depth`: of the queue with `admission: depth`; with `deadline` a bound on the work of one run (depth * alpha).
      None: no bound. 0 closes the queue.
    """

    slo_s: float
    admission: Literal["deadline", "depth"] = "deadline"
    depth: int | None = None
    bulk_share: float = 0.5
    max_batch_fraction: float | None = None


@dataclass(slots=True, eq=False)
class ScheduledQuery:
    """One query that is offered. `due` is its deadline, by the schedule's clock, in s. A caller adds fields of its own
    in a subclass, Q, and gets its queries back as such.
    """

    tokens: int
    due: float
    deferrable: bool = False
    bulk: bool = False
    tenant: Tenant | None = None
    account: Account | None = None  # the tenant's, from admission on
    cost_s: float = 0.0
    # Set by admission. What it predicts, `passed` compares with what happens.
    admitted_at: float = field(init=False, repr=False)
    predicted_s: float = field(init=False, repr=False)  # from admission (`was_idle`: from the start of the run) to the
    # end of the work ahead
    ahead_s: float = field(init=False, repr=False)  # planned seconds of work that waited then, this query's included
    slow: float = field(init=False, repr=False)  # seconds for a second of work that joins the run
    was_idle: bool = field(init=False, repr=False)  # the device was, and later arrivals may still delay its start


Q = TypeVar("Q", bound=ScheduledQuery)


class ReplicaState(NamedTuple):
    """What a replica says of itself: seconds from now, and counts. `opens_s`: until a query of the mean cost would be
    admitted (0: now, inf: closed); `free_s`: until all that it holds is done; `bulk_s`: planned device seconds of
    room for bulk queries. A run takes about `slowdown` times what `model` says; its beta_s is as learned.
    """

    opens_s: float
    free_s: float
    bulk_s: float
    in_flight: int
    waiting: int
    most: int  # in flight at once, since the start
    runs: int  # since the start
    model: Sequence[float]  # query_s, token_s, token2_s, beta_s
    slowdown: float
    margin: float
    refusals: Sequence[int]  # full, never, closed
    # While tenants are told apart and more is asked for than there is: `opens_s` for those who ask for less than their
    # share, and the names of the others, for whom `opens_s` counts.
    under_share_opens_s: float = 0.0
    over_share: Sequence[str] = ()
    routers: int = 1  # connected to it
    depth: int | None = None  # that bounds it; one that goes by its own model has none
    # Room by predicted finish, in planned device seconds. `opens_cost_s`: the cost for which `opens_s` counts; 0: any.
    # `room_s`: what has room now. `reserve_s`: there must be so much for a shorter query, too (`LongQueries`).
    # `room_grows`: as the device works, a second of room in `slowdown` seconds; else much of it comes at `opens_s`.
    opens_cost_s: float = 0.0
    room_s: float = 0.0
    reserve_s: float = 0.0
    room_grows: bool = False


@dataclass(slots=True)
class Refusals:
    """Queries refused since the start, by reason."""

    full: int = 0  # no room before their deadlines
    never: int = 0  # it would not end in time on an idle device either
    closed: int = 0
