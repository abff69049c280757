"""A YAML text says something else after a rewrite, and looks as before."""

import math
from pathlib import Path

import pytest
import yaml

from calibration.service import yaml_text
from calibration.service.yaml_text import rewrite
from deployments.errors import SettingsError

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "serve_app").glob("*.yaml"), *(ROOT / "k8s").rglob("*.yaml")]

# Text before, what `a` becomes, text after.
KEPT = {
    "quotes, numbers and words of others": (
        "'x': 0x40\n\"y\": [ 1,2 , 0o7]\nz: 1_000.00\nn: ~\nyes: No\na:   1  # c\nd: 2026-01-01\n",
        2,
        "'x': 0x40\n\"y\": [ 1,2 , 0o7]\nz: 1_000.00\nn: ~\nyes: No\na: 2    # c\nd: 2026-01-01\n",
    ),
    "a new key, before comments and blank lines": (
        "a:\n  b: 1  # c\n\n  # after\n# d\nx: 1\n",
        {"b": 1, "c": {"d": {}}},
        "a:\n  b: 1  # c\n  c:\n    d: {}\n\n  # after\n# d\nx: 1\n",
    ),
    "a removed key, and not the comments after it": (
        "a:\n  b: 1\n  c: 2\n\n  # after\nx: 1\n",
        {"b": 1},
        "a:\n  b: 1\n\n  # after\nx: 1\n",
    ),
    "a flow mapping": ("a: {b: {c: 0x1}, d: }\n", {"b": {"c": 2}, "d": None}, "a: {b: {c: 2}, d: null}\n"),
    "a list with another layout": (
        "x:\n-   y: 1\n    z:\n      - 2\na: 1\n",
        2,
        "x:\n-   y: 1\n    z:\n      - 2\na: 2\n",
    ),
    "a text over several lines": (
        "x: a text\n  that goes on\na: 1\ny: >-\n  b\n  c\n",
        2,
        "x: a text\n  that goes on\na: 2\ny: >-\n  b\n  c\n",
    ),
    "a literal that ends in blank lines": (
        "a:\n  b: |+\n    # no comment\n\n\nx: 1\n",
        {"b": "# no comment\n\n\n", "c": 1},
        "a:\n  b: |+\n    # no comment\n\n\n  c: 1\nx: 1\n",
    ),
    "anchors, aliases and merge keys elsewhere": (
        "x: &x {y: 1}\nz:\n  <<: *x\n  v: *x\na: 1\n",
        2,
        "x: &x {y: 1}\nz:\n  <<: *x\n  v: *x\na: 2\n",
    ),
    "a value with an alias, which keeps its own": ("x: &x 1\na: *x\n", 2, "x: &x 1\na: 2\n"),
    "a value by a merge key": ("<<: {a: 1}\nb: 1\n", 2, "<<: {a: 1}\nb: 1\na: 2\n"),
    "other documents, a directive, the end of a document": (
        "%YAML 1.1\n---\n# c\na: 1\n...\n# end\n--- { z: 1 }\n",
        2,
        "%YAML 1.1\n---\n# c\na: 2\n...\n# end\n--- { z: 1 }\n",
    ),
    "no line end, and a byte order mark": ("\ufeff# c\na: 1", 2, "\ufeff# c\na: 2"),
    "line ends of Windows": ("x: |\r\n  y\r\na: 1\r\n", 2, "x: |\r\n  y\r\na: 2\r\n"),
    "beyond ASCII": ("x: é # 😀\na: 1\n", 2, "x: é # 😀\na: 2\n"),
    "JSON": ('{\n  "x": [\n    1\n  ],\n  "a": 1\n}\n', 2, '{\n  "x": [\n    1\n  ],\n  "a": 2\n}\n'),
    "JSON on one line": ('{"a": 1}', {"b": 2}, '{\n  "a": {\n    "b": 2\n  }\n}'),
}


@pytest.mark.parametrize(("before", "value", "after"), KEPT.values(), ids=KEPT)
def test_only_what_is_wanted_changes(before, value, after):
    said = next(yaml.safe_load_all(before))
    assert rewrite(before, 0, {**said, "a": value}) == after


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_of_the_repository_keep_every_byte_on_the_round_trip(path):
    """By ruamel.yaml alone, in the layout that was found for the file."""
    text = path.read_bytes().decode()
    for number, said in enumerate(yaml.safe_load_all(text)):
        start, end = yaml_text._span(text, number)
        assert yaml_text._round_trips(text[start:end], said, said)[0] == text[start:end]


VALUES = [
    *(1e-05, 2.5e-07, 1e22, -0.0, 1.0, math.inf, -math.inf, math.nan, 7, True, None),
    *("burst", "", "1e-05", "0x10", "12:30:00", "2026-11-20", "No", "y", "~", " a", "a: b #c", "&a", "x" * 200),
    "a\nb\x85\u2028\t\"\\'😀",
    *([1, "a", [], {"b": None}], {"c": {}, "d": {"e": [{}]}}),
]


@pytest.mark.parametrize("there", ["", "a: 0 # c\n", "x: {y: 1}\n"], ids=["new", "in place", "beside a flow"])
def test_values_are_read_back_as_they_were(there):
    for value in VALUES:
        after = rewrite(f"z: 1\n{there}", 0, {**yaml.safe_load(f"z: 1\n{there}"), "a": value})
        assert repr(yaml.safe_load(after)["a"]) == repr(value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1, # one\n  2]\n", "<config>: the comment '# one' would be lost; move it out of the braces"),
        ("a: &a [1, 2]\nb: *a\n", "b[1]: would change too, perhaps due to an anchor (&) and an alias (*)"),
        ("a: [1, 2]\na: [1, 2]\n", "<config>: is not valid YAML: found duplicate key"),
        ("a: [1, 2]\nb: &b [*b]\n", "<config>: is not valid YAML: "),
    ],
)
def test_refused_in_one_sentence(text, sentence):
    with pytest.raises(SettingsError) as caught:
        rewrite(text, 0, {**yaml.safe_load(text), "a": [1, 3]})
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["a: 3\n", "a: [\n", "--- 1\n--- 2\n"])
def test_a_bug_cannot_damage_a_file(monkeypatch, wrong):
    monkeypatch.setattr(yaml_text, "_round_trips", lambda *_: ("a: 1\n", wrong))
    with pytest.raises(SettingsError):
        rewrite("a: 1\n", 0, {"a": 2})
