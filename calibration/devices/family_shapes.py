"""Writes models with the shape of each packed family's smallest public model and random weights.

A model's cost does not depend on the values of its weights. The vocabulary is reduced, because its table is only looked
up, not multiplied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

_WORDS = 8192
_TOKENS = 512


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

    positions = {} if shape.model_type == "t5" else {"max_position_embeddings": _TOKENS + 2}
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=_WORDS, pad_token_id=0 if "roberta" not in shape.model_type else 1, **positions,
        **shape.values,
    )  # fmt: skip
    of = AutoModelForTextEncoding if shape.model_type == "t5" else AutoModel
    torch.manual_seed(0)
    model = of.from_config(config)  # type: ignore[no-untyped-call]
    if shape.shaken:
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * shape.shaken)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": _TOKENS}), encoding="utf-8")
