"""Runs `windve serve`: starts a local Ray, deploys a config, prints what is served, and stops all of it at the end."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from deployments.errors import SettingsError, first_line
from deployments.hardware.affinity import read_cpu_shape
from deployments.hardware.device_detector import probe_machine
from deployments.serve_adapter.local_ray import (
    JOINS,
    METRICS_PORTS,
    PROXY_PORTS,
    accept_messages,
    serve_client,
    start_local_ray,
)
from serve_app.api_keys import read_keys
from serve_app.config.models import ApplicationArgs
from serve_app.config.overrides import NONE, Overrides
from serve_app.config.router_autoscaling import follow_load
from serve_app.local.console import show_application, show_examples, show_machine, show_ports
from serve_app.local.finish import StopSignal, finish_requests
from serve_app.local.progress import Reporter, deployment_models, waits
from serve_app.local.ray_environment import (
    LOOPBACK,
    PROXY_TIMEOUT_S,
    TOKEN_VARIABLES,
    StartFailed,
    bind_problem,
    free_port,
    scratch_folder,
    set_ray_environment,
    turn_to_start,
)
from serve_app.local.service_file import LocalService

_START_TIMEOUT_S = 600.0  # enough for a large model from a slow disk or hub
_LAST_WORKERS_S = 0.5  # workers notice within milliseconds that their raylet is gone
_KILLED_S = 10.0  # what is killed has ended by then, unless the kernel holds it
_TOO_SLOW = "timed out", "dashboard"  # in errors of a Ray that a busy machine has not started in time
_SETTING = "SettingsError: "  # in a traceback
_METRICS_PORT = 8080  # as on KubeRay
_DASHBOARD_PORT = 8265  # Ray's default


def serve_until_interrupted(path: Path, overrides: Overrides = NONE) -> None:
    """Serve the config file `path` with `overrides` until SIGINT or SIGTERM, then remove all that was started. Raises
    SettingsError or StartFailed.
    """
    console = Console(highlight=False, markup=False)  # names and paths may have brackets
    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGTERM):  # end a download where it stands, even if a shell ignored them
        signal.signal(number, signal.default_int_handler)
    with turn_to_start(console) as turn, scratch_folder() as scratch:
        set_ray_environment(Path(scratch), console)  # before the first import of ray, which reads it
        from serve_app.config.service_config import args_of

        config = _read(path, overrides)
        addresses, grpc_address = _http_addresses(config), _grpc_address(config)
        keys, applications = [], args_of(config)
        for args in applications.values():
            args.find_models()  # shows a wrong name or a download here, not in a replica's log
            keys.append(None if args.shared.api_keys is None else read_keys(args.shared.api_keys)[0].key)
            accept_messages(4 * args.shared.limits.max_body_bytes)
        show_machine(console, probe_machine())
        stop.listen()  # what is started from here on is taken down
        with _local_ray(console, _ports(config)) as (dashboard, metrics_port):
            stop.listen()  # again: Ray has installed its own handlers, which would end the process at once
            _deploy(dashboard, config)
            with console.status("starting: loading the model, warming up"):
                if not _wait_until_running(stop, _reporter(console, dashboard, applications)):
                    return
            turn.close()
            service = _announced(dashboard)
            try:
                models = [show_application(console, *reached) for reached in zip(addresses, keys, strict=True)]
                show_ports(console, dashboard, grpc_address, metrics_port)
                for found, address, key in zip(models, addresses, keys, strict=True):
                    show_examples(console, found, address, key)
                stop.wait()
            finally:
                service.withdraw()
            finish_requests(stop, console)


def _announced(dashboard: str) -> LocalService:
    """Let other commands of this user find the service."""
    import ray

    environment = {name: os.environ[name] for name in (*TOKEN_VARIABLES, *JOINS) if name in os.environ}
    service = LocalService(os.getpid(), dashboard, ray.get_runtime_context().gcs_address, environment)
    service.announce()
    return service


def _read(path: Path, overrides: Overrides) -> dict[str, Any]:
    """The config, on loopback where it names no host: Serve's own default is all interfaces. Its Routers follow the
    load, unless it says how many there are. Raises SettingsError.
    """
    from serve_app.config.service_config import load_config, ours

    config = load_config(path, overrides)
    config["http_options"] = {"host": LOOPBACK, **(config.get("http_options") or {})}
    follow_load(ours(config), read_cpu_shape().usable)
    return config


def _ports(config: dict[str, Any]) -> tuple[int, int]:
    """Of HTTP and of gRPC."""
    return config["http_options"].get("port", 8000), (config.get("grpc_options") or {}).get("port", 9000)


def _http_addresses(config: dict[str, Any]) -> list[str]:
    """The URL of each windve application. Raises SettingsError if the port is taken."""
    from serve_app.config.service_config import ours

    host, (port, _) = config["http_options"]["host"], _ports(config)
    _check_free(host, port, "http_options.port")
    origin = f"http://{_reached_at(host)}:{port}"
    return [origin + (application.get("route_prefix") or "/").rstrip("/") for application in ours(config)]


def _grpc_address(config: dict[str, Any]) -> str | None:
    """The gRPC address, or None if the config offers no gRPC. Its host is HTTP's. Raises SettingsError as above."""
    options = config.get("grpc_options") or {}
    if not options.get("grpc_servicer_functions"):
        return None
    host, (http_port, port) = config["http_options"]["host"], _ports(config)
    if port == http_port:
        raise SettingsError("grpc_options.port", f"{port} is http_options.port as well: give each its own")
    _check_free(host, port, "grpc_options.port")
    return f"{_reached_at(host)}:{port}"


def _check_free(host: str, port: int, key: str) -> None:
    """Raises SettingsError if the port is not one, or taken: who listens there would get our clients' queries."""
    if ":" in host:
        raise SettingsError("http_options.host", f"{host} is an IPv6 address, which is not supported; use one of IPv4")
    if not isinstance(port, int) or not 1 <= port <= 65535:
        raise SettingsError(key, f"should be a port from 1 to 65535, not {port!r}")
    if others := [name for name in (*PROXY_PORTS, *METRICS_PORTS) if os.environ.get(name) == str(port)]:
        raise SettingsError(key, f"{port} is {others[0]} here: give that another port, or choose another")
    if problem := bind_problem(host, port):
        raise SettingsError(key, f"cannot listen on {host}:{port}: {problem}")


def _reached_at(host: str) -> str:
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 - a comparison


@contextmanager
def _local_ray(console: Console, kept: Collection[int]) -> Iterator[tuple[str, int]]:
    """Start Ray on loopback, yield its dashboard's address and its metrics' port, which is none of those that are
    `kept`, and stop it with all the processes it started.
    """
    from ray import serve

    console.print("starting Ray")
    started = _start_ray(console, kept)
    try:
        yield started
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        _stop_ray()


def _start_ray(console: Console, kept: Collection[int], tries: int = 2) -> tuple[str, int]:
    """Ray times out if the machine is too busy, or if somebody takes the metrics' port meanwhile. Returns the
    dashboard's address and the metrics' port.
    """
    metrics_port, dashboard_port = (
        free_port(first, host=LOOPBACK, kept=kept) for first in (_METRICS_PORT, _DASHBOARD_PORT)
    )
    try:
        return start_local_ray(LOOPBACK, metrics_port, dashboard_port, read_cpu_shape().usable), metrics_port
    except Exception as error:
        _stop_ray()
        if tries == 1 or not any(words in str(error) for words in _TOO_SLOW):
            raise StartFailed(f"Ray did not start: {first_line(error)}; see {_logs()}") from error
    console.print("Ray did not start in time; trying once more")
    return _start_ray(console, kept, tries - 1)


def _stop_ray() -> None:
    """Stop Ray with all its processes. If `ray.init` failed, Ray itself leaves those running that it had started."""
    import ray

    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    _end(started)


def _end(processes: Sequence[psutil.Process]) -> None:
    """Wait for Ray's processes to end, and kill the rest: a worker that never connected to its raylet does not end. One
    that has ended stays a zombie until its parent, which may hang, is killed too.
    """
    left = psutil.wait_procs(processes, timeout=_LAST_WORKERS_S)[1]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_KILLED_S)


def _deploy(dashboard: str, config: dict[str, Any]) -> None:
    """Deploy the config. Raises StartFailed with the reason."""
    ends = time.monotonic() + PROXY_TIMEOUT_S
    while True:
        try:
            serve_client(dashboard).deploy_applications(config)
        except RuntimeError as error:
            raise StartFailed(f"Ray Serve refused the config: {first_reason([str(error)])}") from None
        except ConnectionError as error:  # the dashboard listens only a moment after Ray reports it
            if time.monotonic() > ends:
                raise StartFailed(f"Ray's dashboard at {dashboard} does not answer: {error}") from None
            time.sleep(0.2)
        else:
            return


def _reporter(console: Console, dashboard: str, applications: Mapping[str, ApplicationArgs]) -> Reporter:
    """Prints what the start is waiting for."""
    import ray

    names = deployment_models(applications)

    def look() -> list[str]:
        try:
            details = serve_client(dashboard).get_serve_details()["applications"]
        except (RuntimeError, OSError):
            return ["Ray's dashboard does not answer"]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return list(waits(details, names, ray.cluster_resources(), free))  # type: ignore[no-untyped-call]

    return Reporter(lambda line: console.print(line, soft_wrap=True), look, time.monotonic())


def _wait_until_running(stop: StopSignal, reporter: Reporter) -> bool:
    """True once every application runs; False if a signal comes first. Raises StartFailed with the reason."""
    from ray import serve

    ends = time.monotonic() + _START_TIMEOUT_S
    while not stop.wait(0.2):
        applications = serve.status().applications
        if applications and all(application.status == "RUNNING" for application in applications.values()):
            return True
        for application in applications.values():
            messages = [application.message, *(one.message for one in application.deployments.values())]
            # UNHEALTHY may be temporary: Serve replaces such replicas. A wrong setting stays wrong when it tries again.
            if application.status == "DEPLOY_FAILED" or any(_SETTING in message for message in messages):
                raise StartFailed(first_reason(messages))
        reporter.tick(time.monotonic())
        if time.monotonic() > ends:
            raise StartFailed(f"the application did not start within {_START_TIMEOUT_S:.0f} s; see {_logs()}")
    return False


def first_reason(messages: list[str]) -> str:
    """The text of our SettingsError in Serve's messages, which contain tracebacks; else their last line."""
    lines = [line.strip() for message in messages for line in message.splitlines()]
    lines = [line for line in lines if line.strip(".")]
    for line in lines:
        if _SETTING in line:
            return line.split(_SETTING, 1)[1]
    return lines[-1] if lines else f"Ray Serve gave no reason; see {_logs()}"


def _logs() -> str:
    return f"{os.environ.get('RAY_TMPDIR', tempfile.gettempdir())}/ray/session_latest/logs"
