"""Serves models with pickled weights (`pytorch_model.bin`) from a folder with safetensors files converted from them.

All other modules read only safetensors. The folder lies beside the hub's cache. The first replica on a machine creates
it; the others wait for it and share it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from deployments.models.disk_cache import cache_folder
from deployments.models.model_folder import bad_model, find_folder, read_json
from deployments.models.modules import modules_of
from deployments.models.unpickle import NotWeights, unpickle
from deployments.models.weights import SAFE_INDEX, parts_of
from deployments.settings import ModelSettings

logger = logging.getLogger("ray.serve")

_INDEX = "pytorch_model.bin.index.json"
_BESIDE = ("sparse_linear", "colbert_linear")  # bge-m3's heads
_LEFT_OUT = {".bin", ".pt", ".pth", ".pkl", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".gguf", ".tflite"}


def pickles_of(folder: Path) -> dict[str, str]:
    """Pickled weights without a safetensors counterpart, and the name of the file to write for each, both relative to
    `folder`.

    Raises SettingsError if an index names files elsewhere.
    """
    found: dict[str, str] = {}
    if not any((folder / name).is_file() for name in ("model.safetensors", SAFE_INDEX)):
        if (folder / "pytorch_model.bin").is_file():
            found["pytorch_model.bin"] = "model.safetensors"
        else:
            found |= {part: _safe_name(part) for part in parts_of(folder, _INDEX, ".bin")}
    for module in modules_of(folder):
        if (path := module.get("path")) and not (folder / path / "model.safetensors").is_file():
            found |= {f"{path}/pytorch_model.bin": f"{path}/model.safetensors"}
    for stem in _BESIDE:
        if not (folder / f"{stem}.safetensors").is_file():
            found[f"{stem}.pt"] = f"{stem}.safetensors"
    return {source: target for source, target in found.items() if (folder / source).is_file()}


def served_folder(settings: ModelSettings) -> tuple[Path, str | None]:
    """(a folder with the model and its weights as safetensors, the model's revision). Raises SettingsError."""
    folder, revision = find_folder(settings)
    return safe_folder(folder), revision


def safe_folder(folder: Path) -> Path:
    """`folder` itself or, if it holds pickled weights, another folder with safetensors in their place.

    Raises SettingsError if a pickle holds anything but tensors, or if the other folder cannot be written.
    """
    pickles = pickles_of(folder)
    if not pickles:
        return folder
    try:
        kept = cache_folder() / _name(folder, pickles)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(kept.with_name(f".{kept.name}.lock"), fallback_to_soft=False):
            if not kept.is_dir():
                logger.warning(
                    "%s: %s read by torch.load(weights_only=True), and kept as safetensors in %s",
                    folder, " and ".join(pickles) + (" is" if len(pickles) == 1 else " are"), kept,
                )  # fmt: skip
                _make_folder(folder, kept, pickles)
    except OSError as error:
        raise bad_model(
            f"{folder} holds pickled weights, and the safetensors made of them cannot be kept: {error}; "
            "set HF_HOME to a folder with room, which may be written"
        ) from None
    return kept


def _make_folder(folder: Path, target: Path, pickles: Mapping[str, str]) -> None:
    """Create the folder `target` with the model of `folder`: safetensors in place of `pickles`, and links to everything
    else. It creates all of it or nothing.

    Raises OSError, and SettingsError if a pickle holds anything but tensors.
    """
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        made = Path(beside) / target.name
        others = _others(folder)
        for name in (*others, *pickles.values()):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
        for name in others:
            (made / name).symlink_to((folder / name).resolve())
        needed, free = sum((folder / name).stat().st_size for name in pickles), shutil.disk_usage(made).free
        if needed > free:
            raise OSError(f"{needed / 2**30:.1f} GiB are needed in {target.parent}, and {free / 2**30:.1f} are free")
        try:
            unpickle([(folder / source, made / name) for source, name in pickles.items()])
        except NotWeights as error:
            raise bad_model(str(error)) from None
        if parts_of(folder, _INDEX, ".bin") and SAFE_INDEX not in others:
            index = read_json(folder / _INDEX)
            index["weight_map"] = {name: _safe_name(part) for name, part in index["weight_map"].items()}
            (made / SAFE_INDEX).write_text(json.dumps(index), encoding="utf-8")
        made.rename(target)


def _safe_name(part: str) -> str:
    return part.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"


def _others(folder: Path) -> list[str]:
    """The files in the folder and its subfolders, except weights in formats that are not read."""
    files = (path.relative_to(folder) for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    return [
        str(path)
        for path in files
        if path.suffix not in _LEFT_OUT and path.name != _INDEX and not any(part.startswith(".") for part in path.parts)
    ]


def _name(folder: Path, pickles: Mapping[str, str]) -> str:
    """The name of the converted folder, which changes if any of the files has changed."""
    stats = [(name, (folder / name).stat()) for name in pickles]
    told = [str(folder.resolve()), sorted(_others(folder)), [(name, it.st_size, it.st_mtime_ns) for name, it in stats]]
    return f"{folder.name}-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]}"
