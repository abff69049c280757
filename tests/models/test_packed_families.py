"""Packed models of each family against the transformers library's own code: BERT and its kin, decoders, T5."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, DebertaV2Config, Gemma3TextConfig, LlamaConfig, T5Config

from deployments.engines import TokenBatch, packed
from deployments.engines.packed import layers, unsupported
from deployments.engines.packed.tensors import MissingWeight, Weights
from tests.kit import packed_models
from tests.kit.engines import FORMS, card_of, engine_of, rows_of
from tests.kit.packed_models import EXACT, LENGTHS, compare, cosine_in, of_type, pooled

BERT = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
GROUPED |= {"intermediate_size": 96, "pad_token_id": 0, "attn_implementation": "eager"}
T5 = {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}
SLIDING = {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}
BOTH_WAYS = {"use_bidirectional_attention": True, "sliding_window": 40, "sliding_window_pattern": 2, "head_dim": 32}
STRAY = {  # what one of these classes reads, and the others pass over
    "attn_logit_softcapping": 5.0,
    "hidden_activation": "relu",
    "query_pre_attn_scalar": 4,
    "sliding_window": 30,
    "use_bidirectional_attention": True,
}
STRAY_KINDS = STRAY | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DECODERS = {
    "qwen3, keys of others": STRAY,
    "qwen2, keys of others": STRAY,
    "llama, keys of others": STRAY_KINDS,
    "mistral, keys of others": STRAY_KINDS,
    "eurobert, keys of others": STRAY_KINDS | {"is_causal": True},
    "llama, both ways": {"is_causal": False},
    "qwen3": {"head_dim": 32},
    "qwen3, sliding": {"head_dim": 16, **SLIDING},
    "qwen2": {},
    "qwen2, sliding": SLIDING,
    "qwen2, both ways": {"is_causal": False, **SLIDING},
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "mistral, sliding": {"sliding_window": 50},
    "gemma3_text, both ways": BOTH_WAYS,
    "gemma3_text, causal": {"sliding_window": 40, "sliding_window_pattern": 2},
} | {
    f"llama, {name}": {"rope_parameters": {"rope_type": name, "rope_theta": 5e5, **values}}
    for name, values in SCALED.items()
}
KIN_OF_BERT = {
    "bert": {},
    "roberta": {},  # positions start after the padding token
    "xlm-roberta": {},
    "nomic_bert": {"head_dim": 24},  # not its share of the width
    "gte": {"head_dim": 24},
}
KIN_OF_T5 = {
    "t5": {},
    "t5, v1.1": {"feed_forward_proj": "gated-gelu"},
    "t5, other buckets": {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 40},
    "mt5": {},
}
FAMILIES = {name: (BERT, changes, 5e-5) for name, changes in KIN_OF_BERT.items()}
FAMILIES |= {name: (GROUPED, changes, 1e-4) for name, changes in DECODERS.items()}
FAMILIES |= {name: (T5, changes, 1e-4) for name, changes in KIN_OF_T5.items()}


def made(name):
    shape, changes, _ = FAMILIES[name]
    return of_type(name.partition(",")[0], **{**shape, **changes})


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_the_librarys_own(name):
    model, atol = made(name), FAMILIES[name][-1]
    for lengths in LENGTHS.values():
        compare(model, "last", lengths, atol=atol)
    for pooling in ("cls", "mean"):
        compare(model, pooling, LENGTHS["ragged"], atol=atol)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mistral, sliding", "gemma3_text, both ways"])
def test_bfloat16_stays_near(name):
    assert cosine_in(torch.bfloat16, made(name), "last", LENGTHS["ragged"]) >= 0.999


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations(monkeypatch, activation, fused):
    """Whichever way of gelu is the quicker one on this machine."""
    monkeypatch.setattr(layers, "is_quicker_fused", lambda *_: fused)
    compare(of_type("bert", hidden_act=activation, **BERT), "mean", [20, 7])


@pytest.mark.parametrize("model_type", ["roberta", "mpnet"])
def test_padding_tokens_inside_a_text_are_not_counted(monkeypatch, model_type):
    """Which a text has that spells them."""
    queries = packed_models.texts([60, 20, 7])
    for query in queries:
        query[[0, 4, -1]] = 1
    monkeypatch.setattr(packed_models, "texts", lambda _: queries)
    compare(of_type(model_type, pad_token_id=1, **BERT), "mean", [60, 20, 7])


@pytest.fixture
def probed_anew():
    layers._has_fused.cache_clear()
    yield
    layers._has_fused.cache_clear()


def test_products_without_onednn(probed_anew, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    compare(made("bert"), "mean", LENGTHS["ragged"])


def test_products_by_a_torch_whose_private_functions_are_others(probed_anew, monkeypatch, caplog):
    def changed(x, weight, bias):
        raise AssertionError("not called like this")

    monkeypatch.setattr(layers, "_FUSED", SimpleNamespace(_linear_pointwise=changed))
    compare(made("bert"), "mean", LENGTHS["ragged"])
    assert "oneDNN's fused products are not used: " in caplog.text


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DebertaV2Config(), "deberta-v2 models have no packed form"),
        (BertConfig(hidden_act="tanh"), "the activation tanh"),
        (BertConfig(is_decoder=True), "decoder"),
        (Gemma3TextConfig(attn_logit_softcapping=50.0), "capped"),
        (LlamaConfig(hidden_act="tanh"), "the activation tanh"),
        (LlamaConfig(**GROUPED, partial_rotary_factor=0.5), "a part of each head"),
        (T5Config(feed_forward_proj="tanh"), "the activation tanh"),
    ],
)
def test_what_has_no_packed_form_is_named(config, reason):
    assert reason in unsupported(config)


def test_longrope_has_no_packed_form():
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = LlamaConfig(**GROUPED, rope_parameters=long | {"original_max_position_embeddings": 100})
    assert "longrope" in unsupported(config)
    assert unsupported(BertConfig()) is None


def test_a_transformers_without_its_table_of_scalings_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.modeling_rope_utils", None)
    scaled = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    assert "linear are unknown to this version" in unsupported(LlamaConfig(**GROUPED, **scaled))
    assert unsupported(LlamaConfig(**GROUPED)) is None


def test_weights_that_are_not_there_are_named():
    state = made("bert").state_dict()
    del state["encoder.layer.1.output.dense.weight"]
    parts = packed.build(BertConfig(**BERT), Weights(state, state.__getitem__, EXACT))
    parts.blocks[0]()
    with pytest.raises(MissingWeight, match=r"encoder\.layer\.1\.output\.dense\.weight"):
        parts.blocks[1]()


def test_the_files_of_a_t5_encoder_are_served_without_a_decoder(tmp_path):
    """As sentence-t5 and gtr-t5 publish them."""
    model = made("t5")
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    card = card_of(tmp_path, pooling="mean")
    queries = TokenBatch.random(card.vocab_size, [30, 7, 200], seed=0).queries()
    with torch.inference_mode():
        states = [model(input_ids=torch.from_numpy(query[None]).long()).last_hidden_state[0] for query in queries]
    wanted = np.stack([pooled(one, "mean").numpy() for one in states])
    for form in FORMS:
        np.testing.assert_allclose(rows_of(engine_of(card, form=form), queries), wanted, atol=1e-4)
