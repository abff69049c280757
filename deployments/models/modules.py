"""Reads sentence-transformers' files: a model's modules, its pooling and its prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from deployments.errors import SettingsError
from deployments.models.model_folder import bad_model, read_json

_KNOWN = {
    "Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize", "MultiVectorMask", "LogitScore",
}  # fmt: skip
_PACKAGES = ("sentence_transformers.", "pylate.")  # a class of the model's own may have the same last word
_CONFIGS = tuple(  # of the transformer, by what it was when it was saved; sentence-transformers takes the first
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ORDER = ("Pooling", "Dense", "Normalize")  # after the transformer
_POOLING = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_MODE = re.compile(
    r"^(?:pooling_mode_)?(.+?)(?:_tokens?)?$"
)  # older files have a key for each mode, newer ones the mode's name


def check_modules(folder: Path) -> None:
    """Raises SettingsError if the model needs an unsupported module, or modules in an unsupported order."""
    modules = modules_of(folder)
    unknown = [module for module in modules if not _is_known(module)]
    if unknown:
        raise bad_model(f"the model needs the module {unknown[0]['type']}, which is not supported")
    order = [module_name(module) for module in modules if module_name(module) in _ORDER]
    if order != sorted(order, key=_ORDER.index):
        raise bad_model(f"the model's modules {', '.join(order)} are not supported in this order")
    _check_features(folder, modules)


def _is_known(module: dict[str, str]) -> bool:
    return module["type"].startswith(_PACKAGES) and module_name(module) in _KNOWN


def transformer_config(folder: Path) -> dict[str, Any]:
    """What sentence-transformers saved about the transformer: its length, and whether it lowers case."""
    return next(filter(None, (read_json(folder / name) for name in _CONFIGS)), {})


def truncated_to(folder: Path, dimension: int) -> int:
    """How many of an embedding's numbers the model keeps (`truncate_dim`). Raises SettingsError."""
    kept = read_json(folder / "config_sentence_transformers.json").get("truncate_dim") or dimension
    if not (isinstance(kept, int) and kept > 0):
        raise bad_model(f"{folder}/config_sentence_transformers.json has truncate_dim {kept!r}")
    return min(kept, dimension)


def _check_features(folder: Path, modules: list[dict[str, str]]) -> None:
    """Raises SettingsError if modules read or write unusual fields, or the transformer returns something unusual."""
    usual = "sentence_embedding" if "Pooling" in names_of(folder) else "token_embeddings"
    for module in modules:
        config = read_json(folder / module["path"] / "config.json") if module_name(module) in _ORDER[1:] else {}
        for key in ("module_input_name", "module_output_name"):
            if config.get(key, usual) not in {usual, None}:
                raise bad_model(f"{module['path']} has {key} {config[key]!r}, and {usual} alone is served")
    text = (transformer_config(folder).get("modality_config") or {}).get("text") or {}
    method, taken = text.get("method") or "forward", text.get("method_output_name") or "last_hidden_state"
    if method != "forward" or taken not in ("last_hidden_state", "logits"):
        raise bad_model(f"the model's vectors are {taken} of {method}, which is not supported")


def modules_of(folder: Path) -> list[dict[str, str]]:
    """The modules in modules.json, with `type`, and `path` inside the folder. Raises SettingsError for invalid ones."""
    modules: list[dict[str, str]] = read_json(folder / "modules.json").get("list", [])
    for module in modules:
        if not (isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("type", "path"))):
            raise bad_model("modules.json lists a module without a type and a path")
        path = Path(module["path"])
        if path.is_absolute() or ".." in path.parts:
            raise bad_model(f"modules.json names {path}, which is not a folder of the model")
    return modules


def module_name(module: dict[str, str]) -> str:
    """The module's class, without its package."""
    return module["type"].rsplit(".", 1)[-1]


def module_config(folder: Path, name: str) -> dict[str, Any] | None:
    """The config of the model's first module of that class. None if it has no such module."""
    paths = [module["path"] for module in modules_of(folder) if module_name(module) == name]
    return read_json(folder / paths[0] / "config.json") if paths else None


def names_of(folder: Path) -> set[str]:
    """The classes of a model's modules."""
    return {module_name(module) for module in modules_of(folder)}


def pooled_by(folder: Path, wanted: str) -> str:
    """How the tokens' vectors are pooled into an embedding: cls, mean or last. Raises SettingsError."""
    if wanted != "auto":
        return wanted
    config = module_config(folder, "Pooling")
    if config is not None:
        flags = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
        named = config.get("pooling_mode") or flags
        modes = {_MODE.sub(r"\1", str(mode)) for mode in (named if isinstance(named, list) else [named])}
        found = sorted(_POOLING.get(mode, mode) for mode in modes)
        if len(found) == 1 and found[0] in _POOLING.values():
            return found[0]
        if found:
            joined = " and ".join(found)
            raise SettingsError("args.model.pooling", f"the model pools by {joined}; one of cls, mean, last is served")
    raise SettingsError("args.model.pooling", "the model's files do not say how it pools: set cls, mean or last")


def splade_pooling(folder: Path) -> str:
    """Always "splade", the only supported pooling of sparse vectors. Raises SettingsError if the files say another."""
    config = module_config(folder, "SpladePooling") or {}
    how = (config.get("pooling_strategy", "max"), config.get("activation_function", "relu"))
    if how != ("max", "relu"):
        raise bad_model(f"the model pools by {how[0]} of {how[1]}; of these, max of relu is served")
    return "splade"


def prompts_of(folder: Path, wanted: str | None) -> tuple[dict[str, str], str | None]:
    """The prompts that sentence-transformers would put before texts, by name; and the default prompt's name, or None.
    Raises SettingsError.
    """
    config = read_json(folder / "config_sentence_transformers.json")
    prompts: dict[str, str] = config.get("prompts") or {}
    name = wanted or config.get("default_prompt_name")
    if name is not None and name not in prompts:
        there = f"only {', '.join(prompts)}" if prompts else "it has none"
        raise SettingsError("args.model.default_prompt_name", f"the model has no prompt named {name}: {there}")
    if any(prompts.values()) and not (module_config(folder, "Pooling") or {}).get("include_prompt", True):
        if name is not None and prompts[name]:
            raise SettingsError(
                "args.model.default_prompt_name",
                "the model leaves its prompts out of the pooling, which is not supported",
            )
        return {}, None
    return prompts, name
