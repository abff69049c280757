"""Compares packed models with transformers' code: small models with random weights, created on the spot."""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from deployments.engines import packed
from deployments.engines.packed.model import ModelOutput, PackedModel
from deployments.engines.packed.tensors import Place, Weights
from tests.kit.kinds_of_models import shaken

CPU = torch.device("cpu")
EXACT = Place(CPU, torch.float32)
VOCABULARY = 100
LENGTHS = {"ragged": [300, 45, 30, 4, 1], "alike": [40, 40, 40], "long": [700, 513], "one": [77], "shortest": [1]}


def build(model, config, **shape):
    """A transformers model of this class, in which every weight matters."""
    torch.manual_seed(0)
    return shaken(model(config(**{"vocab_size": VOCABULARY, "max_position_embeddings": 720} | shape)), 0.1)


def skip_unknown(model_type):
    """Skip a test of a family that came with a later version of transformers."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type} models")


def of_type(model_type, classes=MODEL_MAPPING, **shape):
    """The base model of this type (for T5, the encoder), or the one in other `classes`."""
    skip_unknown(model_type)
    config = CONFIG_MAPPING[model_type]
    return build((MODEL_FOR_TEXT_ENCODING_MAPPING if "t5" in model_type else classes)[config], config, **shape)


def texts(lengths):
    random = np.random.default_rng(0)
    return [torch.from_numpy(random.integers(5, VOCABULARY, length)) for length in lengths]


def pack(model, pooling, place=EXACT):
    parts = packed.build(model.config, Weights.of_module(model, place))
    return PackedModel(parts, place, ModelOutput(pooling))


def pooled(hidden, pooling):
    return {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pooling]


def compare(model, pooling, lengths, **close):
    """Compare packed and own code in float32: all texts together, and each alone."""
    queries = texts(lengths)
    with torch.inference_mode():
        ours = pack(model, pooling)
        together = ours(torch.cat(queries), np.array(lengths, np.int32))
        alone = torch.cat([ours(query, np.array([len(query)], np.int32)) for query in queries])
        wanted = [pooled(model(input_ids=query[None]).last_hidden_state[0], pooling) for query in queries]
    for found in (together, alone):
        torch.testing.assert_close(found, torch.stack(wanted), **({"atol": 5e-5, "rtol": 1e-4} | close))


def cosine_in(dtype, model, pooling, lengths):
    """The smallest cosine between the packed form in this number format and the own code in float32."""
    queries = texts(lengths)
    with torch.inference_mode():
        found = pack(model, pooling, Place(CPU, dtype))(torch.cat(queries), np.array(lengths, np.int32))
        wanted = [pooled(model(input_ids=query[None]).last_hidden_state[0], pooling) for query in queries]
    return float(torch.cosine_similarity(found, torch.stack(wanted)).min())
