"""Fine-tuning: from the estimated depths to those at which the SLO just holds with both pools loaded. Pure.

`fine_tune` is a generator. It yields depths to try, and is sent which pools met the SLO. All decisions are made here,
and the caller times the runs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

from deployments.hardware.device_detector import ACCELERATOR, CPU

Depths = Mapping[str, int]
Held = Mapping[str, bool]
Tuning = Generator[dict[str, int], Held, "Tuned"]

_NO_LOSS = 50  # the accelerator loses nothing if it holds its estimate to within 1/50,
_NO_LOSS_QUERY = 20  # or to within one query at small depths
_EXACT = 100  # depths up to this are found exactly; larger ones to within 1/100


@dataclass(frozen=True, slots=True)
class Tuned:
    """The depths at which the SLO just holds, and notes for people."""

    depths: dict[str, int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bracket:
    """The largest depth known to hold, and the smallest known to fail. `next` is the depth to try next: away from the
    estimate in growing steps until both bounds are known, then halfway between them.
    """

    holds: int
    fails: int | None
    next: int
    step: int
    most: int

    @classmethod
    def around(cls, estimate: int, most: int) -> Bracket:
        return cls(0, None, min(estimate, most), max(1, estimate // 50), most)

    @property
    def done(self) -> bool:
        if self.fails is None:
            return self.holds >= self.most
        return self.fails - self.holds <= max(1, self.holds // _EXACT)

    def after(self, *, held: bool) -> Bracket:
        """The bracket after a trial of `next`. If it was complete, the trial was of `holds`, and the other pool's
        growth made it fail.
        """
        if self.done:
            return replace(self, holds=0, fails=self.holds, next=max(1, self.holds - self.step))
        holds, fails = (self.next, self.fails) if held else (self.holds, self.next)
        if fails is None:
            return replace(self, holds=holds, next=min(self.most, holds + self.step), step=2 * self.step)
        if not holds:
            return replace(self, fails=fails, next=max(1, fails - self.step), step=2 * self.step)
        return replace(self, holds=holds, fails=fails, next=(holds + fails) // 2)


def fine_tune(estimates: Depths, most: int) -> Tuning:
    """Yields depths to try (per live replica), is sent which pools held, and returns the depths that hold.

    Both pools are tuned at the same time, each by its own results. If the CPU's work costs the accelerator depth, the
    accelerator keeps the depth that it holds alone, and the CPU gets what is left, possibly 0.
    """
    brackets = {pool: Bracket.around(depth, most) for pool, depth in estimates.items() if depth > 0}
    closed = {pool: 0 for pool, depth in estimates.items() if depth == 0}
    brackets = yield from _search(brackets, closed)
    depths = {**{pool: bracket.holds for pool, bracket in brackets.items()}, **closed}
    wanted = estimates.get(ACCELERATOR, 0)
    if not depths.get(CPU) or depths.get(ACCELERATOR, 0) >= wanted - max(wanted >= _NO_LOSS_QUERY, wanted // _NO_LOSS):
        return Tuned(depths)
    return (yield from _protect_accelerator(wanted, depths))


def _search(brackets: dict[str, Bracket], fixed: Depths) -> Generator[dict[str, int], Held, dict[str, Bracket]]:
    while not all(bracket.done for bracket in brackets.values()):
        trial = {pool: bracket.holds if bracket.done else bracket.next for pool, bracket in brackets.items()}
        held = yield {**trial, **fixed}
        brackets = {
            pool: bracket if bracket.done and held[pool] else bracket.after(held=held[pool])
            for pool, bracket in brackets.items()
        }
    return brackets


def _protect_accelerator(estimate: int, together: Depths) -> Tuning:
    """The accelerator holds less with both pools loaded than was estimated for it alone: find out why."""
    alone = yield from _search({ACCELERATOR: Bracket.around(estimate, estimate)}, {CPU: 0})
    most = alone[ACCELERATOR].holds
    if most <= together[ACCELERATOR]:
        return Tuned(dict(together), (f"the accelerator's estimate of {estimate} was too high even when it ran alone",))
    low, high = 0, together[CPU] + 1  # bounds of the largest CPU depth with which the accelerator still holds `most`
    while high - low > 1:
        middle = (low + high) // 2
        held = yield {ACCELERATOR: most, CPU: middle}
        if held[ACCELERATOR] and held[CPU]:
            low = middle
        else:
            high = middle
    lost = f"with {together[CPU]} queries on the CPU, the accelerator holds only {together[ACCELERATOR]}, not {most}"
    gives_way = f"the CPU gives way and gets {low}" if low else "the CPU is left out"
    return Tuned(
        {ACCELERATOR: most, CPU: low},
        (f"{lost}: {gives_way}; fewer cores for the CPU pool (args.cpu.cores) may leave room for more",),
    )


def step_down(depth: int, attempt: int) -> int:
    """The smaller depth to verify after attempt number `attempt` (0, 1, ...) was late. The steps grow."""
    return max(0, depth - max(1, depth // _EXACT) * (1 << max(0, attempt - 1)))
