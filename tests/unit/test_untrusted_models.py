"""A model from somebody else: its weights are numbers and nothing in its folder is run, unless the settings say so."""

import json
import pickle

import pytest

from deployments.engines.pooled_model import PooledModel
from deployments.errors import SettingsError
from tests.kit.engines import card_of
from tests.kit.kinds_of_models import PACKAGE, save_model
from tests.kit.pickled_models import Code, poison

KINDS = ["embedding", "bert reranker", "distilbert classifier", "bert sparse"]


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    folder = tmp_path / "model"
    if request.param == "embedding":
        folder.mkdir()
        for file in PACKAGE.iterdir():
            (folder / file.name).symlink_to(file)
    else:
        save_model(request.param, folder)
    return folder


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran"


def load(folder, **settings):
    classes = json.loads((folder / "config.json").read_text())["architectures"]
    kind = "sparse" if "MaskedLM" in classes[0] else "auto"
    return PooledModel(card_of(folder, kind=kind, **settings))


def test_pickled_weights_beside_good_ones_are_not_looked_at(model, ran):
    for name in ("pytorch_model.bin", "model.bin", "training_args.bin", "optimizer.pt"):
        poison(model / name, ran)
    load(model)
    assert not ran.exists()


def test_pickled_weights_under_another_name_are_refused(model, ran):
    poison(model / "model.safetensors", ran)
    with pytest.raises(SettingsError, match=r"model\.safetensors is not a safetensors file$"):
        load(model)
    (model / "model.safetensors").write_bytes(pickle.dumps(Code(ran)))
    with pytest.raises(SettingsError, match=r"is not a safetensors file$"):
        load(model)
    assert not ran.exists()


@pytest.mark.parametrize("model", ["bert reranker"], indirect=True)
def test_an_index_that_names_other_files_is_refused(model, ran):
    poison(model / "weights.bin", ran)
    for part in ("weights.bin", "../weights.safetensors", "/tmp/weights.safetensors"):
        index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": part}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(SettingsError, match=r"index names .*; only \.safetensors beside it is read"):
            load(model)
    assert not ran.exists()


@pytest.mark.parametrize("model", ["bert reranker"], indirect=True)
def test_an_adapter_is_refused(model):
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/else"}))
    with pytest.raises(SettingsError, match="is an adapter of another model; merge the two first"):
        load(model)


def with_code(model, ran):
    """The model comes with code of its own, as `trust_remote_code` has it."""
    config = json.loads((model / "config.json").read_text())
    classes = ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM")
    config |= {
        "model_type": "somebodys",
        "auto_map": {"AutoConfig": "code.Config"} | dict.fromkeys(classes, "code.Model"),
    }
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    (model / "code.py").write_text(
        f"import os\nos.mkdir({str(ran)!r})\nfrom transformers import BertConfig\nclass Config(BertConfig): pass\n"
    )


def test_code_of_a_model_is_not_run(model, ran):
    with_code(model, ran)
    with pytest.raises(SettingsError, match="names code of its own"):
        load(model)
    assert not ran.exists()


def test_code_of_a_model_is_run_if_the_settings_say_so(model, ran, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "copies"))
    monkeypatch.syspath_prepend(tmp_path / "copies")
    with_code(model, ran)
    with pytest.raises((SettingsError, AttributeError)):  # its code lacks the model itself
        load(model, trust_remote_code=True)
    assert ran.exists()
