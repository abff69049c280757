"""Models that never lie in memory in float32: how much memory they take, and what they compute. And sentences."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    Qwen3Config,
    Qwen3Model,
)

from deployments.engines import TokenBatch, embed, torch_engine
from deployments.engines.torch_engine import TorchEngine
from deployments.errors import SettingsError
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings
from tests.kit.packed_models import build

NEVER = threading.Event()
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
KINDS = {
    "packed": (Qwen3Model, Qwen3Config, GROUPED),
    "own code": (DebertaV2Model, DebertaV2Config, SMALL | {"relative_attention": True}),
}
# 390 MB in bfloat16, in two shards
MEMORY = {"layers": 24, "hidden": 768, "heads": 12, "groups": 4, "size": 64, "inner": 2816, "words": 4000}
MEASURE = """
import re, sys, torch
from pathlib import Path
from deployments.engines import torch_engine
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings
import deployments.engines.forms, deployments.engines.projected, transformers.models.qwen3.modeling_qwen3

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


def save(model, folder):
    """As a hub would publish it, of an embedding model with tokenizer files that the card needs."""
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    return folder


def card_of(folder, pooling="last"):
    return read_model_card(ModelSettings(id=str(folder), pooling=pooling, max_tokens=256))


@pytest.mark.parametrize("form", KINDS)
def test_a_large_model_computes_what_a_small_one_does(tmp_path, monkeypatch, form):
    model, config, shape = KINDS[form]
    card = card_of(save(build(model, config, pad_token_id=0, **shape), tmp_path))
    batch = TokenBatch.random(card.vocab_size, [30, 7, 200, 1], seed=0)
    exact = embed(TorchEngine(card, CpuSettings(dtype="float32"), "cpu", 1), batch, NEVER)
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    same = embed(TorchEngine(card, CpuSettings(dtype="float32"), "cpu", 1), batch, NEVER)
    np.testing.assert_allclose(same, exact, atol=1e-4)
    narrow = TorchEngine(card, CpuSettings(dtype="bfloat16"), "cpu", 2)
    found = embed(narrow, batch, NEVER)
    cosines = np.sum(found * exact, 1) / np.linalg.norm(found, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosines.min() >= 0.999
    assert narrow.form == ("packed" if form == "packed" else "padded")
    if form == "packed":
        assert narrow.info.agreement == pytest.approx(1, abs=1e-3)
        assert narrow.info.agreement < 1
    else:
        assert narrow.info.agreement is None
        assert "not compared with float32" in narrow.info.why


def test_a_narrow_form_that_disagrees_is_left(tmp_path, monkeypatch):
    from deployments.engines import pooled_model

    card = card_of(save(build(Qwen3Model, Qwen3Config, pad_token_id=0, **GROUPED), tmp_path))
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    monkeypatch.setattr(torch_engine, "quick_cpu_dtype", lambda: ("bfloat16", "the CPU has it"))
    assert TorchEngine(card, CpuSettings(), "cpu", 1).info.dtype == "bfloat16"
    strict = pooled_model.Tolerance(pooled_model.agreement, 2.0, "cosine to float32")
    monkeypatch.setattr(pooled_model, "tolerance", lambda _: strict)
    info = TorchEngine(card, CpuSettings(), "cpu", 1).info
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
            TorchEngine(card_of(tmp_path), CpuSettings(dtype=dtype), "cpu", 1)


def test_weights_that_the_class_does_not_have_are_not_computed(tmp_path, monkeypatch):
    state = saved_state(tmp_path)
    batch = TokenBatch.random(100, [30, 7], seed=0)
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    exact = embed(TorchEngine(card_of(tmp_path), CpuSettings(dtype="float32"), "cpu", 1), batch, NEVER)
    strange = {
        f"layers.0.self_attn.{part}_proj.bias": torch.ones(size) for part, size in {"q": 64, "k": 32, "v": 32}.items()
    }
    save_file({f"model.{name}": tensor for name, tensor in (state | strange).items()}, tmp_path / "model.safetensors")
    found = embed(TorchEngine(card_of(tmp_path), CpuSettings(dtype="float32"), "cpu", 1), batch, NEVER)
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_weights_of_another_size(tmp_path, monkeypatch):
    state = saved_state(tmp_path)
    state["layers.1.mlp.up_proj.weight"] = torch.ones(60, 64)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SettingsError, match=r"1 weights .* are missing in .*, or of another size \(layers\.1\.mlp\.up_"
    ):
        TorchEngine(card_of(tmp_path), CpuSettings(dtype="float32"), "cpu", 1)
    monkeypatch.setattr(torch_engine, "LARGE", 1000)
    with pytest.raises(SettingsError, match=r"layers\.1\.mlp\.up_proj\.weight of \[128, 64\] numbers is missing"):
        TorchEngine(card_of(tmp_path), CpuSettings(dtype="float32"), "cpu", 1)


def saved_state(folder, **changes):
    model = build(Qwen3Model, Qwen3Config, pad_token_id=0, **GROUPED, **changes)
    save(model, folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def made_shards(folder):
    """Weights of `MEMORY`, written shard by shard."""
    shape = MEMORY
    config = Qwen3Config(
        vocab_size=shape["words"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["groups"],
        head_dim=shape["size"],
        intermediate_size=shape["inner"],
        pad_token_id=0,
    )
    with torch.device("meta"):
        model = Qwen3Model(config)
    names = {name: tensor.shape for name, tensor in model.state_dict().items()}
    half = len(names) // 2
    weight_map, total = {}, 0
    for number, part in enumerate((list(names)[:half], list(names)[half:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        tensors = {name: torch.randn(names[name]).mul_(0.02).bfloat16() for name in part}
        tensors |= {name: torch.ones(names[name]).bfloat16() for name in part if "norm" in name}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(2 * tensor.numel() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.architectures = ["Qwen3Model"]
    config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_memory_is_little_more_than_the_weights(tmp_path, figure):
    total = made_shards(tmp_path)
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
        TorchEngine(card, CpuSettings(), "cpu", 1)
    monkeypatch.setattr(BertModel, "__init__", broken)
    with pytest.raises(SettingsError, match=r"a bert model, cannot be loaded here: AttributeError: no such thing$"):
        TorchEngine(card, CpuSettings(), "cpu", 1)
