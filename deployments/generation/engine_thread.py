"""Runs a step in the engine's thread: its work, and the tokens drawn from it. Imports neither ray nor torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from deployments.generation.engine.steps import Steps
from deployments.generation.scheduler.work import UNTIMED, Chunk, ComputeSeconds, Work
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked, RowSamplers, Sampler, Sampling, pick

_PROBE_TOKENS = 4


class StepWork(NamedTuple):
    """What the engine computes in one step. `samplers`: one for each wanted chunk, the first batch's before the
    second's. `parked_samplers`: for rows that may arrive, by their numbers.

    A step may be composed, and wait for the engine, while the step before it runs. So the ids of a chunk that continues
    an answer are its sampler's `last`. Rows whose answers have ended in the meantime are left out.
    """

    work: Work
    samplers: Sequence[RowSamplers]
    parked_samplers: Mapping[int, RowSamplers] = MappingProxyType({})

    def run(self, engine: Steps) -> Found:
        """Compute the step, in the engine's thread. If the engine raises an error, all answers of the step end."""
        try:
            return self._run(engine)
        except BaseException:
            for row in (*self.samplers, *self.parked_samplers.values()):
                row.end()
            raise

    def _run(self, engine: Steps) -> Found:
        left_out = {at for at, row in enumerate(self.samplers) if all(one.ended for one in row.samplers)}
        if not left_out:
            return _computed(engine, *self)
        work = self._without(left_out)
        if work.chunks or work.second:
            kept = [row for at, row in enumerate(self.samplers) if at not in left_out]
            found = _computed(engine, work, kept, self.parked_samplers)
        elif work.copies or work.parking or work.called_off or work.joins:
            found = _computed(engine, *self)  # compute all of it: an engine needs something to compute in each step
            found = found._replace(picked=found.picked[len(self.samplers) :], scores=())
        else:
            found = Found([])
        picked = iter(found.picked)
        wanted = [[] if at in left_out else next(picked) for at in range(len(self.samplers))]
        return found._replace(picked=[*wanted, *picked])

    def _without(self, left_out: Collection[int]) -> Work:
        """The work without some wanted chunks. `left_out`: their indices among the wanted chunks."""
        places = count()
        first, second = (
            [chunk for chunk in chunks if not (chunk.wanted and next(places) in left_out)]
            for chunks in (self.work.chunks, self.work.second)
        )
        return self.work._replace(chunks=first, second=second)


class Found(NamedTuple):
    """The result of a step. `picked`: the answers' tokens, for each wanted chunk and then for each row that `arrived`;
    an empty list if it was left out, None if its logits are not finite. `compute_s`, `scores`: see `steps.Computed`.
    """

    picked: Sequence[list[Picked] | None]
    arrived: Sequence[int] = ()
    compute_s: ComputeSeconds = UNTIMED
    scores: Sequence[PromptScores] = ()


def _computed(
    engine: Steps, work: Work, samplers: Sequence[RowSamplers], parked_samplers: Mapping[int, RowSamplers]
) -> Found:
    computed = engine.step(work)
    samplers = [*samplers, *(parked_samplers[number] for number in computed.arrived)]
    logits = computed.logits
    if isinstance(logits, np.ndarray):
        picked = [pick(row, one) for row, one in zip(logits, samplers, strict=True)]
    else:
        picked = logits.pick(samplers)
    for row, tokens in zip(samplers, picked, strict=True):
        for at, sampler in enumerate(row.samplers):
            sampler.drew(None if tokens is None else tokens[at].id)
    return Found(picked, computed.arrived, computed.compute_s, computed.scores)


def probe_work(block: int) -> StepWork:
    """A probe: a short meaningless prompt that uses that block. It fails if the engine is broken."""
    chunk = Chunk(np.zeros(_PROBE_TOKENS, np.int32), 0, (block,))
    return StepWork(Work([chunk]), [RowSamplers([Sampler(Sampling(0.0))], None)])


Ended = Callable[[Found | BaseException], None]
"""Called on the loop when a step has ended, with its result or error."""
Compute = Callable[[StepWork, Ended], None]
"""Begins a step, or queues it behind the step that runs."""


def steps_in(thread: Executor, engine: Steps) -> Compute:
    """Run steps in the engine's `thread`, an executor with a single thread, and report their ends to the loop."""

    def compute(work: StepWork, ended: Ended) -> None:
        on_loop = asyncio.get_running_loop().call_soon_threadsafe

        def step() -> None:
            found: Found | BaseException
            try:
                found = work.run(engine)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the step must end
                found = error
            on_loop(ended, found)

        thread.submit(step)
        time.sleep(0)  # release the GIL, so that the step begins now and not after the reports to Routers

    return compute
