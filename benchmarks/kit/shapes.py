"""Writes models with a real shape and random weights, in folders that windve and sentence-transformers both load.

A model's cost does not depend on the values of its weights, so no model hub is needed to measure it.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.serving import ROOT
from benchmarks.kit.texts import model_folder

_CACHE = ROOT / "reports" / "bench" / "models"


@dataclass(frozen=True, slots=True)
class BertShape:
    """A BERT shape. The vocabulary is that of uncased BERT, with the tokenizer of all-MiniLM-L6-v2."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 30_522
    positions: int = 512

    @property
    def layer_weights(self) -> int:
        """The weights of all layers' products: query, key, value, output, up, down. A token uses each of them once."""
        return self.layers * (4 * self.hidden * self.hidden + 2 * self.hidden * self.intermediate)

    def operations(self, tokens: int) -> int:
        """FLOPs of one query: 2 per weight and token, plus 4 * tokens * hidden per token and layer for attention."""
        return tokens * (2 * self.layer_weights + self.layers * 4 * tokens * self.hidden)


BGE_LARGE = BertShape(hidden=1024, layers=24, heads=16, intermediate=4096)


def bge_large_folder() -> Path:
    """A model with bge-large's shape: 335 million weights, 1.3 GB in float32. Created on first use, in some seconds."""
    folder = _CACHE / "bge-large-random"
    if not folder.exists():
        write_bert(BGE_LARGE, folder)
    return folder


def write_bert(shape: BertShape, folder: Path) -> None:
    """Write a model with [CLS] pooling and normalization, like bge. The folder is created atomically."""
    import torch
    from transformers import BertConfig, BertModel

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made.chmod(0o755)
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=shape.intermediate,
            max_position_embeddings=shape.positions,
        )  # fmt: skip
        BertModel(config).save_pretrained(made)
        for name, content in _texts(shape).items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            shutil.copyfile(model_folder() / name, made / name)
        made.rename(folder)
    except OSError:
        if not folder.exists():  # another process may have made it meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _texts(shape: BertShape) -> dict[str, Any]:
    """The files that sentence-transformers reads."""
    pooling = {
        "word_embedding_dimension": shape.hidden,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(parts.items())
    ]
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": shape.positions, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
