"""A replica that generates: one engine on one device. The accelerator's and the CPU's deployments are this class."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar

from deployments.errors import WindveError
from deployments.generation.engine.factory import StepEngine, create_step_engine
from deployments.generation.frames import GenerationOffers
from deployments.generation.metrics import GeneratorMetrics, GeneratorState
from deployments.generation.scheduler.hybrid.host_cache import Host
from deployments.generation.scheduler.policy import StepPolicy
from deployments.generation.scheduler.scheduler import StepSchedule
from deployments.generation.settings import GenerationSettings
from deployments.generation.step_loop import Stepper
from deployments.generation.step_run import steps_in
from deployments.generation.text.model_card import GenerationCard, read_generation_card
from deployments.generation.timed_steps import PlannedStep, measure, measure_host
from deployments.hardware.affinity import CpuPart, pin_thread, thread_environment
from deployments.hardware.cores import choose_cores
from deployments.hardware.device_detector import CPU
from deployments.serve_adapter.autoscaling import FILL
from deployments.serve_adapter.gc_freeze import spare_what_is_loaded
from deployments.serving.metrics import OfModel, publish_again_and_again
from deployments.serving.wire import Server

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

_PROBE_TIMEOUT_S = 5.0
_FIRST_POLICY = StepPolicy(ttft_s=1.0, tpot_s=0.1)  # until the first Router has sent its settings, before any offer


class Generator:
    """Serve deployment. The engine lives in a thread of its own, bound to its cores before its library is imported,
    so that the event loop stays free for health checks, for admission and for tokens that leave.
    """

    def __init__(self, pool: str, settings: GenerationSettings, device: str, parts: Mapping[str, CpuPart]) -> None:
        """`parts`: what the CPU instances of each model want of a machine, this model's among them if it has any."""
        import ray
        from ray import serve

        context = serve.get_replica_context()
        self._pool = pool
        self._settings = settings.cpu if pool == CPU else settings.accelerator
        rank = context.rank.local_rank if context.rank else 0
        self._cores = choose_cores(pool, settings, parts, rank)
        hybrid = pool != CPU and settings.accelerator.host_blocks > 0
        self._host_cores = (self._cores[1:] or self._cores) if hybrid else ()
        self._engine_cores = self._cores[:1] if hybrid and device != CPU else self._cores  # what launches needs one
        os.environ.update(thread_environment(len(self._cores)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=self._bind)
        self._replica = context.replica_tag
        self._node = ray.get_runtime_context().get_node_id()
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._engine: StepEngine
        self._card: GenerationCard
        self._engine, self._card = self._in_thread(lambda: self._load(settings, device))
        self._metrics = self._open_metrics()
        self._measured = self._in_thread(lambda: measure(self._engine, self._card))
        self._measured_host = self._in_thread(lambda: measure_host(self._engine, self._card))
        bounds = StepPolicy(_FIRST_POLICY.ttft_s, _FIRST_POLICY.tpot_s, self._settings.step_tokens)
        host = None if self._measured_host is None else Host(self._measured_host, self._engine.host_blocks)
        schedule = StepSchedule(self._measured, bounds, self._engine.blocks, host=host)
        self._stepper = Stepper(
            schedule,
            steps_in(self._thread, self._engine.steps),
            on_step=self._metrics.ran,
            on_failure=self._failed,
        )
        self._server = Server(self._host, self._stepper.receive, self._stepper.gone, GenerationOffers.decode)
        spare_what_is_loaded()
        logger.info(
            "%s ready: %s on %s, %s (%s), %s blocks, %s cores %s",
            pool, self._card.name, self._engine.device, self._engine.dtype, self._engine.why, self._engine.blocks,
            len(self._cores), sorted(self._cores),
        )  # fmt: skip

    def __del__(self) -> Awaitable[None] | None:
        """Called by Serve, and waited for, before the replica ends: what was admitted is generated."""
        return self._stepper.drained() if hasattr(self, "_stepper") else None

    def _in_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _bind(self) -> None:
        problem = pin_thread(self._engine_cores)
        if problem:
            logger.warning("%s: not bound to cores: %s", self._pool, problem)

    def _load(self, settings: GenerationSettings, device: str) -> tuple[StepEngine, GenerationCard]:
        card = read_generation_card(settings.model)
        return create_step_engine(card, self._settings, device, len(self._cores), self._host_cores), card

    def _open_metrics(self) -> GeneratorMetrics:
        from ray.serve import metrics

        about = {
            "engine": self._engine.engine,
            "dtype": self._engine.dtype,
            "version": importlib.metadata.version("windve"),
        }
        return GeneratorMetrics(OfModel(metrics, self._card.name), self._pool, about)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What the Router learns of this replica from Serve: engine, device, cores, step time, its node and address."""
        publish_again_and_again(self._publish)
        return {
            **self._engine.describe(),
            "warm_up": asdict(self._measured),
            "host_warm_up": None if self._measured_host is None else asdict(self._measured_host),
            "cores": sorted(self._cores),
            "pid": os.getpid(),
            "node": self._node,
            "channel": {"host": self._host, "port": await self._server.start(), "secret": self._server.secret},
        }

    def _publish(self) -> None:
        state = self._stepper.state()
        self._metrics.publish(
            GeneratorState(
                in_flight=self._stepper.in_flight,
                waiting=state.waiting,
                factor=state.factor,
                margin=state.margin,
                kv_blocks_used=state.blocks - state.free_blocks,
                kv_blocks_free=state.free_blocks,
                refusals=state.refusals,
                host=state.host,
            )
        )

    async def wake(self) -> None:
        """Do nothing. A Router calls it once, because a Serve handle follows its deployment only after a first call."""

    async def time_steps(self, planned: Sequence[PlannedStep], times: int) -> dict[str, Any] | WindveError:
        """As the route `/calibration/steps` answers it: see `Stepper.time_steps`. An error is returned, not raised:
        Serve would count it as the replica's.
        """
        engine, card = self._engine, self._card
        bounds = engine.blocks, self._settings.step_tokens, card.context, engine.host_blocks
        works = (step.work(engine.blocks, card, engine.host_blocks) if step.fits(*bounds) else None for step in planned)
        logger.info("%s: %d steps of a calibration, no generation until they have ended", self._pool, len(planned))
        try:
            found = await self._stepper.time_steps(works, times)
            return {
                "pool": self._pool,
                "replica": self._replica,
                "seconds": [took and [one.seconds for one in took] for took in found],
                "host_seconds": [took and [one.host_s for one in took] for took in found],
            }
        except WindveError as error:
            return error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller learns of this replica while it is autoscaled (see `autoscaling.KeepFill`): the share
        of its blocks that are reserved, the host's among them, or of `ttft_s` that the next prompt would wait,
        whichever is more.
        """
        state = self._stepper.state()
        free, blocks = state.free_blocks, state.blocks
        if state.host is not None:
            free, blocks = free + state.host.free_blocks, blocks + state.host.blocks
        return {FILL: max(1 - free / blocks, state.first_s / self._stepper.schedule.policy.ttft_s)}

    def _failed(self, error: BaseException) -> str:
        self._metrics.failed()
        logger.error("%s: a step failed", self._pool, exc_info=error)
        return f"the {self._pool} engine failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}"

    async def check_health(self) -> None:
        """Called by Serve. Raises where the device is lost or one step has taken `stuck_after_s`."""
        if running_s := self._stepper.running_s:
            if running_s > self._settings.stuck_after_s:
                raise RuntimeError(
                    f"the {self._pool} engine has been in one step for {running_s:.0f} s "
                    f"(stuck_after_s: {self._settings.stuck_after_s:g}): the device hangs"
                )
            return
        await asyncio.wait_for(
            asyncio.get_running_loop().run_in_executor(self._thread, self._engine.probe), _PROBE_TIMEOUT_S
        )
