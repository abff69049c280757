"""Translates a published config.json into the config of the class that computes the model. Pure.

Models that were published with their own code (nomic-embed, gte-en-v1.5, jina-embeddings-v2) have configs for that
code. Transformers' classes silently ignore keys that they do not know, and compute a different model. So here every key
of such a config is translated, known to change nothing, or rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.errors import SettingsError
from deployments.models.model_folder import bad_model

Config = Mapping[str, Any]


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Keys that transformers, sentence-transformers and trainers write into any config, but no forward pass reads.
_HOUSEKEEPING = _keys(
    "architectures auto_map bos_token_id classifier_dropout cls_token_id dtype eos_token_id finetuning_task "
    "gradient_checkpointing id2label initializer_range label2id mask_token_id matryoshka_dimensions model_max_length "
    "model_type num_labels output_attentions output_hidden_states problem_type return_dict sentence_transformers "
    "sep_token_id sbert_ce_default_activation_function task_specific_params tie_word_embeddings tokenizer_class "
    "torch_dtype torchscript transformers.js_config transformers_version unsloth_version use_cache use_return_dict"
)
_KEPT = ("architectures", "bos_token_id", "classifier_dropout", "eos_token_id", "id2label", "label2id", "problem_type")


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family's published config is read."""

    model_type: str  # of the class
    takes: Mapping[str, tuple[str, Any]]  # the class's key: the published key, and its default in the published code
    computes: Mapping[str, tuple[Any, tuple[Any, ...]]]  # a key: its default there, and the supported values
    harmless: frozenset[str]  # keys without effect on the result: dropout, training, the choice of a kernel

    def translate(self, config: Config) -> dict[str, Any]:
        """Translate a config. Raises SettingsError, which names the key, for what is not supported."""
        for key, (default, values) in self.computes.items():
            if config.get(key, default) not in values:
                raise _refused(key, config.get(key, default), self.model_type)
        names = {published for published, _ in self.takes.values()}
        known = names | self.takes.keys() | self.computes.keys() | self.harmless | _HOUSEKEEPING
        for key, value in config.items():
            if value and key not in known and not key.startswith("_"):  # a key that is off changes nothing
                raise _refused(key, value, self.model_type)
        found = {key: config[key] for key in _KEPT if key in config}
        for key, (published, default) in self.takes.items():
            found[key] = config.get(published, default)
            if found[key] is _NEEDED:
                raise bad_model(f"config.json gives no {published}")
        return found | {"model_type": self.model_type}


_NEEDED = object()
_BERT_SIZES = {
    key: (key, _NEEDED)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
}
_DROPOUT = _keys("attention_probs_dropout_prob hidden_dropout_prob")

# nomic-ai/nomic-bert-2048: NomicBertConfig, with the defaults of GPT2Config
_NOMIC = _Family(
    "nomic_bert",
    takes={
        "vocab_size": ("vocab_size", _NEEDED),
        "hidden_size": ("n_embd", _NEEDED),
        "num_hidden_layers": ("n_layer", _NEEDED),
        "num_attention_heads": ("n_head", _NEEDED),
        "intermediate_size": ("n_inner", _NEEDED),
        "max_position_embeddings": ("n_positions", 1024),
        "type_vocab_size": ("type_vocab_size", 2),
        "layer_norm_eps": ("layer_norm_epsilon", 1e-5),
        "hidden_act": ("activation_function", "gelu_new"),
        "rope_parameters": ("rotary_emb_base", 10000.0),
        "pad_token_id": ("pad_token_id", 0),
    },
    computes={
        "activation_function": ("gelu_new", ("swiglu", "geglu")),
        "causal": (False, (False,)),
        "mlp_fc1_bias": (True, (False,)),
        "mlp_fc2_bias": (True, (False,)),
        "moe_every_n_layers": (0, (0, None)),
        "num_experts": (0, (0, None)),
        "parallel_block": (False, (False,)),
        "parallel_block_tied_norm": (False, (False,)),
        "prenorm": (False, (False,)),
        "qkv_proj_bias": (True, (False,)),
        "rotary_emb_fraction": (0.0, (1,)),
        "rotary_emb_interleaved": (False, (False,)),
        "rotary_emb_scale_base": (None, (None,)),
        "rotary_scaling_factor": (None, (None,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)),
        "scale_attn_weights": (True, (True,)),
        "use_rms_norm": (False, (False, None)),
    },
    harmless=_DROPOUT
    | _keys(
        "attn_pdrop dense_seq_output embd_pdrop fused_bias_fc fused_dropout_add_ln head_dim max_trained_positions "
        "pad_vocab_size_multiple reorder_and_upcast_attn resid_pdrop summary_activation summary_first_dropout "
        "summary_proj_to_labels summary_type summary_use_proj use_flash_attn use_xentropy"
    ),
)

# Alibaba-NLP/new-impl: NewConfig. transformers' gte is its port.
_GTE = _Family(
    "gte",
    takes={
        **_BERT_SIZES,
        "hidden_act": ("hidden_act", "gelu"),
        "max_position_embeddings": ("max_position_embeddings", 2048),
        "type_vocab_size": ("type_vocab_size", 1),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "pad_token_id": ("pad_token_id", 0),
        "rope_parameters": ("rope_theta", 10000.0),
    },
    computes={
        "layer_norm_type": ("layer_norm", ("layer_norm",)),
        "logn_attention_clip1": (False, (False,)),
        "logn_attention_scale": (False, (False,)),
        "pack_qkv": (True, (True,)),
        "position_embedding_type": ("rope", ("rope",)),
    },
    harmless=_DROPOUT | {"rope_scaling", "unpad_inputs", "use_memory_efficient_attention"},
)

# jinaai/jina-bert-implementation and jinaai/jina-bert-v2-qk-post-norm: JinaBertConfig
_JINA = _Family(
    "jina_bert",
    takes={
        **_BERT_SIZES,
        "hidden_act": ("hidden_act", "gelu"),
        "max_position_embeddings": ("max_position_embeddings", 512),
        "type_vocab_size": ("type_vocab_size", 2),
        "layer_norm_eps": ("layer_norm_eps", 1e-12),
        "pad_token_id": ("pad_token_id", 0),
        "feed_forward_type": ("feed_forward_type", "original"),
    },
    computes={
        "feed_forward_type": ("original", ("geglu", "reglu", "original")),
        "position_embedding_type": ("absolute", ("alibi",)),
    },
    harmless=_DROPOUT | {"attn_implementation", "emb_pooler"},
)

# These have absolute positions whatever position_embedding_type says.
_ABSOLUTE = _keys("albert bert camembert electra ernie mpnet roberta xlm-roberta xlm-roberta-xl")
# Keys that other classes read and these silently ignore, with the values that change nothing.
_DECODERS = _keys("llama mistral qwen2 qwen3")
_UNREAD = {"attn_logit_softcapping": None, "partial_rotary_factor": 1.0, "use_bidirectional_attention": False}
# For these names, transformers' classes compute the same as the code with which the first models were published.
_PORTED = _keys("eurobert gte modernbert nomic_bert")


def class_config(config: Config, *, own_code: bool) -> dict[str, Any] | None:
    """The config of the class that computes this model. None if config.json has the class's own format already.

    `own_code`: the settings allow the model's own code, which then computes models that would otherwise be rejected.
    Raises SettingsError, which names the key that no class here supports.
    """
    try:
        return _class_config(config)
    except SettingsError as error:
        if "auto_map" not in config:
            raise
        if own_code:
            return None
        raise SettingsError(
            error.key, f"{error.problem}; args.model.trust_remote_code would run the model's own code"
        ) from None


def _class_config(config: Config) -> dict[str, Any] | None:
    if method := config.get("quantization_config"):
        how = method.get("quant_method", "some way") if isinstance(method, Mapping) else method
        raise bad_model(f"the weights are quantized ({how}), which is not supported: serve the model's own weights")
    kind = config.get("model_type")
    if kind == "nomic_bert" and "n_embd" in config:
        return _nomic(config)
    if kind == "new" or (kind == "gte" and "rope_parameters" not in config):
        return _gte(config)
    if _code(config):
        return _jina(config)
    positions = config.get("position_embedding_type")
    if kind in _ABSOLUTE and positions not in {None, "absolute"}:
        raise _refused("position_embedding_type", positions, str(kind))
    if kind in _ABSOLUTE | _PORTED and config.get("is_causal"):  # transformers: only while no text is padded
        raise _refused("is_causal", True, str(kind))
    for key, nothing in _UNREAD.items() if kind in _DECODERS else ():
        if config.get(key) not in (None, nothing):
            raise _refused(key, config[key], str(kind))
    code = [name for key, name in (config.get("auto_map") or {}).items() if key.startswith("AutoModel")]
    same = kind in _PORTED or (kind == "qwen2" and "is_causal" in config)  # gte-Qwen2: transformers obeys this key
    if code and not same:  # transformers' class of that name, if there is one, may compute something else
        raise bad_model(f"config.json names code of its own ({code[0]}), and no class here is known to do the same")
    return None


def _nomic(config: Config) -> dict[str, Any]:
    found = _NOMIC.translate(config)
    multiple = int(config.get("pad_vocab_size_multiple") or 1)
    found["vocab_size"] = _up(found["vocab_size"], multiple)
    found["intermediate_size"] = _up(found["intermediate_size"], 256)  # as its gated MLP rounds it
    found["hidden_act"] = {"swiglu": "silu", "geglu": "gelu"}[found["hidden_act"]]
    found["rope_parameters"] = {"rope_type": "default", "rope_theta": float(found["rope_parameters"])}
    return found


def _gte(config: Config) -> dict[str, Any]:
    """Translate NTK scaling by f as in its code (kexue.fm/archives/9706, equation 6): the frequencies of base * f,
    divided by f ** (2 / d). In transformers this is linear scaling by that factor, with the base times f.
    """
    found = _GTE.translate(config)
    theta, scaling = float(found["rope_parameters"]), config.get("rope_scaling")
    found["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        factor = float(scaling.get("factor", 0))
        if scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None or factor < 1:
            raise _refused("rope_scaling", dict(scaling), "gte")
        size = found["hidden_size"] // found["num_attention_heads"]
        found["rope_parameters"] = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / size)}
    return found


def _code(config: Config) -> str:
    """Which of Jina's implementations a BERT with ALiBi needs; "" for none, since others have other slopes or gates."""
    if (config.get("model_type"), config.get("position_embedding_type")) != ("bert", "alibi"):
        return ""
    named = [config.get("_name_or_path"), config.get("auto_map"), config.get("architectures")]
    return next((code for code in ("qk-post-norm", "jina-bert", "JinaBert") if code in str(named)), "")


def _jina(config: Config) -> dict[str, Any]:
    found = _JINA.translate(config) | {"qk_norm": _code(config) == "qk-post-norm"}
    if found["qk_norm"] and found["feed_forward_type"] == "original":
        raise _refused("feed_forward_type", "original", "jina_bert with norms of queries and keys")
    return found


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refused(key: str, value: Any, family: str) -> SettingsError:
    return bad_model(f"config.json says {key}: {value!r}, which no {family} model here computes")
