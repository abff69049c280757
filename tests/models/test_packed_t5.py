"""Encoders of T5 and mT5, packed, against the transformers library's own code, and as a folder of files."""

import json
import threading

import numpy as np
import pytest
import torch
from transformers import MT5Config, MT5EncoderModel, T5Config, T5EncoderModel

from deployments.engines import TokenBatch, embed
from deployments.engines.packed import unsupported
from deployments.engines.torch_engine import TorchEngine
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings
from tests.kit.packed_models import LENGTHS, build, compare, pooled

SHAPE = {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
FAMILIES = {
    "t5": (T5EncoderModel, T5Config, {}),
    "t5 v1.1": (T5EncoderModel, T5Config, {"feed_forward_proj": "gated-gelu"}),
    "t5, other buckets": (
        T5EncoderModel,
        T5Config,
        {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 40},
    ),
    "mt5": (MT5EncoderModel, MT5Config, {}),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_the_librarys_own(name, lengths):
    model, config, changes = FAMILIES[name]
    compare(build(model, config, **SHAPE, **changes), "mean", lengths, atol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_other_pooling(pooling):
    compare(build(T5EncoderModel, T5Config, **SHAPE), pooling, LENGTHS["ragged"], atol=1e-4)


def test_an_unknown_activation_is_named():
    assert "the activation tanh" in unsupported(T5Config(feed_forward_proj="tanh"))


def test_the_files_of_an_encoder_are_served_without_a_decoder(tmp_path):
    """As sentence-t5 and gtr-t5 publish them."""
    model = build(T5EncoderModel, T5Config, **SHAPE)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    card = read_model_card(ModelSettings(id=str(tmp_path), pooling="mean"))
    engine = TorchEngine(card, CpuSettings(dtype="float32"), "cpu", 1)
    batch = TokenBatch.random(card.vocab_size, [30, 7, 200], seed=0)
    with torch.inference_mode():
        states = [
            model(input_ids=torch.from_numpy(query[None]).long()).last_hidden_state[0] for query in batch.queries()
        ]
    wanted = np.stack([pooled(one, "mean").numpy() for one in states])
    for form in ("packed", "padded"):
        engine.use(form, "float32")
        np.testing.assert_allclose(embed(engine, batch, threading.Event()), wanted, atol=1e-4)
