"""What happens to generations after a failed step.

a step fails        answers that already have tokens end with its error; a probe runs a few meaningless tokens through
                    the model (`StepLoop.probe_work`). The same happens to a generation without finite numbers
the probe fails,    the engine is broken: Routers offer the prompts elsewhere, once, and the replica's health check
or hangs            fails until a step succeeds
the probe succeeds  a prompt was bad; if the step had only one, the prompt ends with the error. Otherwise nobody knows
                    which: Routers offer all of them elsewhere, once. So they do with prompts that were not in the step
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from deployments.errors import EngineFailed
from deployments.generation.step import OfferedGeneration
from deployments.serving.planned_runs import Timed
from deployments.serving.sessions import PROBE_TIMEOUT_S, later

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop


class _Failed(NamedTuple):
    """A prompt without a first token. `is_bad`: if the engine works, this prompt broke the step."""

    prompt: OfferedGeneration
    sentence: str
    is_bad: bool


class FailedSteps:
    """A replica's failed generations. Its methods are called on the event loop."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._failed: list[_Failed] = []  # until the probe has ended
        self._limit: asyncio.TimerHandle | None = None  # time limit of the running probe

    def add(
        self, generations: Sequence[OfferedGeneration], in_step: Collection[OfferedGeneration], sentence: str
    ) -> None:
        """Handle a failed step. `generations`: all whose contents in the cache are unknown now. Without a free block
        there is no probe; the next step then shows whether the engine works.
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
        """The probe has ended, or has taken too long. In the latter case, it may still end later."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit, self._loop.problem = None, problem
        self._tell(is_broken=problem is not None)

    def _tell(self, *, is_broken: bool) -> None:
        failed, self._failed = self._failed, []
        for prompt, sentence, is_bad in failed:
            self._loop.tell_failed([prompt], sentence, "broken" if is_broken else None if is_bad else "suspect")
