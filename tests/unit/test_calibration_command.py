"""`windve calibrate` of embeddings: what is refused before anything is measured, in one sentence that says why."""

import asyncio

import pytest
import yaml
from test_calibration_run import Application as Formula

from calibration import session
from calibration.load import Address
from calibration.measure.traffic import Traffic
from deployments.errors import SettingsError
from serve_app.cli.main import main
from tests.kit.service import ROOT

REHEARSAL = ROOT / "serve_app" / "rehearsal.yaml"


class Application(Formula):
    """The one of rehearsal.yaml."""

    deployed, generates = yaml.safe_load(REHEARSAL.read_text())["applications"][0], False

    def placed(self, changes):
        return changes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--slo", "-1"], "--slo: should be seconds above 0"),
        (["--tokens", "2"], "--tokens: should be at least 3"),
        (["--most", "100001"], "--most: should be at most 100000, the largest depth that a config may have"),
        (["--most", "9", "--stress-step", "10"], "--stress-step: should be at most --most, which is 9"),
        (["--slo", "31"], "--slo: a batch may take as long, 31 s, and batch_timeout_s takes a replica for hung"),
        (["--slo", "60"], "the application drops a query after 60 s"),
        (["--slo", "1", "--answer-tokens", "9"], "--answer-tokens: is for generation, but this application embeds"),
        (["--estimate-only", "--apply"], "--estimate-only: an estimate is not proven, so it is never written"),
        (["--config", str(ROOT / "serve_app/config.yaml")], "describes another application than the running one"),
        (["--config", str(ROOT / "Makefile")], "Makefile: "),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--deploy", "a", "--rayservice", "b"], "--rayservice: requires a pod with a ServiceAccount's token in /var/"),
    ],
)
def test_bad_input_gets_one_sentence(monkeypatch, capsys, tmp_path, words, problem):
    monkeypatch.setattr("calibration.session._find", lambda *_: Application())
    refused(capsys, ["--out", str(tmp_path), *words], problem)
    assert list(tmp_path.iterdir()) == []


def test_a_dashboard_that_does_not_answer_is_named(monkeypatch, capsys):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    where = "http://127.0.0.1:1"
    refused(capsys, ["--dashboard", where], f"Ray's dashboard does not answer at {where}: ")


def refused(capsys, words, problem):
    """Status 2: an option is wrong; 1: what it meets is."""
    status, told = main(["calibrate", *words]), capsys.readouterr()
    assert status == (2 if told.err.startswith("windve: --") else 1)
    assert problem in told.err
    assert told.err.count("\n") == 1
    assert "Traceback" not in told.out + told.err


def test_a_query_longer_than_the_model_takes_is_refused():
    traffic = Traffic(Address("127.0.0.1", 1), (), [], [], 5000, 0, 5.0)
    with pytest.raises(SettingsError, match="--tokens: should be at most 256, the model's maximum, not 5000"):
        asyncio.run(traffic.prepare(256))


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    problem = r"--out: another calibration writes into .*: wait until it has ended"
    with (
        session.alone_in(tmp_path / "out"),
        pytest.raises(SettingsError, match=problem),
        session.alone_in(tmp_path / "out"),
    ):
        pass
    with session.alone_in(tmp_path / "out"):
        pass


def test_a_folder_that_cannot_be_written_is_refused_by_its_option(tmp_path):
    (tmp_path / "file").touch()
    problem = r"--out: .*file cannot be written: File exists"
    with pytest.raises(SettingsError, match=problem), session.alone_in(tmp_path / "file"):
        pass
