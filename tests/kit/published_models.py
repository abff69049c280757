"""Models of each family as hubs publish them: config.json and the weights' names written out, from the best known model
of each, made small in hidden size, layers and vocabulary only. Weights are random.
"""

import json
import re
import shutil
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from tests.kit.kinds_of_models import PACKAGE

HIDDEN, HEADS = 64, 4
SIZE = HIDDEN // HEADS

# sentence-transformers/msmarco-distilbert-base-tas-b
DISTILBERT = {
    "activation": "gelu",
    "architectures": ["DistilBertModel"],
    "attention_dropout": 0.1,
    "dim": HIDDEN,
    "dropout": 0.1,
    "hidden_dim": 128,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "model_type": "distilbert",
    "n_heads": HEADS,
    "n_layers": 3,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 30522,
}
# sentence-transformers/all-mpnet-base-v2
MPNET = {
    "_name_or_path": "microsoft/mpnet-base",
    "architectures": ["MPNetForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "mpnet",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "vocab_size": 30527,
}
# Alibaba-NLP/gte-modernbert-base
MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": HIDDEN,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 5,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "reference_compile": True,
    "repad_logits_with_grad": False,
    "sep_token_id": 50282,
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "torch_dtype": "float16",
    "vocab_size": 50368,
}
# nomic-ai/nomic-embed-text-v1.5
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertForPreTraining",
    },
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_inner": 256,
    "n_layer": 3,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": 30528,
}
# EuroBERT/EuroBERT-210m
EUROBERT = {
    "architectures": ["EuroBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_eurobert.EuroBertConfig",
        "AutoModel": "modeling_eurobert.EuroBertModel",
        "AutoModelForMaskedLM": "modeling_eurobert.EuroBertForMaskedLM",
    },
    "bos_token": "<|begin_of_text|>",
    "bos_token_id": 128000,
    "classifier_pooling": "late",
    "eos_token": "<|end_of_text|>",
    "eos_token_id": 128001,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "mask_token": "<|mask|>",
    "mask_token_id": 128002,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "eurobert",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "num_key_value_heads": HEADS,
    "pad_token": "<|end_of_text|>",
    "pad_token_id": 128001,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "vocab_size": 128256,
}
_NEW_CODE = "Alibaba-NLP/new-impl--"
# Alibaba-NLP/gte-base-en-v1.5
GTE_EN = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{_NEW_CODE}configuration.NewConfig",
        "AutoModel": f"{_NEW_CODE}modeling.NewModel",
        "AutoModelForSequenceClassification": f"{_NEW_CODE}modeling.NewForSequenceClassification",
    },
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": None,
    "rope_theta": 500000,
    "torch_dtype": "float32",
    "type_vocab_size": 0,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 30528,
}
# Alibaba-NLP/gte-multilingual-base
GTE_MULTILINGUAL = GTE_EN | {
    "architectures": ["NewModel", "NewForTokenClassification"],
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "pad_token_id": 1,
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "torch_dtype": "float16",
    "type_vocab_size": 1,
}
_JINA_CODE = "jinaai/jina-bert-implementation--"
# jinaai/jina-embeddings-v2-base-en
JINA = {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "model_max_length": 8192,
    "architectures": ["JinaBertForMaskedLM"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {
        "AutoConfig": f"{_JINA_CODE}configuration_bert.JinaBertConfig",
        "AutoModelForMaskedLM": f"{_JINA_CODE}modeling_bert.JinaBertForMaskedLM",
        "AutoModel": f"{_JINA_CODE}modeling_bert.JinaBertModel",
        "AutoModelForSequenceClassification": f"{_JINA_CODE}modeling_bert.JinaBertForSequenceClassification",
    },
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_type": "bert",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30528,
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
}
# jinaai/jina-embeddings-v2-base-code
_JINA_QK = "jinaai/jina-bert-v2-qk-post-norm"
JINA_CODE = JINA | {
    "_name_or_path": _JINA_QK,
    "auto_map": {
        "AutoConfig": f"{_JINA_QK}--configuration_bert.JinaBertConfig",
        "AutoModel": f"{_JINA_QK}--modeling_bert.JinaBertModel",
    },
    "attn_implementation": "torch",
}


@dataclass(frozen=True)
class Published:
    """How to make a model of one family. `own`: what transformers' class is told, written by hand; `names`: regular
    expressions from the class's names of weights to the published ones; `joined`: published weights that hold several.
    """

    config: dict
    own: dict = field(default_factory=dict)
    names: dict = field(default_factory=dict)
    joined: dict = field(default_factory=dict)


_SHAPE = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": HEADS, "layer_norm_eps": 1e-12}
_QKV = ("q_proj", "k_proj", "v_proj")
_GTE_OWN = {**_SHAPE, "model_type": "gte", "vocab_size": 30528, "intermediate_size": 128, "hidden_act": "gelu"}
_GTE_NAMES = {
    r"^layers\.": "encoder.layer.",
    r"self_attn\.o_proj": "attention.o_proj",
    "post_attention_layernorm": "attn_ln",
    "post_mlp_layernorm": "mlp_ln",
}
_GTE_JOINED = {
    "attention.qkv_proj": tuple(f"self_attn.{part}" for part in _QKV),
    "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
}

FAMILIES = {
    "distilbert": Published(DISTILBERT),
    "mpnet": Published(MPNET),
    "modernbert": Published(MODERNBERT),
    "eurobert": Published(EUROBERT, names={"^": "model."}),
    "nomic": Published(
        NOMIC,
        {
            **_SHAPE,
            "model_type": "nomic_bert",
            "vocab_size": 30528,
            "intermediate_size": 256,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "type_vocab_size": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        {
            r"^embeddings\.LayerNorm": "emb_ln",
            r"^layers\.": "encoder.layers.",
            r"self_attn\.o_proj": "attn.out_proj",
            r"mlp\.up_proj": "mlp.fc11",
            r"mlp\.gate_proj": "mlp.fc12",
            r"mlp\.down_proj": "mlp.fc2",
            "post_attention_layernorm": "norm1",
            "post_mlp_layernorm": "norm2",
        },
        {"attn.Wqkv": tuple(f"self_attn.{part}" for part in _QKV)},
    ),
    "gte en": Published(
        GTE_EN,
        {
            **_GTE_OWN,
            "type_vocab_size": 0,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        _GTE_NAMES,
        _GTE_JOINED,
    ),
    "gte multilingual": Published(
        GTE_MULTILINGUAL,
        # the frequencies are set by `reference`
        {**_GTE_OWN, "type_vocab_size": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
        {**_GTE_NAMES, "^": "new."},
        _GTE_JOINED,
    ),
}


def shaken(model):
    """Random weights that are strong enough for answers that differ; norms and biases have a say."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.1 * noise if "norm" in name.lower() and name.endswith("weight") else 0.15 * noise
    return model.eval()


def reference(name, kind=AutoModel, **changes):
    """Transformers' own class, told by hand what the published config means."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(**((family.own or family.config) | changes))
    model = shaken(kind.from_config(config, dtype=torch.float32))
    if name == "gte multilingual":  # kexue.fm/archives/9706, equation 6, as the published code has it
        powers = torch.arange(0, SIZE, 2).float() / SIZE
        model.base_model.rotary_emb.inv_freq = 1 / (20000 * 8) ** powers / 8 ** (2 / SIZE)
    return model


def published_weights(name, model):
    """By the names under which hubs hold them."""
    if model.base_model is not model:  # its head's weights are named as in transformers' class
        prefix = model.base_model_prefix
        own = {key: value for key, value in model.state_dict().items() if not key.startswith(f"{prefix}.")}
        outer = "" if "^" in FAMILIES[name].names else f"{prefix}."
        return own | {f"{outer}{key}": value for key, value in published_weights(name, model.base_model).items()}
    family, found = FAMILIES[name], {}
    state = dict(model.state_dict())
    for joined, parts in family.joined.items():
        for key in [key for key in state if parts[0] in key]:
            together = torch.cat([state.pop(key.replace(parts[0], part)) for part in parts])
            state[key.replace(parts[0], joined)] = together
    for key, value in state.items():
        for pattern, replacement in family.names.items():
            key = re.sub(pattern, replacement, key)  # noqa: PLW2901
        found[key] = value.contiguous()
    return found


def save_folder(folder, config, weights, pooling="mean"):
    """A model's folder as sentence-transformers lays it out; with no pooling, as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: weight.clone() for name, weight in weights.items()}  # tied ones twice, as many are published
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
