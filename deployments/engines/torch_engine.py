"""PyTorch: the CPU, an NVIDIA GPU, or an Ascend NPU through torch-npu. The same file for all three.

Not run on an NPU yet: no such device was at hand. What is particular to it is `import_torch` and `_quick_dtype`.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deployments.engines import EngineInfo, TokenBatch, Vectors
from deployments.errors import SettingsError
from deployments.model_files import ModelCard
from deployments.settings import AcceleratorSettings, CpuSettings

if TYPE_CHECKING:
    from deployments.engines.pooled_model import Ids, PooledModel


class TorchEngine:
    """A transformer and its pooling on one device, in the quickest dtype that agrees with float32."""

    def __init__(self, card: ModelCard, settings: AcceleratorSettings | CpuSettings, device: str, threads: int) -> None:
        self._torch = import_torch(device)
        self._card = card
        self._device = _open_device(self._torch, device)
        self._max_batch_tokens = settings.max_batch_tokens
        if self._device.type == "cpu":
            self._torch.set_num_threads(threads)
        self._model = self._load()
        dtype, why, cosine = self._choose_dtype(settings.dtype)
        self.info = EngineInfo(
            engine="torch",
            device=self._describe_device(threads),
            dtype=dtype,
            dimension=card.dimension,
            emulated=False,
            why=why,
            agreement=cosine,
        )

    def embed(self, batch: TokenBatch, stop: threading.Event) -> Vectors:
        from deployments.engines.pooled_model import embed_in_passes

        with self._torch.inference_mode():
            return embed_in_passes(batch, self._card.dimension, self._max_batch_tokens, stop, self._run)

    def _run(self, ids: Ids, mask: Ids) -> Vectors:
        vectors: Vectors = self._model(self._to_device(ids), self._to_device(mask)).cpu().numpy()
        return vectors

    def probe(self) -> None:
        """A small product on the device, waited for: a hung device hangs here, a lost one raises."""
        with self._torch.inference_mode():
            ones = self._torch.ones((8, 8), device=self._device)
            if float((ones @ ones).sum().item()) != 8 * 8 * 8:
                raise RuntimeError(f"{self._device} computes wrong numbers")

    def _to_device(self, array: Ids) -> Any:
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def _load(self) -> PooledModel:
        from deployments.engines.pooled_model import PooledModel

        return PooledModel(self._card).to(self._device)

    def _choose_dtype(self, wanted: str) -> tuple[str, str, float | None]:
        """Set the model to its dtype; returns dtype, why, and the smallest cosine to float32 on the probe inputs."""
        from deployments.engines.pooled_model import AGREEMENT, agreement, probe_batch

        candidate, reason = (wanted, "set by hand") if wanted != "auto" else self._quick_dtype()
        if candidate == "float32":
            return candidate, reason, None
        probe = probe_batch(self._card)
        reference = self.embed(probe, threading.Event())
        self._model = self._model.to(getattr(self._torch, candidate))
        cosine = agreement(reference, self.embed(probe, threading.Event()))
        if wanted == "auto" and not cosine >= AGREEMENT:  # a NaN disagrees too
            self._model = self._load()  # the exact weights again: those that were cast have lost their low bits
            return "float32", f"{candidate} differs too much from float32 here (cosine {cosine:.5f})", None
        return candidate, f"{reason}; cosine to float32 {cosine:.5f}", cosine

    def _quick_dtype(self) -> tuple[str, str]:
        """The narrow dtype that this device computes quickly, and the reason."""
        from deployments.engines.pooled_model import quick_cpu_dtype

        if self._device.type == "cuda":
            if self._torch.cuda.get_device_capability(self._device) >= (8, 0):
                return "bfloat16", "the GPU computes bfloat16 natively"
            return "float16", "the GPU predates bfloat16"
        if self._device.type == "npu":
            return "float16", "Ascend NPUs compute float16 natively"
        return quick_cpu_dtype()

    def _describe_device(self, threads: int) -> str:
        from deployments.engines.pooled_model import describe_threads

        if self._device.type == "cpu":
            return describe_threads(threads)
        backend = getattr(self._torch, self._device.type)
        return f"{self._device}, {backend.get_device_name(self._device)}"


def import_torch(device: str) -> ModuleType:
    """Import torch for `device`. Raises SettingsError where torch-npu is needed and does not load."""
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
    if opened.type != "cpu" and not getattr(torch, opened.type).is_available():
        raise SettingsError("args.accelerator.device", f"{opened.type}: torch {torch.__version__} sees no such device")
    return opened
