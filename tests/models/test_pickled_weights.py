"""Weights that are pickles: tensors are served as exactly the model's, anything else is refused and nothing runs."""

import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.pooled_model import PooledModel
from deployments.errors import SettingsError
from deployments.models import pickles
from deployments.models.model_files import read_model_card
from deployments.models.pickles import safe_folder
from deployments.settings import ModelSettings
from tests.kit.heads_of_models import save_m3
from tests.kit.kinds_of_models import save_model


class Code:
    """Unpickling it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "windve"


def pickled(folder, *, parts=1, kind="bert reranker"):
    """A model as older ones are on the hub; and what its weights are."""
    save_model(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    names = {name: f"pytorch_model-{at % parts + 1:05}-of-{parts:05}.bin" for at, name in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors


def load(folder, **settings):
    return PooledModel(read_model_card(ModelSettings(id=str(folder), **settings)))


@pytest.mark.parametrize(
    ("kind", "parts"), [("bert reranker", 1), ("xlm-roberta reranker", 3), ("roberta sparse", 1), ("bert sparse", 2)]
)
def test_the_weights_are_the_models(tmp_path, home, caplog, kind, parts):
    settings = {"kind": "sparse"} if "sparse" in kind else {}
    save_model(kind, tmp_path / "exact")
    wanted = load(tmp_path / "exact", **settings).state_dict()
    pickled(tmp_path / "model", parts=parts, kind=kind)
    found = load(tmp_path / "model", **settings).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "read by torch.load(weights_only=True), and kept as safetensors in" in caplog.text
    (kept,) = (path for path in home.iterdir() if path.is_dir())
    assert not list(kept.rglob("*.bin"))


def test_tied_weights_are_written_apart(tmp_path):
    save_model("bert reranker", tmp_path / "model")
    one = torch.arange(6.0).reshape(2, 3)
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"a": one, "b": one, "c": one[1], "d": one.t()}, tmp_path / "model" / "pytorch_model.bin")
    found = load_file(safe_folder(tmp_path / "model") / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": one.tolist(), "b": one.tolist(), "c": one[1].tolist(), "d": one.t().tolist(),
    }  # fmt: skip


def test_modules_and_heads_beside_the_model_are_taken_too(tmp_path):
    model = tmp_path / "model"
    pickled(model)
    (model / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "2_Dense"}]))
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").write_text("{}")
    linear = torch.nn.Linear(3, 2)
    for name in ("2_Dense/pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt"):
        torch.save(linear.state_dict(), model / name)
    found = safe_folder(model)
    for name in ("2_Dense/model", "sparse_linear", "colbert_linear"):
        assert torch.equal(load_file(found / f"{name}.safetensors")["weight"], linear.weight)
    assert (found / "2_Dense" / "config.json").read_text() == "{}"
    assert not [path for path in found.rglob("*") if path.suffix in {".bin", ".pt"}]


def test_bge_m3s_heads_are_found_in_its_pickles(tmp_path):
    save_m3(tmp_path / "exact")
    (tmp_path / "model").mkdir()
    for file in (tmp_path / "exact").iterdir():
        if file.suffix == ".safetensors":
            suffix, stem = (".bin", "pytorch_model") if file.stem == "model" else (".pt", file.stem)
            torch.save(load_file(file), tmp_path / "model" / f"{stem}{suffix}")
        else:
            (tmp_path / "model" / file.name).symlink_to(file)
    exact, found = (read_model_card(ModelSettings(id=str(tmp_path / name))) for name in ("exact", "model"))
    assert found.token_widths == exact.token_widths == {"sparse": 1, "multi_vector": 24, "tokens": 64}
    for one, other in zip(found.projections.values(), exact.projections.values(), strict=True):
        assert torch.equal(load_file(one[0].file)["weight"], load_file(other[0].file)["weight"])


def test_a_folder_of_safetensors_is_served_as_it_is(tmp_path, home):
    save_model("bert reranker", tmp_path / "model")
    torch.save({"w": Code(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin")
    assert safe_folder(tmp_path / "model") == tmp_path / "model"
    assert not home.exists()


def test_it_is_made_once_and_again_where_the_model_changes(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(pickles, "unpickle", lambda files, real=pickles.unpickle: [made.append(1), *real(files)][1:])
    pickled(tmp_path / "model")
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(safe_folder, [tmp_path / "model"] * 4))
    assert len(found) == len(made) == 1
    torch.save({"other": torch.ones(2)}, tmp_path / "model" / "pytorch_model.bin")
    assert safe_folder(tmp_path / "model") not in found


def poison(model, ran):
    torch.save({"weight": Code(ran)}, model / "pytorch_model.bin")


def old_poison(model, ran):
    torch.save({"weight": Code(ran)}, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def plain_poison(model, ran):
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Code(ran)))


def poisoned_head(model, ran):
    torch.save({"weight": Code(ran)}, model / "colbert_linear.pt")


def poisoned_module(model, ran):
    (model / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "2_Dense"}]))
    (model / "2_Dense").mkdir()
    torch.save({"weight": Code(ran)}, model / "2_Dense" / "pytorch_model.bin")


def poisoned_part(model, ran):
    (model / "pytorch_model.bin").unlink()
    torch.save({"weight": Code(ran)}, model / "weights.bin")
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"weight": "weights.bin"}}))


def part_elsewhere(model, ran):
    poisoned_part(model, ran)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "../model/weights.bin"}}))


def part_of_another_kind(model, ran):
    poisoned_part(model, ran)
    (model / "weights.bin").rename(model / "weights.pkl")
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "weights.pkl"}}))


def module_elsewhere(model, ran):
    poisoned_module(model, ran)
    (model / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "../model/2_Dense"}]))


def damaged(model, ran):
    whole = (model / "pytorch_model.bin").read_bytes()
    (model / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])


def a_list(model, ran):
    torch.save([torch.ones(2)], model / "pytorch_model.bin")


def a_number_among_tensors(model, ran):
    torch.save({"weight": torch.ones(2), "epoch": 3}, model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (poison, r"pytorch_model\.bin is a pickle that would run posix\.mkdir, so it is not read: .*"),
        (old_poison, r"pytorch_model\.bin is a pickle that would run posix\.mkdir, so it is not read: .*"),
        (plain_poison, r"pytorch_model\.bin is no file of tensors \(.*\)"),
        (poisoned_head, r"colbert_linear\.pt is a pickle that would run posix\.mkdir, so it is not read: .*"),
        (poisoned_module, r"2_Dense/pytorch_model\.bin is a pickle that would run posix\.mkdir, so it is not read: .*"),
        (poisoned_part, r"weights\.bin is a pickle that would run posix\.mkdir, so it is not read: .*"),
        (part_elsewhere, r"index names \.\./model/weights\.bin; only \.bin beside it is read"),
        (part_of_another_kind, r"index names weights\.pkl; only \.bin beside it is read"),
        (module_elsewhere, r"modules\.json names \.\./model/2_Dense, which is not a folder of the model"),
        (damaged, r"pytorch_model\.bin is no file of tensors \(.*\)"),
        (a_list, r"pytorch_model\.bin holds no tensors by name, but a list"),
        (a_number_among_tensors, r"pytorch_model\.bin holds something else than plain tensors: epoch"),
    ],
)
def test_what_is_no_file_of_tensors_is_refused_and_nothing_runs(tmp_path, home, change, sentence):
    pickled(tmp_path / "model")
    change(tmp_path / "model", tmp_path / "ran")
    with pytest.raises(SettingsError, match=rf"^args\.model\.id: .*{sentence}$") as caught:
        read_model_card(ModelSettings(id=str(tmp_path / "model")))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert not home.exists() or not [path for path in home.iterdir() if path.is_dir()]


def test_the_poison_works(tmp_path):
    for change in (poison, old_poison):
        change(tmp_path, tmp_path / "ran")
        torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
        (tmp_path / "ran").rmdir()
    plain_poison(tmp_path, tmp_path / "ran")
    pickle.loads((tmp_path / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "ran").exists()


def test_no_room_and_no_place_are_one_sentence(tmp_path, monkeypatch):
    pickled(tmp_path / "model")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(SettingsError, match=r"cannot be kept: 0\.0 GiB are needed in .*; make them elsewhere by: "):
        safe_folder(tmp_path / "model")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SettingsError, match=r"cannot be kept: .*Not a directory|cannot be kept: .*File exists"):
        safe_folder(tmp_path / "model")
