"""Converts pickled weights to safetensors files, only by `torch.load(weights_only=True)`.

It runs as a script in a short-lived process of its own, the only place where a model's pickle is read. It imports
nothing of windve, and reads the files' names as JSON from stdin.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class NotWeights(Exception):
    """A file holds something other than tensors. The message is one sentence."""


def unpickle(files: Sequence[tuple[Path, Path]]) -> None:
    """Convert each (pickle, file to write) in turn. If it raises NotWeights, the rest is not written."""
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-P", __file__],
        input=json.dumps([[str(source), str(target)] for source, target in files]),
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},  # see torch_engine.import_torch
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "without a word").splitlines()[-1]
        raise NotWeights(done.stdout.strip() or f"the process that reads {files[0][0].parent} ended: {last}")


def _read(source: Path) -> Mapping[str, Any]:
    import torch

    try:
        # memory-mapped if the format allows it, so that only what is being written is in memory
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except Exception as error:  # noqa: BLE001 - another format may raise anything
        if wanted := re.search(r"GLOBAL (\S+)", str(error)):
            raise NotWeights(
                f"{source} is a pickle that would run {wanted[1]}, so it is not read: weights are tensors only"
            ) from None
        reason = re.search(r"WeightsUnpickler error: (.+)", str(error))  # the rest is advice on how to run the code
        raise NotWeights(f"{source} is no file of tensors ({reason[1] if reason else type(error).__name__})") from None
    if not isinstance(found, Mapping) or not found:
        raise NotWeights(f"{source} holds no tensors by name, but a {type(found).__name__}")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise NotWeights(f"{source} holds something else than plain tensors: {name}")
    return found


def _own_memory(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors without shared memory, because safetensors cannot represent tied weights."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        place = whole.untyped_storage().data_ptr()
        found[name] = whole.clone() if place in seen else whole
        seen.add(place)
    return found


def _main() -> None:
    from safetensors.torch import save_file

    try:
        for source, target in json.load(sys.stdin):
            save_file(_own_memory(_read(Path(source))), target, metadata={"format": "pt"})
    except NotWeights as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    _main()
