"""What every Router has: the config in force, a pool of replicas for each handle, and the trials of a calibration."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from deployments.admission.trial import Trial, Trials
from deployments.errors import SettingsError
from deployments.hardware.device_detector import Topology
from deployments.serving.metrics import Instruments, OfModel, publish_periodically
from deployments.serving.replica_set import ReplicaSet
from deployments.settings import OneModelSettings, TrialGrant

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

Handles = Mapping[str, tuple[str, "DeploymentHandle[Any]"]]  # by pool: the name of its deployment, and its handle


class Named(Protocol):
    """A model's card."""

    @property
    def name(self) -> str: ...


M = TypeVar("M", bound=Named)  # a card
T = TypeVar("T")  # what makes tokens of texts


class RouterContext(NamedTuple, Generic[M, T]):
    """What a Router finds where it runs: the names of its replica and node, Serve's metrics, and the model's files."""

    replica: str
    node: str
    instruments: Instruments
    card: M
    tokenizer: T

    @classmethod
    def of_serve(cls, card: M, tokenizer: T) -> RouterContext[M, T]:
        """Within a replica of Serve."""
        import ray
        from ray import serve
        from ray.serve import metrics

        node = ray.get_runtime_context().get_node_id()
        return cls(serve.get_replica_context().replica_tag, node, OfModel(metrics, card.name), card, tokenizer)


class Config(Protocol):
    """A `user_config`, typed."""

    @property
    def trial(self) -> TrialGrant | None: ...


C = TypeVar("C", bound=Config)
P = TypeVar("P", bound=ReplicaSet[Any])
S = TypeVar("S", bound=OneModelSettings)


class BaseRouter(ABC, Generic[S, C, P, M]):
    """One replica of the Router deployment."""

    pool_type: type[P]

    def __init__(self, settings: S, topology: Topology, handles: Handles, context: RouterContext[M, Any]) -> None:
        self.settings, self.topology = settings, topology
        self.replica, self.card = context.replica, context.card
        self.config: C  # once `reconfigure` was called
        self.config_problem: str | None = None
        self.started = time.time()
        self.pools: dict[str, P] = {}
        self._node, self._handles = context.node, handles
        self._trials = Trials()

    async def reconfigure(self, user_config: Any) -> None:
        """Put a `user_config` in force: at the start, and in place whenever it changes.

        At the start a bad config refuses to start (SettingsError names the key). Later it changes nothing: what runs
        goes on with the config before it, and the log and `/info` say what is wrong with the new one.
        """
        try:
            config = self._parse(user_config)
        except SettingsError as error:
            self.refuse(error)
        else:
            self.configure(config)

    def refuse(self, error: SettingsError) -> None:
        """A config that came is bad. Raises the error where none is in force."""
        if not self.pools:
            raise error
        self.config_problem = str(error)
        logger.error("refused the new user_config; the previous one stays in force: %s", error)

    def configure(self, config: C) -> None:
        """Put a config in force."""
        self.config, self.config_problem = config, None
        self._trials.configure(config.trial)
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
        return self.pool_type(
            name,
            deployment=deployment,
            handle=handle,
            router=self.replica,
            node=self._node,
            on_change=self._replicas_changed,
        )

    @abstractmethod
    def _parse(self, user_config: Any) -> C:
        """Raises SettingsError."""

    @abstractmethod
    def _put_in_force(self, config: C) -> str:
        """Configure the pools; what is promised now, for the log."""

    @abstractmethod
    def _publish(self) -> None:
        """Give the metrics to Serve."""

    def _replicas_changed(self) -> None:
        """Replicas have come or gone, or have begun or ceased to answer."""

    # --- calibration --------------------------------------------------------------------------------------------------

    def _enter(self, trial: Trial) -> None:
        """A calibration asks. Raises Forbidden or InvalidInput."""
        self._trials.enter(trial, self.topology.pools, asyncio.get_running_loop().time(), time.time())

    @property
    def trial_seconds_ago(self) -> float | None:
        """Since a calibration asked last: it runs. None: it has not, or its grant was withdrawn."""
        return self._trials.seconds_ago(asyncio.get_running_loop().time())

    # --- how it is ----------------------------------------------------------------------------------------------------

    def describe_pools(self) -> dict[str, dict[str, Any]]:
        """Each pool as `/info` shows it."""
        expected = self.topology.replicas
        return {
            name: {"expected_replicas": expected[name], **self._about(name), **pool.describe()}
            for name, pool in self.pools.items()
        }

    def _about(self, _pool: str) -> dict[str, Any]:
        """What `/info` says of a pool beside its replicas."""
        return {}
