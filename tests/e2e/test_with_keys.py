"""API keys on every route, and where they must not show. Over an emulated device that is quick."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.kit.arrivals import burst
from calibration.load import connect, request_bytes
from tests.kit import tei_wire
from tests.kit.service import ROOT, load_yaml

OURS, THEIRS = "sk-ours-7f1e", "sk-theirs-90aa"
POSTS = ("/v1/embeddings", "/embeddings", "/embed", "/", "/embed_all", "/similarity", "/tokenize", "/decode")
GETS = ("/v1/models", "/v1/models/emulated", "/info", "/docs", "/openapi.json", "/", "/nowhere", "/health/", "//health")
BODY = {
    "input": "a",
    "inputs": {"source_sentence": "a", "sentences": ["b"]},
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
    config = load_yaml("rehearsal.yaml")
    args = config["applications"][0]["args"]
    args["api_keys"] = f"file:{keys}"
    args["heterogeneous"] = False
    args["accelerator"]["emulated"] = {"alpha_s": 0.005, "beta_s": 0.02}
    return shared.serve(config, {"authorization": f"Bearer {OURS}"})


def statuses(service, requests):
    """Of each request, one after the other, on connections of their own."""

    async def run():
        replies = []
        for request in requests:
            connection = (await connect(service.address, 1))[0]  # it uses /ping, which needs no key
            replies.append(await connection.ask(request))
            connection.hang_up()
        return replies

    return asyncio.run(run())


def with_headers(headers):
    posts = [request_bytes(BODY, path, headers.items()) for path in POSTS]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return posts + [f"GET {path} HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode() for path in GETS]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {OURS}x"},
        {"authorization": f"Bearer {OURS[:-1]}"},
        {"authorization": f"Bearer {OURS} {THEIRS}"},
        {"authorization": "Bearer "},
        {"authorization": OURS},
        {"authorization": f"Basic {OURS}"},
        {"x-api-key": OURS},
        {"api-key": OURS},
        {"cookie": f"authorization=Bearer {OURS}"},
    ],
    ids=str,
)
def test_without_a_key_no_route_answers(service, headers):
    for path, reply in zip([*POSTS, *GETS], statuses(service, with_headers(headers)), strict=True):
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


CALLS = {
    "Info/Info": {},
    "Embed/Embed": {"inputs": "a"},
    "Tokenize/Tokenize": {"inputs": "a"},
    "Tokenize/Decode": {"ids": [101, 102]},
}


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {OURS}x")],
        [("authorization", OURS)],
        [("x-api-key", OURS)],
    ],
    ids=str,
)
def test_without_a_key_no_call_answers(service, metadata):
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


def test_each_key_opens_every_call_and_health_is_open(service):
    with tei_wire.connected(service.grpc_port) as client:
        for key in (OURS, THEIRS):
            for call, fields in CALLS.items():
                client.call(call, metadata=[("authorization", f"Bearer {key}")], **fields)
        health = health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_key_in_the_url_is_none(service):
    for path in (f"/info?api_key={OURS}", f"/info?authorization=Bearer%20{OURS}"):
        (reply,) = statuses(service, [f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()])
        assert reply.status == 401


@pytest.mark.parametrize("key", [OURS, THEIRS])
def test_each_key_opens_every_route(service, key):
    replies = statuses(service, with_headers({"authorization": f"bearer {key}"}))
    assert 401 not in {reply.status for reply in replies}
    assert burst(service.address, [request_bytes({"input": "a"}, headers=[("authorization", f"Bearer {key}")])])[0].pool


def test_health_and_ping_are_open(service):
    for path in ("/health", "/ping"):
        with urllib.request.urlopen(f"{service.address}{path}", timeout=10) as answer:
            assert answer.status == 200


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


def test_the_document_says_that_a_key_is_wanted(service):
    document = service.get("/openapi.json")
    assert document["security"] == [{"key": []}]
    assert "401" in document["paths"]["/embed"]["post"]["responses"]
    assert document["paths"]["/ping"]["get"]["security"] == []


def test_keys_are_changed_in_the_file_without_a_restart(service, keys):
    before, router = keys.read_text(), service.get("/info")["windve"]["router"]

    def accepted():
        asking = [
            request_bytes({"input": "a"}, headers=[("authorization", f"Bearer {key}")]) for key in (THEIRS, "new")
        ]
        return [reply.status == 200 for reply in burst(service.address, asking)]

    keys.write_text(f"{OURS}\nnew\n")
    ends = time.monotonic() + 60
    while accepted() != [False, True]:
        assert time.monotonic() < ends, "the new key is not taken over"
        time.sleep(0.5)
    assert service.get("/info")["windve"]["router"] == router
    keys.write_text(before)
    while accepted() != [True, False]:
        assert time.monotonic() < ends + 60, "the old key is not taken back"
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], None),  # the application's own config says where the key is
        (["--api-keys", "env:WINDVE_KEY"], None),
        (["--api-keys", "env:WRONG_KEY"], "does not take the key; say where a good one is with --api-keys"),
        (["--api-keys", "env:NO_SUCH_VARIABLE"], "--api-keys: there is no environment variable NO_SUCH_VARIABLE"),
    ],
)
def test_calibration_shows_a_key(service, tmp_path, words, problem):
    token, dashboard = service.token_and_dashboard()
    command = [sys.executable, "-m", "calibration", "--dashboard", dashboard, "--out", str(tmp_path / "report")]
    command += ["--slo", "0.2", "--estimate-only", *words]
    environment = {**os.environ, **token, "WINDVE_KEY": THEIRS, "WRONG_KEY": "wrong"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if problem is None:
        assert done.returncode == 0, done.stdout + done.stderr
        report = (tmp_path / "report" / "report.json").read_text()
        assert OURS not in report + done.stdout
        assert THEIRS not in report + done.stdout
    else:
        assert done.returncode == 1
        assert problem in done.stderr
        assert done.stderr.count("\n") == 1
