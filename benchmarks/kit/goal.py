"""The goals of comparisons, with what was reached. Each comparison has the two or three goals that matter."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kit.sheet import Sheet, table


@dataclass(frozen=True, slots=True)
class Goal:
    """`reached`: None if it could not be measured. `at_most`: smaller is better."""

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


def goal_sheet(goals: Sequence[Goal], title: str = "Goals") -> Sheet:
    columns = {"what": "{what}", "goal": "{sign} {wanted:g} {unit}", "reached": "{reached}", "met": "{met}"}
    return table(title, columns, map(_row, goals))


def _row(goal: Goal) -> dict[str, object]:
    return {
        "what": goal.what,
        "sign": "at most" if goal.at_most else "at least",
        "wanted": goal.wanted,
        "unit": goal.unit,
        "reached": "not available" if goal.reached is None else f"{goal.reached:.2f} {goal.unit}",
        "met": {True: "yes", False: "no", None: "-"}[goal.met],
    }


def ratio(above: float | None, below: float | None) -> float | None:
    """`above` over `below`; None if either was not measured."""
    return None if above is None or not below else above / below


def difference(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above - below
