"""What the files of Dense modules say, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_model_files import CONFIG, NORMALIZE, POOLING, card, model  # noqa: F401 - a fixture

from deployments.errors import SettingsError

DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
SECOND = {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
IDENTITY = "torch.nn.modules.linear.Identity"


def dense(folder, path="2_Dense", **config):
    (folder / path).mkdir()
    about = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": IDENTITY, **config}
    (folder / path / "config.json").write_text(json.dumps(about))
    save_file({"linear.weight": np.zeros((4, 8), np.float32)}, folder / path / "model.safetensors")


@pytest.fixture
def saved(model):  # noqa: F811 - that fixture
    return lambda *modules: model(modules=[POOLING, *modules], pooling={"pooling_mode": "cls"})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.GELU", "gelu"),
        ("torch.nn.modules.activation.SiLU", "silu"),
        ("torch.nn.modules.activation.Sigmoid", "sigmoid"),
        ("torch.nn.ReLU", "relu"),
        (IDENTITY, "identity"),
    ],
)
def test_the_dimension_is_the_last_modules(tmp_path, saved, path, name):
    dense(tmp_path)
    dense(tmp_path, "3_Dense", in_features=4, out_features=6, bias=False, activation_function=path)
    found = card(saved(DENSE, SECOND, NORMALIZE))
    assert (found.dimension, found.normalize, found.token_widths) == (6, True, {"tokens": CONFIG["hidden_size"]})
    first, second = found.projections["text"]
    assert (first.inputs, first.outputs, first.bias, first.activation) == (8, 4, "linear.bias", "identity")
    assert (second.inputs, second.outputs, second.bias, second.activation) == (4, 6, None, name)
    assert second.file == tmp_path / "3_Dense/model.safetensors"


@pytest.mark.parametrize(
    "path", ["torch.nn.functional.tanh", "os.system", "windve_evil.Tanh", "torch.nn.modules.Tanh", None, ""]
)
def test_an_activation_that_is_not_known_is_refused_by_name_and_not_imported(tmp_path, saved, path):
    (tmp_path / "windve_evil.py").write_text("raise SystemExit('it was imported')")
    dense(tmp_path, activation_function=path)
    with pytest.raises(
        Exception, match=r"2_Dense has the activation .*Identity, Tanh, ReLU, GELU, SiLU, Sigmoid"
    ) as found:
        card(saved(DENSE))
    assert f"the activation {path};" in str(found.value)


@pytest.mark.parametrize(
    ("modules", "config", "sentence"),
    [
        ([NORMALIZE, DENSE], {}, "modules Pooling, Normalize, Dense are not supported in this order"),
        ([DENSE], {"in_features": 16}, r"2_Dense/config.json makes 16 numbers into 4, and 8 come in"),
        ([DENSE], {"out_features": None}, r"makes 8 numbers into None"),
        ([DENSE, SECOND], {}, r"3_Dense/config.json makes None numbers into None, and 4 come in"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, saved, modules, config, sentence):
    dense(tmp_path, **config)
    with pytest.raises(SettingsError, match=rf"args\.model\.id: .*{sentence}"):
        card(saved(*modules))


def test_a_module_without_weights_is_refused(tmp_path, saved):
    dense(tmp_path)
    (tmp_path / "2_Dense/model.safetensors").unlink()
    with pytest.raises(SettingsError, match=r"2_Dense holds no model\.safetensors"):
        card(saved(DENSE))
