"""Launches by count: more answers need no more of them, and a graph needs next to none."""

import pytest
import torch

from benchmarks.kit.launches import launches, of_pass, of_step
from tests.kit.packed_models import CPU

BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = BERT | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "tie_word_embeddings": True}


def test_operations_that_do_something_are_counted():
    x = torch.ones(4)

    def call():
        torch.empty(4).copy_(x.view(2, 2)[0].sum()).add_(1)

    assert launches(call, CPU) == 3


def test_a_pass():
    one, two = (of_pass(BERT | {"num_hidden_layers": layers}, [20]) for layers in (1, 2))
    assert two - one == 10  # of a layer: four products, attention, two sums, two norms, an activation
    assert of_pass(BERT, [20, 7, 9]) == two


@pytest.mark.parametrize("flash", [True, False])
def test_a_step(flash):
    assert of_step(LLAMA, 1, flash=flash) == of_step(LLAMA, 32, flash=flash)
