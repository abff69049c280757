"""An embedding replica: one engine on one device. The accelerator's and the CPU's deployments are this one class."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deployments.affinity import pin_thread, plan_affinity, read_cpu_shape, thread_environment
from deployments.autoscaling import FILL, fill_of
from deployments.channel import Batch, BatchServer
from deployments.device_detector import CPU
from deployments.engines import Engine, Stopped, TokenBatch, Vectors, create_engine, embed
from deployments.errors import EngineFailed, ReplicaLost
from deployments.lease_office import LeaseOffice
from deployments.liveness import actor_lives
from deployments.metrics import EmbedderMetrics, publish_again_and_again
from deployments.model_files import ModelCard, read_model_card
from deployments.settings import Settings
from deployments.sparse import pack

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

_PROBE_TIMEOUT_S = 5.0
_WARM_UP_TOKENS = 75  # the paper's query length
_WARM_UP_QUERIES = 8


class Reply(NamedTuple):
    """What a call is answered: `unit` float32 [vectors, dimension] of length 1, the `norms` float32 [vectors] they had
    before (so that a client may have the vectors as the model gave them), and the engine's seconds.

    Other kinds than embedding are answered with the model's own numbers instead of `unit`, and norms of 1: a reranker
    and a classifier with logits, a sparse model with rows of `sparse.pack`.
    """

    unit: Vectors
    norms: npt.NDArray[np.float32]
    compute_s: float


@dataclass(slots=True, eq=False)
class _Call:
    router: str
    fill: float  # the share of the pool's depth that this Router had in flight
    batch: TokenBatch
    answer: asyncio.Future[Reply]
    abandoned: bool = False
    orphaned: bool = False  # its Router is dead: its places are free once the engine is done with it


@dataclass(slots=True)
class _Run:
    """One engine run: the calls that were merged into it."""

    calls: list[_Call]
    started: float
    stop: threading.Event = field(default_factory=threading.Event)


class Embedder:
    """Serve deployment. The engine lives in a thread of its own, bound to its cores before its library is imported,
    so that the event loop stays free for health checks and the next batch.
    """

    def __init__(self, pool: str, settings: Settings, device: str) -> None:
        import ray
        from ray import serve

        context = serve.get_replica_context()
        self._replica = context.replica_tag
        self._pool = pool
        self._settings = settings.cpu if pool == CPU else settings.accelerator
        self._cores = _choose_cores(pool, settings, context.rank.local_rank if context.rank else 0)
        os.environ.update(thread_environment(len(self._cores)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=self._bind)
        self._inbox: list[_Call] = []
        self._calls: dict[str, _Call] = {}
        self._run: _Run | None = None
        self._runs_task: asyncio.Task[None] | None = None
        self._node = ray.get_runtime_context().get_node_id()
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._server = BatchServer(self._host, self._embed_batch, self._abandon_batch)
        self._office = LeaseOffice(actor_lives, self._orphan)
        self._most_queries = 0
        self._engine: Engine
        self._card: ModelCard
        self._engine, self._card = self._in_thread(lambda: self._load(settings, device))
        self._metrics = self._open_metrics()
        self._warm_up = self._in_thread(self._measure)
        info = self._engine.info
        logger.info(
            "%s ready: %s on %s, %s (%s), %s cores %s",
            pool, self._card.name, info.device, info.dtype, info.why, len(self._cores), sorted(self._cores),
        )  # fmt: skip

    def __del__(self) -> Awaitable[None] | None:
        """Called by Serve, and waited for, before the replica ends: batches that came by the channel are answered."""
        return self._server.drain() if hasattr(self, "_server") and self._server.busy else None

    def _in_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def _bind(self) -> None:
        problem = pin_thread(self._cores)
        if problem:
            logger.warning("%s: not bound to cores: %s", self._pool, problem)

    def _load(self, settings: Settings, device: str) -> tuple[Engine, ModelCard]:
        card = read_model_card(settings.model)
        return create_engine(card, self._settings, device, len(self._cores)), card

    def _open_metrics(self) -> EmbedderMetrics:
        from ray.serve import metrics

        info = self._engine.info
        about = {
            "model": self._card.name,
            "engine": info.engine,
            "dtype": info.dtype,
            "version": importlib.metadata.version("windve"),
        }
        return EmbedderMetrics(metrics, self._pool, about)

    def _measure(self) -> dict[str, float]:
        """Warm up, and a first guess of Eq. 12 for the time before calibration: one query against eight."""
        one, many = (self._time(queries) for queries in (1, _WARM_UP_QUERIES))
        alpha_s = max(0.0, (many - one) / (_WARM_UP_QUERIES - 1))
        return {"alpha_s": alpha_s, "beta_s": max(0.0, one - alpha_s)}

    def _time(self, queries: int) -> float:
        tokens = min(_WARM_UP_TOKENS, self._card.max_tokens)
        batch = TokenBatch.random(self._card.vocab_size, [tokens] * queries, seed=queries)
        if not self._engine.info.emulated:
            embed(self._engine, batch, threading.Event())  # the first run of a shape pays for allocations
        started = time.perf_counter()
        embed(self._engine, batch, threading.Event())
        return time.perf_counter() - started

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What the Router learns of this replica from Serve: engine, device, cores, warm-up figures, its node and
        address.
        """
        publish_again_and_again(self._metrics.publish)
        return {
            **asdict(self._engine.info),
            "warm_up": self._warm_up,
            "cores": sorted(self._cores),
            "pid": os.getpid(),
            "node": self._node,
            "channel": {"host": self._host, "port": await self._server.start(), "secret": self._server.secret},
        }

    async def embed(self, replica: str, batch_id: str, ids: bytes, lengths: bytes, *wanted: Any) -> Reply:
        """A batch by way of Serve's handle, for a Router that the channel's port is closed to.

        Raises ReplicaLost where the call was meant for another replica (which has gone); else as `_embed_batch`.
        """
        if replica != self._replica:
            raise ReplicaLost(f"replica {replica} has gone")
        batch = Batch(np.frombuffer(ids, np.int32), np.frombuffer(lengths, np.int32), *wanted)
        return await self._embed_batch(batch_id, batch)

    async def _embed_batch(self, batch_id: str, batch: Batch) -> Reply:
        """One batch of a Router -> vectors.

        Batches that wait while the engine runs are merged into its next run, if they want the same. Raises Stopped if
        the Router has abandoned it, and EngineFailed.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        tokens = TokenBatch(batch.ids, batch.lengths, batch.each_token)
        call = _Call(batch_id.rpartition(":")[0], batch.fill, tokens, answer)
        self._inbox.append(call)
        self._calls[batch_id] = call
        self._count_queries()
        if self._runs_task is None:
            self._runs_task = asyncio.create_task(self._run_inbox())
        try:
            return await call.answer
        finally:
            self._calls.pop(batch_id, None)

    async def abandon(self, replica: str, batch_id: str) -> None:
        """`_abandon_batch` by way of Serve's handle."""
        if replica == self._replica:
            self._abandon_batch(batch_id)

    def _abandon_batch(self, batch_id: str) -> None:
        """Nobody waits for this batch any more: drop it if it waits, stop the run if nobody waits for any of it."""
        call = self._calls.get(batch_id)
        if call is None:
            return
        call.abandoned = True
        if call in self._inbox:
            self._inbox.remove(call)
            _fail(call, Stopped())
        elif self._run is not None and all(other.abandoned for other in self._run.calls):
            self._run.stop.set()

    async def lease(self, replica: str, what: str, *words: Any) -> Any:
        """A Router's word to the office that leases the places of this replica's queue (see `LeaseOffice`).

        Raises ReplicaLost where it was meant for another replica.
        """
        if replica != self._replica:
            raise ReplicaLost(f"replica {replica} has gone")
        told = await self._office.calls[what](*words)
        return {**told, "most_queries": self._most_queries} if what == "census" else told

    def _count_queries(self) -> None:
        self._most_queries = max(self._most_queries, sum(len(call.batch) for call in self._here()))

    def _here(self) -> list[_Call]:
        """Calls that run or wait, in the order in which they came."""
        return [*(self._run.calls if self._run else ()), *self._inbox]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller learns of this replica while it is autoscaled (see `autoscaling.KeepFill`)."""
        return {FILL: fill_of((call.router, call.fill) for call in self._here())}

    def _orphan(self, router: str) -> int:
        """A Router is dead: what waits here of its queries is dropped. Returns how many run on."""
        for call in [call for call in self._inbox if call.router == router]:
            self._inbox.remove(call)
            _fail(call, Stopped())
        running = [call for call in (self._run.calls if self._run else ()) if call.router == router]
        for call in running:
            call.abandoned = call.orphaned = True
        if self._run is not None and all(call.abandoned for call in self._run.calls):
            self._run.stop.set()
        return sum(len(call.batch) for call in running)

    async def _run_inbox(self) -> None:
        """Run what waits, merged, until nothing waits."""
        try:
            while self._inbox:
                each_token = self._inbox[0].batch.each_token
                calls = [call for call in self._inbox if call.batch.each_token == each_token]
                self._inbox = [call for call in self._inbox if call.batch.each_token != each_token]
                await self._run_calls(calls)
        finally:
            self._runs_task = None

    async def _run_calls(self, calls: list[_Call]) -> None:
        self._run = run = _Run(calls, time.monotonic())
        batch = TokenBatch.merge([call.batch for call in calls])
        try:
            unit, norms = await asyncio.get_running_loop().run_in_executor(self._thread, self._embed, batch, run.stop)
        except Exception as error:
            if not isinstance(error, Stopped):
                self._metrics.failed()
                logger.exception("%s: a run of %d queries failed", self._pool, len(batch))
                # Text only: the Router would have to import the engine's library to unpickle its exception.
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                error = EngineFailed(f"the {self._pool} engine failed: {reason}")
            for call in calls:
                _fail(call, error)
            return
        finally:
            self._run = None
            self._office.end_lingering(sum(len(call.batch) for call in calls if call.orphaned))
        compute_s = time.monotonic() - run.started
        self._metrics.ran(len(batch), len(batch.ids), compute_s)
        start = 0
        for call in calls:
            end = start + call.batch.vectors
            if not call.answer.done():
                call.answer.set_result(Reply(unit[start:end], norms[start:end], compute_s))
            start = end

    def _embed(self, batch: TokenBatch, stop: threading.Event) -> tuple[Vectors, npt.NDArray[np.float32]]:
        """In the engine's thread: unit vectors and norms, or the model's own numbers (see Reply)."""
        vectors = embed(self._engine, batch, stop)
        if self._card.kind != "embedding":
            finite = np.all(np.isfinite(vectors), axis=1, keepdims=True)
            rows = pack(np.where(finite, vectors, 0)) if self._card.kind == "sparse" else vectors
            return rows, np.where(finite[:, 0], np.float32(1), np.float32(np.nan))
        norms = np.linalg.norm(vectors, axis=1).astype(np.float32, copy=False)
        return vectors / np.maximum(norms, np.finfo(np.float32).tiny)[:, None], norms

    async def check_health(self) -> None:
        """Called by Serve. Raises where the device is lost or one run has taken `stuck_after_s`."""
        if self._run is not None:
            running_s = time.monotonic() - self._run.started
            if running_s > self._settings.stuck_after_s:
                raise RuntimeError(
                    f"the {self._pool} engine has been in one run for {running_s:.0f} s "
                    f"(stuck_after_s: {self._settings.stuck_after_s:g}): the device hangs"
                )
            return
        await asyncio.wait_for(
            asyncio.get_running_loop().run_in_executor(self._thread, self._engine.probe), _PROBE_TIMEOUT_S
        )


def _fail(call: _Call, error: Exception) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)


def _choose_cores(pool: str, settings: Settings, local_rank: int) -> tuple[int, ...]:
    """Cores of this replica: the CPU's by plan; the accelerator's those that the plan leaves, if the CPU helps it."""
    shape = read_cpu_shape()
    cpu = settings.cpu
    plan = plan_affinity(
        shape,
        cores=None if cpu.cores == "auto" else cpu.cores,
        per_numa_node=cpu.instance_per == "numa_node",
    )
    if pool == CPU:
        return plan.instances[local_rank % len(plan.instances)]
    helped = settings.heterogeneous and settings.accelerator.device != "cpu"
    return plan.reserved if helped and plan.reserved else shape.allowed[-shape.usable :]
