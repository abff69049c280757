"""Models whose weights are pickles, as older ones are on the hub, and pickles that would run code."""

import json
import os

import torch
from safetensors.torch import load_file

from tests.kit.kinds_of_models import save_model


class Code:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def poison(file, folder, **how):
    """A pickle that makes `folder` where it is read carelessly."""
    file.unlink(missing_ok=True)
    torch.save({"weight": Code(folder)}, file, **how)


def pickled(folder, *, parts=1, kind="bert reranker"):
    """A model of that kind; returns what its weights are."""
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
