"""Writes BERT models with a real shape and random weights, in folders that windve and sentence-transformers both load.

A model's cost does not depend on the values of its weights, so no model hub is needed to measure it.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORDS = "river stone window garden market paper light winter road music water house field summer letter".split()  # noqa: SIM905 - each is one token
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ADDED = 2  # tokens that a BERT tokenizer adds to each text


@dataclass(frozen=True, slots=True)
class BertShape:
    """A BERT shape. The vocabulary is as large as that of uncased BERT."""

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
        _write_tokenizer(shape.vocabulary, made)
        made.rename(folder)
    except OSError:
        if not folder.exists():  # another process may have made it meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _texts(shape: BertShape) -> dict[str, Any]:
    """The files that sentence-transformers reads, and the tokenizer's config."""
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
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _SPECIAL, strict=True))
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": shape.positions}
    return {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": shape.positions, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
        "tokenizer_config.json": tokenizer | names,
        "special_tokens_map.json": names,
    }


def _write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Uncased BERT's tokenizer with a vocabulary of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    filler = (f"##w{number}" for number in range(vocabulary - len(_SPECIAL) - len(_WORDS)))
    ids = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS, *filler])}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))  # noqa: S106 - a token of text
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(_SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")
