"""Writes language models with a real shape and random weights, to time steps of generation."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

_TOKENS = 2048


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
        max_position_embeddings=_TOKENS, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": _TOKENS}), encoding="utf-8")
