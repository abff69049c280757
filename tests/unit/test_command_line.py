"""`windve`: what it says of misuse, which words count, and what it leaves unimported."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.errors import SettingsError, WindveError
from serve_app.cli import bench, serve
from serve_app.cli.main import COMMANDS, main
from serve_app.config.overrides import Overrides
from serve_app.config.service_config import load_config, ours, router_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "serve_app"
HEAVY = "{'ray', 'torch', 'transformers', 'numpy', 'pydantic', 'rich', 'yaml'}"


def status_of(*words):
    """argparse ends the process by itself."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help"], ["calibrate", "--help"]])
def test_help_imports_nothing_heavy(words):
    code = f"import sys; from serve_app.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n\
sys.exit(str(found) if (found := {HEAVY} & sys.modules.keys()) else 0)"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_each_command_and_teaches(capsys):
    assert status_of("--help") == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    assert "windve serve --model" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_teaches(capsys, name):
    if name == "bench":
        pytest.importorskip("scipy")
    assert status_of(name, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: windve {name}")
    assert f"windve {name}" in said[20:] or "example" not in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "windve: error: the following arguments are required: COMMAND"),
        (["serv"], "windve: error: argument COMMAND: invalid choice: 'serv'"),
        (["serve", "--port", "70000"], "argument --port: should be a port from 1 to 65535, not '70000'"),
        (["serve", "--slo", "0"], "argument --slo: should be seconds above 0, not '0'"),
        (["serve", "--slo", "nan"], "argument --slo: should be seconds above 0, not 'nan'"),
        (["top", "127.0.0.1:8000"], "argument URL: should begin with http:// or https://, not '127.0.0.1:8000'"),
        (["serve", "--host", ""], "argument --host: should be an address, not ''"),
        (["top", "http://[::1"], "argument URL: should look like http://127.0.0.1:8000, not 'http://[::1'"),
        (["top", "http://h:x"], "argument URL: should look like http://127.0.0.1:8000, not 'http://h:x'"),
        (["top", "--every", "0"], "argument --every: should be seconds from 0.1 to 3600, not '0'"),
        (["top", "--key", "sk-secret"], "windve: --key: should be file:PATH or env:NAME"),
        (["top", "--key", "file:~no-such-user/keys"], "windve: --key: ~no-such-user/keys cannot be read: "),
        (["calibrate", "--slo", "3600"], "windve: --slo: should be seconds above 0 and below 3600, not 3600"),
        (["calibrate", "--tokens", "1"], "windve: --tokens: should be at least 3"),
    ],
)
def test_misuse_is_one_sentence_and_status_2(capsys, words, sentence):
    assert status_of(*words) == 2
    said = capsys.readouterr().err
    assert sentence in said.splitlines()[-1]
    assert "sk-secret" not in said


def test_a_variable_is_checked_like_its_option(monkeypatch, capsys):
    monkeypatch.setenv("WINDVE_HTTP_PORT", "tcp://10.0.0.1:80")
    assert status_of("serve") == 2
    assert "argument --port: should be a port from 1 to 65535, not 'tcp://10.0.0.1:80'" in capsys.readouterr().err


# --- check


def test_check_says_good_or_names_the_key(tmp_path, capsys):
    assert main(["check", str(CONFIGS / "config.yaml")]) == 0
    assert capsys.readouterr().out == f"{CONFIGS / 'config.yaml'}: good\n"
    bad = tmp_path / "bad.yaml"
    bad.write_text((CONFIGS / "config.yaml").read_text().replace("cpu_overflow", "cpu_overflows"))
    assert main(["check", str(bad)]) == 1
    assert capsys.readouterr().err == "windve: args.cpu_overflows: there is no such setting\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("applications: 5", "applications: should be a list"),
        ("applications: [5]", "applications[0]: should be a mapping"),
        (
            "applications: [{import_path: serve_app.app:build, deployments: {}}]",
            "applications[0].deployments: should be a list",
        ),
        ("applications: []", "applications: none is a windve application"),
        ("applications: [{import_path: 5}]", "applications[0].import_path: should be a valid string, not 5"),
        (
            "applications: [{import_path: serve_app.app:build, deployments: [{name: Router}, {name: Router}]}]",
            "applications[0].deployments[1].name: there is a deployment Router before it",
        ),
        (
            "applications: [{import_path: serve_app.app:build, deployments: [{name: Router, num_replicas: 0}]}]",
            "applications[0].deployments[0].num_replicas: should be ",
        ),
    ],
)
def test_check_names_what_has_the_wrong_shape(tmp_path, capsys, text, sentence):
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["check", str(tmp_path / "bad.yaml")]) == 1
    assert capsys.readouterr().err.startswith(f"windve: {sentence}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications: []\nx: {a: 1, a: 2}", "is not valid YAML: the key a is given twice"),
        ("a: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        ("a: " + 5000 * "[", "is not valid YAML: maximum recursion depth exceeded"),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}", "a: is not a setting of Serve, which would ignore it"),
    ],
)
def test_check_refuses_what_yaml_would_take_in_silence_or_not_at_all(tmp_path, capsys, text, words):
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["check", str(tmp_path / "bad.yaml")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


# --- serve: option > environment > file > default


@pytest.fixture
def served(monkeypatch):
    """What `windve serve` would serve: the file's path and what is said in its place."""
    found = []
    monkeypatch.setattr("serve_app.local.serve.serve_until_interrupted", lambda *asked: found.append(asked))

    def run(*words):
        serve.main(words)
        return found.pop()

    return run


def test_an_option_counts_before_a_variable_and_that_before_the_file(served, monkeypatch, tmp_path):
    assert served() == (CONFIGS / "config.yaml", Overrides())
    monkeypatch.setenv("WINDVE_CONFIG", str(tmp_path / "mine.yaml"))
    monkeypatch.setenv("WINDVE_MODEL", "BAAI/bge-m3")
    monkeypatch.setenv("WINDVE_SLO", "0.5")
    monkeypatch.setenv("WINDVE_HTTP_HOST", "")  # as if it were not set
    monkeypatch.setenv("WINDVE_HTTP_PORT", "8100")
    monkeypatch.setenv("WINDVE_GRPC_PORT", "9100")
    assert served() == (tmp_path / "mine.yaml", Overrides("BAAI/bge-m3", 0.5, None, 8100, 9100))
    words = ("other.yaml", "--model", "m", "--slo", "2", "--host", "0.0.0.0", "--port", "1", "--grpc-port", "2")
    assert served(*words) == (Path("other.yaml"), Overrides("m", 2.0, "0.0.0.0", 1, 2))


def test_overrides_replace_what_the_file_says_and_keep_the_rest():
    file = CONFIGS / "config.yaml"
    before = load_config(file)
    after = load_config(file, Overrides("BAAI/bge-m3", 0.5, "0.0.0.0", 8100, 9100))
    assert after["http_options"] == {"host": "0.0.0.0", "port": 8100}
    assert after["grpc_options"] == {**before["grpc_options"], "port": 9100}
    (was,), (found,) = ours(before), ours(after)
    assert found["args"] == {**was["args"], "model": {"id": "BAAI/bge-m3"}}
    assert router_config(found) == {**router_config(was), "slo_s": 0.5}
    assert load_config(file) == before


def test_another_model_leaves_what_was_measured_of_the_one_before():
    measured = {"alpha_s": 0.01, "beta_s": 0.1, "queue_depth": 8}
    config = yaml.safe_load((CONFIGS / "config.yaml").read_text())
    (application,) = config["applications"]
    application["deployments"][0]["user_config"] |= {"cpu": measured, "calibration": {}}
    same = application["args"]["model"]["id"]
    Overrides(model=same).apply(config, [application])
    assert application["args"]["model"]["name"] == "all-MiniLM-L6-v2"
    assert router_config(application)["cpu"] == measured
    Overrides(model="other").apply(config, [application])
    assert router_config(application) == {"slo_s": 1.0, "admission": "deadline", "cpu": {"queue_depth": 8}}


def test_the_file_may_leave_the_promise_to_the_option(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("applications: [{import_path: serve_app.app:build, args: {model: {id: m}}}]")
    with pytest.raises(SettingsError, match="user_config: missing"):
        load_config(file)
    (application,) = ours(load_config(file, Overrides(slo_s=3.0)))
    assert router_config(application) == {"slo_s": 3.0}


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("two_models.yaml", Overrides(model="m"), "--model: the config serves several models: set args.models there"),
        ("generation.yaml", Overrides(slo_s=1.0), "--slo: this application generates: set ttft_s and tpot_s"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(name, overrides, sentence):
    with pytest.raises(SettingsError) as caught:
        load_config(CONFIGS / name, overrides)
    assert str(caught.value).startswith(sentence)


def test_an_option_for_one_application_is_refused_where_there_are_two(tmp_path):
    config = yaml.safe_load((CONFIGS / "config.yaml").read_text())
    config["applications"].append({**config["applications"][0], "name": "second", "route_prefix": "/second"})
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SettingsError, match="--slo: the config has 2 applications"):
        load_config(tmp_path / "two.yaml", Overrides(slo_s=1.0))
    assert load_config(tmp_path / "two.yaml", Overrides(port=8100))["http_options"]["port"] == 8100


# --- the others


def test_bench_says_where_the_benchmarks_are(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    with pytest.raises(WindveError, match="clone the repository"):
        bench.main([])


def test_calibrate_names_what_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "calibration.command", None)
    with pytest.raises(ModuleNotFoundError):
        main(["calibrate"])  # a mistake of ours is not hidden

    def lacks(_):
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setitem(sys.modules, "calibration.command", type(sys)("calibration.command"))
    monkeypatch.setattr(sys.modules["calibration.command"], "main", lacks, raising=False)
    assert main(["calibrate"]) == 1
    assert capsys.readouterr().err == "windve: calibrate needs scipy: pip install 'windve[calibration]'\n"


def test_a_reader_that_goes_is_no_error():
    code = "from serve_app.cli import check, main; check.main = lambda _: print(10**6 * 'x'); main.main(['check'])"
    command = f'{sys.executable} -c "{code}" | head -c 1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x", b"")
