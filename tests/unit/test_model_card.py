"""What the files of a model that generates say."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from deployments.errors import SettingsError
from deployments.generation.text.model_card import read_generation_card, with_end_of
from deployments.generation.text.sampling import Sampling
from deployments.settings import ModelSettings

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


def card(folder, generation=None, tokenizer=None, config=CONFIG, **settings):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.zeros((100, 8), np.float32)}, folder / "model.safetensors")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return read_generation_card(ModelSettings(id=str(folder), name="m", **settings))


def test_without_files_beside_the_config(tmp_path):
    found = card(tmp_path)
    assert (found.name, found.context, found.model.vocab_size, found.end_tokens) == ("m", 512, 100, (7,))
    assert (found.defaults, found.chat_template, found.special_tokens) == (Sampling(1.0, 0, 1.0), None, {})


def test_generation_config_has_end_tokens_and_defaults(tmp_path):
    found = card(tmp_path, {"eos_token_id": [8, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True})
    assert found.end_tokens == (8, 9)
    assert found.defaults == Sampling(0.7, 20, 0.8)
    assert card(tmp_path, {"repetition_penalty": 1.05, "min_p": 0.1}).defaults == Sampling(
        repetition_penalty=1.05, min_p=0.1
    )


@pytest.mark.parametrize("usual", [{"temperature": None, "top_p": None, "repetition_penalty": None}, {"top_k": -1}])
def test_null_and_minus_one_are_the_usual_values(tmp_path, usual):
    assert card(tmp_path, usual).defaults == Sampling()


def test_the_tokenizers_own_end_token_ends_an_answer_too(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 3, "<end>": 7, "beyond": 100}, unk_token="a"))
    for name, ends in (("</s>", (7, 3)), ("<end>", (7,)), ("beyond", (7,)), ("none", (7,)), (None, (7,))):
        found = card(tmp_path, tokenizer={"bos_token": None, "eos_token": name})
        assert with_end_of(found, tokenizer).end_tokens == ends


def test_the_setting_lowers_the_context(tmp_path):
    assert card(tmp_path, max_tokens=100).context == 100
    assert card(tmp_path, max_tokens=1000).context == 512


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        ({"eos_token_id": 100}, "the model has 100 tokens"),
        ({"eos_token_id": ["x"]}, "eos_token_id is"),
        ({"temperature": "hot"}, "has invalid sampling values"),
        ({"top_p": 0}, "has invalid sampling values"),
        ({"top_k": -2}, "has invalid sampling values"),
        ({"min_p": -0.1}, "has invalid sampling values"),
        ({"min_p": True}, "has invalid sampling values"),
        ({"repetition_penalty": 0}, "has invalid sampling values"),
        ({"temperature": float("nan")}, "has invalid sampling values"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path, generation, problem):
    with pytest.raises(SettingsError, match=problem):
        card(tmp_path, generation)


def test_chat_templates_and_special_tokens(tmp_path):
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    found = card(tmp_path, tokenizer={**names, "chat_template": "A"})
    assert found.chat_template == "A"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert card(tmp_path, tokenizer={"chat_template": several}).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert card(tmp_path, tokenizer={"chat_template": "A"}).chat_template == "J"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<b>"}))
    assert card(tmp_path, tokenizer={}).special_tokens == {"bos_token": "<b>"}
