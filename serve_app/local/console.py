"""The output of `windve serve`: the machine, the models, and commands to try."""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from deployments.hardware.device_detector import Machine
from serve_app.local.ray_environment import LOOPBACK, PROXY_TIMEOUT_S, TOKEN_VARIABLES, StartFailed

_EXAMPLES = {  # a first request for each kind of model
    "embedding": ("/v1/embeddings", '{"input": "Where does the overflow go?"}'),
    "reranker": ("/rerank", '{"query": "Where does the overflow go?", "texts": ["To the CPU.", "To the moon."]}'),
    "classifier": ("/predict", '{"inputs": "Where does the overflow go?"}'),
    "sparse": ("/embed_sparse", '{"inputs": "Where does the overflow go?"}'),
    "generation": ("/v1/completions", '{"prompt": "Where does the overflow go?", "max_tokens": 32}'),
    "multi_vector": ("/v1/multi-vector", '{"input": "Where does the overflow go?", "input_type": "query"}'),
}


def show_machine(console: Console, machine: Machine) -> None:
    """Print the CPU, cores, memory and NUMA nodes, and why an NPU that is present cannot be used."""
    cpu = machine.cpu
    quota = f", cgroup limit {cpu.quota:g} CPUs" if cpu.quota is not None else ""
    nodes = f"{machine.numa_nodes} NUMA node{'s' if machine.numa_nodes > 1 else ''}"
    console.print(
        f"machine: {machine.cpu_model} ({machine.architecture}), {len(cpu.allowed)} cores on {nodes}{quota}, "
        f"{machine.memory_gib} GiB"
    )
    if machine.npu_problem:
        console.print(machine.npu_problem, style="yellow")


def _serve_command() -> str:
    """The path to Ray's `serve`, as one would type it here."""
    command = Path(sys.executable).parent / "serve"
    return os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)


def _get_json(url: str, api_key: str | None) -> Any:
    """Call our own service. Retries for a while, because the proxy may not know the routes yet after the start."""
    request = urllib.request.Request(url)  # noqa: S310 - our own address
    if api_key is not None:
        request.add_header("authorization", f"Bearer {api_key}")
    ends = time.monotonic() + PROXY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own address
                return orjson.loads(answer.read())
        except OSError as error:
            if time.monotonic() > ends:
                raise StartFailed(f"the application runs, but {url} does not answer: {error}") from None
            time.sleep(0.1)


def _info_once_complete(address: str, api_key: str | None) -> list[dict[str, Any]]:
    """The `/info` of each model. Waits until the Router knows all replicas, which may be after Serve reports them."""
    ends = time.monotonic() + PROXY_TIMEOUT_S
    while True:
        info: dict[str, Any] = _get_json(f"{address}/info", api_key)
        models = list(info.get("models", {"": info}).values())
        pools = [pool for model in models for pool in model["windve"]["pools"].values()]
        if all(pool["live_replicas"] >= pool["expected_replicas"] for pool in pools) or time.monotonic() > ends:
            return models
        time.sleep(0.1)


def show_application(console: Console, address: str, api_key: str | None) -> list[tuple[str, str]]:
    """Returns the name and the kind of each model."""
    models = _info_once_complete(address, api_key)
    for info in models:
        _show_model(console, info)
    return [(info["model_id"], info["windve"]["kind"]) for info in models]


def _show_model(console: Console, info: dict[str, Any]) -> None:
    ours = info["windve"]
    if generates := ours["kind"] == "generation":
        about = f"generation, {info['max_input_length']} tokens with the answer"
        promise = f"first token within {ours['ttft_s']:g} s, then {ours['tpot_s']:g} s a token"
        columns = ["blocks", "cores"]
    else:
        kind, *others = ours["kinds"]
        also = f" (also {', '.join(others)})" if others else ""
        about = f"{kind} of {ours['dimension']} numbers{also}, {info['max_input_length']} tokens"
        promise, columns = f"SLO {ours['slo_s']} s", ["cores", "depth", "seconds for C queries"]
    console.print(f"model: {info['model_id']}, {about}")
    console.print(f"topology: {ours['topology']}; {promise}")
    if ours["emulated"]:
        what = "tokens" if generates else "vectors"
        console.print(f"the devices are EMULATED: the times are realistic, the {what} are meaningless", style="yellow")
    table = Table("pool", "replicas", "device", "dtype", *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, pool in ours["pools"].items():
        first: dict[str, Any] = next(iter(pool["replicas"].values()), {})
        cells = [name, str(pool["live_replicas"]), str(first.get("device")), str(first.get("dtype"))]
        cores = ",".join(map(str, first.get("cores", [])))
        if generates:
            of_host = f" + {first['host']['blocks']} of the host" if "host" in first else ""
            table.add_row(*cells, f"{first.get('blocks')}{of_host}", cores)
        else:
            model, depth = pool["latency_model"], "-" if pool["queue_depth"] is None else str(pool["queue_depth"])
            curve = f"{model['alpha_s']:.4f} C + {model['beta_s']:.4f} ({model['source']})"
            table.add_row(*cells, cores, depth, curve)
    console.print(table, soft_wrap=True)
    for name, pool in ours["pools"].items():
        if problem := pool.get("promise_problem"):
            console.print(f"the {name} pool: {problem}", style="yellow", soft_wrap=True)


def show_ports(console: Console, dashboard: str, grpc_address: str | None, metrics_port: int) -> None:
    token = "".join(f"{name}={os.environ[name]} " for name in TOKEN_VARIABLES if name in os.environ)
    console.print("\nto change the SLO or the rule while it runs, edit user_config, then in another terminal:")
    console.print(f"{token}{_serve_command()} deploy CONFIG -a {dashboard}", soft_wrap=True)
    console.print(f"\nfor Prometheus: http://{LOOPBACK}:{metrics_port}/metrics")
    if grpc_address is not None:
        console.print(f"for gRPC: {grpc_address}")


def show_examples(console: Console, models: list[tuple[str, str]], address: str, api_key: str | None) -> None:
    key = "" if api_key is None else ' -H "authorization: Bearer KEY"'
    console.print(f"serving on {address} (routes: {address}/docs); Ctrl-C stops it. Try:", soft_wrap=True)
    for name, kind in models:
        route, body = _EXAMPLES[kind]
        if len(models) > 1:
            body = f'{{"model": {orjson.dumps(name).decode()}, {body[1:]}'
        console.print(
            f"curl -s {address}{route}{key} -H 'content-type: application/json' -d '{body}'\n", soft_wrap=True
        )
