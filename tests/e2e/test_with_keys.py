"""API keys: who has one, how they change, and where they must not show. Over an emulated device that is quick."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from chromium import browser

from calibration.load import burst, request_bytes
from tests.kit import tei_wire
from tests.kit.service import ROOT, emulating, wait_until

OURS, THEIRS = "sk-ours-7f1e", "sk-theirs-90aa"
SITE = "https://app.example.com"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The path of the file with the keys."""
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(f"# ours\n{OURS}\n\n# theirs\n{THEIRS}\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def service(shared, keys):
    config = emulating(2.0, accelerator={"alpha_s": 0.005, "beta_s": 0.02})
    config["applications"][0]["args"] |= {"api_keys": f"file:{keys}", "cors_allow_origins": [SITE]}
    return shared.serve(config, {"authorization": f"Bearer {OURS}"})


def status_of(address, key):
    asking = request_bytes({"input": "a"}, headers=[("authorization", f"Bearer {key}")])
    return burst(address, [asking])[0].status


def test_a_key_opens_both_protocols_and_another_none(service):
    keys = {OURS: None, THEIRS: None, f"{OURS}x": grpc.StatusCode.UNAUTHENTICATED}
    assert [status_of(service.address, key) for key in keys] == [200, 200, 401]
    with tei_wire.connected(service.grpc_port) as client:
        for key, code in keys.items():
            call, metadata = tei_wire.request("Info/Info"), [("authorization", f"Bearer {key}")]
            answer = client.unary("Info/Info").future(call, timeout=30, metadata=metadata)
            assert answer.exception() is None if code is None else answer.code() is code


def test_a_preflight_of_a_named_site_needs_no_key(service):
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    told = {}
    for site in (SITE, "https://evil.example.com"):
        asking = Request(f"{service.address}/v1/embeddings", method="OPTIONS", headers={"Origin": site, **wanted})
        try:
            with urlopen(asking, timeout=30) as answer:
                told[site] = answer.status, answer.headers["access-control-allow-origin"]
        except HTTPError as error:
            told[site] = error.code, error.headers["access-control-allow-origin"]
            error.close()
    assert told == {SITE: (200, SITE), "https://evil.example.com": (400, None)}


def test_the_page_asks_for_a_key(service):
    with browser() as tab:
        tab.open(f"{service.address}/")
        tab.wait_for("#ask-key", "needs an API key")
        for key, selector, words in (
            (f"{OURS}x", "#problem", "does not know this API key"),
            (OURS, "#pools", "% full"),
        ):
            tab.write("#key", key)
            tab.click("#ask-key button")
            tab.wait_for(selector, words)
        assert (tab.text("#ask-key"), tab.text("#problem")) == ("", "")
        tab.write("#text", "a")
        tab.click("#go")
        tab.wait_for("#said", "Answered by the accelerator")
        assert OURS not in str(tab.asked)


def test_the_keys_show_nowhere(service, keys):
    shown = [json.dumps(service.get("/info")), json.dumps(service.get("/openapi.json")), service.serve("config")]
    shown.append(service.serve("status"))
    logs = session_logs(service)
    assert any("Router" in path.name for path in logs)
    shown += [path.read_text(errors="replace") for path in logs]
    assert not [text[:200] for text in shown if OURS in text or THEIRS in text]
    assert f"file:{keys}" in service.serve("config")


def session_logs(service):
    """What Ray and its workers wrote for this service."""
    commands = [" ".join(process.cmdline()) for process in service.family if process.is_running()]
    folders = {found for command in commands for found in re.findall(r"/\S*/session_\d[^/\s]*", command)}
    return [path for folder in folders for path in Path(folder, "logs").rglob("*") if path.is_file()]


def test_keys_are_changed_in_the_file_without_a_restart(service, keys):
    before, routers = keys.read_text(), service.routers()

    def accepted():
        """What each Router says of both."""
        return {tuple(status_of(at, key) == 200 for key in (THEIRS, "new")) for at in routers.values()}

    keys.write_text(f"{OURS}\nnew\n")
    wait_until(lambda: accepted() == {(False, True)}, "the new key")
    assert service.routers() == routers
    keys.write_text(before)
    wait_until(lambda: accepted() == {(True, False)}, "the old key")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], None),  # the application's own config says where the key is
        (["--api-keys", "env:WRONG_KEY"], "does not accept the API key; give a valid one with --api-keys"),
    ],
)
def test_calibration_shows_a_key(service, tmp_path, words, problem):
    token, dashboard = service.token_and_dashboard()
    command = [sys.executable, "-m", "serve_app", "calibrate", "--dashboard", dashboard]
    command += ["--out", str(tmp_path / "report")]
    command += ["--slo", "20", "--most", "1", "--estimate-only", *words]  # no estimate that a busy machine spoils
    environment = {**os.environ, **token, "WRONG_KEY": "wrong"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    shown = done.stdout + done.stderr
    if problem is None:
        assert done.returncode == 0, shown
        shown += (tmp_path / "report" / "report.json").read_text()
    else:
        assert done.returncode == 1
        assert problem in done.stderr
        assert done.stderr.count("\n") == 1
    assert OURS not in shown
    assert THEIRS not in shown
