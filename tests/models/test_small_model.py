"""The small model that is made on the spot: a normal model folder, that has learned, and is made once."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.errors import SettingsError
from deployments.generation.text import small_model, train_docstrings
from deployments.generation.text.model_card import read_generation_card
from deployments.generation.text.small_model import make, small_model_folder
from deployments.generation.text.train_docstrings import Recipe, loss_of
from deployments.settings import ModelSettings
from serve_app.cli.main import main

SHORT = Recipe(vocabulary=512, hidden=64, layers=1, steps=150, batch=4, length=64, characters=200_000)
TINY = Recipe(vocabulary=300, hidden=64, layers=1, steps=2, batch=1, length=16, characters=40_000)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(what it is, its losses)"""
    losses = []
    found = make(tmp_path_factory.mktemp("small") / "model", SHORT, lambda step, of, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(1, SHORT.steps + 1))
    return found, [loss for _, loss in losses]


def test_it_begins_better_than_chance_and_learns(made):
    found, losses = made
    chance = math.log(SHORT.vocabulary)
    first, last = (sum(some) / len(some) for some in (losses[:10], losses[-20:]))
    assert first < chance - 1.5, "the bigrams' start"
    assert last < first - 0.2
    assert found.unseen < chance - 2.0, "texts that it has not learned from"


def test_transformers_loads_it_and_it_has_the_loss_that_is_said(made):
    found, _ = made
    model = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(found.folder)
    assert sum(each.numel() for each in model.parameters()) == found.parameters
    torch.manual_seed(1)
    text = "Return a new object with the name of the file. If the file does not exist, the value is None."
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        of_text, of_noise = (float(loss_of(model, some)) for some in (ids, ids[:, torch.randperm(ids.shape[1])]))
    assert of_text < of_noise - 1.0
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert ids.shape[1] < answer.shape[1] <= ids.shape[1] + 20


def test_its_tokenizer_gives_any_text_back_and_writes_chats(made):
    found, _ = made
    tokenizer = AutoTokenizer.from_pretrained(found.folder)
    for text in ("Return x.", "Größe: 5 €", "日本語 🙂\n\tend"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert ids == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<|im_end|>").input_ids == [2]


def test_windve_reads_its_card(made):
    found, _ = made
    card = read_generation_card(ModelSettings(id=str(found.folder)))
    assert set(card.end_tokens) == {0, 2}
    assert card.context == 2048
    assert "im_start" in card.chat_template


FOLDER = f"""
from deployments.generation.text.small_model import small_model_folder
from deployments.generation.text.train_docstrings import Recipe
print(small_model_folder({TINY!r}))
"""


def test_two_processes_make_it_once_and_the_command_makes_the_same(tmp_path, monkeypatch, capsys):
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FOLDER]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {Path(process.communicate()[0].strip()) for process in both}
    (folder,) = found
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}
    monkeypatch.setattr(small_model, "Recipe", lambda: TINY)
    assert main(["small-model", str(tmp_path / "toy")]) == 0
    assert "It is a toy: it writes like docstrings, and knows nothing" in capsys.readouterr().err
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "toy" / path.name).read_bytes(), path.name
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(small_model, "make", None)  # it is not made again
    assert small_model_folder() == folder


def test_a_training_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("raise MemoryError('no more')")
    monkeypatch.setattr(train_docstrings, "__file__", str(broken))
    with pytest.raises(SettingsError, match="MemoryError: no more"):
        make(tmp_path / "model", TINY)
    assert list(tmp_path.iterdir()) == [broken]


def test_the_command_writes_no_folder_that_is_there(tmp_path, capsys):
    assert main(["small-model", str(tmp_path)]) == 1
    said = f"windve: FOLDER: {tmp_path} already exists; remove it, or choose another folder\n"
    assert capsys.readouterr().err == said
