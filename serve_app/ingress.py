"""The base of the Router's Serve deployment, shared by the applications of embeddings and of generation."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve import metrics
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from deployments.admission.door import VISITS
from deployments.serve_adapter.autoscaling import UTILIZATION
from deployments.serve_adapter.haproxy_counts import HAProxyCounts
from deployments.serve_adapter.replica_process import AsgiIngress, access_log_handler
from deployments.serving.haproxy_agent import HAProxyAgent, Situation
from deployments.serving.metrics import Gauge, publish_periodically, router_gauges
from deployments.serving.router import BaseRouter
from deployments.settings import ApplicationSettings
from serve_app.api_keys import ApiKeys
from serve_app.embedding.ollama import ABOUT as OLLAMA_ABOUT
from serve_app.embedding.routes import ALL_ROUTES
from serve_app.observe.access_log import LineWriter
from serve_app.observe.observer import Observer
from serve_app.observe.tracer import Tracer
from serve_app.web.about import CHATS, COMPLETIONS, SHARED_ROUTES
from serve_app.web.asgi import Doorway

Deployed = Mapping[str, tuple[str, DeploymentHandle[Any]]]  # of one model: pool -> name and handle of its deployment
_OTHERS_S = 60.0  # for models whose replicas come later than the first's
KNOWN_ROUTES = ALL_ROUTES.union(SHARED_ROUTES, OLLAMA_ABOUT, COMPLETIONS, CHATS, ("/burst",))  # by name in the log


class ServiceIngress(AsgiIngress):
    """One Router replica: its API keys, its access log and its traces.

    A subclass owns the Routers, answers HTTP with `api`, and inherits a method for each gRPC call. Serve finds the
    method by the call's name.
    """

    _access_log: LineWriter | None = None  # while the settings may be wrong

    def __init__(self, settings: ApplicationSettings) -> None:
        """Raises SettingsError."""
        self._origins = settings.cors_allow_origins
        self.api_keys = None if settings.api_keys is None else ApiKeys.read(settings.api_keys)
        replica, traces = serve.get_replica_context().replica_tag, settings.traces
        tracer = None if traces is None else Tracer.exporting(traces, replica)
        self._access_log = LineWriter(access_log_handler())
        self.observer = Observer(self._access_log, tracer, KNOWN_ROUTES)
        self._agent = HAProxyAgent(VISITS, self._situation)
        self._haproxy = HAProxyCounts()
        self._listening: asyncio.Task[None] | None = None

    def __del__(self) -> None:
        """Serve calls this when the Router has answered all its requests, before it ends the process."""
        if self._access_log is not None:
            self._access_log.close()

    @abstractmethod
    def api(self) -> ASGIApp:
        """The ASGI application with all routes."""

    @abstractmethod
    def every_router(self) -> Sequence[BaseRouter[Any, Any, Any, Any]]:
        """The Router of each model."""

    def asgi_app(self) -> ASGIApp:
        return Doorway(with_cors(self.api(), self._origins), VISITS)

    @property
    def _busy_share(self) -> float:
        return self.every_router()[0].busy.share  # all models' Routers share the thread

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller reads from this Router for autoscaling (see `autoscaling.KeepUtilization`)."""
        return {UTILIZATION: self._busy_share}

    async def open_door(self) -> None:
        """Wait until replicas answer, then tell HAProxy how many requests this Router takes, and publish its door and
        how busy it is. Only the first call does anything.

        Before this returns, Serve sends this Router no requests, and keeps the old Routers, whose replicas may serve
        another model. Once one model answers, it waits up to a minute for the others.
        """
        if self._listening is None:
            joining = [asyncio.create_task(router.joined()) for router in self.every_router()]
            await asyncio.wait(joining, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(joining, timeout=_OTHERS_S)
            for one in joining:
                if one.done():
                    one.result()  # raises SettingsError if it can keep no promise
            for router in self.every_router():
                router.about_process = self._about_process
            publish_periodically(partial(self._publish, router_gauges(metrics)))
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._listening = asyncio.create_task(self._agent.listen(host))

    def _publish(self, gauges: Mapping[str, Gauge]) -> None:
        for name, value in {"busy": self._busy_share, **self._door()}.items():
            gauges[name].set(value, {})

    def _about_process(self) -> dict[str, Any]:
        """What `/info` of each model shows of the process."""
        if (door := self._door()) and (counts := self._haproxy.newest()):
            door["haproxy"] = {"host": ray.util.get_node_ip_address(), **counts}  # type: ignore[no-untyped-call]
        return {"router_busy": round(self._busy_share, 3), "door": door}

    def _door(self) -> dict[str, Any]:
        return self._agent.door.describe(**self._situation()._asdict())

    def _situation(self) -> Situation:
        routers = self.every_router()
        return Situation(
            placed=sum(router.placed for router in routers),
            room=sum(router.room_requests() for router in routers),
            slo_s=min(router.config.slo_s for router in routers),
        )

    async def check_health(self) -> None:
        """Serve calls this about every second; it also reloads the API keys if they changed."""
        if self.api_keys is not None:
            await asyncio.to_thread(self.api_keys.refresh)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Add CORS to `app`, if there are `origins`. A preflight needs no API key, because browsers send none with it."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        allow_private_network="*" not in origins,  # named public sites may ask a private network
        expose_headers=("*",),
    )
