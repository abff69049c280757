"""Models of each family as hubs publish them. `published/` has the config.json of each family's best-known model, and
the published names of its weights. Only hidden size, layers and vocabulary are reduced. Weights are random.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from tests.kit.kinds_of_models import PACKAGE
from tests.kit.packed_models import skip_unknown


@dataclass(frozen=True)
class Published:
    """How to create a model of one family. `own`: the arguments of transformers' class, written by hand. `names`:
    regular expressions from the class's weight names to the published ones. `joined`: published weights that combine
    several.
    """

    published_as: str
    config: dict
    own: dict = field(default_factory=dict)
    names: dict = field(default_factory=dict)
    joined: dict = field(default_factory=dict)


MODELS = {
    file.stem.replace("-", " "): Published(**json.loads(file.read_text()))
    for file in sorted(Path(__file__).with_name("published").iterdir())
}
CONFIGS = {name: model.config for name, model in MODELS.items()}
JINA = CONFIGS["jina"]
FAMILIES = [name for name in MODELS if "jina" not in name]  # transformers has a class of each


def shaken(model):
    """Randomize weights strongly enough that answers differ, including norms and biases."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.1 * noise if "norm" in name.lower() and name.endswith("weight") else 0.15 * noise
    return model.eval()


def reference(name, kind=AutoModel, **changes):
    """Transformers' own class, with the meaning of the published config written by hand."""
    skip_unknown((MODELS[name].own or MODELS[name].config)["model_type"])
    config = AutoConfig.for_model(**((MODELS[name].own or MODELS[name].config) | changes))
    model = shaken(kind.from_config(config, dtype=torch.float32))
    if name == "gte multilingual":  # kexue.fm/archives/9706, equation 6, as the published code has it
        size = config.hidden_size // config.num_attention_heads
        powers = torch.arange(0, size, 2).float() / size
        model.base_model.rotary_emb.inv_freq = 1 / (20000 * 8) ** powers / 8 ** (2 / size)
    return model


def published_weights(name, model):
    """The model's weights under their published names."""
    if model.base_model is not model:  # its head's weights are named as in transformers' class
        prefix = model.base_model_prefix
        own = {key: value for key, value in model.state_dict().items() if not key.startswith(f"{prefix}.")}
        outer = "" if "^" in MODELS[name].names else f"{prefix}."
        return own | {f"{outer}{key}": value for key, value in published_weights(name, model.base_model).items()}
    found, state = {}, dict(model.state_dict())
    for joined, parts in MODELS[name].joined.items():
        for key in [key for key in state if parts[0] in key]:
            together = torch.cat([state.pop(key.replace(parts[0], part)) for part in parts])
            state[key.replace(parts[0], joined)] = together
    for key, value in state.items():
        for pattern, replacement in MODELS[name].names.items():
            key = re.sub(pattern, replacement, key)  # noqa: PLW2901
        found[key] = value.contiguous()
    return found


def save_folder(folder, config, weights, pooling="mean"):
    """Write a model's folder in sentence-transformers' layout; without pooling, in transformers' layout."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: weight.clone() for name, weight in weights.items()}  # tied ones twice, as in many published files
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        module = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
        (folder / "modules.json").write_text(json.dumps([module]))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    shutil.copy(PACKAGE / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def jina_weights(config, seed=0):
    """As `jina-bert-implementation` names them, or `jina-bert-v2-qk-post-norm` where the config names that."""
    random = np.random.default_rng(seed)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    found = {
        "embeddings.word_embeddings.weight": random.normal(0, 0.3, (config["vocab_size"], hidden)),
        "embeddings.token_type_embeddings.weight": random.normal(0, 0.3, (config["type_vocab_size"], hidden)),
    }

    def linear(name, rows, columns, *, bias=True):
        found[f"{name}.weight"] = random.normal(0, 0.15, (rows, columns))
        if bias:
            found[f"{name}.bias"] = random.normal(0, 0.15, rows)

    def norm(name):
        found[f"{name}.weight"] = 1 + random.normal(0, 0.1, hidden)
        found[f"{name}.bias"] = random.normal(0, 0.1, hidden)

    norm("embeddings.LayerNorm")
    with_norms = "qk-post-norm" in config["_name_or_path"]
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}.attention.{part}", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        if with_norms:
            for part in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"):
                norm(f"{layer}.{part}")
            linear(f"{layer}.mlp.up_gated_layer", 2 * wide, hidden, bias=False)
            linear(f"{layer}.mlp.down_layer", hidden, wide)
        elif config["feed_forward_type"] == "original":
            linear(f"{layer}.intermediate.dense", wide, hidden)
            linear(f"{layer}.output.dense", hidden, wide)
            norm(f"{layer}.output.LayerNorm")
        else:
            linear(f"{layer}.mlp.gated_layers", 2 * wide, hidden, bias=False)
            linear(f"{layer}.mlp.wo", hidden, wide)
            norm(f"{layer}.mlp.layernorm")
    return {key: torch.from_numpy(value).float() for key, value in found.items()}
