"""BERT and its kin, packed, against the transformers library's own code."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    GteConfig,
    GteModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from deployments.engines.packed import layers, unsupported
from deployments.engines.packed.attention import Ways
from deployments.engines.packed.families import bert
from tests.kit import packed_models
from tests.kit.packed_models import EXACT, LENGTHS, build, compare

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_bert(pooling, lengths):
    compare(build(BertModel, BertConfig, **SHAPE), pooling, lengths)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations(monkeypatch, activation, fused):
    """Whichever way of gelu is the quicker one on this machine."""
    monkeypatch.setattr(layers, "is_quicker_fused", lambda *_: fused)
    compare(build(BertModel, BertConfig, hidden_act=activation, **SHAPE), "mean", [20, 7])


@pytest.mark.parametrize(("model", "config"), [(RobertaModel, RobertaConfig), (XLMRobertaModel, XLMRobertaConfig)])
def test_positions_of_roberta_start_after_the_padding_token(model, config):
    compare(build(model, config, **SHAPE), "mean", [60, 20, 7])


@pytest.mark.parametrize(("model", "config"), [(RobertaModel, RobertaConfig), (MPNetModel, MPNetConfig)])
def test_padding_tokens_inside_a_text_are_not_counted(monkeypatch, model, config):
    """Which a text has that spells them."""
    queries = packed_models.texts([60, 20, 7])
    for query in queries:
        query[[0, 4, -1]] = 1
    monkeypatch.setattr(packed_models, "texts", lambda _: queries)
    compare(build(model, config, pad_token_id=1, **SHAPE), "mean", [60, 20, 7])


@pytest.mark.parametrize(("model", "config"), [(NomicBertModel, NomicBertConfig), (GteModel, GteConfig)])
def test_heads_of_another_size_than_their_share(model, config):
    compare(build(model, config, head_dim=24, **SHAPE), "mean", [60, 20, 7])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_attention_of_devices_without_a_kernel_for_lengths(monkeypatch, lengths):
    monkeypatch.setattr(bert, "attention_for", lambda heads, place: Ways(heads, place).by_padding)
    compare(build(BertModel, BertConfig, **SHAPE), "mean", lengths)


def test_products_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    compare(build(BertModel, BertConfig, **SHAPE), "mean", LENGTHS["ragged"])


def test_other_models_keep_their_own_code():
    assert "deberta-v2 models have no packed form" in unsupported(DebertaV2Config())
    assert "the activation tanh" in unsupported(BertConfig(hidden_act="tanh"))
    assert "decoder" in unsupported(BertConfig(is_decoder=True))
    assert unsupported(BertConfig()) is None


def test_weights_that_are_not_there_are_named():
    from deployments.engines import packed
    from deployments.engines.packed.tensors import MissingWeight, Weights

    state = build(BertModel, BertConfig, **SHAPE).state_dict()
    del state["encoder.layer.1.output.dense.weight"]
    parts = packed.build(BertConfig(**SHAPE), Weights(state, state.__getitem__, EXACT))
    parts.blocks[0]()
    with pytest.raises(MissingWeight, match=r"encoder\.layer\.1\.output\.dense\.weight"):
        parts.blocks[1]()
