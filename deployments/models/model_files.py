"""A model's card: its kind, length, pooling and normalization, as its files say. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.errors import SettingsError
from deployments.models.colbert import Late, is_stanford, read_late
from deployments.models.config_adapters import class_config
from deployments.models.llm_reranker import Judge, check_words, judge_of
from deployments.models.model_folder import bad_model, read_json, understood
from deployments.models.modules import (
    check_modules,
    check_task,
    names_of,
    pooled_by,
    prompts_of,
    transformer_config,
    transformer_folder,
    truncated_to,
)
from deployments.models.outputs import TEXT, Output, Outputs
from deployments.models.pickles import served_folder
from deployments.models.projections import Projection, projections_of, score_of
from deployments.models.text_pairs import Side
from deployments.models.weights import count_parameters, find_weights
from deployments.settings import Auto, Kind, ModelSettings

SCORING = frozenset({"reranker", "classifier"})  # kinds that answer with a number for each label, not with a vector
_AFTER_PADDING = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # their positions start after the padding token's id
_BEGINNING = 4096  # bytes of tokenizer.json, in which its `truncation` stands
_WITHOUT_TYPES = {"roberta", "xlm-roberta", "camembert"}  # their table of token types has only one type


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's properties, from its files and the settings. `max_tokens` includes special tokens. `dimension`: how
    many numbers answer a query: the vector's, one per label, or one per vocabulary entry (sparse).
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
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: the texts that go before a text
    default_prompt_name: str | None = None
    kind: Kind = "embedding"
    labels: tuple[str, ...] = ()  # of a reranker or a classifier, in the order of its numbers
    token_types: bool = False  # the model distinguishes the two texts of a pair by token types
    config: Mapping[str, Any] | None = None  # translated for the model's class, if config.json is in another format
    token_widths: Mapping[Output, int] = field(default_factory=dict)  # numbers per token, by output
    projections: Mapping[Output, tuple[Projection, ...]] = field(default_factory=dict)  # final layers, by output

    root: Path | None = None  # the folder with modules.json, if the transformer has a folder inside it
    truncation_side: Side = "right"  # where a long text is cut, if the request does not say
    late: Late | None = None  # how a multi-vector model reads queries and documents
    judge: Judge | None = None  # the prompt of a reranker that is a language model

    @property
    def has_head(self) -> bool:
        """Whether its numbers come from a head of its class in transformers."""
        return self.pooling in {"none", "splade"}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """`kind`, and the other kinds whose requests it also answers."""
        others: tuple[Kind, ...] = ("sparse", "multi_vector")
        return (self.kind, *(kind for kind in others if kind in self.token_widths and kind != self.kind))

    def outputs_for(self, kind: Kind) -> Outputs:
        """The outputs for a request to models of this kind, one of `kinds`."""
        return (kind,) if kind in self.token_widths else TEXT  # type: ignore[return-value]


def read_model_card(settings: ModelSettings) -> ModelCard:
    """Find the model's folder (downloading it if `id` is a hub name) and read its card.

    Raises SettingsError, which names the wrong setting in `args.model`.
    """
    with understood(settings.id):
        root, revision = served_folder(settings)
        return _card(settings, root, revision)


def _card(settings: ModelSettings, root: Path, revision: str | None) -> ModelCard:
    check_modules(root)
    folder = transformer_folder(root)
    config, translated = _config(folder, own_code=settings.trust_remote_code)
    weights = find_weights(folder)
    judge = judge_of(settings, config, names_of(root))
    labels = _labels(config) if judge is None else (judge.yes,)
    kind = _kind_of(root, config, labels, settings.kind, is_llm_reranker=judge is not None)
    text, hidden = _sizes(folder, config)
    after = _after(root, config, kind, hidden, judge, alone=settings.kind != "auto")
    sentence, tokenizer = transformer_config(root), read_json(folder / "tokenizer_config.json")
    prompts, default_prompt_name = _prompts(root, kind, settings.default_prompt_name)
    scores = kind in SCORING
    dimension = _dimension(kind, labels, text, after) or hidden
    return ModelCard(
        name=settings.served_name,
        folder=folder,
        revision=revision,
        model_type=str(config.get("model_type", "unknown")),
        dimension=truncated_to(root, dimension) if kind == "embedding" else dimension,
        vocab_size=int(text["vocab_size"]),
        max_tokens=_max_tokens(folder, text, sentence, tokenizer, settings.max_tokens),
        pooling="last" if judge else _pooling(root, kind, settings.pooling),
        normalize=_normalize(root, kind, settings.normalize),
        lower_case=bool(sentence.get("do_lower_case", False)),
        trust_remote_code=settings.trust_remote_code,
        layers=int(text.get("num_hidden_layers") or text.get("n_layers") or 0),
        parameters=sum(map(count_parameters, weights)),
        kind=kind,
        labels=labels if scores else (),
        token_types=scores and not judge and _token_types(tokenizer, config),
        config=translated,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        token_widths=_token_widths(kind, hidden, after),
        projections=after,
        judge=judge,
        late=read_late(root, config) if kind == "multi_vector" else None,
        root=None if root == folder else root,
        truncation_side=tokenizer.get("truncation_side") or _direction(folder),
    )


def _config(folder: Path, *, own_code: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(the config for the model's class, the same again if it was translated or else None). Raises SettingsError."""
    config = read_json(folder / "config.json")
    if not config:
        raise bad_model(f"{folder} holds no config.json, so it is not a model")
    translated = class_config(config, own_code=own_code)
    return translated or config, translated


def _kind_of(
    folder: Path, config: Mapping[str, Any], labels: tuple[str, ...], wanted: str, *, is_llm_reranker: bool = False
) -> Kind:
    """The model's kind, or `wanted` if that is not auto. `is_llm_reranker`: it is a language model that scores pairs
    (`llm_reranker`).

    Raises SettingsError if the model cannot be of the wanted kind.
    """
    classes = config.get("architectures") or []
    named = " and ".join(classes) or "no architectures"
    scores = is_llm_reranker or any(name.endswith("ForSequenceClassification") for name in classes)
    modules = names_of(folder)
    compares = is_stanford(config) or ("Dense" in modules and "Pooling" not in modules)
    if wanted == "auto":
        if "SpladePooling" in modules:
            return "sparse"
        if compares:
            return "multi_vector"
        if scores and "Pooling" not in modules:
            return "reranker" if len(labels) == 1 else "classifier"
        return "embedding"
    if wanted == "multi_vector" and not compares:
        raise SettingsError(
            "args.model.kind", f"multi_vector needs a ColBERT model with its projection; this one is {named}"
        )
    if wanted in SCORING and not scores:
        raise SettingsError("args.model.kind", f"{wanted} needs a model ForSequenceClassification; this one is {named}")
    if wanted in SCORING and (wanted == "reranker") != (len(labels) == 1):
        raise SettingsError(
            "args.model.kind",
            f"a reranker has one label and a classifier several; this model has {len(labels)}: {', '.join(labels[:5])}",
        )
    if wanted == "sparse" and not any(name.endswith("ForMaskedLM") for name in classes):
        raise SettingsError("args.model.kind", f"sparse needs a model ForMaskedLM; this one is {named}")
    return wanted  # type: ignore[return-value]


def _direction(folder: Path) -> Side:
    """The side on which tokenizer.json cuts: transformers' default where tokenizer_config.json names none. Reads only
    the file's beginning, where it stands: the vocabulary behind it may have 30 MB.
    """
    try:
        with (folder / "tokenizer.json").open("rb") as file:
            said = re.search(rb'"truncation":\s*{[^}]*"direction":\s*"Left"', file.read(_BEGINNING))
    except OSError:
        said = None
    return "left" if said else "right"


def _sizes(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """(the config of the text model, how many numbers its vectors have). Raises SettingsError."""
    text = config.get("text_config") or config  # multimodal models nest the text model's numbers
    hidden = text.get("hidden_size") or text.get("dim") or text.get("d_model")
    if not hidden or "vocab_size" not in text:
        raise bad_model(f"{folder}/config.json gives no hidden_size or vocab_size")
    return text, int(hidden)


def _prompts(folder: Path, kind: Kind, wanted: str | None) -> tuple[dict[str, str], str | None]:
    if kind == "multi_vector" and wanted is None:
        return {}, None  # `late` has the prompts for queries and documents
    prompts, default = prompts_of(folder, wanted)
    if kind not in SCORING:
        return prompts, default
    if default is not None and prompts[default]:
        raise SettingsError(
            "args.model.default_prompt_name", f"a {kind} that puts a prompt before texts is not supported"
        )
    return {}, None


def _after(
    root: Path, config: Mapping[str, Any], kind: Kind, hidden: int, judge: Judge | None, *, alone: bool
) -> dict[Output, tuple[Projection, ...]]:
    if judge is None:
        check_task(root, kind)
        return projections_of(root, config, kind, hidden, alone=alone)
    folder = transformer_folder(root)
    check_words(root, folder, judge)
    return {"text": (score_of(folder, config, hidden, (judge.yes, judge.no)),)}


def _dimension(
    kind: Kind, labels: tuple[str, ...], config: dict[str, Any], after: Mapping[Output, tuple[Projection, ...]]
) -> int | None:
    """How many numbers answer a query. None: as many as the transformer returns."""
    if kind in SCORING:
        return len(labels)
    if kind == "sparse":
        return int(config["vocab_size"])
    found = after.get("multi_vector" if kind == "multi_vector" else "text")
    return found[-1].outputs if found else None


def _token_widths(kind: Kind, hidden: int, after: Mapping[Output, tuple[Projection, ...]]) -> dict[Output, int]:
    widths: dict[Output, int] = {"tokens": hidden} if kind == "embedding" else {}
    return widths | {output: some[-1].outputs for output, some in after.items() if output != "text"}


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """The labels, in the order of the model's numbers. Without names in the files, transformers' default labels."""
    named = config.get("id2label") or {number: f"LABEL_{number}" for number in range(config.get("num_labels", 2))}
    try:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    except ValueError:
        raise bad_model("the keys of id2label in config.json should be whole numbers") from None


def _token_types(tokenizer: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether token types are used, as in TEI and BERT's tokenizers: if the model has types, unless the tokenizer's
    files leave them out.
    """
    types = config.get("type_vocab_size", 2 if config.get("model_type") == "bert" else 0)
    inputs = tokenizer.get("model_input_names", ["token_type_ids"])
    return types > 1 and config.get("model_type") not in _WITHOUT_TYPES and "token_type_ids" in inputs


def _pooling(folder: Path, kind: str, wanted: str) -> str:
    """The pooling. Kinds other than embedding have their own: "none" for scores, "tokens" or "splade"."""
    if kind == "embedding":
        return pooled_by(folder, wanted)
    if wanted != "auto":
        raise SettingsError(
            "args.model.pooling", f"the config asks for {wanted}, but the pooling of a {kind} model cannot be chosen"
        )
    if kind == "multi_vector":
        return "tokens"
    return "none" if kind in SCORING else "splade"


def _normalize(folder: Path, kind: str, wanted: Auto | bool) -> bool:
    if wanted != "auto":
        if wanted and kind != "embedding":
            raise SettingsError("args.model.normalize", f"the config asks for true, but the model is a {kind} model")
        return bool(wanted)
    return kind == "embedding" and "Normalize" in names_of(folder)


def _max_tokens(
    folder: Path, config: dict[str, Any], sentence: dict[str, Any], tokenizer: dict[str, Any], wanted: int | None
) -> int:
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    if positions and config.get("model_type") in _AFTER_PADDING:
        if (padding := config.get("pad_token_id", 1)) is None:
            raise bad_model(f"{folder}/config.json gives no pad_token_id, behind which its positions begin")
        positions -= int(padding) + 1
    saved = sentence.get("max_seq_length") or tokenizer.get("model_max_length", tokenizer.get("max_len"))
    limits = [int(limit) for limit in (positions, saved, wanted) if limit]
    if not limits:
        raise SettingsError("args.model.max_tokens", "the model's files do not say how long an input may be: set it")
    return min(limits)
