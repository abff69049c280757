"""A generating replica: one engine on one device. Both pools' deployments use this class."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from deployments.generation.engine.factory import StepEngine, create_step_engine
from deployments.generation.engine_thread import StepWork, steps_in
from deployments.generation.frames import GenerationOffers
from deployments.generation.metrics import GeneratorMetrics, GeneratorState
from deployments.generation.planned_steps import PlannedStep, measure, measure_host
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.settings import GenerationSettings
from deployments.generation.step_loop import StepLoop
from deployments.generation.text.grammar import Grammars
from deployments.generation.text.model_card import GenerationCard, read_generation_card
from deployments.hardware.device_detector import CPU
from deployments.models.space import space_of
from deployments.models.tokenizer_check import ask_once, checked_tokenizer
from deployments.serving.replica import Replica

logger = logging.getLogger("ray.serve")

_FIRST_POLICY = StepPolicy(ttft_s=1.0, tpot_s=0.1)  # until the first Router has sent its settings, before any offer


class Generator(Replica[GenerationSettings]):
    """A replica of the accelerator or the CPU pool. With a hybrid cache, the accelerator's replica also has cores of
    its machine for the host's attention.
    """

    unit = "step"
    frame_type = GenerationOffers

    _engine: StepEngine
    _card: GenerationCard
    _worker: StepLoop

    def _cores_of_engine(self, device: str) -> tuple[int, ...]:
        hybrid = self._pool != CPU and self._settings.num_cpu_blocks > 0
        self._host_cores = (self._cores[1:] or self._cores) if hybrid else ()
        return self._cores[:1] if hybrid and device != CPU else self._cores  # launching kernels needs one core

    def _load(self, settings: GenerationSettings, device: str) -> tuple[StepEngine, GenerationCard]:
        card = read_generation_card(settings.model)
        self._space = space_of(card.model)
        self._grammars = Grammars(
            partial(checked_tokenizer, card.model, settings.model.tokenizer, ask_once),
            card.model.vocab_size,
            card.end_tokens,
        )
        return create_step_engine(card, self._settings, device, len(self._cores), self._host_cores), card

    def _start(self) -> StepLoop:
        engine, card = self._engine, self._card
        self._metrics = self._open_metrics(GeneratorMetrics, engine.engine, engine.dtype)
        self._measured = self._in_thread(lambda: measure(engine, card))
        self._measured_host = self._in_thread(lambda: measure_host(engine, card))
        bounds = StepPolicy(_FIRST_POLICY.ttft_s, _FIRST_POLICY.tpot_s, self._settings.max_num_batched_tokens)
        host = None if self._measured_host is None else HostCache(self._measured_host, engine.num_cpu_blocks)
        schedule = StepScheduler(self._measured, bounds, engine.blocks, host=host, block_size=engine.block_size)
        compute = steps_in(self._thread, engine.steps)
        return StepLoop(schedule, compute, on_step=self._metrics.ran, on_failure=self._failed, grammars=self._grammars)

    async def _probe(self) -> None:
        await self._worker.probe()

    def _in_words(self) -> str:
        engine = self._engine
        room = f"{engine.blocks} blocks of {engine.block_size} tokens"
        return f"{self._card.name} on {engine.device}, {engine.dtype} ({engine.why}), {room}"

    def _describe(self) -> dict[str, Any]:
        return {
            **self._engine.describe(),
            "space": self._space,
            "warm_up": asdict(self._measured),
            "host_warm_up": None if self._measured_host is None else asdict(self._measured_host),
        }

    def _publish(self) -> None:
        state = self._worker.state()
        self._metrics.publish(
            GeneratorState(
                *(self._worker.in_flight, state.waiting, state.slowdown, state.margin),
                *(state.blocks - state.free_blocks, state.free_blocks, state.refusals),
                *(self._worker.schedule.preemptions, state.host),
            )
        )

    def _utilization(self) -> float:
        """The share of blocks that are reserved, including the host's, or the next prompt's wait as a share of
        `ttft_s`, whichever is larger.
        """
        state = self._worker.state()
        free, blocks = state.free_blocks, state.blocks
        if state.host is not None:
            free, blocks = free + state.host.free_blocks, blocks + state.host.blocks
        return max(1 - free / blocks, state.first_s / self._worker.schedule.policy.ttft_s)

    def _planned(self, planned: PlannedStep) -> StepWork | None:
        engine, card = self._engine, self._card
        hosts = engine.num_cpu_blocks, engine.block_size
        fits = planned.fits(engine.blocks, self._settings.max_num_batched_tokens, card.context, *hosts)
        return planned.work(engine.blocks, card, *hosts) if fits else None
