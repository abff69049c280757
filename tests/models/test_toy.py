"""The toy model that comes with windve is a normal model folder, and has learned."""

import yaml
from torch import inference_mode, manual_seed, randperm
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.generation.text.model_card import read_generation_card
from deployments.settings import ModelSettings
from tests.kit.service import ROOT

TEXT = "Return a new object with the name of the file. If the file does not exist, the value is None."


def test_it_knows_texts_from_noise_and_writes_chats():
    config = yaml.safe_load((ROOT / "serve_app" / "generation.yaml").read_text())
    card = read_generation_card(ModelSettings(**config["applications"][0]["args"]["model"]))
    assert (card.context, set(card.end_tokens)) == (2048, {0, 2})
    tokenizer = AutoTokenizer.from_pretrained(card.model.folder)
    for text in (TEXT, "Größe: 5 €", "日本語 🙂\n\tend"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(card.model.folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    manual_seed(1)
    noise = ids[:, randperm(ids.shape[1])]
    with inference_mode():
        assert model(ids, labels=ids).loss < model(noise, labels=noise).loss - 1.0
