"""The benchmark of answers, on a small shape: the contestants give the same tokens, and what is found is shown."""

import numpy as np
import pytest

from benchmarks.comparisons import decoding
from benchmarks.peers.decoders import DECODERS

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def test_windves_answers_are_those_of_transformers(tmp_path):
    """Also with more prompts than one step takes."""
    decoding.write(SMALL, "float32", tmp_path)
    prompts = np.random.default_rng(0).integers(5, 300, (20, decoding.PROMPT)).tolist()
    ours, theirs = (np.array(DECODERS[name](tmp_path, "float32")(prompts, 6)) for name in ("windve", "generate"))
    assert (ours == theirs).mean() > 0.9  # a tie may go either way, and what follows it


def test_a_contestant_is_measured_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(decoding, "SHAPE", SMALL)
    monkeypatch.setattr(decoding, "_STREAM_NUMBERS", 1000)
    read = decoding.write(SMALL, "bfloat16", tmp_path)
    with decoding._Child("windve", tmp_path, "bfloat16") as child:
        about = [{"prompt": decoding.PROMPT, "batch": batch, "answer": 6} for batch in (1, 8)]
        measured = [{**one, **child.measure(*one.values(), read)} for one in about]
    samples = [sample | {"contestant": "windve bf16", "memory": decoding.memory_rate()} for sample in measured]
    samples.append({**about[1], "contestant": "vLLM bf16", "rate": samples[1]["rate"] / 2, "weights": 1.0})
    found = {"samples": samples}
    speeds, prompts, steps = decoding.sheets(found)
    rows = [[row[1] for row in sheet.rows if row[0] == str(decoding.PROMPT)] for sheet in (speeds, prompts, steps)]
    assert rows == [["1", "8"]] * 3
    assert [row[-1] for row in speeds.rows] == ["-", "2.00 x"]
    assert [goal.reached for goal in decoding.goals(found)] == [None, pytest.approx(2), None, None, None]
