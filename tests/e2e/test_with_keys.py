"""API keys on every route, and where they must not show. Over an emulated device that is quick."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2

from calibration.load import burst, request_bytes
from tests.kit import tei_wire
from tests.kit.service import ROOT, emulating, wait_until

OURS, THEIRS = "sk-ours-7f1e", "sk-theirs-90aa"
POSTS = ("/v1/embeddings", "/embeddings", "/embed", "/", "/embed_all", "/similarity", "/tokenize", "/decode")
GETS = ("/v1/models", "/v1/models/emulated", "/info", "/docs", "/openapi.json", "/", "/nowhere", "/health/", "//health",
        f"/info?api_key={OURS}")  # fmt: skip
BODY = {"input": "a", "inputs": {"source_sentence": "a", "sentences": ["b"]}}
CALLS = {
    "Info/Info": {},
    "Embed/Embed": {"inputs": "a"},
    "Tokenize/Tokenize": {"inputs": "a"},
    "Tokenize/Decode": {"ids": [101, 102]},
}


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
    config["applications"][0]["args"]["api_keys"] = f"file:{keys}"
    return shared.serve(config, {"authorization": f"Bearer {OURS}"})


def replies_of_every_route(service, headers):
    """(path, reply)"""
    service.headers, before = headers, service.headers
    try:
        with ThreadPoolExecutor(4) as threads:
            replies = [*threads.map(lambda path: service.ask(path, BODY), POSTS), *threads.map(service.fetch, GETS)]
    finally:
        service.headers = before
    return zip([*POSTS, *GETS], replies, strict=True)


@pytest.mark.parametrize("headers", [{}, {"authorization": f"Bearer {OURS}x"}, {"x-api-key": OURS}], ids=str)
def test_without_a_key_no_route_answers(service, headers):
    """tests/unit/test_api_keys.py has more headers that hold none."""
    for path, reply in replies_of_every_route(service, headers):
        assert reply.status == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
        error = reply.json()["error"]
        if path.startswith("/v1/") or path == "/embeddings":
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            error = error["message"]
        else:
            assert reply.json()["error_type"] == "Unauthorized"
        assert "API key" in error
        assert OURS not in error


@pytest.mark.parametrize("key", [OURS, THEIRS])
def test_each_key_opens_every_route_and_call(service, key):
    for path, reply in replies_of_every_route(service, {"authorization": f"bearer {key}"}):
        assert reply.status != 401, path
    with tei_wire.connected(service.grpc_port) as client:
        for call, fields in CALLS.items():
            client.call(call, metadata=[("authorization", f"Bearer {key}")], **fields)


@pytest.mark.parametrize("metadata", [[], [("authorization", f"Bearer {OURS}x")]], ids=str)
def test_without_a_key_no_call_answers_but_health_is_open(service, metadata):
    with tei_wire.connected(service.grpc_port) as client:
        for call, fields in CALLS.items():
            refused = client.refused(call, metadata=metadata, **fields)
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED, call
            assert "API key" in refused.details()
            assert OURS not in refused.details()
        for call in tei_wire.STREAMS:
            fields = {"ids": [101]} if "Decode" in call else {"inputs": "a"}
            with pytest.raises(grpc.RpcError) as refused:
                list(client.stream(call)(iter([tei_wire.request(call, **fields)]), timeout=30, metadata=metadata))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, call
        assert client.health() == health_pb2.HealthCheckResponse.SERVING
    assert [service.fetch(path).status for path in ("/health", "/ping")] == [200, 200]


def test_openai_client_with_and_without_a_key(service):
    for key, kind in ((OURS, None), ("wrong", openai.AuthenticationError)):
        with openai.OpenAI(base_url=f"{service.address}/v1", api_key=key, max_retries=0) as client:
            if kind is None:
                assert len(client.embeddings.create(model="emulated", input="a").data) == 1
            else:
                with pytest.raises(kind, match="is not one of this service's"):
                    client.embeddings.create(model="emulated", input="a")


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
    before, router = keys.read_text(), service.get("/info")["windve"]["router"]

    def accepted():
        asking = ([("authorization", f"Bearer {key}")] for key in (THEIRS, "new"))
        return [burst(service.address, [request_bytes({"input": "a"}, headers=one)])[0].status == 200 for one in asking]

    keys.write_text(f"{OURS}\nnew\n")
    wait_until(lambda: accepted() == [False, True], "the new key")
    assert service.get("/info")["windve"]["router"] == router
    keys.write_text(before)
    wait_until(lambda: accepted() == [True, False], "the old key")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], None),  # the application's own config says where the key is
        (["--api-keys", "env:WRONG_KEY"], "does not take the key; say where a good one is with --api-keys"),
    ],
)
def test_calibration_shows_a_key(service, tmp_path, words, problem):
    token, dashboard = service.token_and_dashboard()
    command = [sys.executable, "-m", "calibration", "--dashboard", dashboard, "--out", str(tmp_path / "report")]
    command += ["--slo", "0.5", "--estimate-only", *words]
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
