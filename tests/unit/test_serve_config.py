"""Edits of Serve configs and of RayService manifests: only the wanted values change."""

import json
import textwrap
from pathlib import Path

import pytest
import yaml

import serve_app
from calibration.service.config_file import read_text
from calibration.service.serve_config import edit, router_application
from deployments.errors import SettingsError
from serve_app.config.models import IMPORT_PATHS

SHIPPED = Path(serve_app.__file__).parent
FOUND = {
    "max_ongoing_requests": 1000000,
    "user_config": {
        "slo_s": 1.0,
        "accelerator": {"queue_depth": 38, "alpha_s": 1e-05, "beta_s": 0.281},
        "cpu": {"queue_depth": 8, "alpha_s": 0.0858, "cost": {"query_s": 0.5}},
        "calibration": {"at": "2026-11-20T23:59:00Z", "r2": {"accelerator": 0.9991}, "proved": ["bursts"]},
    },
}
DEPTH = {"user_config": {"cpu": {"queue_depth": 38}}}
CALIBRATION = {"user_config": {"calibration": {"at": "x", "r2": {"cpu": 0.5}}}}
NONE = f"applications: no application with import_path: {' or '.join(IMPORT_PATHS)}"
HEAD = """\
applications:
- import_path: serve_app.app:build
  name: w
  deployments:
  - name: Router
"""


def config(router):
    """A Serve config whose Router entry goes on with these lines."""
    return HEAD + textwrap.indent(router, "    ")


def manifest(inner, header="|"):
    return (
        "apiVersion: v1\nkind: ConfigMap\ndata: { a: '1' }  # untouched\n---\n"
        "apiVersion: ray.io/v1\nkind: RayService\nspec:\n"
        f"  serveConfigV2: {header}\n{textwrap.indent(inner, '    ')}"
        "  # the cluster\n  rayClusterConfig: {rayVersion: 3}\n"
    )


MERGES = {
    "a comment behind a value": (
        "user_config:\n  cpu:\n    queue_depth: 64   # guessed\n",
        DEPTH,
        "user_config:\n  cpu:\n    queue_depth: 38   # guessed\n",
    ),
    "the same again": (
        "user_config: {cpu:  {queue_depth: 0x26}}\n",
        DEPTH,
        "user_config: {cpu:  {queue_depth: 0x26}}\n",
    ),
    "an integer where a float is wanted": (
        "user_config: {slo_s: 1}\n",
        {"user_config": {"slo_s": 1.0}},
        "user_config: {slo_s: 1.0}\n",
    ),
    "nothing there": ("", DEPTH, "user_config:\n  cpu: {queue_depth: 38}\n"),
    "null there": ("user_config: # c\n", DEPTH, "user_config: {cpu: {queue_depth: 38}} # c\n"),
    "all is new": (
        "num_replicas: 1\n",
        FOUND,
        (
            "num_replicas: 1\n"
            "max_ongoing_requests: 1000000\n"
            "user_config:\n"
            "  slo_s: 1.0\n"
            "  accelerator: {queue_depth: 38, alpha_s: 1.0e-05, beta_s: 0.281}\n"
            "  cpu:\n"
            "    queue_depth: 8\n"
            "    alpha_s: 0.0858\n"
            "    cost: {query_s: 0.5}\n"
            "  calibration:\n"
            "    at: '2026-11-20T23:59:00Z'\n"
            "    r2: {accelerator: 0.9991}\n"
            "    proved: [bursts]\n"
        ),
    ),
    "a calibration loses its old keys, and the comments stay": (
        "user_config:\n  calibration: # ours\n    at: y # then\n    old: {a: 1}\n\n  # CPU\n  slo_s: 1.0\n",
        CALIBRATION,
        "user_config:\n  calibration: # ours\n    at: x # then\n    r2: {cpu: 0.5}\n\n  # CPU\n  slo_s: 1.0\n",
    ),
    "another `calibration`, and a model of a pool's name, are merged": (
        "user_config: {bulk: {calibration: {a: 1}}, models: {v1.cpu: {a: 1}}}\n",
        {"user_config": {"bulk": {"calibration": {"b": 2}}, "models": {"v1.cpu": {"b": 2}}}},
        "user_config: {bulk: {calibration: {a: 1, b: 2}}, models: {v1.cpu: {a: 1, b: 2}}}\n",
    ),
    "a pool loses what is not true of it any more": (
        "user_config:\n  cpu:  # theirs\n    queue_depth: 8  # per replica\n    alpha_s: 0.1\n    beta_s: 0.2\n",
        DEPTH,
        "user_config:\n  cpu:  # theirs\n    queue_depth: 38  # per replica\n",
    ),
}


@pytest.mark.parametrize(("before", "changes", "after"), MERGES.values(), ids=MERGES)
def test_only_the_wanted_values_change(before, changes, after):
    """Also inside of a manifest, with line ends of Windows."""
    assert edit(config(before), "w", changes) == config(after)
    text = manifest(config(before)).replace("\n", "\r\n")
    assert edit(text, "w", changes) == manifest(config(after)).replace("\n", "\r\n")


@pytest.mark.parametrize("name", ["config.yaml", "rehearsal.yaml"])
@pytest.mark.parametrize("wrap", [str, manifest], ids=["config", "manifest"])
def test_the_shipped_files_keep_their_other_lines(name, wrap):
    before = wrap(read_text(SHIPPED / name))
    after = edit(before, "windve", FOUND)
    assert edit(after, "windve", FOUND) == after
    rest = iter(after.splitlines())
    changed = ("slo_s: 2.0", "accelerator: {alpha_s", "cpu: {alpha_s")
    assert all(line in rest for line in before.splitlines() if not line.strip().startswith(changed))


@pytest.mark.parametrize("header", ["|", "|-", "|+", "|  # a comment", ">+"])
def test_a_manifest_carries_its_config_as_a_literal(header):
    inner = HEAD.replace("\n", "\n\n") if header == ">+" else HEAD
    after = edit(manifest(inner, header), "w", {"a": 1})
    carried = list(yaml.safe_load_all(after))[1]["spec"]["serveConfigV2"]
    assert yaml.safe_load(carried) == yaml.safe_load(HEAD + "    a: 1\n")
    assert header.startswith(">") or after == manifest(HEAD + "    a: 1\n", header)


def test_a_manifest_carries_its_config_in_quotes():
    quoted = f"kind: RayService # c\nspec: {{serveConfigV2: {json.dumps(HEAD)}}}\n"
    assert edit(quoted, "w", {"a": 1}) == quoted.replace('Router\\n"', 'Router\\n    a: 1\\n"')


def test_the_right_one_of_several_manifests_and_applications():
    other = manifest(HEAD.replace("name: w", "name: v"))
    two = HEAD.replace("name: w", "name: u") + HEAD.partition("\n")[2]
    assert edit(f"{other}---\n{manifest(two)}", "w", {"a": 1}) == f"{other}---\n{manifest(two + '    a: 1' + chr(10))}"


def test_an_application_without_a_name_is_the_default():
    text = HEAD.replace("  name: w\n", "")
    assert edit(text, "default", {"a": 1}) == text + "    a: 1\n"
    assert router_application(text, "default")["deployments"] == [{"name": "Router"}]


KEPT = {
    "quotes, numbers and words of others": "'x': 0x40\n\"y\": [ 1,2 ]\nz: 1_000.00\nn: ~\nd: 2026-01-01\na: 1  # c\n",
    "texts over several lines": "x: a text\n  that goes on\ny: >-\n  b\n  c\na: 1\n",
    "anchors, aliases and merge keys of others": "x: &x {y: 1}\nz:\n  <<: *x\n  v: *x\na: 1\n",
    "another indentation": "x:\n-   y: 1\n    z:\n      - 2\na: 1\n",
    "beyond ASCII, and no line end": "x: é # 😀\na: 1",
}


@pytest.mark.parametrize("router", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("around", ["{}", "\ufeff# c\n{}", "%YAML 1.1\n---\n{}\n...\n# end\n--- {{ z: 1 }}\n"])
def test_all_else_keeps_every_byte(router, around):
    before = around.format(config(router))
    assert edit(before, "w", {"a": 2}) == before.replace("a: 1", "a: 2")


ADDED = {
    "before comments and blank lines": ("user_config:\n  b: 1  # c\n\n  # after\n# d\nx: 1\n", "  b: 1  # c\n"),
    "behind a literal that ends in blank lines": ("user_config:\n  b: |+\n    # no\n\n\nx: 1\n", "no\n\n\n"),
    "beside a value by a merge key": ("user_config:\n  <<: {cpu: {}}\n  b: 1\n", "  b: 1\n"),
    "at the end of the file": ("user_config:\n  b: 1", "  b: 1"),
}


@pytest.mark.parametrize(("before", "behind"), ADDED.values(), ids=ADDED)
def test_a_new_key_stands_behind_its_neighbour(before, behind):
    new = behind + "\n" * (not behind.endswith("\n")) + "  cpu: {queue_depth: 38}" + "\n" * behind.endswith("\n")
    assert edit(HEAD + textwrap.indent(before, "    "), "w", DEPTH) == (
        HEAD + textwrap.indent(before.replace(behind, new), "    ")
    )


NUMBERS = [1e-05, 2.5e-07, 1e22, -0.0, 1.0, 7, True, None]
VALUES = [*NUMBERS, "", "1e-05", "12:30:00", "No", "~", " a", "a: b #c", "a\nb\t'😀"]


@pytest.mark.parametrize("there", ["", "a: 0 # c\n", "a: {y: 1}\n", "a:\n  y: 1\n"])
def test_values_are_read_back_as_they_were(there):
    one = {"y": VALUES, "c": {"d": {}}}
    for value in [one] if "y" in there else [*VALUES, VALUES] if there else [one, *VALUES, VALUES]:
        after = yaml.safe_load(edit(config(there), "w", {"a": value}))
        assert repr(after["applications"][0]["deployments"][0]["a"]) == repr(value)


@pytest.mark.parametrize(
    ("text", "application", "sentence"),
    [
        ("a: [", "w", "<config>: is not valid YAML: "),
        ("a: 2026-13-45", "w", "<config>: is not valid YAML: "),
        ("", "w", f"{NONE} is named w; there are none"),
        ("applications: 3", "w", f"{NONE} is named w; there are none"),
        (HEAD, "v", f"{NONE} is named v; there are: w"),
        (HEAD + "---\n" + HEAD, "w", "applications: 2 applications are named w in this file"),
        (manifest(HEAD) + "---\n" + HEAD, "w", "applications: 2 applications are named w in this file"),
        (HEAD + "  - name: Router\n", "w", "applications: the application w has 2 deployments named Router in this"),
        (HEAD[: HEAD.index("  dep")], "w", "applications: the application w has no deployment named Router in this"),
        (config("user_config: {cpu: 3}\n"), "w", "user_config.cpu: should be a mapping in this file"),
        (config("user_config: {slo_s: {a: 1}}\n"), "w", "user_config.slo_s: should be a single value in this file"),
        (manifest(config("user_config: {cpu: 3}\n")), "w", "spec.serveConfigV2.user_config.cpu: should be a mapping"),
        (config("user_config: {b: 1, # ours\n  c: 2}\n"), "w", "<config>: the comment '# ours' would be lost; move it"),
        (config("user_config:\n  cpu: &c {a: 1}\n  b: *c\n"), "w", "<config>: cannot be edited in place, perhaps"),
        (config("b: &c {slo_s: 2}\nuser_config: *c\n"), "w", "<config>: cannot be edited in place, perhaps due to"),
        (manifest(HEAD + "\n    x: [\n"), "w", "spec.serveConfigV2: is not valid YAML: "),
        (manifest(config("user_config:\n  cpu: &c {a: 1}\n  b: *c\n")), "w", "spec.serveConfigV2: cannot be edited in"),
        ("kind: RayService\nspec: {serveConfigV2: {applications: []}}\n", "w", "applications: no application with"),
        ("- 1\n--- 2\n---\n", "w", "applications: no application with"),
        ("kind: RayService\n", "w", "applications: no application with"),
    ],
)
def test_refused_in_one_sentence(text, application, sentence):
    with pytest.raises(SettingsError) as caught:
        edit(text, application, FOUND)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
