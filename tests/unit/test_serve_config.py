"""Edits of Serve configs and of RayService manifests: the wanted values change, and not one other byte."""

from __future__ import annotations

import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import calibration.serve_config as module
import serve_app
from calibration import config_file
from calibration.config_file import read_text, unified_diff, write_atomically
from calibration.serve_config import edit
from deployments.errors import SettingsError

SHIPPED = Path(serve_app.__file__).parent
FOUND = {
    "max_ongoing_requests": 1000000,
    "user_config": {
        "slo_s": 1.0,
        "accelerator": {"queue_depth": 38, "alpha_s": 0.0182, "beta_s": 0.281},
        "cpu": {"queue_depth": 8, "alpha_s": 0.0858, "beta_s": 0.32},
        "calibration": {"at": "2026-11-20T23:59:00Z", "shape": "burst", "r2": {"accelerator": 0.9991}},
    },
}
DEPTH = {"user_config": {"cpu": {"queue_depth": 38}}}
WIDE = """\
# 😀 é
applications:
  -   name: é
      import_path: other:app

  -   import_path: serve_app.app:build
      name: w
      deployments:
        -
          name: Proxy
        -
          name: Router # 😀
"""
MERGED = """\
x: &x {{import_path: 'serve_app.app:build', name: w}}
applications:
- <<: *x
  deployments: [{0}]
"""
CALIBRATION = {"user_config": {"calibration": {"at": "x", "r2": {"cpu": 0.5}}}}
HEAD = """\
applications:
- import_path: serve_app.app:build
  name: w
  deployments:
  - name: Router
"""


def config(router):
    """A Serve config whose Router entry goes on with these lines."""
    return HEAD + block(router, 4)


def block(inner, indent, blank=""):
    """The lines, indented; empty ones not."""
    return "".join(" " * indent + line if line.strip() else blank + line for line in inner.splitlines(keepends=True))


def manifest(inner, indent=4, header="|"):
    return (
        "apiVersion: v1\nkind: ConfigMap\ndata: {a: '1'}  # untouched\n---\n"
        "apiVersion: ray.io/v1\nkind: RayService\nspec:\n"
        f"  serveConfigV2: {header}\n{block(inner, indent)}  # the cluster\n  rayClusterConfig: {{rayVersion: 3}}\n"
    )


REPLACED = [
    (
        "a comment behind the value stays, with its blanks",
        "user_config:\n  cpu:\n    queue_depth:   64   # guessed  \n",
        DEPTH,
        "user_config:\n  cpu:\n    queue_depth:   38   # guessed  \n",
    ),
    (
        "quotes, number formats and unknown keys of others stay",
        "'user_config':\n  slo_s: 1.00\n  \"cpu\":\n    'queue_depth': 0x40\n  odd: [ 1,2 , 0o7]\n",
        DEPTH,
        "'user_config':\n  slo_s: 1.00\n  \"cpu\":\n    'queue_depth': 38\n  odd: [ 1,2 , 0o7]\n",
    ),
    (
        "a value that is right already keeps its spelling",
        "user_config: {cpu: {queue_depth: 0x26}}\n",
        DEPTH,
        "user_config: {cpu: {queue_depth: 0x26}}\n",
    ),
    (
        "of another type is not right already",
        "user_config: {slo_s: 1}\n",
        {"user_config": {"slo_s": 1.0}},
        "user_config: {slo_s: 1.0}\n",
    ),
    (
        "a value on the next line",
        "user_config:\n  cpu:\n    queue_depth:\n      64\n",
        DEPTH,
        "user_config:\n  cpu:\n    queue_depth:\n      38\n",
    ),
    (
        "a value with a tag, one with an anchor that nothing uses",
        "user_config: {cpu: {queue_depth: !!int '64'}, slo_s: &slo 3.0}\n",
        {"user_config": {"slo_s": 1.5, "cpu": {"queue_depth": 38}}},
        "user_config: {cpu: {queue_depth: 38}, slo_s: &slo 1.5}\n",
    ),
    (
        "nothing and null where a value belongs",
        "max_ongoing_requests:   # all\nuser_config: {cpu: {queue_depth: }, slo_s: ~}\n",
        {"max_ongoing_requests": 9, "user_config": {"slo_s": 1.5, "cpu": {"queue_depth": 38}}},
        "max_ongoing_requests: 9   # all\nuser_config: {cpu: {queue_depth: 38 }, slo_s: 1.5}\n",
    ),
    (
        "JSON within YAML",
        'user_config: {"cpu":{"queue_depth":64,"x":null}}\n',
        DEPTH,
        'user_config: {"cpu":{"queue_depth":38,"x":null}}\n',
    ),
    (
        "a literal of several lines",
        "user_config:\n  note: |\n    a\n    b\n\n  slo_s: 1.0\n",
        {"user_config": {"note": "c"}},
        "user_config:\n  note: c\n\n  slo_s: 1.0\n",
    ),
]

INSERTED_INTO_BLOCKS = [
    ("no user_config at all", "", DEPTH, "user_config:\n  cpu: {queue_depth: 38}\n"),
    (
        "no user_config, all of it new",
        "num_replicas: 1\n",
        FOUND,
        (
            "num_replicas: 1\n"
            "max_ongoing_requests: 1000000\n"
            "user_config:\n"
            "  slo_s: 1.0\n"
            "  accelerator: {queue_depth: 38, alpha_s: 0.0182, beta_s: 0.281}\n"
            "  cpu: {queue_depth: 8, alpha_s: 0.0858, beta_s: 0.32}\n"
            "  calibration:\n"
            '    at: "2026-11-20T23:59:00Z"\n'
            "    shape: burst\n"
            "    r2: {accelerator: 0.9991}\n"
        ),
    ),
    (
        "nothing there: the comment stays",
        "user_config: # c\n",
        DEPTH,
        "user_config: # c\n  cpu: {queue_depth: 38}\n",
    ),
    ("nothing there, anchored", "user_config: &u\n", DEPTH, "user_config: &u\n  cpu: {queue_depth: 38}\n"),
    ("null there", "user_config: ~  # c\n", DEPTH, "user_config:  # c\n  cpu: {queue_depth: 38}\n"),
    (
        "null there, a line deeper",
        "user_config:\n  null  # c\nx: 1\n",
        DEPTH,
        "user_config:  # c\n  cpu: {queue_depth: 38}\nx: 1\n",
    ),
    (
        "an empty mapping there",
        "user_config: {} # c\n",
        DEPTH,
        "user_config: # c\n  cpu: {queue_depth: 38}\n",
    ),
    (
        "null where one line belongs",
        "user_config:\n  cpu: # c\n",
        DEPTH,
        "user_config:\n  cpu: {queue_depth: 38} # c\n",
    ),
    ("null to nothing", "user_config:\n", {"user_config": {}}, "user_config: {}\n"),
    (
        "a comment on the last line, and comments that belong to what follows",
        "user_config:\n  cpu:\n    queue_depth: 8  # c\n\n    # after\n  # the replicas\nnum_replicas: 1\n",
        {"user_config": {"cpu": {"alpha_s": 0.5}, "slo_s": 2.0}},
        (
            "user_config:\n  cpu:\n    queue_depth: 8  # c\n    alpha_s: 0.5\n  slo_s: 2.0\n\n    # after\n"
            "  # the replicas\nnum_replicas: 1\n"
        ),
    ),
    (
        "the inner ones first where all end on one line, in whatever order they are asked for",
        "user_config:\n  cpu:\n    queue_depth: 8",
        {"x": 1, "user_config": {"z": 2, "cpu": {"z": 3}}},
        "user_config:\n  cpu:\n    queue_depth: 8\n    z: 3\n  z: 2\nx: 1",
    ),
    (
        "a last value that is a nested block",
        "user_config:\n  odd:\n    deep:\n    - a: 1\n      b:\n\n",
        CALIBRATION,
        ("user_config:\n  odd:\n    deep:\n    - a: 1\n      b:\n  calibration:\n    at: x\n    r2: {cpu: 0.5}\n\n"),
    ),
    (
        "a last value that is a literal, with blank lines behind",
        "user_config:\n  note: |\n    a\n      b\n\n\nx: 1\n",
        {"user_config": {"slo_s": 2.0}},
        "user_config:\n  note: |\n    a\n      b\n  slo_s: 2.0\n\n\nx: 1\n",
    ),
    (
        "a literal that keeps its blank lines",
        "user_config:\n  note: |+  # c\n    a\n\n\nx: 1\n",
        {"user_config": {"slo_s": 2.0}},
        "user_config:\n  note: |+  # c\n    a\n\n\n  slo_s: 2.0\nx: 1\n",
    ),
    (
        "a folded one, with a + in a comment only",
        "user_config:\n  note: >- # a + b\n    a\n\nx: 1\n",
        {"user_config": {"slo_s": 2.0}},
        "user_config:\n  note: >- # a + b\n    a\n  slo_s: 2.0\n\nx: 1\n",
    ),
    (
        "a last value in quotes over two lines",
        "user_config:\n  note: 'a\n\n    b' # c\n",
        {"user_config": {"slo_s": 2.0}},
        "user_config:\n  note: 'a\n\n    b' # c\n  slo_s: 2.0\n",
    ),
    (
        "no final newline",
        "user_config:\n  slo_s: 1.0 # c",
        DEPTH,
        "user_config:\n  slo_s: 1.0 # c\n  cpu: {queue_depth: 38}",
    ),
    (
        "explicit keys override a merge key",
        "<<: {max_ongoing_requests: 5, x: 1}\n",
        {"max_ongoing_requests": 9},
        "<<: {max_ongoing_requests: 5, x: 1}\nmax_ongoing_requests: 9\n",
    ),
    (
        "what a merge key says already is not said again",
        "<<: {max_ongoing_requests: 9}\n",
        {"max_ongoing_requests": 9},
        "<<: {max_ongoing_requests: 9}\n",
    ),
    (
        "a last value that is an alias",
        "odd: &odd {a: 1}\nuser_config:\n  odd: *odd # c\n",
        DEPTH,
        "odd: &odd {a: 1}\nuser_config:\n  odd: *odd # c\n  cpu: {queue_depth: 38}\n",
    ),
    (
        "a leaf longer than a line becomes a block",
        "user_config:\n  slo_s: 1.0\n",
        {"user_config": {"cpu": {"queue_depth": 38, "note": "n" * 90}}},
        f"user_config:\n  slo_s: 1.0\n  cpu:\n    queue_depth: 38\n    note: {'n' * 90}\n",
    ),
]

INSERTED_INTO_FLOWS = [
    (
        "one line",
        "user_config: {slo_s: 1.0} # c\n",
        DEPTH,
        "user_config: {slo_s: 1.0, cpu: {queue_depth: 38}} # c\n",
    ),
    (
        "blanks within",
        "user_config: { slo_s: 1.0 }\n",
        DEPTH,
        "user_config: { slo_s: 1.0, cpu: {queue_depth: 38} }\n",
    ),
    ("empty", "user_config: {cpu: {}}\n", DEPTH, "user_config: {cpu: {queue_depth: 38}}\n"),
    (
        "empty, with a comment",
        "user_config: { # c\n}\n",
        DEPTH,
        "user_config: {cpu: {queue_depth: 38} # c\n}\n",
    ),
    (
        "a trailing comma",
        "user_config: {slo_s: 1.0, }\n",
        DEPTH,
        "user_config: {slo_s: 1.0, cpu: {queue_depth: 38}, }\n",
    ),
    ("null within", "user_config: {cpu: , a: 1}\n", DEPTH, "user_config: {cpu: {queue_depth: 38} , a: 1}\n"),
    ("a bare key last", "user_config: {a}\n", DEPTH, "user_config: {a, cpu: {queue_depth: 38}}\n"),
    (
        "a line for each entry",
        "user_config: {\n  slo_s: 1.0,\n  a: 2 # two\n  # end\n}\n",
        {"user_config": {"x": 1, "z": 2}},
        "user_config: {\n  slo_s: 1.0,\n  a: 2, # two\n  x: 1,\n  z: 2\n  # end\n}\n",
    ),
    (
        "a line for each entry, a trailing comma",
        "user_config: {\n  slo_s: 1.0,\n  a: 2, # two\n}\n",
        {"user_config": {"x": 1, "z": 2}},
        "user_config: {\n  slo_s: 1.0,\n  a: 2, # two\n  x: 1,\n  z: 2,\n}\n",
    ),
    (
        "a line for each entry but the brace",
        "user_config: {slo_s: 1.0,\n  a: 2}\n",
        {"user_config": {"x": 1}},
        "user_config: {slo_s: 1.0,\n  a: 2, x: 1}\n",
    ),
    (
        "a comma on a line of its own",
        "user_config: {\n  a: 2 # two\n  ,\n}\n",
        {"user_config": {"x": 1}},
        "user_config: {\n  a: 2, x: 1 # two\n  ,\n}\n",
    ),
    (
        "nested, all at their ends",
        "user_config: {cpu: {queue_depth: 64}}\n",
        {"x": 1, "user_config": {"z": 2, "cpu": {"z": 3}, "calibration": {"r2": {"a": 0.5}}}},
        "user_config: {cpu: {queue_depth: 64, z: 3}, z: 2, calibration: {r2: {a: 0.5}}}\nx: 1\n",
    ),
]

CALIBRATIONS = [
    (
        "a block is replaced whole, the key's comment and what follows stay",
        "user_config:\n  calibration: # ours\n    # old\n    at: y # then\n    old: {a: 1}\n\n  # CPU\n  slo_s: 1.0\n",
        CALIBRATION,
        "user_config:\n  calibration: # ours\n    at: x\n    r2: {cpu: 0.5}\n\n  # CPU\n  slo_s: 1.0\n",
    ),
    (
        "one line is replaced by a block",
        "user_config:\n  calibration: {at: y} # ours\n  slo_s: 1.0\n",
        CALIBRATION,
        "user_config:\n  calibration: # ours\n    at: x\n    r2: {cpu: 0.5}\n  slo_s: 1.0\n",
    ),
    (
        "a block is replaced by one line",
        "user_config:\n  calibration: # ours\n    at: y\n    r2: {a: 1} # a\n  slo_s: 1.0\n",
        {"user_config": {"calibration": {"at": "x"}}},
        "user_config:\n  calibration: {at: x} # ours\n  slo_s: 1.0\n",
    ),
    (
        "a list, which stands no deeper than its key",
        "user_config:\n  calibration:\n  - at: y\n  - 2\n  slo_s: 1.0\n",
        CALIBRATION,
        "user_config:\n  calibration:\n    at: x\n    r2: {cpu: 0.5}\n  slo_s: 1.0\n",
    ),
    (
        "a literal",
        "user_config:\n  calibration: |\n    by hand\n\n  slo_s: 1.0\n",
        CALIBRATION,
        "user_config:\n  calibration:\n    at: x\n    r2: {cpu: 0.5}\n\n  slo_s: 1.0\n",
    ),
    (
        "a flow over several lines, last in the file",
        "user_config:\n  calibration: {at: y,\n    a: 1} # c",
        CALIBRATION,
        "user_config:\n  calibration: # c\n    at: x\n    r2: {cpu: 0.5}",
    ),
    (
        "in a flow",
        "user_config: {calibration: {at: y}, slo_s: 1.0}\n",
        CALIBRATION,
        "user_config: {calibration: {at: x, r2: {cpu: 0.5}}, slo_s: 1.0}\n",
    ),
    (
        "the same again changes nothing",
        "user_config: {calibration: {'r2':  {cpu: 0.50}, at: x}}\n",
        CALIBRATION,
        "user_config: {calibration: {'r2':  {cpu: 0.50}, at: x}}\n",
    ),
    (
        "only where it is ours",
        "calibration: {a: 1}\nuser_config: {cpu: {calibration: {a: 1}}}\n",
        {"calibration": {"b": 2}, "user_config": {"cpu": {"calibration": {"b": 2}}}},
        "calibration: {a: 1, b: 2}\nuser_config: {cpu: {calibration: {a: 1, b: 2}}}\n",
    ),
    (
        "an anchor that nothing uses goes with it",
        "user_config:\n  calibration: {at: &at y}\n",
        CALIBRATION,
        "user_config:\n  calibration:\n    at: x\n    r2: {cpu: 0.5}\n",
    ),
]

TABLE = [
    pytest.param(*case[1:], id=f"{group}: {case[0]}")
    for group, cases in (
        ("replace", REPLACED),
        ("into a block", INSERTED_INTO_BLOCKS),
        ("into a flow", INSERTED_INTO_FLOWS),
        ("calibration", CALIBRATIONS),
    )
    for case in cases
]


@pytest.mark.parametrize(("before", "changes", "after"), TABLE)
def test_only_the_wanted_values_change(before, changes, after):
    assert edit(config(before), "w", changes) == config(after)


@pytest.mark.parametrize(("before", "changes", "after"), TABLE)
def test_the_same_inside_of_a_manifest_with_line_ends_of_windows(before, changes, after):
    before, after = (manifest(config(text).removesuffix("\n") + "\n").replace("\n", "\r\n") for text in (before, after))
    assert edit(before, "w", changes) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "{applications: [{import_path: 'serve_app.app:build', name: w, deployments: [{name: Router}]}]}",
            "{applications: [{import_path: 'serve_app.app:build', name: w, deployments: [{name: Router, a: 1}]}]}",
            id="a flow from the root on",
        ),
        pytest.param(
            '\ufeff{"applications": [\n  {"import_path": "serve_app.app:build", "name": "w", "deployments": [\n'
            '    {\n      "name": "Router"\n    }\n  ]}\n]}\n',
            '\ufeff{"applications": [\n  {"import_path": "serve_app.app:build", "name": "w", "deployments": [\n'
            '    {\n      "name": "Router",\n      a: 1\n    }\n  ]}\n]}\n',
            id="JSON, with a byte order mark",
        ),
        pytest.param(
            WIDE,
            WIDE + "          a: 1\n",
            id="wide indentation, characters beyond ASCII, other applications and deployments",
        ),
        pytest.param(
            "%YAML 1.1\n---\n" + HEAD + "--- {a: 1}\n",
            "%YAML 1.1\n---\n" + HEAD + "    a: 1\n--- {a: 1}\n",
            id="other documents",
        ),
        pytest.param(HEAD + "...\n# the end\n", HEAD + "    a: 1\n...\n# the end\n", id="the end of a document"),
        pytest.param(
            MERGED.format("{name: Router}"),
            MERGED.format("{name: Router, a: 1}"),
            id="a name by a merge key",
        ),
        pytest.param(
            HEAD + "odd: [.nan, 2026-11-20, !!set {a}, &loop [*loop]]\n",
            HEAD + "    a: 1\nodd: [.nan, 2026-11-20, !!set {a}, &loop [*loop]]\n",
            id="values that are hard to compare",
        ),
    ],
)
def test_whole_files(before, after):
    assert edit(before, "w", {"a": 1}) == after


def test_the_name_of_an_application_without_one():
    text = HEAD.replace("  name: w\n", "")
    assert edit(text, "default", {"a": 1}) == text + "    a: 1\n"


@pytest.mark.parametrize("name", ["config.yaml", "rehearsal.yaml"])
@pytest.mark.parametrize("wrap", [str, manifest], ids=["config", "manifest"])
def test_the_shipped_files(name, wrap):
    plain = read_text(SHIPPED / name)
    before = wrap(plain)
    after = edit(before, "windve", FOUND)
    assert edit(after, "windve", FOUND) == after
    kept = [
        line
        for line in before.splitlines()
        if not re.search(r"queue_depth|slo_s: 2|(accelerator|cpu): \{alpha_s", line)
    ]
    assert is_subsequence(kept, after.splitlines())
    data = yaml.safe_load(edit(plain, "windve", FOUND))
    expected = yaml.safe_load(plain)
    merge(expected["applications"][0]["deployments"][0], FOUND)
    assert data == expected
    assert wrap(edit(plain, "windve", FOUND)) == after


# Scalars.

SCALARS = [
    (1e-05, "1.0e-05"),
    (2.5e-07, "2.5e-07"),
    (1e22, "1.0e+22"),
    (-0.0, "-0.0"),
    (1.0, "1.0"),
    (math.inf, ".inf"),
    (-math.inf, "-.inf"),
    (math.nan, ".nan"),
    (7, "7"),
    (-7, "-7"),
    (True, "true"),
    (None, "null"),
    ("burst", "burst"),
    ("NVIDIA H200", "NVIDIA H200"),
    ("", '""'),
    ("1e-05", '"1e-05"'),
    ("0x10", '"0x10"'),
    ("12:30:00", '"12:30:00"'),
    ("2026-11-20", '"2026-11-20"'),
    ("No", '"No"'),
    ("y", '"y"'),
    ("null", '"null"'),
    ("~", '"~"'),
    (" a", '" a"'),
    ("a: b #c", '"a: b #c"'),
    ("a,b", '"a,b"'),
    ("&a", '"&a"'),
    ("a\nb\x85\u2028\t\"\\'😀", None),
    ([1, "a", [], {"b": None}], "[1, a, [], {b: null}]"),
]


@pytest.mark.parametrize("there", ["", "0 # c", "{x: 0}"], ids=["new", "in place", "in a flow"])
def test_values_read_back_as_they_were(there):
    """All of the table in one edit."""
    wanted = {f"key_{number}": value for number, (value, _) in enumerate(SCALARS)}
    if there.startswith("{"):
        after = edit(config(f"user_config: {there}\n"), "w", {"user_config": wanted})
        read = yaml.safe_load(after)["applications"][0]["deployments"][0]["user_config"]
    else:
        before = "".join(f"{key}: {there}\n" for key in wanted) if there else ""
        after = edit(config(before), "w", wanted)
        read = yaml.safe_load(after)["applications"][0]["deployments"][0]
    for key, (_, written) in zip(wanted, SCALARS, strict=True):
        assert repr(read[key]) == repr(wanted[key])
        assert written is None or re.search(rf"\b{key}: {re.escape(written)}(, |}}| # c\n|\n)", after)


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none()), st.text(max_size=20))
@settings(max_examples=100, deadline=None)
@example("\ud800", "a")
@example("x" * 200, " ")
def test_any_value_and_any_key(value, key):
    entries = f"{{{module._pair(key, value)}}}", f"- {module._pair(key, value)}\n  # c\n"
    assert repr(yaml.safe_load(entries[0])) == repr({key: value})
    assert repr(yaml.safe_load(entries[1])) == repr([{key: value}])


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    changes = {"a": numpy.float64(1e-05), "b": numpy.int64(3), "c": numpy.float32(0.5)}
    assert edit(HEAD, "w", changes) == HEAD + "    a: 1.0e-05\n    b: 3\n    c: 0.5\n"


@pytest.mark.parametrize("changes", [{"a": object()}, {"a": {1: 2}}, {"a": b"x"}])
def test_what_cannot_be_written(changes):
    with pytest.raises(TypeError):
        edit(HEAD, "w", changes)


# Refusals.

WHERE = "applications[0].deployments[0]"


@pytest.mark.parametrize(
    ("router", "changes", "sentence"),
    [
        ("user_config: {cpu: &c {a: 1}, b: *c}\n", DEPTH, f"{WHERE}.user_config.cpu: is shared by an anchor (&)"),
        ("b: &c {a: 1}\nuser_config: {cpu: *c}\n", DEPTH, f"{WHERE}.user_config.cpu: is shared by an anchor"),
        ("b: &c 7\nuser_config: {cpu: {queue_depth: *c}}\n", DEPTH, f"{WHERE}.user_config.cpu.queue_depth: is"),
        ("user_config: {cpu: {queue_depth: &c 7}, b: *c}\n", DEPTH, f"{WHERE}.user_config.cpu.queue_depth: is"),
        ("user_config: {calibration: {a: &c 7}, b: *c}\n", CALIBRATION, f"{WHERE}.user_config.calibration: is"),
        ("b: &c user_config\n*c : {cpu: 1}\n", DEPTH, f"{WHERE}.user_config: is shared by an anchor"),
        ("<<: {user_config: {cpu: {a: 1}}}\n", DEPTH, f"{WHERE}.user_config: comes from a merge key (<<); write"),
        ("user_config: {cpu: {a: 1}, 'cpu': {a: 1}}\n", DEPTH, f"{WHERE}.user_config.cpu: is given twice"),
        ("name: Router\n", DEPTH, f"{WHERE}.name: is given twice; remove one of the two"),
        ("user_config: {cpu: 3}\n", DEPTH, f"{WHERE}.user_config.cpu: should be a mapping in this file"),
        ("user_config: [a]\n", DEPTH, f"{WHERE}.user_config: should be a mapping in this file"),
        ("user_config: {a: 1}\n", {"user_config": 3}, f"{WHERE}.user_config: should be a single value in this"),
        ("user_config: {cpu}\n", DEPTH, f"{WHERE}.user_config.cpu: is a key without a colon"),
        # The check at the end: what would need more than an edit in place.
        ("user_config:\n  ? slo_s\n  : 1\n", DEPTH, None),
        ("user_config:\n  note: |\n    no newline", DEPTH, None),
        ("user_config:\n  calibration: &c\n    at: y\n", {"user_config": {"calibration": {"a": 1}}}, None),
    ],
)
def test_refused_with_the_key(router, changes, sentence):
    with pytest.raises(SettingsError) as caught:
        edit(config(router), "w", changes)
    assert str(caught.value).startswith(
        sentence or "<config>: cannot be edited safely; set the depths by hand: {user_c"
    )
    assert "\n" not in str(caught.value)


ALIASED = "x: &x [{name: Router}]\n" + HEAD.replace("deployments:\n  - name: Router", "deployments: *x")
BRACELESS = HEAD.replace("deployments:\n  - name: Router", "deployments: [name: Router]")


@pytest.mark.parametrize(
    ("text", "application", "sentence"),
    [
        ("a: [", "w", "<config>: is not valid YAML: "),
        ("a: 2026-13-45", "w", "<config>: is not valid YAML: "),
        ("", "w", "applications: no application with import_path: serve_app.app:build is named w; there are none"),
        ("applications: 3", "w", "applications: no application with import_path: serve_app.app:build is named w; th"),
        (HEAD, "v", "applications: no application with import_path: serve_app.app:build is named v; there are: w"),
        (HEAD.replace("serve_app", "x"), "w", "applications: no application with import_path: serve_app.app:build is"),
        (HEAD + "---\n" + HEAD, "w", "applications: 2 applications are named w in this file"),
        (manifest(HEAD) + "---\n" + HEAD, "w", "applications: 2 applications are named w in this file"),
        (HEAD + "  - name: Router\n", "w", "applications: the application w has 2 deployments named Router in this"),
        (
            HEAD.replace("Router", "X"),
            "w",
            "applications: the application w has no deployment named Router in this file",
        ),
        (
            HEAD[: HEAD.index("  dep")],
            "w",
            "applications: the application w has no deployment named Router in this file",
        ),
        (ALIASED, "w", "applications[0].deployments: is shared by an anchor (&) and an alias (*); write it out"),
        (ALIASED.replace("deployments: *x", "<<: {deployments: *x}"), "w", "applications[0].deployments: comes from a"),
        (BRACELESS, "w", f"{WHERE}: is a mapping without braces"),
        (HEAD.replace("name: w", "name: w\n  name: w"), "w", "applications[0].name: is given twice"),
        (manifest(HEAD + "\n    x: [\n"), "w", "spec.serveConfigV2: is not valid YAML: "),
        (manifest(HEAD + "---\n" + HEAD), "w", "applications: no application"),
        (manifest(HEAD.replace("- name", "- a: *b\n    name")), "w", "spec.serveConfigV2: is not valid YAML: "),
        (manifest(HEAD, header=">"), "w", "spec.serveConfigV2: is not valid YAML: "),
        (manifest(HEAD, header="&a |") + "  x: *a\n", "w", "spec.serveConfigV2: is shared by an anchor"),
        (
            manifest(HEAD + "    user_config: &u {a: 1}\n    b: *u\n"),
            "w",
            "spec.serveConfigV2.applications[0].deployments[0].user_config: is shared by",
        ),
        (
            f"kind: RayService\nspec: {{serveConfigV2: {module._quoted(HEAD)}}}\n",
            "w",
            "spec.serveConfigV2: is written in quotes or folded, where lines cannot be edited in place; write it as",
        ),
        (
            manifest(HEAD.replace("\n", "\n\n"), header=">"),
            "w",
            "spec.serveConfigV2: is written in quotes or folded, where lines cannot be edited in place; write it as",
        ),
        ("kind: RayService\nspec: {serveConfigV2: {applications: []}}\n", "w", "applications: no application with"),
        ("- 1\n--- 2\n---\n", "w", "applications: no application with"),
        ("kind: RayService\n", "w", "applications: no application with"),
    ],
)
def test_refused_files(text, application, sentence):
    with pytest.raises(SettingsError) as caught:
        edit(text, application, FOUND)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "edits",
    [
        [module._Edit(0, 0, "x: 1\n")],
        [module._Edit(0, 0, "x: [\n")],
        [module._Edit(0, 0, "--- 1\n---\n")],
        [module._Edit(0, 9, ""), module._Edit(3, 12, "")],
        [],
    ],
)
@pytest.mark.parametrize("wrap", [str, manifest], ids=["config", "manifest"])
def test_a_bug_cannot_damage_a_file(monkeypatch, edits, wrap):
    monkeypatch.setattr(module, "_router_edits", lambda *_: edits)
    with pytest.raises(
        SettingsError, match=r"cannot be edited safely; set the depths by hand: \{max_ongoing_requests: 5\}"
    ):
        edit(wrap(HEAD), "w", {"max_ongoing_requests": 5})


# Manifests.


@pytest.mark.parametrize("header", ["|", "|-", "|+", "|  # a comment", "|2", "|-2", "&a |", "!!str |"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_headers_of_a_literal(header, newline):
    before = ("\n  # deeper\n" if "2" in header else "\n \n") + HEAD.replace("name: w\n", "name: w\n\n \n") + "\n\n"
    after = before.replace("Router\n", "Router\n    a: 1\n")
    assert edit(manifest(before, 4, header).replace("\n", newline), "w", {"a": 1}) == manifest(
        after, 4, header
    ).replace("\n", newline)


def test_a_manifest_that_ends_within_the_config():
    text = "kind: RayService\nspec:\n serveConfigV2: |\n" + block(HEAD, 6).removesuffix("\n")
    assert edit(text, "w", {"a": 1}) == text + "\n          a: 1"


def test_blank_lines_that_the_header_takes_away_are_no_content():
    before = config("note: |+\n  a\n\n\n")
    after = config("note: |+\n  a\nx: 1\n\n\n")
    assert edit(manifest(before), "w", {"x": 1}) == manifest(after)
    before, after = config("note: |+\n  a\n\n"), config("note: |+\n  a\n\nx: 1\n")
    assert edit(manifest(before, header="|+"), "w", {"x": 1}) == manifest(after, header="|+")
    with pytest.raises(SettingsError, match="cannot be edited safely"):  # the note would gain a newline
        edit(manifest(before, header="|-"), "w", {"x": 1})


def test_the_right_one_of_several_manifests():
    other = manifest(HEAD.replace("name: w", "name: v"))
    quoted = f"---\nkind: RayService\nspec: {{serveConfigV2: {module._quoted(HEAD.replace('name: w', 'name: u'))}}}\n"
    before, after = manifest(HEAD), manifest(HEAD + "    a: 1\n")
    assert edit(f"{other}---\n{before}{quoted}", "w", {"a": 1}) == f"{other}---\n{after}{quoted}"


# Any layout.


def merge(into, changes, path=()):
    """The merge as the task says it, in place."""
    for key, value in changes.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict) and here != ("user_config", "calibration"):
            merge(into[key], value, here)
        else:
            into[key] = value


def is_subsequence(lines, within):
    rest = iter(within)
    return all(line in rest for line in lines)


LEAVES = {
    "queue_depth": ["64", "0x40", "'64'", "null", "~", '"a # b"'],
    "alpha_s": ["0.0180", "1.0e-2", ".5", ""],
    "beta_s": ["0.27", "+1.0"],
    "slo_s": ["1.0", "2", "1_000.0"],
    "odd": ["[1,  2]", "{a: {b: 1}, }", "{}", "'x: #'", "text  of words", "-1", "|LITERAL", "|FOLDED", "|NESTED"],
    "max_ongoing_requests": ["5", "~"],
}


class Writer:
    """Writes a tree as YAML in a drawn layout."""

    def __init__(self, draw):
        self.draw = draw

    def pick(self, choices):
        return self.draw(st.sampled_from(choices))

    def maybe(self):
        return self.draw(st.booleans())

    def comment(self):
        return self.pick(["", "", " # c", "   # b: {c} ", " "])

    def between(self):
        return self.pick(["", "", "", "\n", "# at the margin\n", "      # deep\n\n", "  \n"])

    def key(self, key):
        return self.pick([key, key, f"'{key}'", f'"{key}"'])

    def flow(self, tree):
        if not isinstance(tree, dict):
            return tree.replace("|LITERAL", "1").replace("|FOLDED", "2").replace("|NESTED", "3")
        edge = self.pick(["", " "])
        joint = self.pick([", ", ",", " , "]) if edge else ", "
        entries = joint.join(f"{self.key(key)}: {self.flow(value)}" for key, value in tree.items())
        return "{" + edge + entries + self.pick(["", ", "] if tree else [""]) + edge + "}"

    def lines(self, tree, indent, step):
        """The entries of a block mapping, as text."""
        return "".join(self.marked(key, value, indent, step) + self.between() for key, value in tree.items())

    def marked(self, key, value, indent, step):
        """An entry; that of `calibration`, which goes away as a whole, between two marks."""
        entry = self.entry(key, value, indent, step)
        return f"\0{entry[:-1]}\1\n" if key == "calibration" else entry

    def entry(self, key, value, indent, step):
        pad = " " * indent
        head = f"{pad}{self.key(key)}:"
        deeper = pad + " " * step
        if isinstance(value, dict):
            if value and self.maybe():
                return f"{head}{self.comment()}\n{self.between()}{self.lines(value, indent + step, step)}"
            return f"{head} {self.flow(value)}{self.comment()}\n"
        match value:
            case "|LITERAL":
                return f"{head} {self.pick(['|', '|-', '|+'])}\n{deeper}a\n\n{deeper}  # b\n{self.pick(['', chr(10)])}"
            case "|FOLDED":
                return f"{head} >-\n{deeper}a\n{deeper}b\n"
            case "|NESTED":
                at = self.pick([pad, deeper])
                return f"{head}\n{at}- a: 1\n{at}  b:\n{at}- - c{self.comment()}\n{at}  - {{}}\n"
        return f"{head}{' ' if value else ''}{value}{self.comment()}\n"


def some(draw, keys):
    chosen = draw(st.lists(st.sampled_from(keys), unique=True))
    return {key: draw(st.sampled_from(LEAVES[key])) for key in chosen}


@st.composite
def files(draw):
    """A Serve config in a drawn layout, or a manifest with one; and its lines, but those of `calibration`."""
    writer = Writer(draw)
    user_config = some(draw, ["slo_s", "odd"])
    for pool in draw(st.lists(st.sampled_from(["cpu", "accelerator"]), unique=True)):
        user_config[pool] = some(draw, ["queue_depth", "alpha_s", "beta_s", "odd"])
    if writer.maybe():
        user_config["calibration"] = some(draw, ["alpha_s", "odd"])
    router = {"name": "Router", **some(draw, ["max_ongoing_requests", "odd"])}
    if writer.maybe():
        router["user_config"] = writer.pick([user_config, user_config, "", "~"])
    step = writer.pick([2, 4])
    at = writer.pick([0, step])  # sequences stand under their key, or deeper
    entry_at = at + step + at
    text = (
        f"a: 1{writer.comment()}\n{writer.between()}applications:\n"
        f"{' ' * at}-{' ' * (step - 1)}import_path: serve_app.app:build\n{' ' * (at + step)}deployments:\n"
        f"{' ' * entry_at}- name: Other\n{writer.between()}"
    )
    if writer.maybe():
        entry = writer.lines(router, entry_at + step, step)
        lead = " " * entry_at + "-" + " " * (step - 1)
        text += lead + entry.lstrip(" ")
    else:
        text += f"{' ' * entry_at}- {writer.flow(router)}{writer.comment()}\n"
    rest = [f"{' ' * (at + step)}args: {{x:  1}}\n", "b: |\n    text\n\n"]
    header = writer.pick(["", "|", "|+", "|-"])
    text += writer.pick(rest if header == "|-" else ["", *rest])  # a literal without a newline cannot be added to
    if header:
        text = manifest(text, indent=step + 2, header=header)
    text = text.replace("\n", writer.pick(["\n", "\n", "\r\n"]))
    return re.sub("[\0\1]", "", text), re.sub("\r?\n *\0.*?\1", "", text, flags=re.DOTALL).split("\n")


@st.composite
def found(draw):
    pool = st.fixed_dictionaries({"queue_depth": st.integers(0, 999)}, optional={"alpha_s": st.floats(0, 1)})
    calibration = st.fixed_dictionaries({"at": st.text("ab: #'é", max_size=4)}, optional={"r2": pool})
    user_config = st.fixed_dictionaries(
        {}, optional={"slo_s": st.floats(0, 9), "cpu": pool, "calibration": calibration}
    )
    return draw(st.fixed_dictionaries({}, optional={"max_ongoing_requests": st.just(9), "user_config": user_config}))


def config_of(text):
    """The Serve config in a file."""
    *_, last = yaml.safe_load_all(text)
    return yaml.safe_load(last["spec"]["serveConfigV2"]) if "spec" in last else last


@given(files(), found())
@settings(max_examples=50, deadline=None)
def test_any_layout(file, changes):
    text, lines = file
    after = edit(text, "default", changes)
    expected = config_of(text)
    merge(expected["applications"][0]["deployments"][1], changes)
    assert config_of(after) == expected
    ours = re.compile("user_config|queue_depth|alpha_s|slo_s|max_ongoing|cpu|calibration|Router")
    assert is_subsequence([line for line in lines if not ours.search(line)], after.split("\n"))
    assert after == text or unified_diff(text, after, "x")


# Files.


def test_the_diff():
    assert unified_diff("a\nb\n", "a\nb\n", "c.yaml") == ""
    assert unified_diff("a\nb\r\n", "a\nc\r\n", "c.yaml") == "--- c.yaml\n+++ c.yaml\n@@ -1,2 +1,2 @@\n a\n-b\r\n+c\r\n"
    assert unified_diff("a", "b", "c.yaml").endswith(
        "-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    )


def test_reading_keeps_line_ends(tmp_path):
    (tmp_path / "c").write_bytes("é\r\nb\n\r".encode())
    assert read_text(tmp_path / "c") == "é\r\nb\n\r"


def test_reading_fails_in_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match="none: cannot be read: No such file or directory"):
        read_text(tmp_path / "none")
    (tmp_path / "c").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="c: is not UTF-8 text"):
        read_text(tmp_path / "c")


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "c.yaml"
    made.write_bytes(b"a\r\n")
    made.chmod(0o640)
    return made


def modes(folder):
    return {path.name: (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}


def test_written_with_a_backup_beside_it(file):
    backup = write_atomically(file, "a\r\n", "é\r\n")
    assert re.fullmatch(r"c\.yaml\.bak-\d{8}T\d{6}Z", backup.name)
    assert modes(file.parent) == {"c.yaml": ("é\r\n".encode(), 0o640), backup.name: (b"a\r\n", 0o640)}


def test_a_backup_never_replaces_another(file, monkeypatch):
    class Stopped(config_file.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 20, 23, 59, 0, tzinfo=tz)

    monkeypatch.setattr(config_file, "datetime", Stopped)
    backups = [write_atomically(file, before, after).name for before, after in (("a\r\n", "b"), ("b", "c"), ("c", "d"))]
    stem = "c.yaml.bak-20261120T235900Z"
    assert backups == [stem, f"{stem}-1", f"{stem}-2"]
    assert [(file.parent / name).read_bytes() for name in backups] == [b"a\r\n", b"b", b"c"]


def test_a_link_stays_a_link(file, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link.yaml"
    link.symlink_to("../c.yaml")
    backup = write_atomically(link, "a\r\n", "b")
    assert link.is_symlink()
    assert file.read_bytes() == b"b"
    assert backup.parent == tmp_path


def test_a_file_that_changed_meanwhile_is_left_alone(file):
    with pytest.raises(SettingsError, match=r"c\.yaml: changed while the calibration ran; nothing was written, please"):
        write_atomically(file, "a\n", "b")
    assert modes(file.parent) == {"c.yaml": (b"a\r\n", 0o640)}


def test_a_file_that_changes_at_the_last_moment_is_left_alone(file, monkeypatch):
    original = config_file._create_backup

    def create(target):
        file.write_bytes(b"theirs")
        return original(target)

    monkeypatch.setattr(config_file, "_create_backup", create)
    with pytest.raises(SettingsError, match="changed while the calibration ran"):
        write_atomically(file, "a\r\n", "b")
    assert modes(file.parent) == {"c.yaml": (b"theirs", 0o640)}


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(28, "No space left"), SettingsError), (KeyboardInterrupt(), None)]
)
@pytest.mark.parametrize("call", ["replace", "fsync", "fchmod"])
def test_a_failure_leaves_the_original_and_nothing_else(file, monkeypatch, call, error, raised):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(raised or KeyboardInterrupt) as caught:
        write_atomically(file, "a\r\n", "b")
    if raised:
        assert str(caught.value) == f"{file}: cannot be written: No space left"
    assert modes(file.parent) == {"c.yaml": (b"a\r\n", 0o640)}


def test_no_such_file(tmp_path):
    with pytest.raises(SettingsError, match="none: cannot be written: No such file or directory"):
        write_atomically(tmp_path / "none", "a", "b")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(SettingsError, match="loop: cannot be written: "):
        write_atomically(tmp_path / "loop", "a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_imports_neither_ray_nor_torch():
    code = "import sys, calibration.serve_config; print({'ray', 'torch', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
