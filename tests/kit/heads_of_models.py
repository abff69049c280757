"""Small models with various heads after the transformer, saved as their libraries save them, with random weights."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, Gemma3TextConfig, ModernBertConfig

from tests.kit.kinds_of_models import PACKAGE, SHAPE, VOCABULARY, shaken

HIDDEN = SHAPE["hidden_size"]
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
NORMALIZE = {"name": "norm", "path": "norm", "type": "sentence_transformers.models.Normalize"}


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 260, "initializer_range": 0.2, **SHAPE}
GEMMA = Gemma3TextConfig(
    **COMMON, num_key_value_heads=2, head_dim=16, sliding_window=64, use_bidirectional_attention=True
)
LOCAL = ModernBertConfig(**COMMON, local_attention=16, pad_token_id=0)


def save_bert(folder, pooling="cls", *others, config=None):
    """Save a BERT (or a model of `config`) with its tokenizer, this pooling (None: none) and these other modules."""
    torch.manual_seed(2)
    shaken(AutoModel.from_config(config or BertConfig(**COMMON))).save_pretrained(folder)
    shutil.copy(PACKAGE / "tokenizer.json", folder)
    write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 256})
    modules = [TRANSFORMER, *others]
    if pooling is not None:
        flag = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}[pooling]
        write(folder / "1_Pooling/config.json", {f"pooling_mode_{flag}": True, "word_embedding_dimension": HIDDEN})
        modules.insert(1, {"name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    write(folder / "modules.json", [{**module, "idx": index} for index, module in enumerate(modules)])
    return folder


def dense(folder, path, sizes, activation="torch.nn.modules.linear.Identity", **config):
    """A Dense module in `folder`: its entry in modules.json, and its tensors."""
    torch.manual_seed(len(path) + sizes[1])
    outputs, inputs = sizes[1], sizes[0]
    tensors = {"linear.weight": torch.randn(outputs, inputs) * 0.2}
    if config.setdefault("bias", True):
        tensors["linear.bias"] = torch.randn(outputs)
    if config.get("use_residual") and inputs != outputs:
        tensors["residual.weight"] = torch.randn(outputs, inputs)
    about = {"in_features": inputs, "out_features": outputs, "activation_function": activation, **config}
    write(folder / path / "config.json", about)
    save_file(tensors, folder / path / "model.safetensors")
    return {"name": path, "path": path, "type": "sentence_transformers.models.Dense"}, tensors


def save_m3(folder):
    """bge-m3's files: a pooled transformer, and its two heads on tokens as safetensors."""
    save_bert(folder, "cls", NORMALIZE)
    heads = {}
    for name, outputs in (("sparse_linear", 1), ("colbert_linear", 24)):
        heads[name] = {"weight": torch.randn(outputs, HIDDEN) * 0.3, "bias": torch.randn(outputs) * 0.1}
        save_file(heads[name], folder / f"{name}.safetensors")
    special = {
        "cls_token": "[CLS]",
        "eos_token": "[SEP]",
        "pad_token": {"__type": "AddedToken", "content": "[PAD]"},
        "unk_token": "[UNK]",
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256, **special}
    write(folder / "tokenizer_config.json", about)
    return heads


def save_pylate(folder, config=None, **about):
    """A ColBERT as PyLate saves it. Its markers are tokens, here two unused ones of BERT's vocabulary."""
    projection, tensors = dense(folder, "1_Dense", (HIDDEN, 24), bias=False)
    save_bert(folder, None, {**projection, "type": "pylate.models.Dense.Dense"}, config=config)
    said = {"query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 32, "document_length": 180}
    write(folder / "config_sentence_transformers.json", {"model_type": "ColBERT", "prompts": {}, **said, **about})
    return tensors["linear.weight"]


def save_stanford(folder, **about):
    """A ColBERT as Stanford's code saves it: the projection is among the weights, settings in their own file."""
    save_bert(folder, None)
    (folder / "modules.json").unlink()
    projection = torch.randn(16, HIDDEN) * 0.2
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | {"linear.weight": projection}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    write(folder / "config.json", config)
    write(folder / "artifact.metadata", {"query_maxlen": 20, "doc_maxlen": 64, **about})
    return projection


def save_causal(folder, config, *, tied=True):
    """A small language model, with a tokenizer that knows each byte and has learned some words."""
    torch.manual_seed(4)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": 1200, "initializer_range": 0.3}
    AutoModelForCausalLM.from_config(config(**shape, tie_word_embeddings=tied)).eval().save_pretrained(folder)
    tokenizer = FastTokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), special_tokens=special)
    tokenizer.train_from_iterator([__doc__, save_causal.__doc__, *["yes", "no"] * 90], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>", "model_max_length": 1200}
    write(folder / "tokenizer_config.json", about)
    return folder
