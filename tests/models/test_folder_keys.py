"""What a folder says is what is computed, or it is refused: each key alone, against sentence-transformers itself."""

import json
import re

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import Qwen3Config

from deployments.errors import SettingsError
from deployments.models.text_pairs import Cuts
from deployments.models.tokenizer import Tokenizer
from deployments.models.tokenizer_check import checked_tokenizer
from deployments.models.tokenizer_files import read_tokenizer
from tests.kit.engines import card_of, engine_of, rows_of
from tests.kit.heads_of_models import NORMALIZE, dense, save_bert, save_causal

TEXTS = ["to the CPU", "it is told busy " * 90, "the [SEP] of [MASK] Texts", "ΟΔΟΣ, ÜNÏCODE, İ"]
BERT, ST = "sentence_bert_config.json", "config_sentence_transformers.json"
TOKENIZER, POOLING, CONFIG = "tokenizer_config.json", "1_Pooling/config.json", "config.json"
NOT_HERE = "which is not supported"


@pytest.fixture
def folder(tmp_path):
    return save_bert(tmp_path, "mean", NORMALIZE)


def edit(folder, file, **keys):
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(before | keys))


def vectors(folder):
    """As windve computes them, with the default prompt."""
    card = card_of(folder)
    tokenizer = Tokenizer(card, checked_tokenizer(card))
    prompt = card.prompts.get(card.default_prompt_name or "", "")
    ids = tokenizer.encode([prompt + text for text in TEXTS], Cuts(truncate=True))
    rows = rows_of(engine_of(card), ids)[:, : card.dimension]
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if card.normalize else rows


def check_same(folder):
    """Up to the length of the vectors, which sentence-transformers does not mend after `truncate_dim`."""
    found, wanted = vectors(folder), SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)
    assert found.shape == wanted.shape
    if card_of(folder).normalize:
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        (BERT, {"max_seq_length": 16}),
        (BERT, {"do_lower_case": True}),
        (BERT, {"model_kwargs": {"attn_implementation": "eager", "trust_remote_code": True}}),
        (BERT, {"transformer_task": "feature-extraction", "unpad_inputs": False, "query_length": None}),
        (BERT, {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}),
        (ST, {"truncate_dim": 16}),
        (ST, {"similarity_fn_name": "dot", "foreign": 1}),
        (ST, {"prompts": {"q": "query: "}, "default_prompt_name": "q"}),
        (ST, {"prompts": {"q": None}, "default_prompt_name": "q"}),
        (TOKENIZER, {"truncation_side": "left"}),
        (
            "tokenizer.json",
            {"truncation": {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}},
        ),
        (TOKENIZER, {"padding_side": "left"}),
        (TOKENIZER, {"model_max_length": None, "max_len": 9}),  # null is no limit
        (POOLING, {"include_prompt": False, "embedding_dimension": 12}),
        (CONFIG, {"hidden_act": "relu", "layer_norm_eps": 0.1, "num_hidden_layers": 1}),
        (CONFIG, {"is_decoder": True}),
        (CONFIG, {"pad_token_id": 7, "tie_word_embeddings": False, "use_bidirectional_attention": False}),
    ],
)
def test_what_a_key_says_is_computed(folder, file, keys):
    edit(folder, file, **keys)
    check_same(folder)


@pytest.mark.parametrize(
    ("file", "keys", "sentence"),
    [
        (BERT, {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "says processing_kwargs.text: {'add_sp"),
        (BERT, {"processing_kwargs": {"common": {"max_length": 8}}}, "says processing_kwargs.common: "),
        (BERT, {"tokenizer_args": {"model_max_length": 8}}, "says tokenizer_args.model_max_length: 8, " + NOT_HERE),
        (BERT, {"processor_kwargs": {"truncation_side": "left"}}, "says processor_kwargs.truncation_side: 'left'"),
        (BERT, {"config_args": {"hidden_act": "relu"}}, "says config_args.hidden_act: 'relu'"),
        (BERT, {"config_kwargs": {"is_causal": False}}, "says config_kwargs.is_causal: False"),
        (BERT, {"transformer_task": "fill-mask"}, "of this embedding model says transformer_task: 'fill-mask'"),
        (BERT, {"query_length": 4}, "of this embedding model says query_length: 4"),
        (BERT, {"module_output_name": "mine"}, "of this embedding model says module_output_name: 'mine'"),
        (BERT, {"modality_config": {"message": {"method": "forward"}}}, "the model reads message, and only text is"),
        (BERT, {"a_key_of_version_7": 1}, "says a_key_of_version_7: 1, " + NOT_HERE),
        (ST, {"max_active_dims": 4}, "says max_active_dims: 4, " + NOT_HERE),
        (POOLING, {"pooling_layer": -2}, "1_Pooling/config.json says pooling_layer: -2, " + NOT_HERE),
        (POOLING, {"pooling_mode": "max"}, "the model pools by max; one of cls, mean, last is served"),
        (CONFIG, {"is_causal": True}, "config.json says is_causal: True, which no bert model here computes"),
    ],
)
def test_what_a_key_says_is_refused(folder, file, keys, sentence):
    edit(folder, file, **keys)
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        card_of(folder)


STATIC = {"path": "", "type": "sentence_transformers.models.StaticEmbedding"}
POOLED = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
SPLADE = {"path": "2", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}
FIRST = {"path": "", "type": "sentence_transformers.models.Transformer"}


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ([STATIC, NORMALIZE], "StaticEmbedding, which is not supported: it is a table of vectors, one for each token"),
        ([FIRST, POOLED, {**FIRST, "path": "2"}], "Transformer, Pooling, Transformer are not supported in this order"),
        ([FIRST, POOLED, POOLED], "Transformer, Pooling, Pooling are not supported in this order"),
        ([FIRST, SPLADE, NORMALIZE], "Transformer, SpladePooling, Normalize are not supported in this order"),
        ([{**FIRST, "type": "sentence_transformers.models.Router"}], "it has different modules for queries and docu"),
    ],
)
def test_modules_that_are_refused(folder, modules, sentence):
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SettingsError, match=sentence):
        card_of(folder)


def test_a_dropout_is_served(folder):
    module = {"path": "4_Dropout", "type": "sentence_transformers.models.Dropout", "name": "4", "idx": 3}
    edit(folder, "4_Dropout/config.json", dropout=0.1)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, module]))
    check_same(folder)


@pytest.mark.parametrize("pickled", [False, True])
def test_the_transformer_may_have_a_folder_of_its_own(tmp_path, pickled):
    """As sentence-transformers saved it before 2.0."""
    module, _ = dense(tmp_path, "2_Dense", (64, 24), "torch.nn.modules.activation.Tanh")
    save_bert(tmp_path, "mean", module)
    edit(tmp_path, BERT, max_seq_length=16)
    inside = tmp_path / "0_Transformer"
    inside.mkdir()
    for name in (CONFIG, TOKENIZER, BERT, "tokenizer.json", "model.safetensors"):
        (tmp_path / name).rename(inside / name)
    if pickled:
        import torch

        torch.save(load_file(inside / "model.safetensors"), inside / "pytorch_model.bin")
        (inside / "model.safetensors").unlink()
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    check_same(tmp_path)


def test_half_precision_that_overflows_is_found(folder):
    """Not finite in float16: the vectors of a model whose weights are large. `Embedder` refuses it at the warm-up."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1e4 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    card = card_of(folder)
    ids = Tokenizer(card).encode(TEXTS, Cuts(truncate=True))
    assert np.isfinite(rows_of(engine_of(card), ids)).all()
    assert not np.isfinite(rows_of(engine_of(card, dtype="float16"), ids)).all()
    assert engine_of(card, dtype="auto").info.dtype in {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"model_type": "MultiVectorEncoder"}, "the model has no module Normalize of token_embeddings"),
        ({"model_type": "MultiVectorEncoder", "query_prefix": "[Q] "}, "the model's query_prefix is PyLate's"),
        ({"model_type": "ColBERT", "prompts": {"query": "q: "}}, "a model of PyLate with prompts is not supported"),
        ({"model_type": "ColBERT", "query_expansion": {"length": 8}}, "says query_expansion: {'length': 8}"),
    ],
)
def test_what_multi_vector_models_are_refused(tmp_path, about, sentence):
    module, _ = dense(tmp_path, "1_Dense", (64, 24), bias=False)
    save_bert(tmp_path, None, module)
    (tmp_path / ST).write_text(json.dumps(about))
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        card_of(tmp_path)


def test_the_words_of_a_reranker_are_those_of_its_template(tmp_path):
    save_causal(tmp_path, Qwen3Config)
    score = {"path": "1", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}
    (tmp_path / "modules.json").write_text(json.dumps([FIRST, score]))
    fast = read_tokenizer(tmp_path)
    ids = {"true_token_id": fast.token_to_id("yes"), "false_token_id": fast.token_to_id("no")}
    edit(tmp_path, "1/config.json", **ids)
    assert card_of(tmp_path, template="qwen3-reranker").kind == "reranker"
    edit(tmp_path, "1/config.json", false_token_id=None)
    with pytest.raises(SettingsError, match="LogitScore says false_token_id: None, and the template's 'no' is another"):
        card_of(tmp_path, template="qwen3-reranker")
