"""Ray's token: who has it may change and run what he likes; who has it not gets no further than SECURITY.md says."""

import contextlib
import http.client
import json
import os
import pickle
import re
import secrets
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest
import ray
from ray.serve.generated.serve_pb2 import ASGIRequest
from test_with_keys import session_logs

from tests.kit.service import ROOT, ROUTERS, load_yaml, running

BIN = Path(sys.executable).parent
KEY = "sk-token-5c1e"
SECURITY = (ROOT / "SECURITY.md").read_text()
RAYS_OWN_PORTS = (8265, 44217, 44227, 52365)  # as another Ray on the machine takes them
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
WRONG = "f" * 64


@pytest.fixture(scope="module")
def owner(tmp_path_factory):
    """The user's own token, in a file of his, and an empty home."""
    folder = tmp_path_factory.mktemp("owner")
    token = folder / "my-token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    (folder / "home").mkdir()
    return SimpleNamespace(
        token=token.read_text(),
        home=folder / "home",
        file=token,
        environment={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
    )


@pytest.fixture(scope="module")
def service(tmp_path_factory, owner):
    config = load_yaml("rehearsal.yaml")
    application = config["applications"][0]
    application["args"]["cpu_overflow"] = False
    folder = tmp_path_factory.mktemp("token")
    keys = folder / "api-keys"
    keys.write_text(KEY)
    application["args"]["api_keys"] = f"file:{keys}"
    with contextlib.ExitStack() as taken, pytest.MonkeyPatch.context() as patch:
        for port in RAYS_OWN_PORTS:
            with contextlib.suppress(OSError):  # another Ray has it indeed
                taken.enter_context(socket.create_server(("", port)))
        for name, value in {**owner.environment, "HOME": str(owner.home)}.items():
            patch.setenv(name, value)
        with running(config, folder) as service:
            service.headers = {"authorization": f"Bearer {KEY}"}
            yield service
            service.process.terminate()  # as systemd and Kubernetes stop a service: taken down as by Ctrl-C
            assert service.process.wait(90) == 0
            ends = time.monotonic() + 60
            while service.leftovers():  # the dashboard's own children end a moment after it
                assert time.monotonic() < ends, service.leftovers()
                time.sleep(0.1)


@pytest.fixture(scope="module")
def dashboard(service):
    return service.token_and_dashboard()[1]


def test_a_users_own_token_is_used_and_left_alone(service, owner):
    assert service.token_and_dashboard()[0] == owner.environment
    assert owner.file.read_text() == owner.token
    assert stat.S_IMODE(owner.file.stat().st_mode) == 0o600
    assert not (owner.home / ".ray").exists()


# --- the dashboard, by HTTP


def ask(url, method="GET", body=None, token=None):
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def routes():
    """(method, path) of all that Ray's dashboard and its agents can answer, from their own code."""
    files = (Path(ray.__file__).parent / "dashboard").rglob("*.py")
    found = set()
    for file in files:
        for method, path in re.findall(r"routes\.(get|post|put|delete)\(\s*f?\"([^\"]*)\"", file.read_text()):
            found.add((method.upper(), re.sub(r"\{[^}]*\}", "x", path)))
    return sorted(found)


def documented(title):
    """The paths in the line of SECURITY.md that begins with `title`."""
    line = next(line for line in SECURITY.splitlines() if line.startswith(f"- {title}"))
    return set(re.findall(r"`(/[^`]*)`", line))


@pytest.mark.parametrize("who", ["dashboard", "agent"])
def test_what_is_open_without_the_token_is_what_security_md_says(service, dashboard, who):
    port = dashboard.rsplit(":", 1)[1] if who == "dashboard" else agent_port(service)
    asked = routes()
    assert len(asked) > 50
    open_ones = {None: set(), WRONG: set()}
    for method, path in asked:
        if "$" not in path and path.startswith("/"):
            for token, found in open_ones.items():
                body = None if method == "GET" else b"{}"
                if ask(f"http://127.0.0.1:{port}{path}", method, body, token)[0] not in {401, 403, 404}:
                    found.add(path)
    assert open_ones == dict.fromkeys(open_ones, documented(f"Open on the {who}"))


SERVE_PATHS = (
    *("/health", "/ping", "/info", "/docs", "/openapi.json", "/metrics", "/v1/models", "/", "/-/healthz", "/-/routes"),
    *("/-/", "/api/version", "/api/jobs/", "/api/serve/applications/", "/nodes", "/stats", "/favicon.ico"),
)


def test_what_is_open_without_a_key_is_what_security_md_says(service):
    open_ones = {path for path in SERVE_PATHS if ask(f"{service.address}{path}")[0] not in {401, 404}}
    assert open_ones == documented("Open on the Serve ports")
    for name in ("/grpc.health.v1.Health/Check", "/ray.serve.RayServeAPIService/ListApplications"):
        assert call(service.grpc_port, name)[0] is grpc.StatusCode.OK
    code, details = call(service.grpc_port, "/tei.v1.Info/Info")
    assert (code, "API key" in details) == (grpc.StatusCode.UNAUTHENTICATED, True)


def agent_port(service):
    agent = next(process for process in processes(service) if process_name(process) == "agent")
    ports = [port for port, _ in listening(agent)]
    return next(port for port in ports if protection(port) == "token" and speaks_http(port))


# --- the ports


def processes(service):
    family = [psutil.Process(service.process.pid), *psutil.Process(service.process.pid).children(recursive=True)]
    return [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def process_name(process):
    """As SECURITY.md names it."""
    command = " ".join(process.cmdline())
    names = {
        "bin/haproxy": "haproxy",
        "ray::ProxyActor": "proxy",
        "Embedder": "embedder",
        ":Router": "Router",
        "/gcs_server": "gcs_server",
        "raylet/raylet": "raylet",
        "ray::DashboardAgent": "agent",
        "ray::RuntimeEnvAgent": "runtime env agent",
        "dashboard.py": "dashboard",
        "monitor.py": "monitor",
    }
    return next((name for sign, name in names.items() if sign in command), "others")


def listening(process):
    """(port, whether it is bound to loopback) of each socket."""
    try:
        found = process.net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    return {(one.laddr.port, one.laddr.ip in LOOPBACK) for one in found if one.status == psutil.CONN_LISTEN}


def speaks_http(port):
    """Status and body of what answers HTTP/1.1 there, or None."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(f"http://127.0.0.1:{port}/api/version")
    return None


CALLS = (
    "/ray.serve.ASGIService/HandleRequest",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ReporterService/HealthCheck",
    "/tei.v1.Info/Info",
)


def call(port, name, body=b"", token=None):
    """(status, details) of a gRPC call."""
    metadata = [("authorization", f"Bearer {token}")] if token else None
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(name)(body, timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def hangs_up_on_garbage(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"\xff\xff\xff\xff")
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def protection(port):
    """What stands between this port and who has neither token nor key: found out by asking."""
    answer = speaks_http(port)
    if answer is not None and answer[0] != 400:
        status, body = answer
        if status == 401:
            return "token" if body == b"Unauthorized: Missing authentication token" else "API key"
        return "nothing"
    told = [call(port, name) for name in CALLS]
    if all(code is grpc.StatusCode.UNAVAILABLE for code, _ in told):
        return "secret" if hangs_up_on_garbage(port) else "nothing"
    answered = [(code, details) for code, details in told if code is not grpc.StatusCode.UNIMPLEMENTED]
    if not answered:
        return "unknown"
    if any(code is not grpc.StatusCode.UNAUTHENTICATED for code, _ in answered):
        return "nothing"
    return "API key" if all("API key" in details for _, details in answered) else "token"


def table():
    """SECURITY.md's: {(who, "all" or "loopback", what protects it)}."""
    lines = SECURITY.split("## Ports")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    return {
        (who, "loopback" if bound.startswith("loopback") else "all", protected.split(",")[0])
        for names, _, bound, _, protected in rows
        for who in names.split(", ")
    }


def test_every_port_is_protected_as_security_md_says(service):
    ends = time.monotonic() + 20
    while (found := protections(service)) != table() and time.monotonic() < ends:
        time.sleep(0.5)  # Serve may just replace HAProxy
    assert found == table()


def protections(service):
    """Of its ports, as in `table`."""
    return {
        (process_name(process), "loopback" if is_local else "all", protection(port))
        for process in processes(service)
        for port, is_local in listening(process)
    }


class Pickled:
    """Unpickling it makes a folder: what an attacker would send in place of a call."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_what_replicas_unpickle_has_shown_the_token(service, owner, tmp_path):
    """Serve's replicas listen on all interfaces, and unpickle the calls that they get there."""
    ports = [
        port
        for process in processes(service)
        if process_name(process) in {"Router", "embedder"}
        for port, is_local in listening(process)
        if not is_local and call(port, CALLS[0])[0] is not grpc.StatusCode.UNIMPLEMENTED
    ]
    assert len(ports) == ROUTERS + 1, "the Routers' and the embedder's"
    for number, port in enumerate(ports):
        file = tmp_path / str(number)
        sent = ASGIRequest(pickled_request_metadata=pickle.dumps(Pickled(file))).SerializeToString()
        for token in (None, WRONG):
            assert call(port, CALLS[0], sent, token)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert not file.exists()
        call(port, CALLS[0], sent, owner.token)
        assert file.exists(), "the test cannot tell: not even the owner's was unpickled"


# --- others on the machine


def test_nobody_else_can_enter_rays_folder(service):
    commands = [" ".join(process.cmdline()) for process in processes(service)]
    sessions = {found for command in commands for found in re.findall(r"/\S*/session_\d[^/\s]*", command)}
    assert len(sessions) == 1
    session = Path(sessions.pop())
    assert (session / "sockets" / "raylet").is_socket()
    closed = [folder for folder in session.parents if not stat.S_IMODE(folder.stat().st_mode) & 0o077]
    assert any(folder.stat().st_uid == os.getuid() for folder in closed)


def test_neither_texts_nor_secrets_are_logged_or_told(service, dashboard, owner):
    inputs = "zanzibar", ["zanzibar", ""], ["zanzibar"] * 3000
    assert [service.ask("/v1/embeddings", {"input": one}).status for one in inputs] == [200, 400, 400]
    details = ask(f"{dashboard}/api/serve/applications/", token=owner.token)[1].decode()
    assert json.loads(details)["applications"]
    told = [path.read_text(errors="replace") for path in session_logs(service)]
    for shown in (*told, details, service.log.read_text(), json.dumps(service.get("/info"))):
        for secret in ("zanzibar", KEY, owner.token):
            assert secret not in shown
        assert not re.search(r"secret['\"]?: ?['\"]?[0-9a-f]{64}", shown), "the batch socket's secret"


# --- commands

UNAUTHORIZED = "Authentication required: Unauthorized: Missing authentication token"
WANTED = "windve: Ray's dashboard at {dashboard} requires its cluster's token"
UNSET = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
NOT_IT = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token have none, or a wrong one"
INVALID = "InvalidAuthToken: Authentication token is missing or incorrect"
CODE = "import ray; ray.init(address='{gcs}', _node_ip_address='127.0.0.1', log_to_driver=False); print('IN')"
DRIVER = (sys.executable, "-c", CODE)
SUBMIT = (BIN / "ray", "job", "submit", "--address", "{dashboard}", "--")
CALIBRATION = (  # of an SLO that one query meets on a busy machine too
    sys.executable, "-m", "serve_app", "calibrate", "--most", "1", "--slo", "30", "--estimate-only",
    "--out", "{folder}/{who}",
)  # fmt: skip
ELSEWHERE = (*CALIBRATION, "--dashboard", "{dashboard}")
COMMANDS = [  # whose token, what is typed, what is said; None: it is done
    ("nobody's", (BIN / "serve", "deploy", "{config}", "-a", "{dashboard}"), UNAUTHORIZED),
    ("nobody's", (*SUBMIT, "touch", "{folder}/ran"), UNAUTHORIZED),
    ("nobody's", ELSEWHERE, f"{WANTED}: {UNSET}\n"),
    ("another", ELSEWHERE, f"{WANTED}: {NOT_IT}\n"),
    ("nobody's", DRIVER, INVALID),
    ("another", DRIVER, INVALID),
    ("own", (*SUBMIT, "env", "-C", ROOT, *CALIBRATION), None),  # the job finds the dashboard by itself
    ("own", DRIVER, None),
]


def test_only_with_the_token_commands_are_done(service, dashboard, owner, tmp_path):
    """By somebody else on this machine, who has no word of where our service is; all at once."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    folder = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    # As our Ray, which takes loopback as it is; and not tried for long.
    rays = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    another = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": WRONG}
    tokens = {"nobody's": {}, "another": another, "own": owner.environment}
    config = tmp_path / "config.yaml"
    config.write_text(service.file.read_text().replace("slo_s: 2.0", "slo_s: 7.0"))
    names = {"config": config, "dashboard": dashboard, "folder": tmp_path, "gcs": gcs(service)}
    started = [
        subprocess.Popen(
            [str(word).format(**names, who=who) for word in words], cwd=ROOT,
            env={**ours, **folder, **rays, **tokens[who]}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for who, words, _ in COMMANDS
    ]  # fmt: skip
    done = [process.communicate(timeout=300) for process in started]
    for (who, words, says), process, (told, errors) in zip(COMMANDS, started, done, strict=True):
        assert process.returncode == (0 if says is None else 1), f"{who} {words}\n{told[-2000:]}\n{errors[-2000:]}"
        assert says is None or says.format(**names) in errors, (who, words, errors)
        assert ("IN\n" in told) == (says is None and words is DRIVER), (who, words)
    assert [path.parent.name for path in tmp_path.glob("*/report.json")] == ["own"]
    assert not (tmp_path / "ran").exists()
    assert service.get("/info")["windve"]["slo_s"] == 2.0


def gcs(service):
    """Where Ray's control store listens."""
    commands = [" ".join(process.cmdline()) for process in processes(service)]
    return next(found[1] for command in commands if (found := re.search(r"--gcs-address=(\S+)", command)))
