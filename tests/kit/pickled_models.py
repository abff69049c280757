"""Models whose weights are pickles, as older ones are on the hub, and pickles that would run code."""

import json
import os

import torch
from safetensors.torch import load_file

from tests.kit.kinds_of_models import save_model


class Code:
    """Unpickling this creates a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def poison(file, folder, **how):
    """A pickle that creates `folder` if it is unpickled without protection."""
    file.unlink(missing_ok=True)
    torch.save({"weight": Code(folder)}, file, **how)


def pickled(folder, *, parts=1, kind="bert reranker"):
    """Write a model of this kind with pickled weights; returns the weights."""
    save_model(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    names = {name: f"pytorch_model-{at % parts + 1:05}-of-{parts:05}.bin" for at, name in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors
