"""Creates a replica's engine by its settings: a causal language model on one device, or an emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.engines.torch_engine import import_torch, open_device
from deployments.errors import SettingsError
from deployments.generation.engine.emulated_steps import EmulatedSteps
from deployments.generation.engine.steps import Steps
from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
from deployments.generation.scheduler.step_time import HostTime, StepTime
from deployments.generation.settings import EmulatedWithHost, GenerationAcceleratorSettings, GenerationCpuSettings
from deployments.generation.text.model_card import GenerationCard
from deployments.hardware.device_detector import quick_cpu_dtype

_CPU_SHARE, _ACCELERATOR_SHARE = 0.5, 0.85  # the cache's share of the memory that the weights leave free
_MOST_ON_CPU = 32  # full-length texts in a CPU's cache: reading more would be too slow anyway

PoolOfDevices = GenerationAcceleratorSettings | GenerationCpuSettings


@dataclass(frozen=True, slots=True)
class StepEngine:
    """An engine: `steps` computes, with `blocks` cache blocks. The other fields describe it."""

    steps: Steps
    blocks: int
    engine: str
    device: str
    dtype: str
    emulated: bool
    why: str
    model: StepTime | None = None  # if known without measuring
    block_size: int = BLOCK  # tokens of a block
    num_cpu_blocks: int = 0  # cache blocks in the host's memory
    host: HostTime | None = None  # if known without measuring
    layers: int = 1

    def describe(self) -> dict[str, Any]:
        names = ("engine", "device", "dtype", "emulated", "why", "blocks", "block_size", "num_cpu_blocks")
        return {name: getattr(self, name) for name in names}


def create_step_engine(
    card: GenerationCard, settings: PoolOfDevices, device: str, threads: int, host_cores: Sequence[int] = ()
) -> StepEngine:
    """Create the engine. `host_cores`: the cores on which an accelerator's host computes attention.

    Raises SettingsError if the model or the device cannot be used.
    """
    if settings.emulated is None:
        return _Loaded(card, settings, device, threads, host_cores).engine()
    times, num_cpu_blocks = settings.emulated, _host_blocks(settings)
    given = times.host if isinstance(times, EmulatedWithHost) and num_cpu_blocks else None
    host = None if given is None else given.host_time
    blocks = times.blocks if settings.blocks == "auto" else settings.blocks
    model, vocabulary = times.step_time, card.model.vocab_size
    return StepEngine(
        EmulatedSteps(
            model, blocks, vocabulary, noise=times.noise, seed=times.seed, host=host, num_cpu_blocks=num_cpu_blocks
        ),
        blocks,
        engine="emulated",
        device=f"emulated (a step {times.beta_s} s, a row {times.row_s} s)",
        dtype="float32",
        emulated=True,
        why="accelerator and CPU are emulated: the tokens mean nothing",
        model=model,
        num_cpu_blocks=num_cpu_blocks,
        host=host,
    )


def _host_blocks(settings: PoolOfDevices) -> int:
    return settings.num_cpu_blocks if isinstance(settings, GenerationAcceleratorSettings) else 0


class _Loaded:
    """Loads a model from its files onto a device."""

    def __init__(
        self, card: GenerationCard, settings: PoolOfDevices, device: str, threads: int, host_cores: Sequence[int]
    ) -> None:
        self._torch = import_torch(device)
        self._card, self._settings = card, settings
        self._device = open_device(self._torch, device)
        if self._device.type == "cpu":
            self._torch.set_num_threads(threads)
        self._threads, self._host_cores, self._host_blocks = threads, host_cores, _host_blocks(settings)

    def engine(self) -> StepEngine:
        from deployments.engines.model_forms import read_config
        from deployments.engines.packed.tensors import MissingWeight, Place, Weights
        from deployments.generation.engine.causal_model import CausalModel, unsupported
        from deployments.generation.engine.causal_stages import CausalStages
        from deployments.generation.engine.device_sampling import logits_of
        from deployments.generation.engine.graphed_decoder import ModelSteps, with_graphs
        from deployments.generation.engine.hybrid_steps import HybridSteps
        from deployments.generation.engine.paged_attention import block_size_for

        config = read_config(self._card.model)
        if problem := unsupported(config):
            raise SettingsError("args.model.id", problem)
        dtype, why = (self._settings.dtype, "set by hand") if self._settings.dtype != "auto" else self._quick_dtype()
        place = Place(self._device, getattr(self._torch, dtype))
        num_cpu_blocks = self._host_blocks
        block_size = block_size_for(place, has_host=num_cpu_blocks > 0)
        block_bytes = _block_bytes(config, block_size, place.dtype.itemsize)
        weights_bytes = self._card.model.parameters * place.dtype.itemsize
        blocks = self._settings.blocks
        if blocks == "auto":
            blocks = self._blocks(block_size, block_bytes, weights_bytes)
        self._check_host(block_bytes, weights_bytes + blocks * block_bytes)
        try:
            weights = Weights.of_files(self._card.model.folder, place)
            model = CausalModel(config, weights, blocks, num_cpu_blocks=num_cpu_blocks, block_size=block_size)
        except MissingWeight as error:
            raise SettingsError("args.model.id", f"{self._card.name}'s files lack the weight {error.args[0]}") from None
        cores = f", {self._threads} threads" if self._device.type == "cpu" else ""
        named = f"torch {self._torch.__version__} on {self._device}{cores}"
        stages = CausalStages(model, self._host_cores) if num_cpu_blocks else None
        if stages is None:
            steps: Steps = ModelSteps(with_graphs(model, self._card.context), logits_of(self._device))
        else:
            steps = HybridSteps(stages)
        return StepEngine(
            steps, blocks, "torch", named, dtype, emulated=False, why=why,
            block_size=block_size, num_cpu_blocks=num_cpu_blocks, layers=config.num_hidden_layers,
        )  # fmt: skip

    def _quick_dtype(self) -> tuple[str, str]:
        if self._device.type == "cpu":
            return quick_cpu_dtype()
        if self._device.type == "cuda":
            has_bfloat16 = self._torch.cuda.get_device_capability(self._device) >= (8, 0)
        else:
            has_bfloat16 = self._torch.npu.is_bf16_supported()  # Ascend 310P and 910A have none
        if has_bfloat16:
            return "bfloat16", "the fastest format of accelerators"
        return "float16", "the fastest format of accelerators without bfloat16"

    def _check_host(self, block_bytes: int, own_bytes: int) -> None:
        """Raises SettingsError if the host lacks the memory for its blocks, besides what a CPU as accelerator uses."""
        left = _free_memory() - (own_bytes if self._device.type == "cpu" else 0)
        if self._host_blocks and self._host_blocks * block_bytes > left:
            raise SettingsError(
                "args.accelerator.num_cpu_blocks",
                f"{self._host_blocks} blocks take {self._host_blocks * block_bytes / 1e9:.3g} GB of the host's memory, "
                f"which has room for {max(0, left // block_bytes)}",
            )

    def _blocks(self, block_size: int, block_bytes: int, weights_bytes: int) -> int:
        """How many cache blocks fit into the memory that the weights leave free. Raises SettingsError if too few."""
        free, share = _free_memory(), _CPU_SHARE
        if self._device.type != "cpu":
            (free, total), share = getattr(self._torch, self._device.type).mem_get_info(), _ACCELERATOR_SHARE
            if isinstance(self._settings, GenerationAcceleratorSettings):
                free = min(free, total // self._settings.replicas_per_device)  # others there may not have loaded yet
        left = share * (free - weights_bytes)
        least = blocks_of(self._card.context, block_size)
        if self._device.type == "cpu":
            left = min(left, _MOST_ON_CPU * least * block_bytes)
        if left < least * block_bytes:
            raise SettingsError(
                f"args.{'cpu' if self._device.type == 'cpu' else 'accelerator'}.blocks",
                f"the free memory holds the keys and values of {max(0, int(left // block_bytes)) * block_size} tokens, "
                f"fewer than one text of {self._card.context}; lower model.max_tokens, or set the number of blocks",
            )
        return int(left // block_bytes)


def _block_bytes(config: Any, block_size: int, itemsize: int) -> int:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * block_size * size * itemsize)


def _free_memory() -> int:
    """Free bytes of the machine or the container, whichever has less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        bound = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except OSError:
        return free
    return min(free, max(0, int(bound) - used)) if bound.isdigit() else free
