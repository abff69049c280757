"""What happened to a generation, for the access log and traces. The Router fills it in if a request has one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deployments.generation.metrics import Streamed

Outcome = Literal["admitted", "refused", "never", "lost", "cancelled"]


@dataclass(slots=True, eq=False)
class OfferRecord:
    """An offer to one replica. Times are the loop's, s.

    Outcomes: "never", even an idle device would be late; "lost", the replica died, failed or did not answer;
    "cancelled", the request ended before the replica decided, or its first token came from another replica.
    """

    pool: str
    replica: str
    at: float
    decided: float | None = None
    outcome: Outcome = "cancelled"

    def ends(self, now: float, outcome: Outcome) -> None:
        """Note the replica's decision."""
        self.decided, self.outcome = now, outcome


@dataclass(slots=True, eq=False)
class GenerationRecord:
    """`streamed`: when its tokens came; None until the Router begins the generation."""

    streamed: Streamed | None = None
    offers: list[OfferRecord] = field(default_factory=list)

    def offer(self, pool: str, replica: str, now: float) -> OfferRecord:
        """Note that it is offered to this replica."""
        self.offers.append(OfferRecord(pool, replica, now))
        return self.offers[-1]

    @property
    def admitted(self) -> OfferRecord | None:
        """The last offer that was admitted."""
        return next((one for one in reversed(self.offers) if one.outcome == "admitted"), None)
