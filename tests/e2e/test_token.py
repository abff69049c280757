"""Ray's token: who has it may change and run what he likes; who has it not gets no further than SECURITY.md says."""

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
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest
import ray
from ray.serve.generated.serve_pb2 import ASGIRequest

from benchmarks.kit.arrivals import burst
from calibration.load import request_bytes
from tests.kit.service import ROOT, load_yaml, running

pytestmark = pytest.mark.alone  # a second Ray on a machine opens fewer ports than the first

BIN = Path(sys.executable).parent
KEY = "sk-token-5c1e"
SECURITY = (ROOT / "SECURITY.md").read_text()
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
DENIED = {"none": {}, "wrong": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}}


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
    application["args"]["heterogeneous"] = False
    application["args"]["accelerator"]["emulated"] = {"alpha_s": 0.01, "beta_s": 0.1}
    application["deployments"][0]["user_config"] = {
        "slo_s": 1.0,
        "admission": "depth",
        "accelerator": {"queue_depth": 20},
    }
    folder = tmp_path_factory.mktemp("token")
    keys = folder / "api-keys"
    keys.write_text(KEY)
    application["args"]["api_keys"] = f"file:{keys}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**owner.environment, "HOME": str(owner.home)}.items():
            patch.setenv(name, value)
        with running(config, folder) as service:
            service.headers = {"authorization": f"Bearer {KEY}"}
            yield service


@pytest.fixture(scope="module")
def dashboard(service):
    return service.token_and_dashboard()[1]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """The environment of somebody else on this machine: no token, and no word of where our service is."""
    folder = tmp_path_factory.mktemp("stranger")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**ours, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def start(command, environment):
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def gcs(service):
    """Where Ray's control store listens."""
    commands = [" ".join(process.cmdline()) for process in processes(service)]
    return next(found[1] for command in commands if (found := re.search(r"--gcs-address=(\S+)", command)))


@pytest.fixture(scope="module", autouse=True)
def drivers(service, gcs, stranger):
    """`ray.init` of those who have no token, from the beginning, as it tries for a while: (status, output) of each."""
    code = f"import ray; ray.init(address='{gcs}', _node_ip_address='127.0.0.1', log_to_driver=False); print('IN')"
    alike = {**stranger, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # as our Ray, which takes loopback as it is
    trying = {name: start([sys.executable, "-c", code], {**alike, **more}) for name, more in DENIED.items()}
    yield trying
    for process in trying.values():
        process.kill()
        process.communicate()


def test_a_users_own_token_is_used_and_left_alone(service, owner):
    assert service.token_and_dashboard()[0] == owner.environment
    assert owner.file.read_text() == owner.token
    assert stat.S_IMODE(owner.file.stat().st_mode) == 0o600
    assert not (owner.home / ".ray").exists()
    assert owner.token not in service.log.read_text()


def test_with_the_token_the_owner_deploys(service):
    service.router["accelerator"]["queue_depth"] = 7
    service.type_deploy()
    service.wait_for(lambda pools: pools["accelerator"]["queue_depth"] == 7)


@pytest.mark.parametrize("how", ["another terminal", "ray job"])
def test_with_the_token_the_owner_calibrates(service, dashboard, owner, stranger, tmp_path, how):
    job = [sys.executable, "-m", "calibration", "--slo", "0.3", "--estimate-only"]
    job += ["--out", str(tmp_path / "report")]
    if how == "ray job":
        job = [BIN / "ray", "job", "submit", "--address", dashboard, "--", "env", "-C", str(ROOT), *job]
        environment = {**stranger, **owner.environment}
    else:  # where the service has said where it is, and where the token is
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(job, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "report" / "report.json").exists()


@pytest.mark.parametrize("token", DENIED)
def test_commands_without_the_token_are_refused_with_a_sentence(service, dashboard, stranger, tmp_path, token):
    before = service.get("/info")["windve"]
    ran = tmp_path / "ran"
    commands = {
        "serve deploy": [BIN / "serve", "deploy", str(service.file), "-a", dashboard],
        "ray job submit": [BIN / "ray", "job", "submit", "--address", dashboard, "--", "touch", str(ran)],
        "calibration": [
            *(sys.executable, "-m", "calibration", "--dashboard", dashboard, "--slo", "1"),
            *("--out", str(tmp_path / "report")),
        ],
    }
    rays = {
        "none": "Authentication required: Unauthorized: Missing authentication token",
        "wrong": "Authentication failed: Forbidden: Invalid authentication token",
    }[token]
    ours = {
        "none": "wants its cluster's token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH\n",
        "wrong": "wants its cluster's token, and there is none, or another, in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
        "~/.ray/auth_token\n",
    }[token]
    at_work = {name: start(command, {**stranger, **DENIED[token]}) for name, command in commands.items()}
    for name, process in at_work.items():
        told, errors = process.communicate(timeout=60)
        assert process.returncode == 1, (name, told)
        if name == "calibration":
            assert errors == f"calibration: Ray's dashboard at {dashboard} {ours}"
        else:
            assert rays in errors, name
    assert not ran.exists()
    after = service.get("/info")["windve"]
    assert after["router"] == before["router"]
    assert after["pools"]["accelerator"]["queue_depth"] == before["pools"]["accelerator"]["queue_depth"]


# --- the dashboard, by HTTP


def ask(url, method="GET", body=None, token=None):
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/version", None),
        ("GET", "/nodes?view=summary", None),
        ("GET", "/api/serve/applications/", None),
        ("PUT", "/api/serve/applications/", b'{"applications": []}'),
        ("DELETE", "/api/serve/applications/", None),
        ("GET", "/api/jobs/", None),
        ("POST", "/api/jobs/", b'{"entrypoint": "touch FILE"}'),
        ("PUT", "/api/packages/gcs/_ray_pkg_0.zip", b"x"),
    ],
)
def test_the_dashboard_wants_the_token(dashboard, owner, tmp_path, method, path, body):
    ran = tmp_path / "ran"
    body = body and body.replace(b"FILE", str(ran).encode())
    assert ask(dashboard + path, method, body) == (401, b"Unauthorized: Missing authentication token")
    assert ask(dashboard + path, method, body, "f" * 64) == (403, b"Forbidden: Invalid authentication token")
    assert not ran.exists()
    if method == "GET":
        assert ask(dashboard + path, token=owner.token)[0] == 200


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
    open_ones = set()
    for method, path in asked:
        if "$" not in path and path.startswith("/"):
            status, _ = ask(f"http://127.0.0.1:{port}{path}", method, None if method == "GET" else b"{}")
            if status not in {401, 404}:
                open_ones.add(path)
    assert open_ones == documented(f"Open on the {who}")


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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/api/version")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


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
            channel.unary_unary(name)(body, timeout=5, metadata=metadata)
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
        return "secret" if hangs_up_on_garbage(port) else "unknown"
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
    found = {
        (process_name(process), "loopback" if is_local else "all", protection(port))
        for process in processes(service)
        for port, is_local in listening(process)
    }
    assert found == table()


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
    assert len(ports) == 2, "the Router's and the embedder's"
    for number, port in enumerate(ports):
        file = tmp_path / str(number)
        sent = ASGIRequest(pickled_request_metadata=pickle.dumps(Pickled(file))).SerializeToString()
        for token in (None, "f" * 64):
            assert call(port, CALLS[0], sent, token)[0] is grpc.StatusCode.UNAUTHENTICATED
        assert not file.exists()
        call(port, CALLS[0], sent, owner.token)
        assert file.exists(), "the test cannot tell: not even the owner's was unpickled"


# --- others on the machine


def test_rays_control_store_wants_the_token(gcs, stranger, owner):
    code = f"from ray._raylet import GcsClient; print(len(GcsClient(address='{gcs}').internal_kv_keys(b'', None)))"
    right = start([sys.executable, "-c", code], {**stranger, **owner.environment})
    asked = [start([sys.executable, "-c", code], {**stranger, **more}) for more in DENIED.values()]
    told, errors = right.communicate(timeout=60)
    assert int(told) > 0, errors
    for process in asked:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "InvalidAuthToken: Authentication token is missing or incorrect" in errors


def test_nobody_else_can_enter_rays_folder(service):
    commands = [" ".join(process.cmdline()) for process in processes(service)]
    sessions = {found for command in commands for found in re.findall(r"/\S*/session_\d[^/\s]*", command)}
    assert len(sessions) == 1
    session = Path(sessions.pop())
    assert (session / "sockets" / "raylet").is_socket()
    closed = [folder for folder in session.parents if not stat.S_IMODE(folder.stat().st_mode) & 0o077]
    assert any(folder.stat().st_uid == os.getuid() for folder in closed)


def test_neither_texts_nor_secrets_are_logged_or_told(service, dashboard, owner):
    text = "nobody but me may read zanzibar"
    bodies = [{"input": text}, {"input": [text, ""]}, {"input": text * 400, "truncate": False}, {"inputs": text}]
    bodies += [{"input": text, "prompt_name": "none"}, {"input": [text] * 3000}]
    asked = [request_bytes(body, headers=[("authorization", f"Bearer {KEY}")]) for body in bodies]
    statuses = [reply.status for reply in burst(service.address, asked)]
    assert statuses[0] == 200
    assert {400, 422, 413} & set(statuses), statuses
    commands = [" ".join(process.cmdline()) for process in processes(service)]
    session = {found for command in commands for found in re.findall(r"/\S*/session_\d[^/\s]*", command)}.pop()
    logs = [path for path in Path(session, "logs").rglob("*") if path.is_file()]
    told = [path.read_text(errors="replace") for path in logs]
    assert sum("Router" in path.name for path in logs) >= 1
    details = ask(f"{dashboard}/api/serve/applications/", token=owner.token)[1].decode()
    assert json.loads(details)["applications"]
    for shown in (*told, details, service.log.read_text(), json.dumps(service.get("/info"))):
        for secret in ("zanzibar", KEY, owner.token):
            assert secret not in shown
        assert not re.search(r"secret['\"]?: ?['\"]?[0-9a-f]{64}", shown), "the batch socket's secret"


def test_a_driver_without_the_token_is_not_let_in(drivers, gcs, stranger, owner):
    code = f"import ray; ray.init(address='{gcs}', _node_ip_address='127.0.0.1', log_to_driver=False); print('IN')"
    alike = {**stranger, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    told, errors = start([sys.executable, "-c", code], {**alike, **owner.environment}).communicate(timeout=60)
    assert told == "IN\n", errors
    for process in drivers.values():
        told, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert told == ""
        assert "InvalidAuthToken" in errors
