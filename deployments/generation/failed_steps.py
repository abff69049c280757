"""What becomes of the generations of a step that failed.

a step fails        answers of which tokens have come end with its error; a few tokens of nobody's run through the
                    model (`StepLoop.probe_work`). So where it gives an answer no numbers, for this one
these fail, too,    the engine is broken: prompts are told so, and Routers offer them elsewhere, once; the replica's
or hang             health check fails until a step succeeds
these succeed       a prompt was bad. If the step had but one, it is told its own error. Of several nobody knows which:
                    Routers offer them elsewhere, once, and so those that were not in the step
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from deployments.errors import EngineFailed
from deployments.generation.step import OfferedGeneration
from deployments.generation.step_timing import Timed
from deployments.serving.sessions import PROBE_TIMEOUT_S, later

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop


class _Failed(NamedTuple):
    """A prompt that has no token. `is_bad`: if the engine is well, it broke its step."""

    prompt: OfferedGeneration
    sentence: str
    is_bad: bool


class FailedSteps:
    """One replica's, on its event loop."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._failed: list[_Failed] = []  # until the probe has ended
        self._limit: asyncio.TimerHandle | None = None  # of the probe that runs

    def add(
        self, generations: Sequence[OfferedGeneration], in_step: Collection[OfferedGeneration], sentence: str
    ) -> None:
        """A step has failed, and of these nobody knows what the cache holds. Where no block is free, nothing is probed:
        the next step says whether the engine is well.
        """
        prompts = [one for one in generations if not any(answer.tokens for answer in one.each_answer)]
        self._loop.fail([one for one in generations if one not in prompts], sentence)
        self._loop.drop(prompts, cut_off=True)
        suspects = [one for one in prompts if one in in_step]
        self._failed += [_Failed(one, sentence, suspects == [one]) for one in prompts]
        if self._limit is not None:
            return
        if (work := self._loop.probe_work()) is None:
            self._tell(is_broken=False)
        else:
            before_s = self._loop.schedule.until_free(self._loop.now())
            self._limit = later(before_s + PROBE_TIMEOUT_S, self._hangs)
            self._loop.run_step(work, self._probed)

    def _probed(self, found: Timed | EngineFailed) -> None:
        self._over(str(found) if isinstance(found, EngineFailed) else None)

    def _hangs(self) -> None:
        self._over(f"the engine has not computed a few tokens within {PROBE_TIMEOUT_S:g} s")

    def _over(self, problem: str | None) -> None:
        """The probe has ended, or has taken too long: then it may still end."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit, self._loop.problem = None, problem
        self._tell(is_broken=problem is not None)

    def _tell(self, *, is_broken: bool) -> None:
        failed, self._failed = self._failed, []
        for prompt, sentence, is_bad in failed:
            self._loop.tell_failed([prompt], sentence, "broken" if is_broken else None if is_bad else "suspect")
