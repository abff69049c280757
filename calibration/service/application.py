"""A calibration's access to the running application: `/info` over HTTP, and the config over Ray Serve's REST API."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from calibration.load import Address
from calibration.service.serve_config import DEPLOYMENT, merged
from deployments.errors import SettingsError, WindveError, first_line
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.serve_adapter.local_ray import serve_client
from serve_app.api_keys import read_keys
from serve_app.config.models import EMBEDDINGS, GENERATION, IMPORT_PATHS, Args
from serve_app.local import service_file

POOLS = (ACCELERATOR, CPU)
_DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
_CONFIG_KEYS = ("proxy_location", "http_options", "grpc_options", "target_capacity")
_ALL_INTERFACES = {"0.0.0.0", "::", ""}  # noqa: S104 - compared with, not bound
_IN_FORCE_S = 30.0  # for a new user_config, or calls, to reach all Routers


class CalibrationFailed(WindveError):
    """The run cannot continue, or must not write. The text is one sentence with the reason."""

    code = "calibration_failed"


@dataclass(slots=True)
class Application:
    """One windve application on a Ray cluster. `deployed`: its Serve config at the start.

    `model`: the model to calibrate, if the application serves several; `address` is then that of this model.
    """

    name: str
    dashboard: str
    address: Address
    deployed: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of every request; they contain the API key
    model: str | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)  # configs in force until `restore`, the latest last

    @classmethod
    def find(
        cls, *, dashboard: str, name: str | None, url: str | None, api_keys: str | None = None, model: str | None = None
    ) -> Application:
        """Find the application with Ray Serve's API at `dashboard` (see `find_dashboard`).

        `url`: the application's address (None: from its config). `api_keys`: where to read its API key, in the form of
        the setting (None: from the setting). `model`: the model, if it serves several. Raises CalibrationFailed if
        there is no application, SettingsError if one must be chosen or the key is not found.
        """
        details = serve_details(dashboard)
        ours = {
            key: found["deployed_app_config"]
            for key, found in details["applications"].items()
            if (found.get("deployed_app_config") or {}).get("import_path") in IMPORT_PATHS
        }
        if not ours:
            there = ", ".join(details["applications"]) or "none at all"
            raise CalibrationFailed(
                f"no windve application was deployed from a Serve config at {dashboard} (applications there: {there}); "
                "start one with `make serve` or `serve deploy`"
            )
        if name is None and len(ours) > 1:
            raise SettingsError("--application", f"several are running; choose one: {', '.join(sorted(ours))}")
        name = name or next(iter(ours))
        if name not in ours:
            raise SettingsError("--application", f"no application is named {name}; choose one: {', '.join(ours)}")
        where = url or _url(details, ours[name], dashboard)
        reads = ours[name]["import_path"] == EMBEDDINGS  # an application that generates serves one model
        model = _chosen(model, Args(ours[name].get("args"))) if reads else None
        if model is not None:
            where = f"{where.rstrip('/')}/models/{quote(model)}"
        headers = _authorization(api_keys, ours[name])
        return cls(name, dashboard, Address.parse(where), ours[name], headers, model)

    def info(self) -> dict[str, Any]:
        """The content of `/info`. Raises CalibrationFailed if it does not answer."""
        try:
            request = urllib.request.Request(f"{self.address}/info", headers=dict(self.headers))  # noqa: S310 - checked
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - checked: http(s)
                found: dict[str, Any] = orjson.loads(answer.read())
        except (OSError, ValueError, HTTPException) as error:
            if getattr(error, "code", None) == HTTPStatus.UNAUTHORIZED:
                raise CalibrationFailed(
                    f"the application at {self.address} does not accept the API key; give a valid one with --api-keys"
                ) from None
            raise CalibrationFailed(
                f"the application does not answer at {self.address}/info: {error}; set its address with --url"
            ) from None
        if "windve" not in found:
            raise CalibrationFailed(f"the server at {self.address}/info is not windve; set the address with --url")
        return found

    def wait_until_it_answers(self) -> None:
        """Wait, because the proxy may not know the routes yet when Serve reports RUNNING. Raises CalibrationFailed."""
        ends = time.monotonic() + _IN_FORCE_S
        while True:
            try:
                self.info()
            except CalibrationFailed:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)
            else:
                return

    @property
    def generates(self) -> bool:
        """Whether the application generates text; else it serves embeddings."""
        return bool(self.deployed.get("import_path") == GENERATION)

    def router_config(self) -> dict[str, Any]:
        """The Router's `user_config` at the start; with several models, the part in force for this one."""
        return self._user_config(self.deployed)

    def _user_config(self, application: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(_router(application).get("user_config") or {})
        own = (found.pop("models", None) or {}).get(self.model) if self.model is not None else {}
        return found | (own or {})

    def placed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes to the Router's entry, with those of `user_config` in this model's part if there are several."""
        if self.model is None:
            return dict(changes)
        return {**changes, "user_config": {"models": {self.model: changes["user_config"]}}}

    def try_out(self, changes: Mapping[str, Any], note: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        """Put `changes` in force at all Routers, until `restore`. `note` gets the whole config before that. Raises
        CalibrationFailed.
        """
        self.check_unchanged()
        self.tried.append(changed := _with_router(self.deployed, self.placed(changes)))
        note(changed)
        self._change(changed)
        self._wait_until_in_force(self._user_config(changed))

    def restore(self) -> None:
        """Put the original config back, unless someone has deployed another one meanwhile."""
        if self.tried and self._deployed_now() in self.tried:
            self._change(self.deployed)
        self.tried.clear()

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Merge `changes` into the Router's entry, and wait until all Routers show them. Raises CalibrationFailed."""
        self.check_unchanged()
        changed = _with_router(self.deployed, self.placed(changes))
        self._change(changed)
        self.deployed = changed
        self._wait_until_in_force(self.router_config())

    def check_unchanged(self) -> None:
        """Raises CalibrationFailed if another config has been deployed since the start."""
        if self._deployed_now() not in [self.deployed, *self.tried]:
            raise CalibrationFailed(
                "the application's config changed during the calibration: nothing was applied; run it again"
            )

    def _wait_until_in_force(self, user_config: Mapping[str, Any]) -> None:
        """Ask until all Routers show these values."""
        ends, what = time.monotonic() + _IN_FORCE_S, "step_time" if self.generates else "queue_depth"
        wanted = {pool: found[what] for pool, found in user_config.items() if pool in POOLS and what in (found or {})}
        while True:
            for said in self.hear_routers().values():
                shown = {pool: found[what] for pool, found in said["pools"].items() if pool in wanted}
                if not shown.items() <= wanted.items():
                    break
            else:
                return
            if said["config_problem"] or time.monotonic() > ends:
                reason = said["config_problem"] or f"of Router {said['router']}, /info shows {shown}"
                raise CalibrationFailed(f"the application did not apply the result: {reason}")
            time.sleep(0.02)

    def hear_routers(self) -> dict[str, dict[str, Any]]:
        """What each Router that Serve lists says in `/info`, under `windve`. Raises CalibrationFailed."""
        ends, heard = time.monotonic() + _IN_FORCE_S, dict[str, dict[str, Any]]()
        while missing := (names := set(self._routers())) - heard.keys():
            if time.monotonic() > ends:
                raise CalibrationFailed(f"Router {missing.pop()} does not answer")
            said = self.info()["windve"]  # a connection gets any Router
            heard[said["router"]] = said
        return {name: heard[name] for name in names}

    def _routers(self) -> list[str]:
        """The names of the Routers that serve, as Serve lists them."""
        replicas = self._details().get("deployments", {}).get(DEPLOYMENT, {}).get("replicas", [])
        return [one["replica_id"] for one in replicas if one["state"] == "RUNNING"]

    def _deployed_now(self) -> dict[str, Any]:
        return self._details().get("deployed_app_config") or {}

    def _details(self) -> dict[str, Any]:
        found: dict[str, Any] = serve_details(self.dashboard)["applications"].get(self.name, {})
        return found

    def _change(self, application: Mapping[str, Any]) -> None:
        """Deploy the cluster's current Serve config, with this application replaced."""
        details = serve_details(self.dashboard)
        config = {key: details[key] for key in _CONFIG_KEYS if details.get(key) is not None}
        config["applications"] = [
            application if name == self.name else found["deployed_app_config"]
            for name, found in details["applications"].items()
            if found.get("deployed_app_config")
        ]
        deploy_config(self.dashboard, config)


def notes_on_pools(windve: Mapping[str, Any]) -> Iterator[str]:
    """Notes for the user before a run. Raises CalibrationFailed if nothing can be measured."""
    if windve["config_problem"]:
        raise CalibrationFailed(f"the application has refused its own config: {windve['config_problem']}")
    for name, pool in windve["pools"].items():
        if not pool["live_replicas"]:
            raise CalibrationFailed(f"the {name} pool has no live replica: see `serve status`, then run it again")
        if pool["live_replicas"] < pool["expected_replicas"]:
            yield (
                f"the {name} pool has {pool['live_replicas']} of {pool['expected_replicas']} replicas: "
                "the missing ones may be slower"
            )
        if pool["in_flight"] if "in_flight" in pool else pool["rows"] or pool["waiting"]:
            yield "other traffic is being served: it affects the latencies, and its requests may be refused"


def check_replicas(application: Application, before: Mapping[str, Any]) -> None:
    """Raises CalibrationFailed if replicas joined or left, because the measurements are of the earlier ones."""
    now = application.info()["windve"]["pools"]
    for name, pool in before.items():
        if set(now.get(name, {"replicas": ()})["replicas"]) != set(pool["replicas"]):
            raise CalibrationFailed(
                f"replicas of the {name} pool joined or left during the run: nothing was written; run it again, "
                f"with a fixed number of replicas (args.{name}.replicas) if they are autoscaled"
            )


def _authorization(api_keys: str | None, application: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The header with the first API key; empty if the application requires none. Raises SettingsError."""
    source = api_keys or (application.get("args") or {}).get("api_keys")
    return (("authorization", f"Bearer {read_keys(source, '--api-keys')[0].key}"),) if source else ()


def find_dashboard(given: str | None) -> str:
    """The address of Ray's dashboard: as given, or of this Ray job, or of the service that `windve serve` started here.

    Call it before the first import of ray, because it may set the token that ray reads then.
    """
    service = service_file.find()
    given = given or os.environ.get("RAY_DASHBOARD_ADDRESS")
    if given:
        if service is not None and service.dashboard == given:
            os.environ.update(service.environment | os.environ)  # a token that is set stays
        return given
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return _dashboard_of_this_job()
    if service is None:
        return _DEFAULT_DASHBOARD
    os.environ.update(service.environment)  # before the first import of ray, which reads it
    return service.dashboard


def _dashboard_of_this_job() -> str:
    import logging

    import ray

    with ray.init(logging_level=logging.ERROR, log_to_driver=False) as context:
        return f"http://{context.dashboard_url}"


def deploy_config(dashboard: str, config: Mapping[str, Any]) -> None:
    """Do what `serve deploy` does. Raises CalibrationFailed if Serve refuses the config."""
    from ray.exceptions import RayError

    try:
        serve_client(dashboard).deploy_applications(dict(config))
    except (RayError, RuntimeError, OSError) as error:
        raise CalibrationFailed(f"Ray Serve at {dashboard} refused the config: {first_line(error)}") from None


def serve_details(dashboard: str) -> dict[str, Any]:
    """The applications' details from Ray Serve's REST API. Raises CalibrationFailed or SettingsError."""
    from ray.exceptions import AuthenticationError

    try:
        found: dict[str, Any] = serve_client(dashboard).get_serve_details()
    except ValueError:
        raise SettingsError("--dashboard", f"should look like {_DEFAULT_DASHBOARD}, not '{dashboard}'") from None
    except AuthenticationError:
        wants = f"Ray's dashboard at {dashboard} requires its cluster's token"
        if os.environ.get("RAY_AUTH_MODE") != "token":
            raise CalibrationFailed(f"{wants}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH") from None
        raise CalibrationFailed(
            f"{wants}: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token have none, or a wrong one"
        ) from None
    except (RuntimeError, OSError) as error:
        raise CalibrationFailed(
            f"Ray's dashboard does not answer at {dashboard}: {first_line(error)}; start the application, or set "
            "the address with --dashboard"
        ) from None
    return found


def _url(details: Mapping[str, Any], application: Mapping[str, Any], dashboard: str) -> str:
    options = details.get("http_options") or {}
    host = options.get("host") or ""
    if host in _ALL_INTERFACES:
        host = urlsplit(dashboard).hostname
    if ":" in (host or ""):
        host = f"[{host}]"
    scheme = "https" if options.get("ssl_keyfile") else "http"
    prefix = (application.get("route_prefix") or "/").rstrip("/")
    return f"{scheme}://{host}:{options.get('port', 8000)}{prefix}"


def _router(application: Mapping[str, Any]) -> dict[str, Any]:
    for deployment in application.get("deployments") or []:
        if deployment.get("name") == DEPLOYMENT:
            found: dict[str, Any] = deployment
            return found
    raise CalibrationFailed(f"the application's config has no deployment named {DEPLOYMENT}: add it")


def _with_router(application: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with `changes` merged into the Router's entry."""
    ours = _router(application)
    deployments = [merged(one, changes) if one is ours else one for one in application["deployments"]]
    return {**application, "deployments": deployments}


def _chosen(model: str | None, args: Args) -> str | None:
    """The model to calibrate, if the application lists several. Raises SettingsError."""
    names = ", ".join(args.models)
    if model is not None and model not in args.models:
        raise SettingsError("--model", f"the application serves no model named {model}; choose one: {names}")
    if not args.several:
        return None
    if model is None and len(args.models) > 1:
        raise SettingsError("--model", f"the application serves several models; choose one: {names}")
    return model or next(iter(args.models))
