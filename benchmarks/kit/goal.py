"""What a comparison is to reach, beside what it reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kit.sheet import Sheet


@dataclass(frozen=True, slots=True)
class Goal:
    """`reached` is None where it could not be measured. `at_most`: smaller is better."""

    what: str
    wanted: float
    reached: float | None
    unit: str = "x"
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    def row(self) -> list[str]:
        sign = "at most" if self.at_most else "at least"
        reached = "not available" if self.reached is None else f"{self.reached:.2f} {self.unit}"
        verdict = {True: "yes", False: "no", None: "-"}[self.met]
        return [self.what, f"{sign} {self.wanted:g} {self.unit}", reached, verdict]


def goal_sheet(goals: Sequence[Goal], title: str = "Goals") -> Sheet:
    return Sheet(title, ["what", "goal", "reached", "met"], [goal.row() for goal in goals])


def ratio(above: float | None, below: float | None) -> float | None:
    """None where either was not measured."""
    return None if above is None or not below else above / below
