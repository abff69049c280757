"""A step on its way to the engine's thread and back: what it computes, and the tokens that come of it. Imports neither
ray nor torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from deployments.generation.scheduler.step import UNTIMED, Chunk, ComputeSeconds, Steps, Work
from deployments.generation.text.sampling import Picked, RowSamplers, Sampler, Sampling, pick

_PROBE_TOKENS = 4


class StepWork(NamedTuple):
    """What the engine computes in one step. `samplers`: one for each chunk that is wanted, the first batch's before the
    second's; `parked_samplers`: for rows that may arrive, by their numbers.

    It may be composed, and wait for the engine, while the step before runs. So a chunk that continues an answer has its
    sampler's `last` for its ids. Rows whose answers have ended meanwhile are left out.
    """

    work: Work
    samplers: Sequence[RowSamplers]
    parked_samplers: Mapping[int, RowSamplers] = MappingProxyType({})

    def run(self, engine: Steps) -> Found:
        """In the engine's thread. Raises what the engine does; no answer of the step goes on then."""
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
            found = _computed(engine, *self)  # all of it: an engine has something to compute in each step
            found = found._replace(picked=found.picked[len(self.samplers) :])
        else:
            found = Found([])
        picked = iter(found.picked)
        wanted = [[] if at in left_out else next(picked) for at in range(len(self.samplers))]
        return found._replace(picked=[*wanted, *picked])

    def _without(self, left_out: Collection[int]) -> Work:
        """`left_out`: places among the chunks that are wanted."""
        places = count()
        first, second = (
            [chunk for chunk in chunks if not (chunk.wanted and next(places) in left_out)]
            for chunks in (self.work.chunks, self.work.second)
        )
        return self.work._replace(chunks=first, second=second)


class Found(NamedTuple):
    """`picked`: of each chunk that is wanted, then of each row that `arrived`, the tokens of its answers; none where it
    was left out, None where the logits are no numbers. `compute_s`: see `step.Computed`.
    """

    picked: Sequence[list[Picked] | None]
    arrived: Sequence[int] = ()
    compute_s: ComputeSeconds = UNTIMED


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
    return Found(picked, computed.arrived, computed.compute_s)


def probe_work(block: int) -> StepWork:
    """A short prompt of nobody's, whose keys and values go into that block: what breaks steps breaks it, too."""
    chunk = Chunk(np.zeros(_PROBE_TOKENS, np.int32), 0, (block,))
    return StepWork(Work([chunk]), [RowSamplers([Sampler(Sampling(0.0))], None)])


Ended = Callable[[Found | BaseException], None]
"""Called on the loop as a step ends."""
Compute = Callable[[StepWork, Ended], None]
"""Begins a step, if need be once the one before has ended."""


def steps_in(thread: Executor, engine: Steps) -> Compute:
    """Steps run in the engine's `thread`, the only one of its executor; their ends are told to the loop."""

    def compute(work: StepWork, ended: Ended) -> None:
        on_loop = asyncio.get_running_loop().call_soon_threadsafe

        def step() -> None:
            found: Found | BaseException
            try:
                found = work.run(engine)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the step's generations are told
                found = error
            on_loop(ended, found)

        thread.submit(step)
        time.sleep(0)  # gives that thread the interpreter, which may rest: else it begins when Routers have been told

    return compute
