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
    num_cpu_blocks = settings.num_cpu_blocks if isinstance(settings, GenerationAcceleratorSettings) else 0
    if settings.emulated is None:
        return _loaded(card, settings, device, threads, host_cores, num_cpu_blocks)
    times = settings.emulated
    given = times.host if isinstance(times, EmulatedWithHost) and num_cpu_blocks else None
    host = None if given is None else given.host_time
    blocks = times.blocks if settings.blocks == "auto" else settings.blocks
    steps = EmulatedSteps(
        times.step_time, blocks, card.model.vocab_size,
        noise=times.noise, seed=times.seed, host=host, num_cpu_blocks=num_cpu_blocks,
    )  # fmt: skip
    return StepEngine(
        steps, blocks, "emulated", f"emulated (a step {times.beta_s} s, a row {times.row_s} s)", "float32",
        emulated=True, why="accelerator and CPU are emulated: the tokens mean nothing",
        model=times.step_time, num_cpu_blocks=num_cpu_blocks, host=host,
    )  # fmt: skip


def _loaded(  # noqa: PLR0917
    card: GenerationCard, settings: PoolOfDevices, device: str, threads: int, host_cores: Sequence[int],
    num_cpu_blocks: int,
) -> StepEngine:  # fmt: skip
    """Load the model from its files onto the device."""
    torch = import_torch(device)
    from deployments.engines.packed.tensors import MissingWeight, Place, Weights
    from deployments.generation.engine.causal_model import CausalModel
    from deployments.generation.engine.causal_stages import CausalStages
    from deployments.generation.engine.device_sampling import logits_of
    from deployments.generation.engine.graphed_decoder import ModelSteps, with_graphs
    from deployments.generation.engine.hybrid_steps import HybridSteps
    from deployments.generation.engine.paged_attention import block_size_for

    there = open_device(torch, device)
    on_cpu = there.type == "cpu"
    if on_cpu:
        torch.set_num_threads(threads)
    config = _config(card)
    dtype, why = (settings.dtype, "set by hand") if settings.dtype != "auto" else _quick_dtype(torch, there)
    place = Place(there, getattr(torch, dtype))
    block_size = block_size_for(place, has_host=num_cpu_blocks > 0)
    block_bytes = _block_bytes(config, block_size, place.dtype.itemsize)
    weights_bytes = card.model.parameters * place.dtype.itemsize
    blocks = settings.blocks
    if blocks == "auto":
        least = blocks_of(card.context, block_size)
        blocks = _room(torch, there, settings, weights_bytes, least * block_bytes) // block_bytes
        _check_blocks(blocks, block_size, card.context, there)
    _check_host(num_cpu_blocks, block_bytes, weights_bytes + blocks * block_bytes if on_cpu else 0)
    try:
        weights = Weights.of_files(card.model.folder, place)
        model = CausalModel(config, weights, blocks, num_cpu_blocks=num_cpu_blocks, block_size=block_size)
    except MissingWeight as error:
        raise SettingsError("args.model.id", f"{card.name}'s files lack the weight {error.args[0]}") from None
    if num_cpu_blocks:
        steps: Steps = HybridSteps(CausalStages(model, host_cores))
    else:
        steps = ModelSteps(with_graphs(model, card.context), logits_of(there))
    named = f"torch {torch.__version__} on {there}" + (f", {threads} threads" if on_cpu else "")
    return StepEngine(
        steps, blocks, "torch", named, dtype, emulated=False, why=why,
        block_size=block_size, num_cpu_blocks=num_cpu_blocks, layers=config.num_hidden_layers,
    )  # fmt: skip


def _config(card: GenerationCard) -> Any:
    """The model's transformers config. Raises SettingsError if such a model cannot generate here."""
    from deployments.engines.model_forms import read_config
    from deployments.generation.engine.causal_model import unsupported

    config = read_config(card.model)
    if problem := unsupported(config):
        raise SettingsError("args.model.id", problem)
    return config


def _quick_dtype(torch: Any, device: Any) -> tuple[str, str]:
    if device.type == "cpu":
        return quick_cpu_dtype()
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_bfloat16 = torch.npu.is_bf16_supported()  # Ascend 310P and 910A have none
    if has_bfloat16:
        return "bfloat16", "the fastest format of accelerators"
    return "float16", "the fastest format of accelerators without bfloat16"


def _room(torch: Any, device: Any, settings: PoolOfDevices, weights_bytes: int, text_bytes: int) -> int:
    """The bytes of a cache in the memory that the weights leave free. `text_bytes`: those of a full-length text."""
    if device.type == "cpu":
        return max(0, min(int(_CPU_SHARE * (_free_memory() - weights_bytes)), _MOST_ON_CPU * text_bytes))
    free, total = getattr(torch, device.type).mem_get_info()
    if isinstance(settings, GenerationAcceleratorSettings):
        free = min(free, total // settings.replicas_per_device)  # others there may not have loaded yet
    return max(0, int(_ACCELERATOR_SHARE * (free - weights_bytes)))


def _check_blocks(blocks: int, block_size: int, context: int, device: Any) -> None:
    """Raises SettingsError if so many blocks hold less than a full-length text."""
    if blocks < blocks_of(context, block_size):
        raise SettingsError(
            f"args.{'cpu' if device.type == 'cpu' else 'accelerator'}.blocks",
            f"the free memory holds the keys and values of {blocks * block_size} tokens, "
            f"fewer than one text of {context}; lower model.max_tokens, or set the number of blocks",
        )


def _check_host(num_cpu_blocks: int, block_bytes: int, own_bytes: int) -> None:
    """Raises SettingsError if the host lacks the memory for its blocks, besides what a CPU as accelerator uses."""
    left = _free_memory() - own_bytes
    if num_cpu_blocks and num_cpu_blocks * block_bytes > left:
        raise SettingsError(
            "args.accelerator.num_cpu_blocks",
            f"{num_cpu_blocks} blocks take {num_cpu_blocks * block_bytes / 1e9:.3g} GB of the host's memory, "
            f"which has room for {max(0, left // block_bytes)}",
        )


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
