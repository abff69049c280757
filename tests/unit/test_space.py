"""Where two spaces have the same name, the same text gets the same vector."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.models import space
from deployments.models.model_files import ModelCard
from deployments.models.space import space_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("deployments.models.disk_cache.cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def card(tmp_path):
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "2_Dense").mkdir()
    modules = [{"path": path, "type": f"x.{path[2:]}"} for path in ("1_Pooling", "2_Dense")]
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "x.Transformer"}, *modules]))
    for name in ("config.json", "tokenizer.json", "1_Pooling/config.json", "2_Dense/config.json"):
        (folder / name).write_text("{}")
    for name in ("vocab.txt", "spiece.model", "chat_template.jinja", "modeling_x.py", "README.md"):
        (folder / name).write_text("a")
    for name in ("model", "2_Dense/model", "sparse_linear", "other"):
        save_file({"w": np.ones(3, np.float32)}, folder / f"{name}.safetensors")
    return ModelCard("m", folder, None, "bert", 4, 100, 16, "mean", True, False, True, 1, 1, {"query": "q: "})


def copied(card, folder):
    shutil.copytree(card.folder, folder)
    return dataclasses.replace(card, folder=folder)


def test_it_is_equal_in_another_place_at_another_time_and_under_another_name(card, tmp_path):
    other = dataclasses.replace(copied(card, tmp_path / "elsewhere"), name="docs", revision="5617a9f")
    os.utime(other.folder / "config.json", (1.0, 1.0))
    assert space_of(card) == space_of(other)
    assert len(space_of(card)) == 16


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "2_Dense/model.safetensors", "sparse_linear.safetensors", "config.json", "tokenizer.json",
        "1_Pooling/config.json", "vocab.txt", "spiece.model", "chat_template.jinja", "modeling_x.py",
    ],
)  # fmt: skip
def test_each_file_that_is_read_counts(card, name):
    before, path = space_of(card), card.folder / name
    if path.suffix == ".safetensors":
        save_file({"w": np.full(3, 2, np.float32)}, path)
    else:
        path.write_text(path.read_text() + " ")
    assert space_of(card) != before


@pytest.mark.parametrize("name", ["README.md", "other.safetensors"])
def test_other_files_do_not_count(card, name):
    before = space_of(card)
    (card.folder / name).unlink()
    assert space_of(card) == before


def test_code_that_is_not_run_does_not_count(card):
    """Other tools may add it to a snapshot of the hub."""
    card = dataclasses.replace(card, trust_remote_code=False)
    before = space_of(card)
    (card.folder / "modeling_x.py").unlink()
    assert space_of(card) == before


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "cls"}, {"normalize": False}, {"prompts": {"query": "q:"}}, {"default_prompt_name": "query"},
        {"max_tokens": 8}, {"dimension": 2}, {"lower_case": True}, {"kind": "sparse"},
    ],
)  # fmt: skip
def test_how_the_files_are_read_counts(card, change):
    assert space_of(dataclasses.replace(card, **change)) != space_of(card)


def test_a_files_name_counts(card):
    before = space_of(card)
    (card.folder / "config.json").rename(card.folder / "other.json")
    assert space_of(card) != before


def test_it_is_hashed_once(card, tmp_path, monkeypatch):
    before = space_of(card)
    monkeypatch.setattr(space, "_hash", lambda *_: pytest.fail("hashed again"))
    assert space_of(card) == before
    kept = next((tmp_path / "cache" / "spaces").iterdir())
    kept.write_text("[]")
    monkeypatch.undo()
    assert space_of(card) == before
