"""Reads sentence-transformers' files: a model's modules, its pooling and its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deployments.errors import SettingsError
from deployments.models.folder_keys import LEGACY_POOLING, MODULES, REFUSED, SENTENCE, TRANSFORMER_CONFIGS, Keys
from deployments.models.model_folder import bad_model, read_json
from deployments.settings import Kind

_PACKAGES = ("sentence_transformers.", "pylate.")  # a class of the model's own may have the same last word
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_ALIKE = {"MLMTransformer": "Transformer", "SpladePooling": "Pooling"}  # in that order
_POOLING = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_TASKS = {  # of a transformer, by the model's kind: its task, what it returns, and that feature's name
    "embedding": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "multi_vector": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "sparse": ("fill-mask", "logits", "token_embeddings"),
    "reranker": ("sequence-classification", "logits", "scores"),
    "classifier": ("sequence-classification", "logits", "scores"),
}


def check_modules(folder: Path) -> None:
    """Raises SettingsError if the model needs an unsupported module, modules in an unsupported order, or a key of
    theirs that is not supported.
    """
    modules = modules_of(folder)
    for module in modules:
        _check_known(module)
    names = [_ALIKE.get(module_name(module), module_name(module)) for module in modules]
    order = [name for name in names if name in _ORDER]
    twice = [name for name in order if name != "Dense" and order.count(name) > 1]
    more = "SpladePooling" in names_of(folder) and order[-1] != "Pooling"
    if order != sorted(order, key=_ORDER.index) or twice or more:
        raise bad_model(f"the model's modules {', '.join(map(module_name, modules))} are not supported in this order")
    MODULES["Transformer"].check(*_transformer_file(folder))
    for module in modules:
        if module_name(module) not in _TRANSFORMERS and module["path"]:  # without one it has no config of its own
            file = folder / module["path"] / "config.json"
            MODULES[module_name(module)].check(read_json(file), file)
    _check_features(folder, modules)
    SENTENCE.check(
        read_json(folder / "config_sentence_transformers.json"), folder / "config_sentence_transformers.json"
    )


def _check_known(module: dict[str, str]) -> None:
    name = module_name(module)
    if not (module["type"].startswith(_PACKAGES) and name in MODULES):
        why = f": {REFUSED[name]}" if REFUSED.get(name) else ""
        raise bad_model(f"the model needs the module {module['type']}, which is not supported{why}")


def check_task(folder: Path, kind: Kind) -> None:
    """Raises SettingsError if the transformer does not compute what a model of this kind needs of it."""
    config = transformer_config(folder)
    task, output, feature = _TASKS[kind]
    modalities = config.get("modality_config") or {"text": {}}
    text = modalities.get("text")
    if text is None:
        raise bad_model(f"the model reads {' and '.join(modalities)}, and only text is supported")
    method, taken = text.get("method") or "forward", text.get("method_output_name") or output
    if (method, taken) != ("forward", output):
        raise bad_model(f"the model's vectors are {taken} of {method}, which is not supported")
    only: dict[str, tuple[Any, ...]] = {"transformer_task": (task,), "module_output_name": (feature,)}
    if kind != "multi_vector":
        only |= dict.fromkeys(("query_length", "document_length", "query_expansion"), ())
    Keys(refused=only).check({key: config.get(key) for key in only}, f"the transformer of this {kind} model")


def transformer_folder(folder: Path) -> Path:
    """The folder with the transformer's files: the model's own, or in older models one inside it."""
    paths = [module["path"] for module in modules_of(folder) if module_name(module) in _TRANSFORMERS]
    return folder / paths[0] if paths else folder


def transformer_config(folder: Path) -> dict[str, Any]:
    """What sentence-transformers saved about the transformer: its length, and whether it lowers case."""
    return _transformer_file(folder)[0]


def _transformer_file(folder: Path) -> tuple[dict[str, Any], Path]:
    """The first of the transformer's configs that says anything, and where it is."""
    paths = [transformer_folder(folder) / name for name in TRANSFORMER_CONFIGS]
    return next(((found, path) for path in paths if (found := read_json(path))), ({}, paths[0]))


def truncated_to(folder: Path, dimension: int) -> int:
    """How many of an embedding's numbers the model keeps (`truncate_dim`). Raises SettingsError."""
    kept = read_json(folder / "config_sentence_transformers.json").get("truncate_dim") or dimension
    if not (isinstance(kept, int) and kept > 0):
        raise bad_model(f"{folder}/config_sentence_transformers.json has truncate_dim {kept!r}")
    return min(kept, dimension)


def _check_features(folder: Path, modules: list[dict[str, str]]) -> None:
    """Raises SettingsError if modules read or write unusual fields."""
    usual = "sentence_embedding" if "Pooling" in names_of(folder) else "token_embeddings"
    for module in modules:
        config = read_json(folder / module["path"] / "config.json") if module_name(module) in _ORDER[2:] else {}
        for key in ("module_input_name", "module_output_name"):
            if config.get(key, usual) not in {usual, None}:
                raise bad_model(f"{module['path']} has {key} {config[key]!r}, and {usual} alone is served")


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
        named = config.get("pooling_mode") or [mode for key, mode in LEGACY_POOLING.items() if config.get(key)]
        found = sorted(_POOLING.get(str(mode), str(mode)) for mode in (named if isinstance(named, list) else [named]))
        if len(found) == 1 and found[0] in _POOLING.values():
            return found[0]
        if found:
            named = " and ".join(found)
            raise SettingsError("args.model.pooling", f"the model pools by {named}; one of cls, mean, last is served")
    raise SettingsError("args.model.pooling", "the model's files do not say how it pools: set cls, mean or last")


def prompts_of(folder: Path, wanted: str | None) -> tuple[dict[str, str], str | None]:
    """The prompts that sentence-transformers would put before texts, by name; and the default prompt's name, or None.
    Raises SettingsError.
    """
    config = read_json(folder / "config_sentence_transformers.json")
    prompts = {name: text or "" for name, text in (config.get("prompts") or {}).items()}
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
