"""The base of all Routers: the config in force, a pool of replicas for each handle."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from deployments.errors import SettingsError
from deployments.hardware.device_detector import ACCELERATOR, CPU, Topology
from deployments.serving.metrics import Instruments, OfModel, publish_periodically
from deployments.serving.replica_set import ReplicaSet
from deployments.settings import OneModelSettings

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_NS = 1e-9
_OVER_S = 1.0  # a share of busy time covers at least this much time
_STEP_S = 0.1  # between two readings that are kept
_JOIN_S, _LOOK_S = 600.0, 0.01  # the longest wait for replicas at the start; how often it looks

Handles = Mapping[str, tuple[str, "DeploymentHandle[Any]"]]  # by pool: the name of its deployment, and its handle


def read_busy_s(schedstat: Path = _SCHEDSTAT) -> float:
    """Seconds in which the calling thread ran or waited for a core since its start.

    Linux counts both (`/proc/thread-self/schedstat`: ns that it ran, ns that it waited, time slices). Without this
    file it returns the CPU time alone.
    """
    try:
        ran_ns, waited_ns = map(int, schedstat.read_bytes().split()[:2])
    except (OSError, ValueError):
        return time.thread_time()
    return (ran_ns + waited_ns) * _NS


class BusyMeter:
    """Measures how busy a thread is. Make it and read it in this thread.

    `read`: seconds in which the thread was busy since its start; `clock`: s on any clock.
    """

    def __init__(self, read: Callable[[], float] = read_busy_s, clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._readings = deque([(clock(), read())])

    @property
    def share(self) -> float:
        """The thread's busy time over all time, in [0, 1], since the last reading that is a second old or older. If
        there is none yet, since this meter was made.
        """
        now, busy_s = self._clock(), self._read()
        readings = self._readings
        while len(readings) > 1 and readings[1][0] <= now - _OVER_S:
            readings.popleft()
        since, before_s = readings[0]
        if now >= readings[-1][0] + _STEP_S:
            readings.append((now, busy_s))
        return min(1.0, max(0.0, (busy_s - before_s) / (now - since))) if now > since else 0.0


class Named(Protocol):
    """A model's card."""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=Named)  # a card
T = TypeVar("T")  # a tokenizer


class RouterContext(NamedTuple, Generic[M, T]):
    """A Router's environment: the names of its replica and node, Serve's metrics, the model's card, tokenizer and space
    (`models/space.py`).
    """

    replica: str
    node: str
    instruments: Instruments
    card: M
    tokenizer: T
    space: str = ""

    @classmethod
    def of_serve(cls, card: M, tokenizer: T, space: str) -> RouterContext[M, T]:
        """The environment of the current Serve replica. Call it only inside one."""
        import ray
        from ray import serve
        from ray.serve import metrics

        node = ray.get_runtime_context().get_node_id()
        return cls(serve.get_replica_context().replica_tag, node, OfModel(metrics, card.name), card, tokenizer, space)


C = TypeVar("C")  # a `user_config`, typed
P = TypeVar("P", bound=ReplicaSet[Any])
S = TypeVar("S", bound=OneModelSettings)


class BaseRouter(ABC, Generic[S, C, P, M]):
    """One replica of the Router deployment."""

    pool_type: type[P]

    def __init__(self, settings: S, topology: Topology, handles: Handles, context: RouterContext[M, Any]) -> None:
        self.settings, self.topology = settings, topology
        self.replica, self.card, self.space = context.replica, context.card, context.space
        self.config: C  # set by `reconfigure`
        self.config_problem: str | None = None
        self.started = time.time()
        self.busy = BusyMeter()
        self.about_process: Callable[[], dict[str, Any]] = dict  # what `/info` shows of it; the ingress knows
        self.pools: dict[str, P] = {}
        self._node, self._handles = context.node, handles
        self.placed = 0  # requests that replicas have, or that wait for them in the bulk queue

    @property
    @abstractmethod
    def live_pools(self) -> Mapping[str, bool]:
        """For each pool that is not closed: whether it has a live replica."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Queries or answers in progress at its replicas, from all Routers."""

    async def reconfigure(self, user_config: Any) -> None:
        """Apply a `user_config`. Serve calls this at the start and whenever the config changes.

        Raises SettingsError, which names the key, if the first config is bad. A bad config later is ignored: the
        previous one stays in force, and the log and `/info` report the problem.
        """
        try:
            config = self._parse(user_config)
        except SettingsError as error:
            self.refuse(error)
        else:
            self.configure(config)

    def refuse(self, error: SettingsError) -> None:
        """Reject a bad config: keep the one in force and report the error, or raise it if none is in force."""
        if not self.pools:
            raise error
        self.config_problem = str(error)
        logger.error("refused the new user_config; the previous one stays in force: %s", error)

    def configure(self, config: C) -> None:
        """Apply a config. The first one also connects the pools and starts publishing metrics."""
        self.config, self.config_problem = config, None
        first = not self.pools
        if first:
            self.pools |= {name: self._pool(name) for name in self._handles}
        promise = self._put_in_force(config)
        if first:
            for pool in self.pools.values():
                pool.connect()
            asyncio.get_running_loop().call_soon(publish_periodically, self._publish)
        logger.info("%s: in force: %s", self.card.name, promise)

    def _pool(self, name: str) -> P:
        deployment, handle = self._handles[name]
        pool = self.pool_type(
            name,
            deployment=deployment,
            handle=handle,
            router=self.replica,
            node=self._node,
            on_change=self._replicas_changed,
        )
        pool.space, pool.nothing_else_answers = self.space, self._nothing_else_answers
        if name == CPU and ACCELERATOR in self._handles:
            pool.patience_s = math.inf  # until Serve's time is over (`serve_deployments._FINISH_S`)
        return pool

    def _nothing_else_answers(self) -> bool:
        return not any(pool.has_listed_replica for pool in self.pools.values())

    @abstractmethod
    def _parse(self, user_config: Any) -> C:
        """Parse a `user_config`. Raises SettingsError."""

    @abstractmethod
    def _put_in_force(self, config: C) -> str:
        """Configure the pools. Returns a description of the new promise for the log."""

    def room_requests(self) -> float:
        """For how many more requests the replicas have room now. `inf`: only they can tell."""
        return math.inf

    @abstractmethod
    def _publish(self) -> None:
        """Publish the metrics to Serve."""

    def _replicas_changed(self) -> None:
        """Called when replicas join or leave, or start or stop answering."""

    async def joined(self) -> None:
        """Wait until a replica answers, at most until ten minutes after the start. Raises SettingsError if no request
        could be answered in time.
        """
        while not self.can_answer and time.time() < self.started + _JOIN_S:  # noqa: ASYNC110 - once, at the start
            await asyncio.sleep(_LOOK_S)

    @property
    def can_answer(self) -> bool:
        """Whether any replica answers."""
        return any(pool.live for pool in self.pools.values())

    # --- status -------------------------------------------------------------------------------------------------------

    async def hear_replicas(self) -> None:
        """Refresh each replica's state: it reports to other Routers what it does for them. Call it before
        `describe_pools`.
        """
        links = [link for pool in self.pools.values() for link in pool.live]
        await asyncio.gather(*(link.ask_state() for link in links))

    def describe_pools(self) -> dict[str, dict[str, Any]]:
        """Each pool as `/info` shows it."""
        expected = self.topology.replicas
        return {
            name: {"expected_replicas": expected[name], **self._about(name), **pool.describe()}
            for name, pool in self.pools.items()
        }

    def _about(self, _pool: str) -> dict[str, Any]:
        """Additional fields that `/info` shows for a pool."""
        return {}
