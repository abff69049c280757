"""The benchmark of families, on small shapes: what it writes loads, runs in both forms, and is shown."""

import json

from benchmarks.comparisons import families
from benchmarks.kit.serving import ROOT
from calibration.devices.shapes import SHAPES
from deployments.engines import packed


def test_every_packed_family_is_measured():
    kin = {"camembert", "xlm-roberta", "mt5"}  # the same classes under other names
    assert {shape.model_type for shape in SHAPES.values()} == packed.FAMILIES.keys() - kin


def test_the_documentation_has_what_was_measured():
    found = json.loads((ROOT / "benchmarks/results/families.json").read_text())
    section = (ROOT / "docs/models.md").read_text().partition("## Families")[2].partition("### ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    for family in SHAPES:
        row = next(row for row in rows if row[0].strip().startswith(family))
        assert (row[3], row[4].strip()) == ("packed", families.in_words(found, family)), family


def test_a_family_runs_in_both_forms(monkeypatch):
    """All of them: test_device_check.py."""
    family = "BERT"
    monkeypatch.setattr(families, "LOADS", {"75 tokens": lambda _: [9, 9], "mixed": lambda _: [20, 3]})
    samples = families.measure(SHAPES[family].tiny(), 0.0)
    found = {"samples": [{"family": family, **sample} for sample in samples]}
    (sheet,) = families.sheets(found)
    assert [row[3] for row in sheet.rows] == ["75 tokens", "mixed"]
    assert all(goal.reached > 0 for goal in families.goals(found))
