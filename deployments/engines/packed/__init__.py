"""The packed form: transformers without padding. The queries of a pass are concatenated, and only attention
distinguishes them.

`families/` builds each family's models from the shared parts: `layers.py`, `attention.py`, `positions.py`.
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
    """The interface of a module in `families/`."""

    def unsupported(self, config: Any) -> str | None: ...

    def build(self, config: Any, weights: Weights, *, types: bool = False) -> Parts: ...


def unsupported(config: Any) -> str | None:
    """Why a model of this transformers config cannot run packed, or None."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} models have no packed form here"
    return _family(config).unsupported(config)


def build(config: Any, weights: Weights, *, types: bool = False) -> Parts:
    """The parts of a model that is not `unsupported`. `weights`: named as in the base model.

    Building a part raises MissingWeight if a tensor that it needs is missing.
    """
    return _family(config).build(config, weights, types=types)


def _family(config: Any) -> Family:
    module = importlib.import_module(f"{__name__}.families.{FAMILIES[config.model_type]}")
    return cast("Family", module)
