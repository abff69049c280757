"""The replicas of an application's pools, which time planned runs on their devices. A call goes through Ray, so whoever
cannot reach the cluster's Ray cannot make one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibration.service.application import Application, CalibrationFailed
from deployments.errors import Unavailable, WindveError, first_line
from deployments.serving.planned_runs import LEASE_S, Timed
from serve_app.config.generation import GenerationArgs
from serve_app.config.models import ApplicationArgs, Args
from serve_app.local import service_file

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_CALL_S = 600.0  # admitted work ends first, and a large run on a slow device takes minutes
_BUSY_S, _AGAIN_S = 30.0, 0.2  # how long a replica may answer that it is busy: the lease of a killed run ends by then


@dataclass(slots=True)
class Replicas:
    """One replica of each pool: the one that its own warm-up found to be the slowest, because one depth applies to all.
    The others of its pool serve meanwhile. `names`: by pool; `holder` identifies this run.
    """

    handles: Mapping[str, DeploymentHandle[Any]]
    names: Mapping[str, str]
    holder: str = field(default_factory=lambda: secrets.token_hex(8))
    _held: set[str] = field(default_factory=set)

    @classmethod
    def connect(
        cls, application: Application, pools: Mapping[str, Any], cost_s: Callable[[dict[str, Any]], float]
    ) -> Replicas:
        """Reach them through the cluster's Ray. `pools`: as `/info` shows them; `cost_s`: of a warm-up's figures.
        Raises CalibrationFailed.
        """
        from ray import serve

        args_of: type[ApplicationArgs] = GenerationArgs if application.generates else Args
        by_model = args_of(application.deployed.get("args")).deployments()  # type: ignore[call-arg]
        deployments = by_model[application.model or next(iter(by_model))]
        join_ray(application.dashboard)
        handles = {pool: serve.get_deployment_handle(deployments[pool], application.name) for pool in pools}
        names = {
            pool: max(found["replicas"], key=lambda name, every=found["replicas"]: cost_s(every[name]["warm_up"]))  # type: ignore[misc]
            for pool, found in pools.items()
        }
        return cls(handles, names)

    async def time(self, pool: str, planned: Any, times: int = 1, *, warm_up: bool = True) -> list[Timed] | None:
        """Have the pool's replica time a planned run. None if it has no room for it. Raises CalibrationFailed."""
        ends = time.monotonic() + _BUSY_S
        self._held.add(pool)
        while True:
            found = await self._call(pool, [planned], times, lease_s=LEASE_S, warm_up=warm_up)
            if not isinstance(found, WindveError):
                took: list[Timed] | None = found[0]
                return took
            if not isinstance(found, Unavailable) or time.monotonic() > ends:
                raise CalibrationFailed(f"the {pool} pool timed no planned run: {found}")
            await asyncio.sleep(_AGAIN_S)

    async def release(self) -> None:
        """End the leases: the replicas admit queries again."""
        while self._held:
            await self._call(self._held.pop(), [], 0, lease_s=0.0, warm_up=False)

    async def _call(self, pool: str, planned: list[Any], times: int, **lease: Any) -> Any:
        call = self.handles[pool].options(method_name="time_planned")
        try:
            async with asyncio.timeout(_CALL_S):
                return await call.remote(planned, times, replica=self.names[pool], holder=self.holder, **lease)
        except TimeoutError:
            raise CalibrationFailed(f"the {pool} pool did not time a planned run within {_CALL_S:g} s") from None
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the replica cannot be reached
            raise CalibrationFailed(f"the {pool} pool's replica was lost: {first_line(error)}") from None


def join_ray(dashboard: str) -> None:
    """Join the cluster's Ray, if this process has not: that of this Ray job, of the service that `windve serve` started
    here, of RAY_ADDRESS, or the one that runs on this machine. Raises CalibrationFailed.
    """
    import ray

    service = service_file.find()
    here = None if service is None or service.dashboard != dashboard else service.address
    try:
        ray.init(
            address=here or os.environ.get("RAY_ADDRESS") or "auto",
            logging_level=logging.ERROR,
            log_to_driver=False,
            ignore_reinit_error=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CalibrationFailed(
            f"a calibration must join the service's Ray, which cannot be reached from here: {first_line(error)}; run "
            f"it there, as a Ray job: ray job submit --address {dashboard} -- windve calibrate ..."
        ) from None
