"""Published models of each family against transformers' own classes, and jina-embeddings-v2 against float64."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from jina_reference import Jina
from published_models import FAMILIES, JINA, JINA_CODE, jina_weights, published_weights, reference, save_folder

from deployments.engines import TokenBatch, embed
from deployments.engines.pooled_model import agreement
from deployments.engines.torch_engine import TorchEngine
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings

NEVER = threading.Event()
JINAS = {
    "jina": JINA,
    "jina reglu": JINA | {"feed_forward_type": "reglu"},
    "jina original": JINA | {"feed_forward_type": "original"},
    "jina of six heads": JINA | {"num_attention_heads": 6, "hidden_size": 96},
    "jina code": JINA_CODE,
}
LENGTHS = {"ragged": [300, 45, 130, 4, 1], "alike": [40, 40, 40], "one": [77], "shortest": [1]}
LONG = [700, 513]  # past a local window of 128 on both sides, and past 512
PAST_512 = {"modernbert", "nomic", "gte en", "gte multilingual", *JINAS}


class Family:
    """One published model in its folder, and what its vectors should be."""

    def __init__(self, name, folder):
        if name in JINAS:
            weights = jina_weights(JINAS[name])
            save_folder(folder, JINAS[name], weights)
            self._model = Jina(JINAS[name], weights)
        else:
            self._model = reference(name)
            save_folder(folder, FAMILIES[name].config, published_weights(name, self._model))
        self.folder = folder
        self._hidden = {}

    def hidden(self, query):
        """The vector of each token [tokens, hidden] of one query alone."""
        if (key := query.tobytes()) not in self._hidden:
            if isinstance(self._model, Jina):
                self._hidden[key] = self._model(query)
            else:
                with torch.inference_mode():
                    ids = torch.from_numpy(query.astype(np.int64))[None]
                    self._hidden[key] = self._model(input_ids=ids).last_hidden_state[0].numpy()
        return self._hidden[key]

    def pooled(self, batch, pooling):
        how = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0)}[pooling]
        return np.stack([how(self.hidden(query)) for query in batch.queries()]).astype(np.float32)


@pytest.fixture(scope="module", params=[*FAMILIES, *JINAS])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def family(name, tmp_path_factory):
    return Family(name, tmp_path_factory.mktemp("published") / "model")


def engine_of(family, form, dtype="float32", **settings):
    card = read_model_card(ModelSettings(id=str(family.folder), **settings))
    engine = TorchEngine(card, CpuSettings(engine="torch", dtype=dtype), "cpu", 1)
    engine.use(form, dtype)
    return engine


@pytest.mark.parametrize("form", ["padded"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_vectors_are_the_models_own(family, name, form, pooling):
    engine = engine_of(family, form, pooling=pooling)
    lengths = LENGTHS | ({"long": LONG} if name in PAST_512 else {})
    for some in lengths.values():
        batch = TokenBatch.random(30000, some, seed=0)
        got, wanted = embed(engine, batch, NEVER), family.pooled(batch, pooling)
        assert agreement(wanted, got) >= 0.9999
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-4)
