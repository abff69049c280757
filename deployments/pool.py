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
from deployments.channel import Channel
from deployments.engines import TokenBatch
from deployments.errors import EngineFailed, ReplicaLost, WindveError
from deployments.holdings import Holdings
from deployments.metrics import PoolState
from deployments.nearness import nearest_first
from deployments.queue_manager import QueueManager
from deployments.retry_after import PoolLoad
from deployments.settings import PoolConfig
from deployments.tenancy import Tenancy

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
        actor: str,  # the Router's own
        node: str,  # on which the Router runs
        on_change: Callable[[], None],  # called whenever replicas or places have come or gone
    ) -> None:
        self.name = name
        self.members: Mapping[str, Mapping[str, Any]] = {}
        self.config = PoolConfig(queue_depth=0)
        self._deployment = deployment
        self._queue = queue
        self._router = router
        self._node = node
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        # What crosses is bytes and arrays: plain pickle does it without looking for closures.
        pickled = handle.options(request_serialization="pickle", response_serialization="pickle")
        self._embed = pickled.options(method_name="embed")
        self._abandon = pickled.options(method_name="abandon")
        self._lease = pickled.options(method_name="lease")
        self._channels: dict[str, Channel] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._joining: set[str] = set()
        self.batcher = Batcher(name, self._send, self._call_off, lambda: queue.is_full(name))
        holdings = Holdings(self.batcher.out, lambda: queue.in_flight(name), lambda: self.batcher.waiting)
        self.batcher.places = holdings.at
        self.tenancy = Tenancy(
            name, router, actor, self._call_lease, queue, holdings, self._places_changed, self._doubt
        )

    def connect(self) -> None:
        """Follow the pool's replicas from now on."""

        def changed(members: membership.Members, died: str | None) -> None:
            self._loop.call_soon_threadsafe(self._follow, members, died)

        membership.watch(self._deployment, changed)
        # A handle starts to follow its deployment with its first call: make one that means nothing.
        self._spawn(self._call_abandon("none", "none"))

    def configure(self, config: PoolConfig) -> None:
        """Take a new depth and latency model over, in place."""
        self.config = config
        self._queue.set_depth(self.name, config.queue_depth)
        self.tenancy.set_depth(config.queue_depth)
        self.batcher.depth = config.queue_depth
        self.batcher.pacing = Pacing.from_beta(self.latency_model[1])

    def try_depth(self, depth: int | None) -> None:
        """Let batches be as large as a trial's `depth` allows, and never smaller than the depth in force does. None: no
        trial.
        """
        self.batcher.depth = max(self.config.queue_depth, depth or 0)
        self.tenancy.set_trial(depth)

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

    @property
    def _fill(self) -> float:
        """The share of the pool's depth that this Router has in flight: autoscaling goes by it."""
        return self._queue.in_flight(self.name) / max(1, self._queue.capacity_of(self.name))

    def load(self, share: float = 1.0) -> PoolLoad:
        """What this pool runs and holds; `share` of its capacity is open to who asks."""
        alpha_s, beta_s = self.latency_model
        capacity = int(self._queue.capacity_of(self.name) * share)
        return PoolLoad(alpha_s, beta_s, capacity, tuple(self.batcher.running()), self.batcher.waiting)

    def state(self) -> PoolState:
        """For Prometheus."""
        alpha_s, beta_s = self.latency_model
        return PoolState(
            self._queue.in_flight(self.name), self.batcher.waiting, self.config.queue_depth, len(self.members),
            alpha_s, beta_s, self.calibrated,
        )  # fmt: skip

    async def census(self) -> dict[str, dict[str, Any]]:
        """What the owners of the places say, replica by replica: who has how much (see `LeaseOffice.census`)."""
        replicas = list(self.members)
        told = await asyncio.gather(*(self._call_lease(replica, "census") for replica in replicas))
        return {replica: found for replica, found in zip(replicas, told, strict=True) if found is not None}

    def _follow(self, members: membership.Members, died: str | None) -> None:
        """Serve says which replicas live. One is used as soon as it has told which of its places are ours."""
        for replica in set(members) - set(self.members) - self._joining:
            self._joining.add(replica)
            self._spawn(self._join(replica))
        self._set_members({replica: members[replica] for replica in self.members if replica in members}, died)

    def _set_members(self, members: membership.Members, died: str | None = None) -> None:
        if set(members) != set(self.members):
            logger.info("the %s pool has %d live replicas", self.name, len(members))
        for replica in set(self.members) - set(members):
            self.tenancy.drop(replica)
            self._channels.pop(replica, None)  # it closes with the replica, which may still answer what it runs
        self.members = members
        self._queue.set_replicas(self.name, len(members))
        self.batcher.pacing = Pacing.from_beta(self.latency_model[1])
        self.batcher.set_replicas(nearest_first(members, self._node, self._router), self._lost)
        if died is not None:
            self.batcher.give_up(died, self._lost(died))
        self.tenancy.update()

    def _places_changed(self) -> None:
        self.batcher.look_again()
        self._on_change()

    def _lost(self, replica: str) -> ReplicaLost:
        return ReplicaLost(f"the {self.name} pool lost replica {replica} while the query was on it; please try again")

    async def _send(
        self, replica: str, batch_id: str, queries: Sequence[npt.NDArray[np.int32]], each_token: bool
    ) -> Reply:
        from ray.exceptions import RayActorError, RayTaskError

        channel = self._channels.get(replica)
        try:
            if channel is not None:
                return await channel.embed(
                    f"{self._router}:{batch_id}", queries, each_token=each_token, fill=self._fill
                )
            batch = TokenBatch.pack(list(queries))
            reply: Reply = await self._embed.remote(
                replica, f"{self._router}:{batch_id}", batch.ids.tobytes(), batch.lengths.tobytes(), each_token,
                self._fill,
            )  # fmt: skip
        except WindveError:
            raise
        except (RayActorError, ConnectionError):
            self._doubt(replica)
            raise self._lost(replica) from None
        except RayTaskError as error:
            if isinstance(error.cause, WindveError):
                raise error.cause from None
            raise EngineFailed(f"the {self.name} engine failed: {_first_line(error.cause)}") from error
        except Exception as error:
            raise EngineFailed(f"the {self.name} engine failed: {_first_line(error)}") from error
        return reply

    def _broke(self, replica: str, channel: Channel) -> None:
        """Seen at once, even where nothing was on the way: with its node a replica dies and so do those beside it, and
        a query that one of them lost must not be sent to the next.
        """
        if self._channels.get(replica) is channel:
            self._doubt(replica)

    def _call_off(self, replica: str, batch_id: str) -> None:
        channel = self._channels.get(replica)
        if channel is not None:
            channel.abandon(f"{self._router}:{batch_id}")
        else:
            self._spawn(self._call_abandon(replica, f"{self._router}:{batch_id}"))

    async def _open_channel(self, replica: str) -> None:
        """Where its port is closed to us, Serve's handle carries the batches: slower, and said once."""
        at = membership.current(self._deployment).get(replica, {}).get("channel")
        if at is None:
            return  # gone meanwhile
        try:
            self._channels[replica] = await Channel.open(
                at["host"], at["port"], at["secret"], lambda channel: self._broke(replica, channel)
            )
        except (OSError, TimeoutError) as error:
            logger.warning(
                "the %s pool's replica %s cannot be reached at %s:%s (%s): batches go through Serve's handle, slower",
                self.name, replica, at["host"], at["port"], _first_line(error),
            )  # fmt: skip

    async def _call_abandon(self, replica: str, batch_id: str) -> None:
        try:
            await self._abandon.remote(replica, batch_id)
        except Exception as error:  # noqa: BLE001 - a replica that has gone has nothing to abandon
            logger.info("the %s pool did not reach replica %s: %s", self.name, replica, _first_line(error))

    async def _call_lease(self, replica: str, what: str, *words: Any) -> Any:
        """A word to the office that leases this replica's places, and its answer; None where it is not reached."""
        response = self._lease.remote(replica, what, *words)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, its places are not counted on until it answers
            logger.info("the %s pool did not reach replica %s: %s", self.name, replica, _first_line(error))
            self._doubt(replica)
            return None

    def _doubt(self, replica: str) -> None:
        """A call to it broke: nothing is sent there until it answers, or Serve says what became of it."""
        if replica in self.members and replica not in self._joining:
            self._joining.add(replica)
            self._set_members({name: told for name, told in self.members.items() if name != replica})
            self._spawn(self._join(replica))

    async def _join(self, replica: str) -> None:
        """Until it answers, or Serve counts it out."""
        wait_s = _FIRST_GREETING_S
        try:
            while replica in membership.current(self._deployment):
                if await self.tenancy.join(replica):
                    await self._open_channel(replica)
                    break
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LAST_GREETING_S)
        finally:
            self._joining.discard(replica)
        now = membership.current(self._deployment)
        if replica in now:
            self._set_members({**self.members, replica: now[replica]})
        else:
            self.tenancy.drop(replica)

    def _spawn(self, errand: Any) -> None:
        task = self._loop.create_task(errand, context=contextvars.Context())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
