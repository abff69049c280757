"""The packed form: transformers over tokens without padding. Queries of a pass follow one another in one row of tokens;
only attention knows where one ends.

`families/` says how a family's model is made of the shared parts: `layers.py`, `attention.py`, `positions.py`.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from deployments.engines.packed.model import Parts
from deployments.engines.packed.tensors import Weights

FAMILIES = {  # the config's model_type -> the module in families/
    "bert": "bert",
    "camembert": "bert",
    "distilbert": "distilbert",
    "eurobert": "decoder",
    "gemma3_text": "decoder",
    "gte": "rotary_bert",
    "jina_bert": "jina",
    "llama": "decoder",
    "mistral": "decoder",
    "modernbert": "modernbert",
    "mpnet": "mpnet",
    "mt5": "t5",
    "nomic_bert": "rotary_bert",
    "qwen2": "decoder",
    "qwen3": "decoder",
    "roberta": "bert",
    "t5": "t5",
    "xlm-roberta": "bert",
}


class Family(Protocol):
    """What a module of `families/` has."""

    def unsupported(self, config: Any) -> str | None: ...

    def build(self, config: Any, weights: Weights, *, types: bool = False) -> Parts: ...


def unsupported(config: Any) -> str | None:
    """Why a model of this transformers config cannot run packed, or None."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} models have no packed form here"
    return _family(config).unsupported(config)


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:
    """The parts of a model that is not `unsupported`. `weights` are under the base model's names.

    Raises MissingWeight where a tensor is missing, as soon as a part needs it.
    """
    return _family(config).build(config, weights, types=types)


def _family(config: Any) -> Family:
    module = importlib.import_module(f"{__name__}.families.{FAMILIES[config.model_type]}")
    return cast("Family", module)
