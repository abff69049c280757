"""The layers after a model's transformer and pooling: Dense modules of sentence-transformers, and heads on tokens.

A module's config names its activation by a Python path. The path is looked up in a table, never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from deployments.models.colbert import is_stanford
from deployments.models.model_folder import bad_model, read_json
from deployments.models.modules import module_name, modules_of
from deployments.models.outputs import Output
from deployments.models.weights import SAFE_INDEX
from deployments.settings import Kind

_TORCH = ("torch.nn.", "torch.nn.modules.activation.", "torch.nn.modules.linear.")
_ACTIVATIONS = {
    path + name: name.lower() for path in _TORCH for name in ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
}


@dataclass(frozen=True, slots=True)
class Projection:
    """`activation(x @ weight.T + bias)`, with tensors by their names in a safetensors file.

    - `residual`: None; or "" to add x itself; or the name of the matrix by which x is multiplied before it is added.
    - `words`: the weight is a single row: the tensor's row for the first of these tokens minus that for the second.
    """

    file: Path
    inputs: int
    outputs: int
    weight: str = "linear.weight"
    bias: str | None = None
    activation: str = "identity"  # identity, tanh, relu, gelu, silu or sigmoid
    residual: str | None = None
    words: tuple[str, str] | None = None


def projections_of(
    folder: Path, config: Mapping[str, Any], kind: Kind, hidden: int, *, alone: bool
) -> dict[Output, tuple[Projection, ...]]:
    """The layers after a transformer with vectors of `hidden` numbers, by output. `alone`: only those of this kind.

    Raises SettingsError.
    """
    if kind == "multi_vector":
        return {"multi_vector": _of_colbert(folder, config, hidden)}
    if kind != "embedding":
        return {}
    dense = _dense_modules(folder, hidden)
    return {**({"text": dense} if dense else {}), **({} if alone else _of_m3(folder, hidden))}


def _of_m3(folder: Path, hidden: int) -> dict[Output, tuple[Projection, ...]]:
    """bge-m3's heads on tokens, if their files exist (named as in FlagEmbedding)."""
    files: dict[Output, tuple[str, str]] = {
        "sparse": ("sparse_linear", "relu"),
        "multi_vector": ("colbert_linear", "identity"),
    }
    found: dict[Output, tuple[Projection, ...]] = {}
    for output, (name, activation) in files.items():
        file = folder / f"{name}.safetensors"
        if file.is_file():
            outputs = _shape(file, "weight")[0]
            found[output] = (Projection(file, hidden, outputs, "weight", "bias", activation),)
    return found


def _of_colbert(folder: Path, config: Mapping[str, Any], hidden: int) -> tuple[Projection, ...]:
    """A ColBERT model's projection. Stanford's is among the model's weights; those of others are Dense modules."""
    if not is_stanford(config):
        return _dense_modules(folder, hidden)
    file = folder / "model.safetensors"
    return (Projection(file, hidden, _shape(file, "linear.weight")[0]),)


def _shape(file: Path, tensor: str) -> list[int]:
    with opened(file) as tensors:
        shape: list[int] = tensors.get_slice(tensor).get_shape()
    return shape


def _tensors(file: Path) -> list[str]:
    with opened(file) as tensors:
        names: list[str] = list(tensors.keys())
    return names


@contextmanager
def opened(file: Path, framework: Literal["np", "pt"] = "np") -> Iterator[Any]:
    """Open a safetensors file for numpy or torch. Raises SettingsError if it cannot be read."""
    try:
        with safe_open(file, framework) as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise bad_model(f"{file} cannot be read: {error}") from None


def score_of(folder: Path, config: Mapping[str, Any], hidden: int, words: tuple[str, str]) -> Projection:
    """The projection to a language model's logit of one token minus that of another, which models that were converted
    to a classifier hold ready. Raises SettingsError.
    """
    names = ["score.weight", "lm_head.weight", "model.embed_tokens.weight"]
    if not config.get("tie_word_embeddings", True):
        names.pop()
    parts = read_json(folder / SAFE_INDEX).get("weight_map")
    for name in names:
        file = folder / (parts.get(name, "") if parts else "model.safetensors")
        if file.is_file() and name in _tensors(file):
            return Projection(file, hidden, 1, name, words=None if name == names[0] else words)
    raise bad_model(f"{folder} holds no {' or '.join(names)}, which scores come from")


def _dense_modules(folder: Path, hidden: int) -> tuple[Projection, ...]:
    found: list[Projection] = []
    for module in modules_of(folder):
        if module_name(module) == "Dense":
            found.append(_dense(folder / module["path"], found[-1].outputs if found else hidden))
    return tuple(found)


def _dense(folder: Path, inputs: int) -> Projection:
    config = read_json(folder / "config.json")
    path = config.get("activation_function", "torch.nn.Tanh")  # sentence-transformers' default
    if path not in _ACTIVATIONS:
        known = ", ".join(name.removeprefix("torch.nn.") for name in _ACTIVATIONS if name.count(".") == 2)
        raise bad_model(f"{folder} has the activation {path}; of these, {known} are served")
    if config.get("in_features") != inputs or not isinstance(config.get("out_features"), int):
        sizes = f"{config.get('in_features')} numbers into {config.get('out_features')}"
        raise bad_model(f"{folder}/config.json makes {sizes}, and {inputs} come in")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise bad_model(f"{folder} holds no model.safetensors")
    residual = None
    if config.get("use_residual", False):
        residual = "" if config["out_features"] == inputs else "residual.weight"
    return Projection(
        file,
        inputs,
        config["out_features"],
        bias="linear.bias" if config.get("bias", True) else None,
        activation=_ACTIVATIONS[path],
        residual=residual,
    )
