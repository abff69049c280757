"""Determines a model's kind, by its modules if these tell it, else by the class of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.errors import SettingsError
from deployments.models.colbert import is_stanford
from deployments.models.modules import names_of
from deployments.settings import Kind

SCORING = frozenset({"reranker", "classifier"})  # kinds that answer with a number for each label, not with a vector


def kind_of(
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
