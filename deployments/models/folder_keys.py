"""How each key of sentence-transformers' files in a model's folder is handled. Pure.

`tests/kit/folder_page.py` writes docs/model-files.md from these tables, and a test compares them with the installed
libraries. A key that is in no table is refused, so that none is ignored that changes a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.models.model_folder import bad_model

PADDING = "padding changes nothing"
THEIR_LIBRARY = "about the library that saved the model"
OF_SCORES = "scores are answered as TEI does: the sigmoid or softmax of the logits, or with `raw_scores` the logits"
COMPARED = "the tokens are those of transformers"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file.

    - `done`: mean the same as in the library that reads them.
    - `refused`: are refused, except for these values, which ask for what is done anyway. So is a null.
    - `unused`: have no effect on the answers, and why.
    - `is_open`: other keys are ignored by the libraries as well.
    """

    done: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False

    def check(self, config: Mapping[str, Any], file: object) -> None:
        """Raises SettingsError, which names the key, for what is refused."""
        for key, value in _flat(config):
            known = key in self.done or key in self.unused or (self.is_open and key not in self.refused)
            if not (known or value is None or value in self.refused.get(key, ())):
                raise bad_model(f"{file} says {key}: {value!r}, which is not supported")


_NESTED = words("model_args model_kwargs tokenizer_args processor_kwargs config_args config_kwargs processing_kwargs")


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value), with a dot between the names of a nested one."""
    for key, value in config.items():
        if key in _NESTED and isinstance(value, dict):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield key, value


def _arguments(new: str, old: str, **unused: str) -> dict[str, str]:
    unused["trust_remote_code"] = "`args.model.trust_remote_code` decides"
    unused |= dict.fromkeys(("revision", "code_revision"), "`args.model.revision` decides")
    return {f"{name}.{key}": why for name in (new, old) for key, why in unused.items()}


TRANSFORMER = Keys(
    words(
        "max_seq_length do_lower_case transformer_task modality_config module_output_name "
        "query_length document_length query_expansion"
    ),
    refused={"tokenizer_name_or_path": ()},
    unused={
        "unpad_inputs": PADDING,
        **_arguments(
            "model_kwargs",
            "model_args",
            **dict.fromkeys(("dtype", "torch_dtype"), "`dtype` of the pool decides"),
            **dict.fromkeys(("attn_implementation", "device_map", "low_cpu_mem_usage"), "the engine decides"),
            use_safetensors="weights are read from safetensors",
            add_pooling_layer="the pooler is not used",
        ),
        **_arguments("processor_kwargs", "tokenizer_args", use_fast=COMPARED, padding_side=PADDING),
        **_arguments(
            "config_kwargs", "config_args", use_cache="nothing is generated", attn_implementation="the engine decides"
        ),
        **{f"processing_kwargs.{one}": "only texts are read" for one in ("audio", "image", "video", "chat_template")},
    },
)
_FEATURES = words("module_input_name module_output_name")
_SIZE = dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), "the size of what comes in")
LEGACY_POOLING = {  # sentence-transformers' older keys, a flag for each mode
    f"pooling_mode_{key}": mode
    for key, mode in {
        "cls_token": "cls",
        "max_tokens": "max",
        "mean_tokens": "mean",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "weightedmean_tokens": "weightedmean",
        "lasttoken": "lasttoken",
    }.items()
}

# The modules that are served, by their class, and the keys of their config.json.
MODULES: Mapping[str, Keys] = {
    "Transformer": TRANSFORMER,
    "MLMTransformer": TRANSFORMER,
    "Pooling": Keys(words("pooling_mode include_prompt") | LEGACY_POOLING.keys(), unused=_SIZE),
    "SpladePooling": Keys(
        refused={"pooling_strategy": ("max",), "activation_function": ("relu",)},
        unused=_SIZE | {"chunk_size": "the same result with less memory"},
    ),
    "Dense": Keys(_FEATURES | words("in_features out_features bias activation_function use_residual")),
    "Normalize": Keys(_FEATURES),
    "Dropout": Keys(unused={"dropout": "acts only in training"}),
    "MultiVectorMask": Keys(
        words("skiplist_words"), refused={"skiplist_tasks": (["document"],), "keep_only_token_ids": ()}
    ),
    "LogitScore": Keys(words("true_token_id false_token_id"), refused={"module_input_name": ("causal_logits",)}),
}
_ONE_TABLE = (
    "it is a table of vectors, one for each token: a look-up that a client computes faster than it asks a server"
)
# sentence-transformers' other modules, and why a model with one is refused.
REFUSED: Mapping[str, str] = {
    "StaticEmbedding": _ONE_TABLE,
    "SparseStaticEmbedding": _ONE_TABLE,
    "Router": "it has different modules for queries and documents",
    "Asym": "it has different modules for queries and documents",
    "CLIPModel": "it reads images",
    **dict.fromkeys(("BoW", "WordEmbeddings", "WordWeights", "CNN", "LSTM"), "it computes on words of its own"),
    **dict.fromkeys(("WeightedLayerPooling", "LayerNorm", "SparseAutoEncoder"), ""),
    **dict.fromkeys(("HierarchicalTokenPooling", "LambdaTokenPooling", "BaseTokenPooling"), ""),
}

TRANSFORMER_CONFIGS = (
    tuple(  # of the transformer, by what it was when it was saved; sentence-transformers takes the first
        f"sentence_{name}_config.json"
        for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    )
)
PYLATE = words(
    "query_prefix document_prefix query_length document_length do_query_expansion attend_to_expansion_tokens "
    "attend_to_mask_tokens skiplist_words"
)
SENTENCE = Keys(
    words("model_type prompts default_prompt_name truncate_dim") | PYLATE,
    refused={"max_active_dims": (), "query_expansion": ()},
    unused={
        "__version__": THEIR_LIBRARY,
        "requirements": THEIR_LIBRARY,
        "similarity_fn_name": "`/similarity` and `/score` of vectors are cosines, as TEI's and vLLM's",
        "activation_fn": OF_SCORES,
        "keep_in_fp32_modules": "`dtype` of the pool decides; scores are compared with float32",
    },
    is_open=True,
)
