"""One pool as the Router sees it: its live replicas, its batcher, and the calls that carry batches to them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deployments import membership
from deployments.batcher import Batcher, Pacing, Reply
from deployments.engines import TokenBatch
from deployments.errors import EngineFailed, ReplicaLost, WindveError
from deployments.queue_manager import QueueManager
from deployments.retry_after import PoolLoad
from deployments.settings import PoolConfig

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_FIRST_GREETING_S, _LAST_GREETING_S = 0.2, 5.0  # between greetings of a replica that is in doubt


class Pool:
    """`name` is "accelerator" or "cpu"; `deployment` is the name of its Serve deployment."""

    def __init__(
        self,
        name: str,
        *,
        deployment: str,
        handle: DeploymentHandle[Any],
        queue: QueueManager,
        router: str,
        on_change: Callable[[], None],  # called whenever replicas have come or gone
    ) -> None:
        self.name = name
        self.members: Mapping[str, Mapping[str, Any]] = {}
        self.config = PoolConfig(queue_depth=0)
        self._deployment = deployment
        self._queue = queue
        self._router = router
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        # What crosses is bytes and arrays: plain pickle does it without looking for closures.
        pickled = handle.options(request_serialization="pickle", response_serialization="pickle")
        self._embed = pickled.options(method_name="embed")
        self._abandon = pickled.options(method_name="abandon")
        self._errands: set[asyncio.Task[None]] = set()
        self.batcher = Batcher(name, self._send, self._call_off, lambda: queue.is_full(name))

    def connect(self) -> None:
        """Follow the pool's replicas from now on."""

        def changed(members: membership.Members, died: str | None) -> None:
            self._loop.call_soon_threadsafe(self._set_members, members, died)

        membership.watch(self._deployment, changed)
        # A handle starts to follow its deployment with its first call: make one that means nothing.
        self._spawn(self._call_abandon("none", "none"))

    def configure(self, config: PoolConfig) -> None:
        """Take a new depth and latency model over, in place."""
        self.config = config
        self._queue.set_depth(self.name, config.queue_depth)
        self.batcher.depth = config.queue_depth
        self.batcher.pacing = Pacing.from_beta(self.latency_model[1])

    def try_depth(self, depth: int | None) -> None:
        """Let batches be as large as a trial's `depth` allows, and never smaller than the depth in force does."""
        self.batcher.depth = max(self.config.queue_depth, depth or 0)

    @property
    def latency_model(self) -> tuple[float, float]:
        """(alpha_s, beta_s): calibrated if the config has them, else what a replica measured while it warmed up."""
        if self.config.alpha_s is not None and self.config.beta_s is not None:
            return self.config.alpha_s, self.config.beta_s
        warm_up = next((member["warm_up"] for member in self.members.values()), {"alpha_s": 0.0, "beta_s": 0.0})
        return warm_up["alpha_s"], warm_up["beta_s"]

    @property
    def calibrated(self) -> bool:
        return self.config.alpha_s is not None  # and beta_s with it: the settings see to that

    def load(self, share: float = 1.0) -> PoolLoad:
        """What this pool runs and holds; `share` of its capacity is open to who asks."""
        alpha_s, beta_s = self.latency_model
        capacity = int(self._queue.capacity_of(self.name) * share)
        return PoolLoad(alpha_s, beta_s, capacity, tuple(self.batcher.running()), self.batcher.waiting)

    def _set_members(self, members: membership.Members, died: str | None) -> None:
        if set(members) != set(self.members):
            logger.info("the %s pool has %d live replicas", self.name, len(members))
        for replica in set(members) - set(self.members):
            self._spawn(self._call_abandon(replica, "none"))  # opens the channel before the first query needs it
        self.members = members
        self._queue.set_replicas(self.name, len(members))
        self.batcher.pacing = Pacing.from_beta(self.latency_model[1])
        self.batcher.set_replicas(members, self._lost)
        if died is not None:
            self.batcher.give_up(died, self._lost(died))
        self._on_change()

    def _lost(self, replica: str) -> ReplicaLost:
        return ReplicaLost(f"the {self.name} pool lost replica {replica} while the query was on it; please try again")

    async def _send(self, replica: str, batch_id: str, queries: Sequence[npt.NDArray[np.int32]]) -> Reply:
        from ray.exceptions import RayActorError, RayTaskError

        batch = TokenBatch.pack(list(queries))
        try:
            reply: Reply = await self._embed.remote(
                replica, f"{self._router}:{batch_id}", batch.ids.tobytes(), batch.lengths.tobytes()
            )
        except WindveError:
            raise
        except RayActorError:
            self._doubt(replica)
            raise self._lost(replica) from None
        except RayTaskError as error:
            if isinstance(error.cause, WindveError):
                raise error.cause from None
            raise EngineFailed(f"the {self.name} engine failed: {_first_line(error.cause)}") from error
        except Exception as error:
            raise EngineFailed(f"the {self.name} engine failed: {_first_line(error)}") from error
        return reply

    def _call_off(self, replica: str, batch_id: str) -> None:
        self._spawn(self._call_abandon(replica, f"{self._router}:{batch_id}"))

    async def _call_abandon(self, replica: str, batch_id: str) -> bool:
        try:
            there: bool = await self._abandon.remote(replica, batch_id)
        except Exception as error:  # noqa: BLE001 - a replica that has gone has nothing to abandon
            logger.info("the %s pool did not reach replica %s: %s", self.name, replica, _first_line(error))
            return False
        return there

    def _doubt(self, replica: str) -> None:
        """A call to it broke: nothing is sent there until it answers a greeting, or Serve says what became of it."""
        member = self.members.get(replica)
        if member is not None:
            self._set_members({name: told for name, told in self.members.items() if name != replica}, None)
            self._spawn(self._greet(replica, member))

    async def _greet(self, replica: str, member: Mapping[str, Any]) -> None:
        """Until it answers, or Serve counts it out."""
        wait_s = _FIRST_GREETING_S
        while replica in membership.current(self._deployment) and replica not in self.members:
            if await self._call_abandon(replica, "none"):
                if replica in membership.current(self._deployment):
                    self._set_members({**self.members, replica: member}, None)
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LAST_GREETING_S)

    def _spawn(self, errand: Any) -> None:
        task = self._loop.create_task(errand, context=contextvars.Context())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
