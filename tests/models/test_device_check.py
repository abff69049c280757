"""The tasks of `windve check --devices` on this CPU, with tiny models."""

import dataclasses

import pytest
from transformers import CONFIG_MAPPING

from calibration.devices.shapes import SHAPES, BertShape, CausalShape
from calibration.devices.tasks import Plan, find_device, tasks
from deployments.engines.packed.model import PackedModel


@pytest.fixture
def plan(tmp_path):
    return dataclasses.replace(
        Plan.of("cpu", tmp_path, quick=True),
        encoder=BertShape(64, 2, 4, 128),
        batches=((75, 2), (512, 1)),
        square=64,
        rows=64,
        causal=CausalShape("a tiny model's", 64, 2, 2, 1, 96, 128),
        least_s=0.0,
    )


def found(plan, *parts):
    return {(task.part, task.name): task.run() for task in tasks(plan, parts)}


def test_the_device_is_this_cpu():
    about = find_device("cpu")
    assert about["device"] == "cpu"
    assert {"torch", "transformers", "ray"} <= about["libraries"].keys()


def test_speeds(plan):
    rows = found(plan, "peak", "encoder", "generation")
    assert {row["dtype"] for (part, _), row in rows.items() if part == "peak"} >= {"float32"}
    assert rows["encoder", "form"]["why"]
    for name, tokens, batch in (("75 tokens", 75, 2), ("512 tokens", 512, 1), ("alone", 75, 1)):
        row = rows["encoder", name]
        assert (row["tokens"], row["batch"]) == (tokens, batch)
        assert row["tflops"] == pytest.approx(row["queries_s"] * plan.encoder.operations(tokens) / 1e12)
    assert [rows["generation", name]["rows"] for name in ("1 row", "32 rows")] == [1, 32]


def families(plan, *names):
    return {task.name: task.run() for task in tasks(plan, ("families",)) if task.name in names}


def test_every_family_agrees(plan):
    known = [family for family, shape in SHAPES.items() if shape.model_type in {*CONFIG_MAPPING, "jina_bert"}]
    for family, row in families(plan, *known).items():
        assert row["exact"] > 0.99999, family
        assert row["agrees"], family
        assert row["warnings"] == [], family


def test_a_form_that_is_wrong_or_fails_is_seen(plan, monkeypatch):
    computed = PackedModel.__call__
    monkeypatch.setattr(PackedModel, "__call__", lambda *args, **more: computed(*args, **more).roll(1, -1))
    (row,) = families(plan, "BERT").values()
    assert (row["form"], row["agrees"]) == ("padded", False)

    def lacks(*_, **__):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(PackedModel, "__init__", lacks)
    with pytest.raises(RuntimeError, match="no kernel image"):  # a row with `error`
        families(plan, "BERT")
