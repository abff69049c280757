"""The benchmark of answers, on a small shape: both contestants give the same tokens, and what is found is shown."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.comparisons import decoding

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def test_it_measures_both_on_the_same_answers(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(decoding, "_prepared", {})
    monkeypatch.setattr(decoding, "_STREAM_NUMBERS", 1000)
    monkeypatch.setattr(decoding, "quickest_cpu_dtype", lambda: ("float32", "for the test"))
    try:
        decoding.prepare(SMALL, 20)
        both = decoding._prepared["both"]
        prompts = np.random.default_rng(0).integers(5, 300, (20, decoding.PROMPT)).astype(np.int32)
        ours, theirs = decoding.own(both, prompts, 6), decoding.generated(both, prompts, 6)
        assert (ours == theirs).mean() > 0.9  # a tie may go either way, and what follows it
        samples = [{"batch": batch, "answer": 6, **decoding.measure(batch, 6)} for batch in (1, 8)]
    finally:
        torch.set_num_threads(threads)
    found = {"samples": samples}
    (sheet,) = decoding.sheets(found)
    assert [row[0] for row in sheet.rows] == ["1", "8"]
    assert [goal.reached is None for goal in decoding.goals(found)] == [False, False, True]
    assert decoding.plot(found).axes
