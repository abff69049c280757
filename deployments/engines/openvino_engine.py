"""OpenVINO on the CPU: the torch module is exported at start and compiled for this machine's instructions."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deployments.engines import EngineInfo, Queries, Stopped, TokenBatch, Vectors, embed, probe
from deployments.engines.micro_batches import cut_batch, window_tokens
from deployments.engines.races import measured_throughput, quickest_cpu_dtype
from deployments.engines.torch_engine import import_torch
from deployments.errors import SettingsError
from deployments.models.model_files import ModelCard
from deployments.models.outputs import TEXT
from deployments.settings import EngineSettings

if TYPE_CHECKING:
    from deployments.engines.pooled_model import PaddedModel

_FEWEST_PASS_TOKENS = 512
_PASS_TOKENS = 2048  # including padding; larger passes exceed the caches and are slower
_PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVinoEngine:
    """A transformer and its pooling, compiled by OpenVINO with exactly `threads` threads."""

    def __init__(self, card: ModelCard, settings: EngineSettings, threads: int) -> None:
        openvino = _import_openvino()
        if any(output != "tokens" for output in card.token_widths):
            raise SettingsError(
                "args.cpu.engine",
                f"openvino does not compute the sparse or multi-vector answers of {card.name}; use torch",
            )
        self._card = card
        self._largest_pass = self._most_tokens = min(settings.max_batch_tokens, _PASS_TOKENS)
        self._threads = threads
        self._each_token: PaddedModel | None = None
        self._core = openvino.Core()
        import_torch("cpu")
        from deployments.engines.pooled_model import describe_threads, one_sentence

        with one_sentence("compiled by openvino", card):
            self._model, self._reference = self._export(openvino)
            self._request, dtype, why, agreed = self._choose_dtype(settings.dtype)
        self.speed = measured_throughput(self, card)
        self.info = EngineInfo(
            engine=f"openvino {openvino.__version__.split('-')[0]}",
            device=describe_threads(threads),
            dtype=dtype,
            dimension=card.dimension,
            emulated=False,
            why=f"{why}; {self.speed}",
            agreement=agreed,
            queries_per_s=round(self.speed.queries_per_s, 1),
        )

    def passes(self, batch: TokenBatch, stop: threading.Event) -> Iterator[tuple[Queries, tuple[Vectors, ...]]]:
        run = self._pooled if batch.outputs == TEXT else self._tokens
        for queries in cut_batch(batch.lengths, self._most_tokens, at_once=1, padded=True):
            if stop.is_set():
                raise Stopped
            yield queries, (run(batch.select(queries)),)

    def _pooled(self, batch: TokenBatch) -> Vectors:
        from deployments.engines.pooled_model import pad

        vectors: Vectors = self._request.infer(list(pad(batch.queries())))[0]
        return vectors

    def _tokens(self, batch: TokenBatch) -> Vectors:
        """Token vectors, by torch in float32, since the compiled model includes the pooling. Loaded on first use."""
        torch = import_torch("cpu")
        from deployments.engines.pooled_model import PaddedModel, PooledModel

        if self._each_token is None:
            self._each_token = PaddedModel(PooledModel(self._card), torch.float32, torch.device("cpu"))
        with torch.inference_mode():
            found = self._each_token(torch.from_numpy(batch.ids), batch.lengths, each_token=True)
        vectors: Vectors = found.numpy()
        return vectors

    @property
    def micro_batch_tokens(self) -> int:
        return window_tokens(self._most_tokens, at_once=1, padded=True)

    def bound_passes(self, tokens: int) -> None:
        share = tokens * self._largest_pass // window_tokens(self._largest_pass, at_once=1, padded=True)
        self._most_tokens = min(self._largest_pass, max(share, _FEWEST_PASS_TOKENS))

    def probe(self) -> None:
        """See `Engine`."""
        probe(self, self._card)

    def _export(self, openvino: Any) -> tuple[Any, Vectors]:
        """Export the model, and compute torch's float32 vectors of the probe inputs. It uses torch.export with variable
        batch size and length, because TorchScript tracing fails in transformers' attention masks.
        """
        torch = import_torch("cpu")
        from deployments.engines.pooled_model import PooledModel, pad, probe_batch
        from deployments.engines.projection_heads import ProjectionHeads, Whole

        torch.set_num_threads(self._threads)
        model = Whole(PooledModel(self._card, attention="eager"), ProjectionHeads(self._card))
        ids = torch.ones((3, 7), dtype=torch.int64)
        mask = ids.clone()
        mask[1, 4:] = 0  # transformers leaves the mask out of the graph if nothing is padded
        free = {0: torch.export.Dim("queries", min=1), 1: torch.export.Dim("tokens", min=2, max=self._card.max_tokens)}
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's export warns about its own internals
            reference = model(*map(torch.from_numpy, pad(probe_batch(self._card).queries()))).numpy()
            exported = torch.export.export(model, (ids, mask), dynamic_shapes=(free, free), strict=False)
            return openvino.convert_model(exported), reference

    def _compile(self, dtype: str) -> Any:
        compiled = self._core.compile_model(
            self._model,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": _PRECISION[dtype],
                "INFERENCE_NUM_THREADS": self._threads,
                "NUM_STREAMS": 1,
                "ENABLE_CPU_PINNING": False,  # the calling thread, and so its children, are pinned already
            },
        )
        return compiled.create_infer_request()

    def _choose_dtype(self, wanted: str) -> tuple[Any, str, str, float | None]:
        """Compile the fastest dtype that agrees. Returns (infer request, dtype, why, agreement with float32 on the
        probe inputs). Raises SettingsError if even float32 disagrees.
        """
        from deployments.engines.pooled_model import probe_batch, tolerance

        candidate, reason = (wanted, "set by hand") if wanted != "auto" else quickest_cpu_dtype()
        probe, like = probe_batch(self._card), tolerance(self._card)
        for dtype in dict.fromkeys((candidate, "float32")):
            self._request = self._compile(dtype)
            agreed = like.of(self._reference, embed(self, probe, threading.Event()))
            if agreed >= like.least or (dtype == wanted and dtype != "float32"):
                return self._request, dtype, f"{reason}; by torch: {like.describe(agreed)}", agreed
            reason = f"{dtype} differs too much from torch in float32 here ({like.describe(agreed)})"
        raise SettingsError("args.cpu.engine", f"openvino: {reason}; use torch")


def _import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would report each model conversion to the internet.

    Raises SettingsError if OpenVINO is not installed.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # OpenVINO then uses its own stub
    try:
        import openvino
    except ImportError:
        raise SettingsError("args.cpu.engine", "openvino is not installed (pip install windve[openvino])") from None
    return openvino
