"""Packed against the transformers library's own code: float32, random weights, every kind, pooling and length."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from deployments.engines import packed_bert
from deployments.engines.packed_bert import PackedBert, unsupported

CPU = torch.device("cpu")
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
LENGTHS = {"ragged": [300, 45, 30, 4, 1], "alike": [40, 40, 40], "long": [700, 513], "one": [77], "shortest": [1]}


def build(model, config, **changes):
    torch.manual_seed(0)
    built = model(config(vocab_size=100, max_position_embeddings=720, **{**SHAPE, **changes})).eval()
    for parameter in built.parameters():  # norms and biases are ones and zeros at first: give them a say
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return built


def texts(lengths):
    random = np.random.default_rng(0)
    return [torch.from_numpy(random.integers(5, 100, length)) for length in lengths]


def pooled(hidden, pooling):
    return {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pooling]


def compare(model, pooling, lengths):
    queries = texts(lengths)
    with torch.inference_mode():
        packed = PackedBert(SimpleNamespace(pooling=pooling), model, torch.float32, CPU)
        got = packed(torch.cat(queries), np.array(lengths, np.int32))
        wanted = [pooled(model(input_ids=query[None]).last_hidden_state[0], pooling) for query in queries]
    torch.testing.assert_close(got, torch.stack(wanted), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("longest_dense", [0, 75, 512])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_of_attention_agree(monkeypatch, dtype, lengths, longest_dense):
    """Whichever is the quicker one on this machine: the head's sizes are those of all-MiniLM-L6-v2."""
    monkeypatch.setattr(packed_bert, "_longest_dense", lambda *_: longest_dense)
    attention, longest_padded = packed_bert._choose_attention(CPU, dtype, 12, 32)
    counts = np.array(lengths, np.int32)
    layout = packed_bert.Layout.of(counts, CPU, dtype, padded=max(lengths) <= longest_padded)
    torch.manual_seed(0)
    qkv = (torch.randn(layout.tokens + layout.spare, 3, 12, 32) / 3).to(dtype)  # scores are about 1
    got = attention(qkv, layout)
    q, k, v = (part.transpose(0, 1).float() for part in qkv.unbind(1))
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        shares = torch.softmax(q[:, here] @ k[:, here].transpose(1, 2), -1)
        wanted = (shares @ v[:, here]).transpose(0, 1).flatten(1)
        close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
        torch.testing.assert_close(got[here].float(), wanted, **close)
        start += length


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_bert(pooling, lengths):
    compare(build(BertModel, BertConfig), pooling, lengths)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations(monkeypatch, activation, fused):
    """Whichever way of gelu is the quicker one on this machine."""
    monkeypatch.setattr(packed_bert, "_is_quicker_fused", lambda *_: fused)
    compare(build(BertModel, BertConfig, hidden_act=activation), "mean", [20, 7])


@pytest.mark.parametrize(("model", "config"), [(RobertaModel, RobertaConfig), (XLMRobertaModel, XLMRobertaConfig)])
def test_positions_of_roberta_start_after_the_padding_token(model, config):
    compare(build(model, config), "mean", [60, 20, 7])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_attention_of_devices_without_a_kernel_for_lengths(monkeypatch, lengths):
    monkeypatch.setattr(packed_bert, "_choose_attention", lambda *_: (packed_bert._fused_padded, 720))
    compare(build(BertModel, BertConfig), "mean", lengths)


def test_products_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    compare(build(BertModel, BertConfig), "mean", LENGTHS["ragged"])


def test_other_models_keep_their_own_code():
    distil = DistilBertModel(DistilBertConfig(vocab_size=100, n_layers=1, dim=32, n_heads=2, hidden_dim=64))
    assert "distilbert models have no packed form" in unsupported(distil)
    assert "the activation silu" in unsupported(build(BertModel, BertConfig, hidden_act="silu"))
    assert "decoder" in unsupported(build(BertModel, BertConfig, is_decoder=True))
    assert unsupported(build(BertModel, BertConfig)) is None
