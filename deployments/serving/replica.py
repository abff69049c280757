"""The base of all replicas: cores and a thread for the engine, a server for Routers, metadata, health, shutdown."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Generic, TypeVar

from deployments.errors import Unavailable, WindveError, first_line
from deployments.hardware.affinity import CpuPart, pin_thread, thread_environment
from deployments.hardware.cores import choose_cores
from deployments.hardware.device_detector import CPU
from deployments.serve_adapter.autoscaling import UTILIZATION
from deployments.serve_adapter.replica_process import freeze_gc
from deployments.serving.connections import Server
from deployments.serving.frames import WIRE
from deployments.serving.metrics import Instruments, OfModel, publish_periodically
from deployments.serving.planned_runs import Timed
from deployments.serving.sessions import PROBE_TIMEOUT_S, RouterSessions
from deployments.settings import OneModelSettings

logger = logging.getLogger("ray.serve")

# Of a CPU pool's engine, which would take the cores that Routers need to read and refuse requests. As the only pool
# it yields by so little that a busy neighbour at nice 0 does not starve it.
_NICE, _NICE_OVERFLOW = 1, 10

S = TypeVar("S", bound=OneModelSettings)
T = TypeVar("T")


class Replica(ABC, Generic[S]):
    """Serve deployment. The engine runs in its own thread, which is pinned to its cores before the engine's library is
    imported. The event loop stays free for health checks, admission and outgoing answers.
    """

    unit: ClassVar[str]  # the log's word for one computation of the engine
    frame_type: ClassVar[Any]  # a Router's frames; its `decode` reads one

    _settings: Any  # the pool's
    _card: Any
    _engine: Any
    _metrics: Any
    _worker: Any  # RouterSessions: runs the engine for Routers

    def __init__(
        self, pool: str, settings: S, device: str, parts: Mapping[str, CpuPart], *, is_overflow: bool = False
    ) -> None:
        """`parts`: the share of a machine that each model's CPU instances want, including this model's, if any.
        `is_overflow`: the pool takes what the accelerator cannot answer.
        """
        import ray
        from ray import serve

        context = serve.get_replica_context()
        self._pool, self._replica = pool, context.replica_tag
        self._settings = settings.cpu if pool == CPU else settings.accelerator
        rank = context.rank.local_rank if context.rank else 0
        self._cores = choose_cores(pool, settings, parts, rank)
        self._engine_cores = self._cores_of_engine(device)
        self._niceness = _NICE_OVERFLOW if is_overflow else _NICE
        os.environ.update(thread_environment(len(self._cores)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=self._bind)
        self._node = ray.get_runtime_context().get_node_id()
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._engine, self._card = self._in_thread(lambda: self._load(settings, device))
        self._worker = self._start()
        self._server = Server(self._host, self._worker.receive, self._worker.gone, self.frame_type.decode)
        freeze_gc()
        logger.info("%s ready: %s, %s cores %s", pool, self._in_words(), len(self._cores), sorted(self._cores))

    def __del__(self) -> Awaitable[None] | None:
        """Serve awaits this before the replica ends: all admitted work is answered first, and no Router needs it."""
        return self._worker.released() if hasattr(self, "_worker") else None

    @abstractmethod
    def _load(self, settings: S, device: str) -> tuple[Any, Any]:
        """Load the engine and the model's card. Runs in the engine's thread."""

    @abstractmethod
    def _start(self) -> RouterSessions[Any, Any]:
        """Warm up and measure the engine, and open the metrics. Returns the worker that runs the engine for Routers."""

    @abstractmethod
    def _in_words(self) -> str:
        """Model, device and number format, for the log."""

    @abstractmethod
    def _describe(self) -> dict[str, Any]:
        """What Routers and `/info` show about the engine."""

    @abstractmethod
    def _publish(self) -> None:
        """Publish the metrics to Serve."""

    @abstractmethod
    def _utilization(self) -> float:
        """How full the replica is; at 1 it cannot take more without refusing."""

    @abstractmethod
    def _planned(self, planned: Any) -> Any:
        """The work of a planned run; None if the replica has no room for it."""

    def _cores_of_engine(self, device: str) -> tuple[int, ...]:  # noqa: ARG002 - generation's override needs it
        return self._cores

    def _in_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _open_metrics(self, kind: Callable[[Instruments, str, Mapping[str, str]], T], engine: str, dtype: str) -> T:
        from ray.serve import metrics

        about = {"engine": engine, "dtype": dtype, "version": importlib.metadata.version("windve")}
        return kind(OfModel(metrics, self._card.name), self._pool, about)

    def _bind(self) -> None:
        """Pin the engine's thread, and let a CPU pool's yield to Routers, HAProxy and accelerators' replicas."""
        if self._pool == CPU:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        problem = pin_thread(self._engine_cores)
        if problem:
            logger.warning("%s: not bound to cores: %s", self._pool, problem)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What Routers learn about this replica from Serve: engine, device, warm-up figures, cores, node, address."""
        publish_periodically(self._publish)
        return {
            **self._describe(),
            "cores": sorted(self._cores),
            "pid": os.getpid(),
            "node": self._node,
            "wire": WIRE,
            "channel": {"host": self._host, "port": await self._server.start(), "secret": self._server.secret},
        }

    async def time_planned(
        self, planned: Sequence[Any], times: int, *, replica: str, holder: str, lease_s: float, warm_up: bool
    ) -> list[list[Timed] | None] | WindveError:
        """Time planned runs for a calibration: see `PlannedRuns.time`. `ReplicaRouter` sends the call to `replica`.
        Errors are returned, not raised, because Serve would count them against the replica.
        """
        if replica != self._replica:
            return Unavailable(f"the {self._pool} pool has no replica {replica} any more")
        lease = {"holder": holder, "lease_s": lease_s, "warm_up": warm_up}
        try:
            found: list[list[Timed] | None] = await self._worker.planned.time(
                map(self._planned, planned), times, **lease
            )
        except WindveError as error:
            return error
        return found

    async def wake(self) -> None:
        """Do nothing. A Router calls it once because a Serve handle follows its deployment only after a first call."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller reads from this replica for autoscaling (see `autoscaling.KeepUtilization`)."""
        return {UTILIZATION: self._utilization()}

    def _failed(self, error: BaseException) -> str:
        self._metrics.failed()
        logger.error("%s: a %s failed", self._pool, self.unit, exc_info=error)
        return f"the {self._pool} engine failed: {first_line(error)}"

    async def check_health(self) -> None:
        """Serve calls this and replaces the replica after three failures in a row.

        Raises an error if the device is lost, the engine fails on every input, or one run or step has taken longer than
        `batch_timeout_s`.
        """
        if self._worker.problem is not None:
            raise RuntimeError(f"{self._worker.problem}: it now fails on inputs that it answered before")
        if running_s := self._worker.running_s:
            if running_s > self._settings.batch_timeout_s:
                raise RuntimeError(
                    f"the {self._pool} engine has been in one {self.unit} for {running_s:.0f} s "
                    f"(batch_timeout_s: {self._settings.batch_timeout_s:g}): the device hangs"
                )
            return
        await asyncio.wait_for(self._probe(), PROBE_TIMEOUT_S)

    async def _probe(self) -> None:
        """Run a tiny input through the idle engine's model. Raises whatever the engine raises."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.probe)
