"""Tiny causal language models of transformers, and a check of generated tokens against them."""

import numpy as np
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.kit.packed_models import VOCABULARY, of_type

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "llama": {"num_key_value_heads": 2, "head_dim": 32},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
    "qwen2, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}
NEAR = 1e-4  # if the two best logits are this close, either token is right


def causal(family, **changes):
    shape = {"tie_word_embeddings": False} | SHAPE | FAMILIES.get(family, {}) | changes
    return of_type(family.partition(",")[0], MODEL_FOR_CAUSAL_LM_MAPPING, **shape)


def check(own, ids, prompt):
    """Check that each token after the first `prompt` ones has the largest logit of transformers' `own` model."""
    with torch.inference_mode():
        logits = own(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1]
    picked = logits.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0]
    assert (logits.amax(1) - picked <= NEAR).all()


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(5, VOCABULARY, length).tolist()
