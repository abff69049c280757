"""Published configs in the words of the classes that compute them; what no class computes is refused by its name."""

import json

import pytest

from deployments.errors import SettingsError
from deployments.models.config_adapters import class_config
from deployments.models.model_files import read_model_card
from deployments.settings import ModelSettings
from tests.kit.published_models import CONFIGS, JINA, jina_weights, save_folder

NOMIC, GTE_EN, GTE_MULTILINGUAL, JINA_CODE = (
    CONFIGS[name] for name in ("nomic", "gte en", "gte multilingual", "jina code")
)
BERT = {"model_type": "bert", "hidden_size": 64, "vocab_size": 100, "position_embedding_type": "absolute"}


def translated(config, **changes):
    return class_config(config | changes, own_code=False)


OFF = {"use_bidirectional_attention": False, "attn_logit_softcapping": None, "partial_rotary_factor": 1}


OWN_WORDS = [CONFIGS[name] for name in ("distilbert", "mpnet", "modernbert")]


@pytest.mark.parametrize("config", [*OWN_WORDS, BERT, {"model_type": "qwen3"} | OFF])
def test_configs_in_the_words_of_their_class_stay_as_they_are(config):
    assert translated(config) is None


def test_nomic():
    found = translated(NOMIC)
    assert (found["model_type"], found["hidden_size"], found["num_hidden_layers"]) == ("nomic_bert", 64, 3)
    assert (found["num_attention_heads"], found["intermediate_size"], found["hidden_act"]) == (4, 256, "silu")
    assert (found["max_position_embeddings"], found["layer_norm_eps"]) == (8192, 1e-12)
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000.0}
    assert "auto_map" not in found
    assert translated(NOMIC, activation_function="geglu")["hidden_act"] == "gelu"
    assert translated(NOMIC, n_inner=2730, vocab_size=30522)["intermediate_size"] == 2816  # as its MLP rounds it
    assert translated(NOMIC, vocab_size=30522)["vocab_size"] == 30528  # a multiple of 64


def test_nomic_with_the_words_of_both():
    """As the hub has it today: with what transformers' class reads beside it, but for fewer positions."""
    both = translated(NOMIC, hidden_size=64, max_position_embeddings=2048, hidden_act="silu", head_dim=16)
    assert both == translated(NOMIC)
    native = {"model_type": "nomic_bert", "hidden_size": 64, "rope_parameters": {"rope_theta": 1000.0}}
    assert translated(native) is None


def test_gte():
    found = translated(GTE_EN)
    assert (found["model_type"], found["type_vocab_size"], found["pad_token_id"]) == ("gte", 0, 0)
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert translated(GTE_EN, model_type="gte") == found  # snowflake-arctic-embed-m-v2.0
    assert translated({"model_type": "gte", "rope_parameters": {"rope_theta": 1.0}}) is None


def test_gte_scales_its_frequencies():
    rope = translated(GTE_MULTILINGUAL)["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 160000.0, "factor": 8 ** (2 / 16)}


def test_jina():
    found = translated(JINA)
    assert (found["model_type"], found["feed_forward_type"], found["qk_norm"]) == ("jina_bert", "geglu", False)
    assert found["max_position_embeddings"] == 8192
    assert translated(JINA_CODE)["qk_norm"]
    rewritten = translated(JINA, _name_or_path=".", auto_map={"AutoModel": "modeling_bert.JinaBertModel"})
    assert rewritten == found


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (NOMIC, "prenorm", True),
        (NOMIC, "parallel_block", True),
        (NOMIC, "mlp_fc1_bias", True),
        (NOMIC, "qkv_proj_bias", True),
        (NOMIC, "rotary_emb_fraction", 0.5),
        (NOMIC, "rotary_emb_interleaved", True),
        (NOMIC, "rotary_scaling_factor", 2),
        (NOMIC, "use_rms_norm", True),
        (NOMIC, "activation_function", "gelu"),
        (NOMIC, "num_experts", 8),
        (NOMIC, "a_key_of_tomorrow", "on"),
        (GTE_EN, "logn_attention_scale", True),
        (GTE_EN, "pack_qkv", False),
        (GTE_EN, "layer_norm_type", "rms_norm"),
        (GTE_EN, "position_embedding_type", "absolute"),
        (GTE_EN, "rope_scaling", {"type": "ntk", "factor": 2.0, "mixed_b": 0.625}),
        (GTE_EN, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        (JINA, "feed_forward_type", "swiglu"),
        (JINA_CODE, "feed_forward_type", "original"),
        (BERT, "position_embedding_type", "alibi"),
        (BERT, "position_embedding_type", "relative_key"),
        (BERT | {"model_type": "xlm-roberta"}, "position_embedding_type", "rotary"),
        ({"model_type": "llama"}, "use_bidirectional_attention", True),
        ({"model_type": "qwen3"}, "attn_logit_softcapping", 50.0),
        ({"model_type": "mistral"}, "partial_rotary_factor", 0.5),
    ],
)
def test_what_no_class_computes_is_refused_by_name(config, key, value):
    with pytest.raises(SettingsError) as caught:
        translated(config, **{key: value})
    said = str(caught.value)
    assert said.startswith(f"args.model.id: config.json says {key}: ")
    assert said.count("\n") == 0
    assert ("trust_remote_code" in said) == ("auto_map" in config)


@pytest.mark.parametrize("key", ["n_inner", "n_head"])
def test_a_size_that_is_missing_is_named(key):
    with pytest.raises(SettingsError, match=f"config.json gives no {key}"):
        translated({name: value for name, value in NOMIC.items() if name != key})


def test_what_the_published_code_takes_for_granted():
    """Its defaults are not those of transformers' class: an absent key may be the one that is refused."""
    with pytest.raises(SettingsError, match="says qkv_proj_bias: True"):
        translated({name: value for name, value in NOMIC.items() if name != "qkv_proj_bias"})


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_quantized_weights_are_refused(method):
    with pytest.raises(SettingsError, match=f"the weights are quantized \\({method}\\), which is not supported"):
        translated(BERT, quantization_config={"quant_method": method})


def test_code_that_nobody_has_translated_is_not_passed_over():
    """Transformers would compute a plain BERT."""
    config = BERT | {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    with pytest.raises(SettingsError, match="position_embedding_type: 'rotary', which no xlm-roberta model"):
        translated(config | {"model_type": "xlm-roberta", "position_embedding_type": "rotary"})  # jina-embeddings-v3
    with pytest.raises(
        SettingsError, match=r"code of its own \(code\.Model\), and .*; args\.model\.trust_remote_code would"
    ):
        translated(config)
    both_ways = {"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}, "is_causal": False}
    assert translated(both_ways) is None  # transformers' class reads that key
    with pytest.raises(SettingsError, match="code of its own"):
        translated({key: value for key, value in both_ways.items() if key != "is_causal"})
    assert class_config(config, own_code=True) is None
    assert class_config(NOMIC | {"prenorm": True}, own_code=True) is None
    assert class_config(NOMIC, own_code=True) == translated(NOMIC)  # which needs no code of its own


@pytest.mark.parametrize(
    ("config", "kind", "positions"),
    [(NOMIC, "nomic_bert", 8192), (GTE_EN, "gte", 8192), (JINA, "jina_bert", 8192), (JINA_CODE, "jina_bert", 8192)],
)
def test_card(tmp_path, config, kind, positions):
    folder = save_folder(tmp_path / "model", config, jina_weights(JINA))
    card = read_model_card(ModelSettings(id=str(folder)))
    assert (card.model_type, card.kind, card.dimension, card.layers) == (kind, "embedding", 64, 3)
    assert (card.vocab_size, card.max_tokens, card.pooling) == (30528, positions, "mean")
    assert not card.trust_remote_code
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(SettingsError, match="quantized"):
        read_model_card(ModelSettings(id=str(folder)))
