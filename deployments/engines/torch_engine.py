"""PyTorch on a CPU, an NVIDIA GPU, or an Ascend NPU through torch-npu.

Not run on an NPU yet, because no such device was at hand. Its special code is in `import_torch`, `_quick_dtype`, and
the attention that `packed/attention.py` chooses for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.engines import EngineInfo, Queries, Stopped, TokenBatch, Vectors, embed, probe
from deployments.engines.memory import bound_prepared_operations, keep_freed_memory
from deployments.engines.micro_batches import cut_batch, window_tokens
from deployments.engines.races import quickest_cpu_dtype
from deployments.errors import SettingsError
from deployments.hardware.device_detector import quick_cpu_dtype
from deployments.models.model_files import ModelCard
from deployments.models.model_folder import bad_model
from deployments.settings import EngineSettings

if TYPE_CHECKING:
    from deployments.engines.model_forms import Encoder

logger = logging.getLogger("ray.serve")

_FEWEST_PASS_TOKENS = 256  # smaller passes cost more than a tenth of the throughput
LARGE = 1_000_000_000  # parameters; a larger model is never in memory in float32
_CPU_PASS_TOKENS = 1024  # fits into a core's caches; larger passes were slower on each CPU measured


class TorchEngine:
    """A transformer and its pooling on one device, in the quickest dtype that agrees with float32: packed, if the model
    has a packed form that agrees, on CUDA with graphs where these are quicker; or padded.
    """

    def __init__(self, card: ModelCard, settings: EngineSettings, device: str, threads: int) -> None:
        self._torch = import_torch(device)
        self._card = card
        self._device = open_device(self._torch, device)
        self._most_tokens = settings.max_batch_tokens  # in a pass
        self._threads = 1
        if self._device.type == "cpu":
            keep_freed_memory()
            self._most_tokens = min(self._most_tokens, _CPU_PASS_TOKENS)
            self._threads = threads
            self._torch.set_num_threads(threads)
            self._local = threading.local()
            self._workers = ThreadPoolExecutor(threads, thread_name_prefix="engine")
        self._pass_tokens = self._most_tokens
        from deployments.engines.projection_heads import ProjectionHeads

        self._heads = ProjectionHeads(card).to(self._device)
        self._encoder: Encoder
        from deployments.engines.pooled_model import one_sentence

        with one_sentence("computed", card):
            dtype, why, agreed = self._choose(settings.dtype)
        self.info = EngineInfo(
            engine="torch",
            device=self._describe_device(threads),
            dtype=dtype,
            dimension=card.dimension,
            emulated=False,
            why=why,
            agreement=agreed,
        )

    @property
    def form(self) -> str:
        """The form of the model that the engine runs: "packed", "graphs" or "padded"."""
        return self._encoder.form

    def use(self, form: str, dtype: str) -> None:
        """Switch to that form and number format, even if others are faster. For comparisons."""
        from deployments.engines.model_forms import Forms
        from deployments.engines.packed.tensors import Place

        self._encoder = Forms(self._card).builds(Place(self._device, getattr(self._torch, dtype)))[form]()

    @property
    def micro_batch_tokens(self) -> int:
        return self._window_tokens(self._pass_tokens)

    def bound_passes(self, tokens: int) -> None:
        share = tokens * self._most_tokens // self._window_tokens(self._most_tokens)
        self._pass_tokens = min(self._most_tokens, max(share, _FEWEST_PASS_TOKENS))

    def _window_tokens(self, most_tokens: int) -> int:
        return window_tokens(most_tokens, self._threads, padded=self._encoder.padded)

    def passes(self, batch: TokenBatch, stop: threading.Event) -> Iterator[tuple[Queries, tuple[Vectors, ...]]]:
        cut = cut_batch(batch.lengths, self._pass_tokens, self._threads, padded=self._encoder.padded)
        ordered = batch.select(np.concatenate(cut))
        ends = np.cumsum([len(queries) for queries in cut])
        bounds = np.concatenate([[0], np.cumsum(ordered.lengths)])
        with self._torch.inference_mode():
            ids = self._torch.from_numpy(ordered.ids)
            if self.form != "graphs":  # these copy a pass's ids together with its other inputs
                ids = ids.to(self._device, non_blocking=True)  # once for all passes

        def run(number: int) -> tuple[Any, ...]:
            if stop.is_set():
                raise Stopped
            start, end = ends[number] - len(cut[number]), ends[number]
            with self._torch.inference_mode():
                tokens = ids[bounds[start] : bounds[end]]
                return self._heads(self._encoder, tokens, ordered.lengths[start:end], batch.outputs)

        outcomes = self._side_by_side if self._device.type == "cpu" else _one_ahead
        return ((cut[number], found) for number, found in outcomes(run, len(cut)))

    def _side_by_side(
        self, run: Callable[[int], tuple[Any, ...]], passes: int
    ) -> Iterator[tuple[int, tuple[Vectors, ...]]]:
        """Run each pass on one core. That beats one pass on all cores: no layer waits for the slowest core, and a core
        that is briefly busy with other work delays only its own pass. A single pass gets all cores.
        """
        at_once = min(passes, self._threads)
        threads = self._threads // at_once

        def run_here(number: int) -> tuple[int, tuple[Vectors, ...]]:
            if getattr(self._local, "threads", None) != threads:  # the call is costly: it clears caches
                self._torch.set_num_threads(threads)
                self._local.threads = threads
            return number, tuple(one.numpy() for one in run(number))

        if at_once == 1:
            yield from map(run_here, range(passes))
            return
        running = [self._workers.submit(run_here, number) for number in range(passes)]
        try:
            for ended in as_completed(running):
                yield ended.result()
        finally:
            for one in running:
                one.cancel()  # those that have not started

    def probe(self) -> None:
        """See `Engine`. If the device hangs, so does this call."""
        probe(self, self._card)

    def _choose(self, wanted: str) -> tuple[str, str, float | None]:
        """Take the first form, in the quickest number format, that agrees with float32: (dtype, why, its agreement on
        the probe). The last form is taken in a format that was set by hand even if it disagrees.
        """
        from deployments.engines.model_forms import Forms, LargeForms
        from deployments.engines.packed.tensors import Place
        from deployments.engines.pooled_model import probe_batch, tolerance
        from deployments.engines.projection_heads import PooledEncoder

        card, probe, like = self._card, probe_batch(self._card), tolerance(self._card)

        def run(encoder: PooledEncoder) -> Vectors:
            ids = self._torch.from_numpy(probe.ids).to(self._device)
            with self._torch.inference_mode():
                rows: Vectors = self._heads(encoder, ids, probe.lengths, probe.outputs)[0].cpu().numpy()
            return rows

        forms = LargeForms(card) if card.parameters > LARGE else Forms(card)
        candidate, reason = (wanted, "set by hand") if wanted != "auto" else self._quick_dtype()
        for dtype in dict.fromkeys((candidate, "float32")):
            builds = forms.builds(Place(self._device, getattr(self._torch, dtype)), run)
            for form, build in builds.items():
                is_last = form == list(builds)[-1]
                try:
                    self._encoder = build()
                    found = embed(self, probe, threading.Event())
                except Exception as error:
                    if is_last:
                        raise
                    # An older library or driver may lack something. The last form needs only what all have.
                    logger.warning("the %s form in %s is left out: %s: %s", form, dtype, type(error).__name__, error)
                    continue
                if forms.reference is None:
                    return dtype, f"{reason}; {form}; not compared with float32", None
                agreed = like.of(forms.reference, found)
                if agreed >= like.least or (is_last and dtype == wanted):  # NaN is neither
                    return dtype, f"{reason}; {form}; {like.describe(agreed)}", None if dtype == "float32" else agreed
            reason = f"{dtype} differs too much from float32 here ({like.describe(agreed)})"
            del self._encoder, build, builds  # free its memory for the next one
        raise bad_model(f"{card.name} does not agree with itself: {reason}")

    def _quick_dtype(self) -> tuple[str, str]:
        """The dtype that this device computes fastest, and the reason."""
        if self._device.type == "cuda":
            if self._torch.cuda.get_device_capability(self._device) >= (8, 0):
                return "bfloat16", "the GPU computes bfloat16 natively"
            return "float16", "the GPU predates bfloat16"
        if self._device.type == "npu":
            return "float16", "Ascend NPUs compute float16 natively"
        # Of a large model, half the memory matters more than a race.
        return quick_cpu_dtype() if self._card.parameters > LARGE else quickest_cpu_dtype()

    def _describe_device(self, threads: int) -> str:
        if self._device.type == "cpu":
            return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
        backend = getattr(self._torch, self._device.type)
        return f"{self._device}, {backend.get_device_name(self._device)}"


def _one_ahead(run: Callable[[int], tuple[Any, ...]], passes: int) -> Iterator[tuple[int, tuple[Vectors, ...]]]:
    """Submit each pass to the device before the answer of the previous one is copied back. So the device never waits
    for a copy, and a stopped run ends within two passes.
    """
    before = run(0)
    for number in range(1, passes):
        ahead = run(number)
        yield number - 1, tuple(one.cpu().numpy() for one in before)
        before = ahead
    yield passes - 1, tuple(one.cpu().numpy() for one in before)


def import_torch(device: str) -> ModuleType:
    """Import torch for `device`. Raises SettingsError if torch-npu is needed and does not load."""
    # With torch-npu but without CANN, `import torch` itself would fail, because it loads the backend automatically.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    bound_prepared_operations()
    import torch

    if device.startswith("npu"):
        try:
            import torch_npu  # noqa: F401 - registers the device
        except Exception as error:
            raise SettingsError("args.accelerator.device", f"npu: torch-npu does not load: {error}") from error
    return torch


def open_device(torch: ModuleType, device: str) -> Any:
    """The torch.device. Raises SettingsError if torch does not see it."""
    opened = torch.device(device)
    if opened.type != "cpu" and not getattr(torch, opened.type).is_available():
        raise SettingsError("args.accelerator.device", f"{opened.type}: torch {torch.__version__} sees no such device")
    return opened
