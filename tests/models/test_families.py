"""Published models of each family against transformers' own classes, and jina-embeddings-v2 against float64."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from deployments.engines import TokenBatch
from deployments.engines.pooled_model import agreement
from deployments.errors import SettingsError
from deployments.models.text_pairs import TYPE
from tests.kit.engines import FORMS, card_of, check_rows, engine_of, rows_of
from tests.kit.jina_reference import Jina
from tests.kit.published_models import CONFIGS, FAMILIES, JINA, jina_weights, published_weights, reference, save_folder

EXACT = {"atol": 2e-5, "rtol": 1e-4}
JINAS = {
    "jina": JINA,
    "jina reglu": JINA | {"feed_forward_type": "reglu"},
    "jina original": JINA | {"feed_forward_type": "original"},
    "jina of six heads": JINA | {"num_attention_heads": 6, "hidden_size": 96},
    "jina code": CONFIGS["jina code"],
}
LENGTHS = {"ragged": [300, 45, 130, 4, 1], "alike": [40, 40, 40], "one": [77], "shortest": [1]}
LONG = [700, 513]  # past a local window of 128 on both sides, and past 512
PAST_512 = {"modernbert", "eurobert", "nomic", "gte en", "gte multilingual", *JINAS}
HEAD = {
    "bert.pooler.dense.weight": (64, 64),
    "bert.pooler.dense.bias": 64,
    "classifier.weight": (1, 64),
    "classifier.bias": 1,
}


class Family:
    """One published model in its folder, and what its vectors should be."""

    def __init__(self, name, folder):
        if name in JINAS:
            weights = jina_weights(JINAS[name])
            save_folder(folder, JINAS[name], weights)
            self._model = Jina(JINAS[name], weights)
        else:
            self._model = reference(name)
            save_folder(folder, CONFIGS[name], published_weights(name, self._model))
        self.folder = folder
        self._hidden = {}

    def hidden(self, query):
        """The vector of each token [tokens, hidden] of one query alone."""
        if (key := query.tobytes()) not in self._hidden:
            if isinstance(self._model, Jina):
                self._hidden[key] = self._model(query)
            else:
                with torch.inference_mode():
                    ids = torch.from_numpy(query.astype(np.int64))[None]
                    self._hidden[key] = self._model(input_ids=ids).last_hidden_state[0].numpy()
        return self._hidden[key]

    def pooled(self, queries, pooling="mean"):
        """Of each query, [1, hidden]."""
        how = {"cls": lambda x: x[:1], "last": lambda x: x[-1:], "mean": lambda x: x.mean(0, keepdims=True)}[pooling]
        return [how(self.hidden(query)).astype(np.float32) for query in queries]

    def engine(self, form, dtype="float32", pooling="mean"):
        return engine_of(card_of(self.folder, pooling=pooling), form=form, dtype=dtype)


def queries_of(lengths):
    return TokenBatch.random(30000, lengths, seed=0).queries()


@pytest.fixture(scope="module", params=[*FAMILIES, *JINAS])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def family(name, tmp_path_factory):
    return Family(name, tmp_path_factory.mktemp("published") / "model")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_vectors_are_the_models_own(family, name, form, pooling):
    engine = family.engine(form, pooling=pooling)
    for lengths in [*LENGTHS.values(), *([LONG] if name in PAST_512 else [])]:
        queries = queries_of(lengths)
        check_rows(engine, queries, family.pooled(queries, pooling), **EXACT)


ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
RERANKERS = {  # the name that the published class begins with
    "distilbert": ("DistilBert", {}),
    "mpnet": ("MPNet", {}),
    "modernbert": ("ModernBert", {}),  # gte-reranker-modernbert-base: by the mean
    "modernbert by its first token": ("ModernBert", {"classifier_pooling": "cls", "classifier_bias": True}),
    "gte multilingual": ("New", {}),  # gte-multilingual-reranker-base
}


def check_scores(folder, queries, wanted):
    card = card_of(folder)
    assert (card.kind, card.dimension) == ("reranker", 1)
    assert np.ptp(wanted) > 0.05  # else they would agree whatever is computed
    for form in FORMS:
        np.testing.assert_allclose(rows_of(engine_of(card, form=form), queries), wanted, **EXACT)
    return card


def logits_of(model, queries):
    with torch.inference_mode():
        return [model(input_ids=torch.from_numpy(query.astype(np.int64))[None]).logits for query in queries]


@pytest.mark.parametrize("which", RERANKERS)
def test_rerankers(tmp_path, which):
    (beginning, changes), name = RERANKERS[which], which.partition(" by")[0]
    config = CONFIGS[name] | changes | ONE_LABEL
    config |= {"architectures": [f"{beginning}ForSequenceClassification"], "pad_token_id": config["pad_token_id"]}
    model = reference(name, AutoModelForSequenceClassification, **changes, **ONE_LABEL)
    save_folder(tmp_path, config, published_weights(name, model), pooling=None)
    queries = queries_of([300, 45, 130, 4, 2])
    check_scores(tmp_path, queries, torch.cat(logits_of(model, queries)).numpy())


def test_jinas_reranker(tmp_path):
    """jina-reranker-v1: BERT's head over the same encoder, with its two types of tokens."""
    config = JINA | ONE_LABEL | {"architectures": ["JinaBertForSequenceClassification"]}
    inner = jina_weights(JINA)
    random = np.random.default_rng(1)
    heads = {name: random.normal(0, 0.3, shape) for name, shape in HEAD.items()}
    weights = {f"bert.{name}": weight for name, weight in inner.items()}
    weights |= {name: torch.from_numpy(head).float() for name, head in heads.items()}
    save_folder(tmp_path, config, weights, pooling=None)
    queries = queries_of([60, 7, 2])
    for query in queries:
        query[len(query) // 2 :] += TYPE
    first = np.stack([Jina(JINA, inner)(query % TYPE, query // TYPE)[0] for query in queries])
    pooled = np.tanh(first @ heads["bert.pooler.dense.weight"].T + heads["bert.pooler.dense.bias"])
    card = check_scores(tmp_path, queries, pooled @ heads["classifier.weight"].T + heads["classifier.bias"])
    assert card.token_types


def test_words_of_distilbert(tmp_path):
    """opensearch-neural-sparse: SPLADE over DistilBERT."""
    model = reference("distilbert", AutoModelForMaskedLM)
    config = CONFIGS["distilbert"] | {"architectures": ["DistilBertForMaskedLM"]}
    save_folder(tmp_path, config, published_weights("distilbert", model), pooling=None)
    queries = queries_of([300, 45, 4])
    wanted = torch.cat([logits.amax(1).relu().log1p() for logits in logits_of(model, queries)])
    engine = engine_of(card_of(tmp_path, kind="sparse"), form="packed")
    np.testing.assert_allclose(rows_of(engine, queries), wanted.numpy(), **EXACT)


def test_weights_that_the_config_does_not_speak_of_are_refused(tmp_path):
    """The norms of the model for code, under a config that names the other code."""
    save_folder(tmp_path, JINA, jina_weights(JINA) | jina_weights(JINAS["jina code"]))
    with pytest.raises(SettingsError, match=r"has weights that no jina_bert model has \(encoder\.layer\.0\."):
        engine_of(card_of(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(family, form):
    """Random weights are stronger than trained ones: these lose less."""
    queries = queries_of(LENGTHS["ragged"])
    found = rows_of(family.engine(form, "bfloat16"), queries)
    assert agreement(np.concatenate(family.pooled(queries)), found) >= 0.999
