"""All tensors of a packed model lie on its device. torch's `meta` device, like CUDA, refuses to compute with a stray
tensor of the CPU.
"""

import numpy as np
import pytest
import torch

from deployments.engines.model_forms import Forms
from deployments.engines.packed import attention
from deployments.engines.packed.tensors import Place, Weights
from deployments.generation.engine.causal_model import CausalModel
from deployments.generation.scheduler.work import Chunk
from tests.kit import causal_models
from tests.kit.engines import card_of
from tests.kit.kinds_of_models import KINDS, save_model
from tests.kit.published_models import CONFIGS, FAMILIES, JINA, jina_weights, published_weights, reference, save_folder

META = torch.device("meta")
LENGTHS = [[200, 45, 4, 1], [40, 40], [1]]


def computes(forms, dtype):
    """Pass batches through the packed form."""
    model = forms.builds(Place(META, dtype))["packed"]()
    with torch.inference_mode():
        for lengths in LENGTHS:
            ids = torch.zeros(sum(lengths), dtype=torch.int32, device=META)
            for each_token in (False, True):
                found = model(ids, np.array(lengths, np.int32), each_token=each_token)
                assert (found.device.type, len(found)) == ("meta", sum(lengths) if each_token else len(lengths))


def check(card):
    forms = Forms(card)
    computes(forms, torch.float32)  # straight from the host's memory
    forms._own.model.to(META)  # the exact form, to which others are compared, has moved the weights
    for dtype in (torch.float32, torch.bfloat16):
        computes(forms, dtype)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("name", [*FAMILIES, "jina"])
def test_packed_families(tmp_path, name, pooling):
    if name == "jina":
        save_folder(tmp_path, JINA, jina_weights(JINA))
    else:
        save_folder(tmp_path, CONFIGS[name], published_weights(name, reference(name)))
    check(card_of(tmp_path, pooling=pooling))


@pytest.mark.parametrize("name", KINDS)
def test_heads(tmp_path, name):
    folder = save_model(name, tmp_path)
    check(card_of(folder, **({"kind": "sparse"} if "sparse" in name else {})))


def test_the_check_finds_a_stray_tensor(tmp_path, monkeypatch):
    save_folder(tmp_path, CONFIGS["distilbert"], published_weights("distilbert", reference("distilbert")))
    padded = attention.Ways.padded
    monkeypatch.setattr(attention.Ways, "padded", lambda *args: padded(*args) + torch.ones(1))
    with pytest.raises(RuntimeError, match="device"):
        check(card_of(tmp_path))


@pytest.mark.parametrize("name", causal_models.FAMILIES)
def test_steps_of_generation(name):
    own = causal_models.causal(name)
    for place in (Place(META, torch.float32), Place(META, torch.bfloat16)):
        model = CausalModel(own.config, Weights.of_module(own, place), blocks=8)
        chunks = [
            Chunk(np.zeros(150, np.int32), 0, (0, 1), wanted=False),
            Chunk(np.zeros(1, np.int32), 200, (2, 3)),
            Chunk(np.zeros(1, np.int32), 130, (4, 5)),
        ]
        logits = model.step(chunks)
        assert (logits.device.type, logits.shape) == ("meta", (2, own.config.vocab_size))
