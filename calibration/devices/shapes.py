"""Writes models with real shapes and random weights: a model's cost does not depend on the values of its weights, so no
model hub is needed to measure it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

_WORDS = "river stone window garden market paper light winter road music water house field summer letter".split()  # noqa: SIM905 - each is one token
_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ADDED = 2  # tokens that a BERT tokenizer adds to each text
_POSITIONS, _CAUSAL_POSITIONS = 512, 2048
_FEW_WORDS = 8192  # of families: the table is only looked up, not multiplied


# BERT, in a folder that windve and sentence-transformers both load


@dataclass(frozen=True, slots=True)
class BertShape:
    """A BERT shape. The vocabulary is as large as that of uncased BERT."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 30_522

    @property
    def layer_weights(self) -> int:
        """The weights of all layers' products: query, key, value, output, up, down. A token uses each of them once."""
        return self.layers * (4 * self.hidden * self.hidden + 2 * self.hidden * self.intermediate)

    def operations(self, tokens: int) -> int:
        """FLOPs of one query: 2 per weight and token, plus 4 * tokens * hidden per token and layer for attention."""
        return tokens * (2 * self.layer_weights + self.layers * 4 * tokens * self.hidden)


BERT_LARGE = BertShape(hidden=1024, layers=24, heads=16, intermediate=4096)
MINILM = BertShape(hidden=384, layers=6, heads=12, intermediate=1536)


def text_of(tokens: int, seed: int = 0) -> str:
    """A text of exactly `tokens` tokens, special tokens included, for uncased BERT and for what `write_bert` writes."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    return " ".join(chance.choices(_WORDS, k=tokens - _ADDED))


def write_bert(shape: BertShape, folder: Path) -> None:
    """Write a model with [CLS] pooling and normalization, like bge. The folder is created atomically."""
    import torch
    from transformers import BertConfig, BertModel

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made_in:
        made = Path(made_in) / "model"
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=shape.intermediate, max_position_embeddings=_POSITIONS,
        )  # fmt: skip
        BertModel(config).save_pretrained(made)
        for name, content in _texts(shape).items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _write_tokenizer(shape.vocabulary, made)
        made.rename(folder)


def _texts(shape: BertShape) -> dict[str, Any]:
    """The files that sentence-transformers reads, and the tokenizer's config."""
    modes = {"cls_token": True, "mean_tokens": False, "max_tokens": False, "mean_sqrt_len_tokens": False}
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(parts.items())
    ]
    names = {f"{name}_token": token for name, token in _SPECIAL.items()}
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": _POSITIONS}
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": _POSITIONS, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": shape.hidden}
        | {f"pooling_mode_{mode}": chosen for mode, chosen in modes.items()},
        "tokenizer_config.json": tokenizer | names,
        "special_tokens_map.json": names,
    }


def _write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Uncased BERT's tokenizer with a vocabulary of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    filler = (f"##w{number}" for number in range(vocabulary - len(_SPECIAL) - len(_WORDS)))
    ids = {word: number for number, word in enumerate([*_SPECIAL.values(), *_WORDS, *filler])}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))  # noqa: S106 - a token of text
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(list(_SPECIAL.values()))
    made.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")


# Language models, to time steps of generation


@dataclass(frozen=True, slots=True)
class CausalShape:
    """A shape of the Llama family, with tied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int

    def cut(self, layers: int) -> CausalShape:
        """The same with fewer layers."""
        return replace(self, name=f"{self.name}, {layers} of its {self.layers} layers", layers=layers)


LLAMA_1B = CausalShape("Llama-3.2-1B's", 2048, 16, 32, 8, 8192, 128_256)
SMOLLM = CausalShape("SmolLM2-135M's", 576, 30, 9, 3, 1536, 49_152)


def write_causal(shape: CausalShape, folder: Path) -> None:
    """Write the model as transformers saves it, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, intermediate_size=shape.inner,
        max_position_embeddings=_CAUSAL_POSITIONS, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder, _CAUSAL_POSITIONS)  # type: ignore[no-untyped-call]


# Each packed family, at the shape of its smallest public model


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """`model`: the public model with this shape. `values`: its config's. `note`: what was left out. `queries`: batch
    size.
    """

    model: str
    model_type: str
    pooling: Literal["cls", "mean", "last"]
    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    queries: int = 16
    shaken: float = 0.0  # standard deviation of what is added to each weight, so that norms and biases matter

    def tiny(self) -> FamilyShape:
        """The same family with two small layers, in which every weight matters."""
        values = {name: _TINY.get(name, value) for name, value in self.values.items()}
        return replace(self, values=values, shaken=0.05)


def _bert(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"intermediate_size": inner}


def _grouped(hidden: int, layers: int, heads: tuple[int, int, int], inner: int) -> dict[str, Any]:
    """`heads`: (query heads, key heads, head size)."""
    own = {"num_key_value_heads": heads[1], "head_dim": heads[2]}
    return _bert(hidden, layers, heads[0], inner) | own


_TINY = {
    **_grouped(128, 2, (2, 1, 64), 192),
    "dim": 128,
    "hidden_dim": 192,
    "n_layers": 2,
    "n_heads": 2,  # DistilBERT
    "d_model": 128,
    "d_ff": 192,
    "d_kv": 64,
    "num_layers": 2,
    "num_heads": 2,  # T5
}
_BASE = _bert(768, 12, 12, 3072)
_GEMMA = _grouped(768, 24, (3, 1, 256), 1152)
_GATED_JINA = _bert(512, 4, 8, 2048) | {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}
SHAPES = {
    "BERT": FamilyShape("all-MiniLM-L6-v2", "bert", "mean", _bert(384, 6, 12, 1536)),
    "RoBERTa": FamilyShape("all-distilroberta-v1", "roberta", "mean", _bert(768, 6, 12, 3072)),
    "DistilBERT": FamilyShape(
        "msmarco-distilbert-base-tas-b", "distilbert", "cls", {"dim": 768, "n_layers": 6, "n_heads": 12}
    ),
    "MPNet": FamilyShape("all-mpnet-base-v2", "mpnet", "mean", _BASE),
    "ModernBERT": FamilyShape("granite-embedding-small-english-r2", "modernbert", "cls", _bert(384, 12, 12, 1536)),
    "nomic-embed": FamilyShape("nomic-embed-text-v1.5", "nomic_bert", "mean", _BASE),
    "gte": FamilyShape("gte-base-en-v1.5", "gte", "cls", _BASE),
    "jina-embeddings-v2": FamilyShape("jina-embeddings-v2-small-en", "jina_bert", "mean", _GATED_JINA),
    "EuroBERT": FamilyShape("EuroBERT-210m", "eurobert", "mean", _grouped(768, 12, (12, 12, 64), 3072)),
    "T5": FamilyShape(
        "gtr-t5-base", "t5", "mean", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "d_kv": 64}
    ),
    "Qwen2": FamilyShape(
        "KaLM-embedding-multilingual-mini-v1", "qwen2", "mean", _grouped(896, 24, (14, 2, 64), 4864), queries=8
    ),
    "Qwen3": FamilyShape("Qwen3-Embedding-0.6B", "qwen3", "last", _grouped(1024, 28, (16, 8, 128), 3072), queries=8),
    "Llama": FamilyShape("SmolLM2-135M", "llama", "last", _grouped(576, 30, (9, 3, 64), 1536)),
    "Mistral": FamilyShape(
        "e5-mistral-7b-instruct", "mistral", "last", _grouped(4096, 2, (32, 8, 128), 14336), "2 of its 32 layers", 8
    ),
    "Gemma 3": FamilyShape(
        "embeddinggemma-300m",
        "gemma3_text",
        "mean",
        _GEMMA | {"use_bidirectional_attention": True, "sliding_window": 512, "query_pre_attn_scalar": 256},
    ),
}


def write_family(shape: FamilyShape, folder: Path) -> None:
    """Write the model as transformers saves it, in float32."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding

    import deployments.engines.jina_bert  # noqa: F401 - registers its classes

    positions = {} if shape.model_type == "t5" else {"max_position_embeddings": _POSITIONS + 2}
    sizes = {**positions, **shape.values, "vocab_size": _FEW_WORDS}
    config = AutoConfig.for_model(shape.model_type, pad_token_id=int("roberta" in shape.model_type), **sizes)
    of = AutoModelForTextEncoding if shape.model_type == "t5" else AutoModel
    torch.manual_seed(0)
    model = of.from_config(config)  # type: ignore[no-untyped-call]
    if shape.shaken:
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * shape.shaken)
    _save(model, folder, _POSITIONS)


def _save(model: Any, folder: Path, most_tokens: int) -> None:
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": most_tokens}), encoding="utf-8")
