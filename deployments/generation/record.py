"""What became of one generation, for the access log and traces: the Router writes it where it is asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deployments.generation.metrics import Streamed

Outcome = Literal["admitted", "refused", "never", "lost", "cancelled"]


@dataclass(slots=True, eq=False)
class OfferRecord:
    """To one replica. Times are the loop's, s. `never`: an idle device would be late, too. `lost`: it died, failed or
    did not answer. `cancelled`: the request ended before it decided.
    """

    pool: str
    replica: str
    at: float
    decided: float | None = None
    outcome: Outcome = "cancelled"

    def ends(self, now: float, outcome: Outcome) -> None:
        """It has decided."""
        self.decided, self.outcome = now, outcome


@dataclass(slots=True, eq=False)
class GenerationRecord:
    """`streamed`: its tokens by the clock; None until the Router begins it."""

    streamed: Streamed | None = None
    offers: list[OfferRecord] = field(default_factory=list)

    def offer(self, pool: str, replica: str, now: float) -> OfferRecord:
        """It is offered to this replica."""
        self.offers.append(OfferRecord(pool, replica, now))
        return self.offers[-1]

    @property
    def admitted(self) -> OfferRecord | None:
        """Where it was admitted last."""
        return next((one for one in reversed(self.offers) if one.outcome == "admitted"), None)
