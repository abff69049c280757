"""Models that never lie in memory in float32: how much memory they take, and what they compute. And sentences."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, BertConfig, BertModel, DebertaV2Config, DebertaV2Model, Qwen3Config, Qwen3Model

from deployments.engines import TokenBatch, pooled_model, torch_engine
from deployments.errors import SettingsError
from tests.kit import engines
from tests.kit.engines import engine_of, rows_of
from tests.kit.packed_models import build

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
KINDS = {
    "packed": (Qwen3Model, Qwen3Config, GROUPED),
    "own code": (DebertaV2Model, DebertaV2Config, SMALL | {"relative_attention": True}),
}
MEMORY = {"num_hidden_layers": 24, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4}
MEMORY |= {"head_dim": 64, "intermediate_size": 2816, "vocab_size": 4000}  # 390 MB in bfloat16
MEASURE = """
import re, sys, torch
from pathlib import Path
from deployments.engines import torch_engine
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings
import deployments.engines.model_forms, deployments.engines.projection_heads, transformers.models.qwen3.modeling_qwen3

torch.set_num_threads(1)
torch_engine.LARGE = 1000
card = read_model_card(ModelSettings(id=sys.argv[1], pooling="last", max_tokens=256))
def kilobytes(what):
    return int(re.search(what + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
info = torch_engine.TorchEngine(card, CpuSettings(dtype="bfloat16"), "cpu", 1).info
print(kilobytes("VmHWM") - before, info.agreement, info.dtype)
"""


def save(model, folder, **how):
    """As a hub would publish it, of an embedding model with tokenizer files that the card needs."""
    model.save_pretrained(folder, **how)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    return folder


def card_of(folder, pooling="last"):
    return engines.card_of(folder, pooling=pooling, max_tokens=256)


@pytest.mark.parametrize("form", KINDS)
def test_a_large_model_computes_what_a_small_one_does(tmp_path, monkeypatch, form):
    model, config, shape = KINDS[form]
    card = card_of(save(build(model, config, pad_token_id=0, **shape), tmp_path))
    queries = TokenBatch.random(card.vocab_size, [30, 7, 200, 1], seed=0).queries()
    exact = rows_of(engine_of(card), queries)
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    np.testing.assert_allclose(rows_of(engine_of(card), queries), exact, atol=1e-4)
    narrow = engine_of(card, dtype="bfloat16", threads=2)
    assert pooled_model.agreement(exact, rows_of(narrow, queries)) >= 0.999
    assert narrow.form == ("packed" if form == "packed" else "padded")
    if form == "packed":
        assert narrow.info.agreement == pytest.approx(1, abs=1e-3)
        assert narrow.info.agreement < 1
    else:
        assert narrow.info.agreement is None
        assert "not compared with float32" in narrow.info.why


def test_a_narrow_form_that_disagrees_is_left(tmp_path, monkeypatch):
    card = card_of(save(build(Qwen3Model, Qwen3Config, pad_token_id=0, **GROUPED), tmp_path))
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    monkeypatch.setattr(torch_engine, "quick_cpu_dtype", lambda: ("bfloat16", "the CPU has it"))
    assert engine_of(card, dtype="auto").info.dtype == "bfloat16"
    strict = pooled_model.Tolerance(pooled_model.agreement, 2.0, "cosine to float32")
    monkeypatch.setattr(pooled_model, "tolerance", lambda _: strict)
    info = engine_of(card, dtype="auto").info
    assert info.dtype == "float32"
    assert info.why.startswith("bfloat16 differs too much from float32 here (cosine to float32 0.99")


@pytest.mark.parametrize(
    "missing", ["layers.1.mlp.up_proj.weight", "layers.0.self_attn.q_norm.weight", "layers.1.self_attn.k_proj.bias"]
)
def test_weights_of_a_large_model_that_are_missing(tmp_path, monkeypatch, missing):
    """Also those that another config would do without."""
    state = saved_state(tmp_path, attention_bias=True)
    state = {name: tensor for name, tensor in state.items() if name != missing}
    if missing.endswith("bias"):
        state = {name: tensor for name, tensor in state.items() if not name.endswith("bias")}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(SettingsError, match=r"qwen3 model's weight layers\.\d\..* of \[.*\] numbers is missing"):
            engine_of(card_of(tmp_path), dtype=dtype)


def test_weights_that_the_class_does_not_have_are_not_computed(tmp_path, monkeypatch):
    state = saved_state(tmp_path)
    queries = TokenBatch.random(100, [30, 7], seed=0).queries()
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    exact = rows_of(engine_of(card_of(tmp_path)), queries)
    strange = {
        f"layers.0.self_attn.{part}_proj.bias": torch.ones(size) for part, size in {"q": 64, "k": 32, "v": 32}.items()
    }
    save_file({f"model.{name}": tensor for name, tensor in (state | strange).items()}, tmp_path / "model.safetensors")
    found = rows_of(engine_of(card_of(tmp_path)), queries)
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_weights_of_another_size(tmp_path, monkeypatch):
    state = saved_state(tmp_path)
    state["layers.1.mlp.up_proj.weight"] = torch.ones(60, 64)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SettingsError, match=r"1 weights .* are missing in .*, or of another size \(layers\.1\.mlp\.up_"
    ):
        engine_of(card_of(tmp_path))
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    with pytest.raises(SettingsError, match=r"layers\.1\.mlp\.up_proj\.weight of \[128, 64\] numbers is missing"):
        engine_of(card_of(tmp_path))


def saved_state(folder, **changes):
    model = build(Qwen3Model, Qwen3Config, pad_token_id=0, **GROUPED, **changes)
    save(model, folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_memory_is_little_more_than_the_weights(tmp_path, figure):
    model = AutoModel.from_config(Qwen3Config(**MEMORY, pad_token_id=0), dtype=torch.bfloat16)
    total = sum(2 * parameter.numel() for parameter in model.parameters())
    save(model, tmp_path, max_shard_size="200MB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    del model
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    kilobytes, agreement, dtype = done.stdout.split()
    assert dtype == "bfloat16"
    assert float(agreement) >= 0.999
    share = int(kilobytes) * 1024 / total
    figure(f"peak memory while {total / 2**20:.0f} MB of weights are loaded: {share:.2f} of them")
    assert share <= 1.2


def test_any_error_of_a_models_code_ends_in_a_sentence(tmp_path, monkeypatch):
    card = card_of(save(build(BertModel, BertConfig, **SMALL), tmp_path), "mean")

    def broken(*_, **__):
        raise AttributeError("no such thing\nin two lines")

    monkeypatch.setattr(BertModel, "forward", broken)
    with pytest.raises(SettingsError, match=r"a bert model, cannot be computed here: AttributeError: no such thing$"):
        engine_of(card, dtype="auto")
    monkeypatch.setattr(BertModel, "__init__", broken)
    with pytest.raises(SettingsError, match=r"a bert model, cannot be loaded here: AttributeError: no such thing$"):
        engine_of(card, dtype="auto")
