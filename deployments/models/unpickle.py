"""Converts pickled weights to safetensors files, only by `torch.load(weights_only=True)`.

It runs as a script in a short-lived process of its own, the only place where a model's pickle is read. It imports
nothing of windve, reads the files' names as JSON from stdin, and writes one line of JSON for each.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Written:
    """A safetensors file that was written from a pickle."""

    file: str
    tensors: int
    size: int  # bytes


class NotWeights(Exception):
    """A file holds something other than tensors. The message is one sentence."""


def unpickle(files: Sequence[tuple[Path, Path]]) -> Iterator[Written]:
    """Convert each (pickle, file to write) in turn. If it raises NotWeights, the rest is not written."""
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # see torch_engine.import_torch
    with subprocess.Popen(  # noqa: S603 - ourselves
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([[str(source), str(target)] for source, target in files]))
        process.stdin.close()
        done, last = 0, "without a word"
        for line in process.stdout:
            if not line.startswith("{"):  # a warning or an error of torch
                last = line.strip() or last
                continue
            answer = json.loads(line)
            if "problem" in answer:
                raise NotWeights(answer["problem"])
            done += 1
            yield Written(**answer)
    if done < len(files):
        raise NotWeights(f"{files[done][0]} could not be read, the process that read it ended: {last}")


def _convert(source: Path, target: Path) -> Written:
    from safetensors.torch import save_file

    tensors = _own_memory(_read(source))
    save_file(tensors, target, metadata={"format": "pt"})
    return Written(str(target), len(tensors), target.stat().st_size)


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
    try:
        for source, target in json.load(sys.stdin):
            print(json.dumps(asdict(_convert(Path(source), Path(target)))), flush=True)
    except (NotWeights, OSError) as error:
        print(json.dumps({"problem": str(error)}), flush=True)


if __name__ == "__main__":
    _main()
