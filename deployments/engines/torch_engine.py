"""PyTorch: the CPU, an NVIDIA GPU, or an Ascend NPU through torch-npu. The same file for all three.

Not run on an NPU yet: no such device was at hand. What is particular to it is `_import_torch` and `_quick_dtype`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.engines import EngineInfo, Stopped, TokenBatch, Vectors
from deployments.errors import SettingsError
from deployments.model_files import ModelCard
from deployments.settings import AcceleratorSettings, CpuSettings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

AGREEMENT = 0.999  # smallest cosine to float32 that a default may have
_PROBE_LENGTHS = (3, 8, 24, 75, 200)  # tokens; the comparison's inputs


class TorchEngine:
    """A transformer and its pooling on one device, in the quickest dtype that agrees with float32."""

    def __init__(self, card: ModelCard, settings: AcceleratorSettings | CpuSettings, device: str, threads: int) -> None:
        self._torch = _import_torch(device)
        self._card = card
        self._device = _open_device(self._torch, device)
        self._max_batch_tokens = settings.max_batch_tokens
        if self._device.type == "cpu":
            self._torch.set_num_threads(threads)
        self._model = self._load()
        dtype, why, agreement = self._choose_dtype(settings.dtype)
        self.info = EngineInfo(
            engine="torch",
            device=self._describe_device(threads),
            dtype=dtype,
            dimension=card.dimension,
            emulated=False,
            why=why,
            agreement=agreement,
        )

    def embed(self, batch: TokenBatch, stop: threading.Event) -> Vectors:
        queries = batch.queries()
        vectors = np.empty((len(queries), self._card.dimension), dtype=np.float32)
        with self._torch.inference_mode():
            for chosen in self._passes(batch.lengths):
                if stop.is_set():
                    raise Stopped
                vectors[chosen] = self._run([queries[i] for i in chosen])
        return vectors

    def probe(self) -> None:
        """A small product on the device, waited for: a hung device hangs here, a lost one raises."""
        with self._torch.inference_mode():
            ones = self._torch.ones((8, 8), device=self._device)
            assert float((ones @ ones).sum().item()) == 512.0

    def _passes(self, lengths: np.ndarray[Any, np.dtype[np.int32]]) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        """Indices of the queries of each pass: of like length together, at most `max_batch_tokens` padded tokens."""
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(order):
            longest = int(lengths[order[start]])
            end = start + max(1, self._max_batch_tokens // longest)
            # A pass goes on only while its queries waste less than half of the padded tokens.
            wasteful = np.nonzero(lengths[order[start:end]] * 2 < longest)[0]
            if len(wasteful) and end - start > _SMALL_PASS:
                end = start + max(int(wasteful[0]), _SMALL_PASS)
            yield order[start:end]
            start = end

    def _run(self, queries: list[Any]) -> Vectors:
        torch = self._torch
        longest = max(map(len, queries))
        ids = np.zeros((len(queries), longest), dtype=np.int64)
        mask = np.zeros((len(queries), longest), dtype=np.int64)
        for row, query in enumerate(queries):
            ids[row, : len(query)] = query
            mask[row, : len(query)] = 1
        on_device = torch.from_numpy(mask).to(self._device, non_blocking=True)
        hidden = self._model(
            input_ids=torch.from_numpy(ids).to(self._device, non_blocking=True), attention_mask=on_device
        ).last_hidden_state
        vectors: Vectors = self._pool(hidden, on_device).cpu().numpy()
        return vectors

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[queries, tokens, dimension] -> float32 [queries, dimension]; padding is on the right."""
        if self._card.pooling == "cls":
            return hidden[:, 0].float()
        if self._card.pooling == "last":
            rows = self._torch.arange(len(hidden), device=hidden.device)
            return hidden[rows, mask.sum(1) - 1].float()
        weights = mask.unsqueeze(-1).float()
        return (hidden.float() * weights).sum(1) / weights.sum(1)

    def _load(self) -> Any:
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # one line in the log, not a bar
        logger.info("loading %s from %s", self._card.name, self._card.folder)
        try:
            model = AutoModel.from_pretrained(
                self._card.folder,
                dtype=self._torch.float32,
                use_safetensors=True,
                trust_remote_code=self._card.trust_remote_code,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise SettingsError("args.model.id", f"{self._card.folder} cannot be loaded: {error}") from error
        return model.eval().to(self._device)

    def _choose_dtype(self, wanted: str) -> tuple[str, str, float | None]:
        """Set the model to its dtype; returns dtype, why, and the smallest cosine to float32 on the probe inputs."""
        torch = self._torch
        candidate, reason = (wanted, "set by hand") if wanted != "auto" else self._quick_dtype()
        if candidate == "float32":
            return candidate, reason, None
        reference = self._probe_vectors()
        self._model = self._model.to(getattr(torch, candidate))
        agreement = float(np.min(np.sum(reference * self._probe_vectors(), axis=1)))
        if wanted == "auto" and not agreement >= AGREEMENT:  # a NaN disagrees too
            self._model = self._load()  # the exact weights again: those that were cast have lost their low bits
            return "float32", f"{candidate} differs too much from float32 here (cosine {agreement:.5f})", None
        return candidate, f"{reason}; cosine to float32 {agreement:.5f}", agreement

    def _probe_vectors(self) -> Vectors:
        """Unit vectors of fixed pseudo-random token ids, several lengths in one batch."""
        random = np.random.default_rng(0)
        lengths = [min(length, self._card.max_tokens) for length in _PROBE_LENGTHS]
        queries = [random.integers(0, self._card.vocab_size, length, dtype=np.int32) for length in lengths]
        vectors = self.embed(TokenBatch.pack(queries), threading.Event())
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def _quick_dtype(self) -> tuple[str, str]:
        """The narrow dtype that this device computes quickly, and the reason."""
        torch = self._torch
        if self._device.type == "cuda":
            if torch.cuda.get_device_capability(self._device) >= (8, 0):
                return "bfloat16", "the GPU computes bfloat16 natively"
            return "float16", "the GPU predates bfloat16"
        if self._device.type == "npu":
            return "float16", "Ascend NPUs compute float16 natively"
        if _cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"}:
            return "bfloat16", "the CPU has bfloat16 instructions"
        return "float32", "the CPU has no bfloat16 instructions"

    def _describe_device(self, threads: int) -> str:
        if self._device.type == "cuda":
            return f"{self._device}, {self._torch.cuda.get_device_name(self._device)}"
        if self._device.type == "npu":
            return f"{self._device}, {self._torch.npu.get_device_name(self._device)}"
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


_SMALL_PASS = 8  # queries; splitting further costs more in passes than the padding does


def _import_torch(device: str) -> ModuleType:
    # Where torch-npu is installed and CANN is not, `import torch` itself fails by loading the backend on its own.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    if device.startswith("npu"):
        try:
            import torch_npu  # noqa: F401 - registers the device
        except Exception as error:
            raise SettingsError("args.accelerator.device", f"npu: torch-npu does not load: {error}") from error
    return torch


def _open_device(torch: ModuleType, device: str) -> Any:
    """The torch.device, looked for. Raises SettingsError where torch does not see it."""
    opened = torch.device(device)
    backend = getattr(torch, opened.type)
    if opened.type != "cpu" and not backend.is_available():
        raise SettingsError("args.accelerator.device", f"{opened.type}: torch {torch.__version__} sees no such device")
    return opened


def _cpu_flags() -> set[str]:
    """Instruction-set names of the first core: x86 `flags`, ARM `Features`."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - line by line, stops early
            for line in file:
                if line.startswith(("flags", "Features")):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()
