"""What a calibration in a pod writes into a RayService, by an API server of Kubernetes that is a stand-in here."""

import json
import shutil
import ssl
import subprocess
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from rich.console import Console

from calibration.report.report_model import WrittenReport
from calibration.service.application import CalibrationFailed
from calibration.service.config_file import example
from calibration.service.ray_service import RayService
from calibration.session import _Session
from deployments.errors import SettingsError
from serve_app.cli.main import main

PATH = "/apis/ray.io/v1/namespaces/search/rayservices/windve"
CONFIG = """\
# A remark.
applications:
  - name: windve
    import_path: serve_app.app:build
    args: {model: {id: x}, accelerator: {device: cuda, replicas: 4}}
    deployments:
      - name: Router
        user_config:
          slo_s: 1.0  # of the contract
"""
CHANGES = {"user_config": {"accelerator": {"queue_depth": 40}}}


class Application:
    """The one that was calibrated: with as many replicas as its cluster has devices."""

    name, generates = "windve", False

    def __init__(self):
        self.deployed = {"args": {"model": {"id": "x"}, "accelerator": {"device": "cuda"}}}

    def placed(self, changes):
        return changes


class ApiServer(ThreadingHTTPServer):
    """Holds one RayService. `meanwhile`: changes by others, each before a write. `refuses`: verb -> status."""

    def __init__(self, certificate, key):
        super().__init__(("127.0.0.1", 0), Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.config, self.version, self.meanwhile, self.refuses, self.heard = CONFIG, 7, [], {}, []

    def change(self, config):
        self.config, self.version = config, self.version + 1

    def handle_error(self, request, client_address):
        """A client that does not trust the certificate hangs up."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.hear(None)
        if status := self.server.refuses.get("GET"):
            return self.answer(status, {})
        spec = {"serveConfigV2": self.server.config, "rayClusterConfig": {}}
        return self.answer(200, {"metadata": {"resourceVersion": str(self.server.version)}, "spec": spec})

    def do_PATCH(self):
        patch = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.hear(patch)
        if self.server.meanwhile:
            self.server.change(self.server.meanwhile.pop(0)(self.server.config))
        if status := self.server.refuses.get("PATCH"):
            return self.answer(status, {})
        if patch["metadata"]["resourceVersion"] != str(self.server.version):
            return self.answer(409, {"kind": "Status", "reason": "Conflict"})
        if "dryRun" not in self.server.heard[-1]["query"]:
            self.server.change(patch["spec"]["serveConfigV2"])
        return self.answer(200, {"spec": patch["spec"]})

    def hear(self, patch):
        url = urlsplit(self.path)
        what = {"verb": self.command, "path": url.path, "query": parse_qs(url.query), "patch": patch}
        self.server.heard.append({**what, "token": self.headers["authorization"], "type": self.headers["content-type"]})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: there is no certificate for the stand-in")
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kubernetes"
    made = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key", "-out", folder / "ca.crt"]
    subprocess.run(["openssl", *words.split(), *made], check=True, capture_output=True)
    return folder


@pytest.fixture
def server(certificate):
    made = ApiServer(certificate / "ca.crt", certificate / "key")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def service(server, certificate, tmp_path, monkeypatch):
    account = tmp_path / "account"
    account.mkdir()
    shutil.copy(certificate / "ca.crt", account)
    (account / "token").write_text("secret\n")
    (account / "namespace").write_text("search")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # for what is outside the cluster
    return RayService.beside_this_pod("windve", account)


def test_the_depths_are_written_and_all_else_stays(server, service):
    assert service.change(Application(), CHANGES) == server.config
    assert service.text == CONFIG
    added = [line for line in server.config.splitlines() if line not in CONFIG.splitlines()]
    assert server.config.replace("\n".join(added) + "\n", "") == CONFIG
    router = yaml.safe_load(server.config)["applications"][0]["deployments"][0]
    assert router["user_config"] == {"slo_s": 1.0, **CHANGES["user_config"]}
    read, write = server.heard
    assert (read["verb"], write["verb"]) == ("GET", "PATCH")
    assert (read["path"], write["path"]) == (PATH, PATH)
    assert (write["type"], write["query"]) == ("application/merge-patch+json", {"fieldManager": ["windve-calibration"]})
    assert write["patch"] == {"metadata": {"resourceVersion": "7"}, "spec": {"serveConfigV2": server.config}}
    assert {call["token"] for call in server.heard} == {"Bearer secret"}


def test_a_trial_stores_nothing(server, service):
    service.change(Application(), CHANGES, dry_run=True)
    assert server.heard[-1]["query"]["dryRun"] == ["All"]
    assert server.config == CONFIG


def test_what_someone_else_changes_meanwhile_is_kept(server, service):
    server.meanwhile = [lambda text: text.replace("slo_s: 1.0", "slo_s: 0.5"), lambda text: text + "# another\n"]
    service.change(Application(), CHANGES)
    assert [call["verb"] for call in server.heard] == ["GET", "PATCH"] * 3
    assert "slo_s: 0.5  # of the contract\n" in server.config
    assert server.config.endswith("# another\n")
    assert "queue_depth: 40" in server.config


def test_it_gives_up_where_the_resource_changes_all_the_time(server, service):
    server.meanwhile = [lambda text: text] * 9
    with pytest.raises(CalibrationFailed, match=r"^rayservice/windve changed 5 times while it was written$"):
        service.change(Application(), CHANGES)
    assert server.config == CONFIG


@pytest.mark.parametrize(
    ("verb", "status", "problem"),
    [
        ("GET", 403, "the pod's ServiceAccount may not get it: apply k8s/calibration/rbac.yaml, whose Role names"),
        ("PATCH", 403, "the pod's ServiceAccount may not patch it: apply k8s/calibration/rbac.yaml, whose Role names"),
        ("GET", 404, "there is none to get: apply the service first, or correct --rayservice"),
        ("GET", 401, "refused to get: 401 Unauthorized"),
        ("PATCH", 500, "refused to patch: 500 Internal Server Error"),
    ],
)
def test_a_refusal_says_what_to_do(server, service, verb, status, problem):
    server.refuses = {verb: status}
    with pytest.raises(CalibrationFailed) as refused:
        service.change(Application(), CHANGES)
    assert str(refused.value).startswith(f"rayservice/windve, {service.url}: {problem}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("file", ["token", "ca.crt"])
def test_where_the_account_is_incomplete_it_is_said(service, file):
    (service.account / file).unlink()
    with pytest.raises(CalibrationFailed, match=r"the API server cannot be asked: .*No such file"):
        service.change(Application(), CHANGES)


def test_the_token_is_sent_to_the_cluster_s_own_server_only(server, service, certificate):
    service.url = service.url.replace("127.0.0.1", "localhost")  # not in the certificate
    with pytest.raises(CalibrationFailed, match=r"the API server cannot be asked: .*certificate"):
        service.change(Application(), CHANGES)
    assert server.heard == []


def test_depths_of_another_model_are_not_written(server, service):
    server.meanwhile = [lambda text: text.replace("id: x", "id: y")]
    with pytest.raises(SettingsError, match=r"rayservice/windve: describes another application than the running one"):
        service.change(Application(), CHANGES)
    assert "queue_depth" not in server.config


def test_a_rayservice_without_a_config_is_named(server, service):
    server.config = ""
    with pytest.raises(SettingsError, match=r"rayservice/windve: applications: no application .* is named windve"):
        service.change(Application(), CHANGES)


# In the command


def session(service, *, dry_run=False):
    return _Session(Namespace(dry_run=dry_run), Application(), None, service, Console(width=200))


def test_the_command_shows_what_it_wrote(server, service, capsys):
    written = WrittenReport()
    session(service)._write_service(service, CHANGES, written)
    shown = capsys.readouterr().out
    assert "+          accelerator:" in shown
    assert "written: rayservice/windve" in shown
    assert written.config == "rayservice/windve"


def test_where_the_result_cannot_be_written_a_person_can(server, service, capsys, tmp_path):
    service.change(Application(), example(Application()), dry_run=True)  # as before the measuring
    server.refuses = {"GET": 500}
    with pytest.raises(CalibrationFailed, match="500 Internal Server Error"):
        session(service)._write_service(service, CHANGES, WrittenReport())
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\nprintf %s "$*" > "$OUT"\n')
    kubectl.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "words")}
    subprocess.run(["/bin/sh", "-c", capsys.readouterr().out], env=environment, check=True)
    words, _, patch = (tmp_path / "words").read_text().partition(" -p ")
    assert words == "patch rayservice windve --type merge"
    server.refuses = {}
    assert json.loads(patch) == {"spec": {"serveConfigV2": service.change(Application(), CHANGES)}}


def test_without_permission_nothing_is_measured(server, service, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("calibration.session._find", lambda *_: Application())
    monkeypatch.setattr(RayService, "beside_this_pod", lambda _: service)
    server.refuses = {"PATCH": 403}
    words = ["--deploy", "serve.yaml", "--rayservice", "windve", "--out", str(tmp_path / "out")]
    assert main(["calibrate", *words]) == 1
    assert "may not patch it: apply k8s/calibration/rbac.yaml" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert server.heard[-1]["query"]["dryRun"] == ["All"]
