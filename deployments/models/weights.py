"""A model's weights as files: which there are, that they are numbers only, and how many. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from deployments.errors import SettingsError
from deployments.models.model_folder import read_json

_LARGEST_HEADER = 100_000_000  # bytes: safetensors' own bound


def find_weights(folder: Path) -> list[Path]:
    """The files of the model's weights. Raises SettingsError where they are not those of a model that is served."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise SettingsError("args.model.id", f"{folder} holds no .safetensors weights; no other format is loaded")
    _check_index(folder)
    return weights


def count_parameters(weights: Path) -> int:
    """Numbers in a safetensors file, from its header alone. Raises SettingsError where it is none."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size) if size <= _LARGEST_HEADER else b"")
        except ValueError:
            raise SettingsError("args.model.id", f"{weights} is not a safetensors file") from None
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


def _check_index(folder: Path) -> None:
    """Transformers loads whatever file the index of a model in several parts names, and adapters if it can."""
    for part in set(read_json(folder / "model.safetensors.index.json").get("weight_map", {}).values()):
        if Path(part).name != part or not part.endswith(".safetensors"):
            raise SettingsError(
                "args.model.id", f"{folder}'s index names {part}; only .safetensors beside it is loaded"
            )
    if (folder / "adapter_config.json").exists():
        raise SettingsError("args.model.id", f"{folder} is an adapter of another model; merge the two first")
