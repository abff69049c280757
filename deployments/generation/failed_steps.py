"""What becomes of the generations of a step that failed.

a step fails        answers of which tokens have come end with its error; a few tokens of nobody's run through the
                    model (`StepLoop.probe_work`)
these fail, too     the engine is broken: prompts are told so, and Routers offer them elsewhere, once; the replica's
                    health check fails until a step succeeds
these succeed       a prompt was bad. If there was but one, it is told its own error. Of several nobody knows which:
                    Routers offer them elsewhere, once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from deployments.errors import EngineFailed
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.step_timing import Timed

if TYPE_CHECKING:
    from deployments.generation.step_loop import StepLoop


class _Failed(NamedTuple):
    """Prompts of one step, none of which has a token."""

    prompts: Sequence[Generation]
    sentence: str


class FailedSteps:
    """One replica's, on its event loop."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._failed: list[_Failed] = []  # until the probe has ended

    def add(self, generations: Sequence[Generation], sentence: str) -> None:
        """A step has failed, and of these nobody knows what the cache holds."""
        prompts = [one for one in generations if not any(answer.tokens for answer in one.item.answers)]
        self._loop.fail([one for one in generations if one not in prompts], sentence)
        self._loop.drop(prompts, cut_off=True)
        if not self._failed:
            self._loop.run_step(self._loop.probe_work(), self._probed)
        self._failed.append(_Failed(prompts, sentence))

    def _probed(self, found: Timed | EngineFailed) -> None:
        failed, self._failed = self._failed, []
        is_broken = isinstance(found, EngineFailed)
        self._loop.problem = str(found) if is_broken else None
        for prompts, sentence in failed:
            kind: Literal["suspect"] | None = "suspect" if len(prompts) > 1 else None
            self._loop.tell_failed(prompts, sentence, "broken" if is_broken else kind)
