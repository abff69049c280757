"""Finds a model's weight files, ensures that they are safetensors, and counts parameters. No torch here."""

from __future__ import annotations

import json
from pathlib import Path

from deployments.models.model_folder import bad_model, read_json

SAFE_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


def find_weights(folder: Path) -> list[Path]:
    """The safetensors files with the model's weights. Raises SettingsError unless all are there."""
    parts = parts_of(folder, SAFE_INDEX, ".safetensors")
    if (folder / "adapter_config.json").exists():
        raise bad_model(f"{folder} is an adapter of another model; merge the two first")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not parts:
        raise bad_model(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin")
    if missing := [part for part in parts if not (folder / part).is_file()]:
        raise bad_model(f"{folder} lacks {missing[0]}, which its index names")
    return [folder / part for part in parts]


def count_parameters(weights: Path) -> int:
    """The number of parameters in a safetensors file, from its header. Raises SettingsError if it is no such file."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size) if size <= _LARGEST_HEADER else b"")
        except ValueError:
            raise bad_model(f"{weights} is not a safetensors file") from None
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


def parts_of(folder: Path, index: str, ending: str) -> list[str]:
    """The files of a model in several parts, from its index. Raises SettingsError if the index names files elsewhere,
    which transformers would load.
    """
    parts: list[str] = sorted(set(read_json(folder / index).get("weight_map", {}).values()))
    for part in parts:
        if Path(part).name != part or not part.endswith(ending):
            raise bad_model(f"{folder}'s index names {part}; only {ending} beside it is read")
    return parts
