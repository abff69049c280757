"""Weights that are pickles: tensors are served as exactly the model's, anything else is refused and nothing runs."""

import json
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
from deployments.models.pickles import safe_folder
from tests.kit.engines import card_of
from tests.kit.kinds_of_models import save_model
from tests.kit.pickled_models import Code, pickled, poison

WEIGHTS = "pytorch_model.bin"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "windve"


def weights_of(folder, **settings):
    return PooledModel(card_of(folder, **settings)).state_dict()


@pytest.mark.parametrize(("kind", "parts"), [("bert reranker", 1), ("roberta sparse", 3)])
def test_the_weights_are_the_models(tmp_path, home, caplog, kind, parts):
    settings = {"kind": "sparse"} if "sparse" in kind else {}
    save_model(kind, tmp_path / "exact")
    wanted = weights_of(tmp_path / "exact", **settings)
    pickled(tmp_path / "model", parts=parts, kind=kind)
    found = weights_of(tmp_path / "model", **settings)
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


def test_a_folder_of_safetensors_is_served_as_it_is(tmp_path, home):
    save_model("bert reranker", tmp_path / "model")
    torch.save({"w": Code(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin")
    assert safe_folder(tmp_path / "model") == tmp_path / "model"
    assert not home.exists()


def test_it_is_made_once_and_again_where_the_model_changes(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(pickles, "unpickle", lambda files, real=pickles.unpickle: [made.append(1), real(files)])
    pickled(tmp_path / "model")
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(safe_folder, [tmp_path / "model"] * 4))
    assert len(found) == len(made) == 1
    torch.save({"other": torch.ones(2)}, tmp_path / "model" / "pytorch_model.bin")
    assert safe_folder(tmp_path / "model") not in found


def put(name, content=None, **how):
    """That file; without content one that would run code."""

    def change(model, ran):
        (model / name).parent.mkdir(exist_ok=True)
        torch.save({"weight": Code(ran)} if content is None else content, model / name, **how)

    return change


def module(path):
    def change(model, ran):
        put("2_Dense/pytorch_model.bin")(model, ran)
        (model / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": path}]))

    return change


def part(name):
    """Weights in parts; the one that the index names would run code."""

    def change(model, ran):
        (model / WEIGHTS).unlink()
        put(name)(model, ran)
        (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))

    return change


def plain_pickle(model, ran):
    (model / WEIGHTS).write_bytes(pickle.dumps(Code(ran)))


def damaged(model, ran):
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[: len(whole) // 2])


RUNS = r" is a pickle that would run posix\.mkdir, so it is not read: .*"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (put(WEIGHTS), rf"pytorch_model\.bin{RUNS}"),
        (put(WEIGHTS, _use_new_zipfile_serialization=False), rf"pytorch_model\.bin{RUNS}"),
        (plain_pickle, r"pytorch_model\.bin is no file of tensors \(.*\)"),
        (put("colbert_linear.pt"), rf"colbert_linear\.pt{RUNS}"),
        (module("2_Dense"), rf"2_Dense/pytorch_model\.bin{RUNS}"),
        (module("../model/2_Dense"), r"modules\.json names \.\./model/2_Dense, which is not a folder of the model"),
        (part("weights.bin"), rf"weights\.bin{RUNS}"),
        (part("../model/weights.bin"), r"index names \.\./model/weights\.bin; only \.bin beside it is read"),
        (part("weights.pkl"), r"index names weights\.pkl; only \.bin beside it is read"),
        (damaged, r"pytorch_model\.bin is no file of tensors \(.*\)"),
        (put(WEIGHTS, [torch.ones(2)]), r"pytorch_model\.bin holds no tensors by name, but a list"),
        (
            put(WEIGHTS, {"weight": torch.ones(2), "epoch": 3}),
            r"pytorch_model\.bin holds something else than plain tensors: epoch",
        ),
    ],
)
def test_what_is_no_file_of_tensors_is_refused_and_nothing_runs(tmp_path, home, change, sentence):
    pickled(tmp_path / "model")
    change(tmp_path / "model", tmp_path / "ran")
    with pytest.raises(SettingsError, match=rf"^args\.model\.id: .*{sentence}$") as caught:
        card_of(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    assert not home.exists() or not [path for path in home.iterdir() if path.is_dir()]


def test_the_poison_works(tmp_path):
    for how in ({}, {"_use_new_zipfile_serialization": False}):
        poison(tmp_path / WEIGHTS, tmp_path / "ran", **how)
        torch.load(tmp_path / WEIGHTS, weights_only=False)
        (tmp_path / "ran").rmdir()
    plain_pickle(tmp_path, tmp_path / "ran")
    pickle.loads((tmp_path / WEIGHTS).read_bytes())
    assert (tmp_path / "ran").exists()


def test_no_room_and_no_place_are_one_sentence(tmp_path, monkeypatch):
    pickled(tmp_path / "model")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(SettingsError, match=r"cannot be kept: 0\.0 GiB are needed in .*; set HF_HOME "):
        safe_folder(tmp_path / "model")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("a file")
    with pytest.raises(SettingsError, match=r"cannot be kept: .*Not a directory|cannot be kept: .*File exists"):
        safe_folder(tmp_path / "model")
