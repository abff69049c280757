"""What clients of other servers send, in their own words, and what becomes of each field."""

import dataclasses

import numpy as np
import ollama
import pytest

from deployments.errors import EmptyInput, InvalidInput
from deployments.models.excerpts import Excerpts
from deployments.models.model_files import read_model_card
from deployments.models.text_pairs import Cuts, Pair, TokenBounds
from deployments.models.tokenizer import Tokenizer
from serve_app.embedding.api import HttpApi
from serve_app.version import VERSION
from tests.kit import client_fields
from tests.kit.asgi_client import get, post
from tests.kit.fake_router import ANSWERS, VECTORS, FakeRouter
from tests.kit.router_world import SETTINGS

SCORES = (1 / (1 + np.exp(-ANSWERS["reranker"][:, 0].astype(float)))).tolist()
LOGITS = ANSWERS["reranker"][:, 0].tolist()


def asked(path, payload, kind="embedding"):
    """The answer's JSON, and the options of which the Router was asked."""
    router = FakeRouter(kind)
    reply = post(HttpApi(router), path, payload)
    assert reply.status == 200, reply.body
    return reply.json, router.asked[-1][1]


def refused(path, payload, kind="embedding"):
    """(status, sentence)"""
    reply = post(HttpApi(FakeRouter(kind)), path, payload)
    told = reply.json
    error = told.get("error", told.get("message"))
    return reply.status, error["message"] if isinstance(error, dict) else error


# --- /rerank with documents -------------------------------------------------------------------------------------------

RERANK = {"query": "q", "documents": ["a", "b", "c"]}
RERANK_BODIES = {  # as the clients send them
    "litellm hosted_vllm": {"model": "m", **RERANK, "top_n": 2, "return_documents": True},
    "litellm infinity": {"model": "m", **RERANK, "top_n": 2, "return_documents": True},
    "langchain InfinityRerank": {**RERANK, "return_documents": False, "raw_scores": False, "model": "m"},
    "vllm bench": {"model": "m", **RERANK, "truncate_prompt_tokens": -1},
}


@pytest.mark.parametrize("client", RERANK_BODIES)
@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_rerank_with_documents(path, client):
    body = RERANK_BODIES[client]
    told, _ = asked(path, body, "reranker")
    best = [1, 2, 0][: body.get("top_n")]
    assert [one["index"] for one in told["results"]] == best
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx([SCORES[index] for index in best])
    has_texts = body.get("return_documents", True)
    assert [one.get("document") for one in told["results"]] == [
        {"text": "abc"[index]} if has_texts else None for index in best
    ]
    assert told["id"]
    assert (told["model"], set(told["usage"])) == ("m", {"prompt_tokens", "total_tokens"})


def test_rerank_with_texts_stays_tei_s():
    told, _ = asked("/rerank", {"query": "q", "texts": ["a"]}, "reranker")
    assert told == [{"index": 0, "score": pytest.approx(SCORES[0])}]
    for top_n, best in ((2, [1, 2]), (0, [1, 2, 0])):
        told, _ = asked("/rerank", {"query": "q", "texts": ["a", "b", "c"], "top_n": top_n}, "reranker")
        assert [one["index"] for one in told] == best
    assert "texts is missing" in refused("/rerank", {"query": "q"}, "reranker")[1]
    for body in (b"null", b"[1]", b"{", b'"documents"'):
        assert post(HttpApi(FakeRouter("reranker")), "/rerank", body).status == 422


@pytest.mark.parametrize(("path", "fields"), [("/rerank", {"raw_scores": False}), ("/infinity/rerank", {})])
def test_infinity_s_documents_are_strings(path, fields):
    """Where the request is Infinity's own: by `raw_scores`, which vLLM does not have, or by the path for clients whose
    requests are the same to both, as LiteLLM's.
    """
    for returned, wanted in ((True, ["b", "c", "a"]), (False, [None] * 3), (None, [None] * 3)):
        told, _ = asked(path, {**RERANK, **fields, "return_documents": returned}, "reranker")
        assert [one.get("document") for one in told["results"]] == wanted


def test_a_rerank_by_an_embedding_model_is_refused_and_names_score():
    told = refused("/v1/rerank", RERANK)
    assert told[0] == 400
    said = "/v1/rerank does not work with an embedding model: /score gives the cosines; use one of /v1/emb"
    assert told[1].startswith(said)


def test_options_of_a_rerank():
    for fields in ({"raw_scores": True}, {"use_activation": False}):
        told, _ = asked("/v2/rerank", {**RERANK, **fields, "top_n": 0}, "reranker")
        assert [one["relevance_score"] for one in told["results"]] == sorted(LOGITS, reverse=True)
    bounds = {"max_tokens_per_doc": 4, "max_tokens_per_query": 3, "truncate_prompt_tokens": 9}
    _, wanted = asked("/v2/rerank", {**RERANK, **bounds, "truncation_side": "left"}, "reranker")
    assert wanted["bounds"] == TokenBounds(query=9, first=3, second=4)
    assert (wanted["truncate"], wanted["truncation_direction"]) == (True, "left")


# --- fields that are carried out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        ("/v1/embeddings", {"truncate_prompt_tokens": 5}, {"bounds": TokenBounds(query=5), "truncate": True}),
        ("/v1/embeddings", {"truncate_prompt_tokens": -1}, {"truncate": True}),
        ("/v1/embeddings", {"truncation_side": "left"}, {"truncation_direction": "left"}),
        ("/v1/embeddings", {"task": "retrieval.query"}, {"prompt_name": "query"}),
        ("/v1/embeddings", {"task": "retrieval.passage"}, {"prompt_name": ""}),
        ("/v1/embeddings", {"task": "text-matching"}, {}),
        ("/v1/embeddings", {"task": "retrieval.query", "prompt_name": ""}, {"prompt_name": ""}),
        ("/api/embed", {"options": {"num_ctx": 5, "temperature": 1}}, {"bounds": TokenBounds(query=5)}),
        ("/api/embed", {"options": {"num_ctx": 0}, "keep_alive": "5m", "dimensions": 0}, {}),
        ("/embeddings", {"model": "m", "encoding_format": "float", "dimensions": 0, "modality": "text"}, {}),
        ("/v2/embed", {"max_tokens": 5, "truncate": "NONE"}, {"bounds": TokenBounds(query=5), "truncate": False}),
    ],
)
def test_a_field_reaches_the_router(path, fields, wanted):
    assert asked(path, {"input": "a", **({"texts": ["a"]} if path == "/v2/embed" else {}), **fields})[1] == wanted


@pytest.mark.parametrize("name", ["normalize", "normalized", "use_activation"])
def test_vectors_of_the_model_s_own_lengths_on_openai_s_route(name):
    for value, factor in ((False, 2), (True, 1), (None, 1)):
        told, _ = asked("/v1/embeddings", {"input": "a", name: value})
        assert told["data"][0]["embedding"] == pytest.approx((factor * VECTORS[0]).tolist())


def test_jina_s_base64():
    told, _ = asked("/v1/embeddings", {"input": "a", "embedding_type": "base64"})
    openai, _ = asked("/v1/embeddings", {"input": "a", "encoding_format": "base64"})
    assert told["data"] == openai["data"]
    assert isinstance(told["data"][0]["embedding"], str)


# --- fields that are not ----------------------------------------------------------------------------------------------


def test_values_that_ask_for_what_is_done_anyway_are_taken():
    fields = {"padding": "do_not_pad", "add_special_tokens": True, "late_chunking": False, "priority": 0, "user": "u"}
    asked("/v1/embeddings", {"input": "a", **fields, "mm_processor_kwargs": {}, "cache_salt": "x", "request_id": "y"})
    asked("/v1/rerank", {**RERANK, "max_chunks_per_doc": 1, "rank_fields": ["text"]}, "reranker")


def test_the_page_tells_of_every_published_field():
    """Each is in one place of the type that takes it: `page` fails where one is nowhere, or in two."""
    assert client_fields.PAGE.read_text() == client_fields.page(), "python -m tests.kit.client_fields writes it"


# --- Ollama -----------------------------------------------------------------------------------------------------------


def test_ollama_s_routes_about_models():
    api = HttpApi(FakeRouter())
    tags, running = (get(api, f"/api/{path}").json["models"] for path in ("tags", "ps"))
    assert [(one["name"], one["model"], one["capabilities"]) for one in tags] == [("m", "m", ["embedding"])]
    assert tags[0]["modified_at"] == "1970-01-01T00:00:05Z"
    assert {**running[0], **tags[0]} == running[0]
    assert running[0]["context_length"] == 16
    assert ollama.ListResponse(**get(api, "/api/tags").json).models[0].model == "m"
    assert ollama.ProcessResponse(**get(api, "/api/ps").json).models[0].size_vram == 0
    assert get(api, "/api/version").json == {"version": VERSION}
    for body in ({"model": "m"}, {"name": "m:latest", "verbose": True}):
        shown = ollama.ShowResponse(**post(api, "/api/show", body).json)
        assert shown.modelinfo["bert.embedding_length"] == 4
    assert post(api, "/api/show", {"model": "n"}).json == {
        "error": "there is no model 'n' here; this server serves 'm'"
    }
    assert get(HttpApi(FakeRouter("reranker")), "/api/tags").status == 404


def test_ollama_s_names_and_empty_inputs():
    router = FakeRouter()
    for body in ({}, {"input": ""}, {"input": []}):
        told = post(HttpApi(router), "/api/embed", {"model": "m:latest", **body})
        assert (told.status, told.json["model"], told.json["embeddings"]) == (200, "m", [])
    assert post(HttpApi(router), "/api/embeddings", {"model": "m"}).json["embedding"] == []
    assert router.asked == []
    assert "input[1] is an empty string" in refused("/api/embed", {"input": ["a", ""]})[1]


# --- bounds on tokens -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(read_model_card(SETTINGS.model))


WORDS = "one two three four five"


def test_a_bound_cuts_as_the_model_s_length_does(tokenizer):
    (whole,) = tokenizer.encode([WORDS], Cuts(truncate=False))
    for side, kept in (("right", whole[1:4]), ("left", whole[-4:-1])):
        (cut,) = tokenizer.encode([WORDS], Cuts(truncate=True, side=side, bounds=TokenBounds(query=5)))
        assert cut.tolist() == [whole[0], *kept, whole[-1]]
        assert tokenizer.check(
            whole.tolist(), 0, Cuts(truncate=True, side=side, bounds=TokenBounds(query=5))
        ).tolist() == (cut.tolist())
    assert tokenizer.encode([WORDS], Cuts(truncate=False, bounds=TokenBounds(query=9999)))[0].tolist() == whole.tolist()
    with pytest.raises(InvalidInput, match="input 0 has 7 tokens and the model takes 5"):
        tokenizer.encode([WORDS], Cuts(truncate=False, bounds=TokenBounds(query=5)))
    with pytest.raises(InvalidInput, match="a bound of 2 tokens leaves no room for text: 2 are special tokens"):
        tokenizer.encode([WORDS], Cuts(truncate=True, bounds=TokenBounds(query=2)))


def test_the_texts_of_a_pair_have_bounds_of_their_own():
    pairs = Tokenizer(dataclasses.replace(read_model_card(SETTINGS.model), kind="reranker"))
    wanted = pairs.encode_pairs([Pair("one two", "one two three"), Pair("one two", "six")], Cuts(truncate=False))
    found = pairs.encode_pairs(
        [Pair(WORDS, WORDS), Pair(WORDS, "six")], Cuts(truncate=False, bounds=TokenBounds(first=2, second=3))
    )
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in wanted]
    (cut,) = pairs.encode_pairs([Pair("one two", WORDS)], Cuts(truncate=True, bounds=TokenBounds(query=8)))
    assert len(cut) == 8
    with pytest.raises(EmptyInput):
        pairs.encode_pairs([Pair("", "")], Cuts(truncate=False, bounds=TokenBounds(first=1)))


def test_a_bound_above_the_model_s_own_reads_no_more_of_a_long_text(monkeypatch):
    pairs = Tokenizer(dataclasses.replace(read_model_card(SETTINGS.model), kind="reranker"))
    long = [Pair("one", "two three " * 1000)]
    (whole,) = pairs.encode_pairs(long, Cuts(truncate=True))
    monkeypatch.setattr(Excerpts, "first_characters", lambda *_: pytest.fail("the text was read up to the bound"))
    (found,) = pairs.encode_pairs(long, Cuts(truncate=True, bounds=TokenBounds(second=4096)))
    assert found.tolist() == whole.tolist()
    with pytest.raises(InvalidInput, match="a bound of 4096 tokens on a text is no less than the model takes"):
        pairs.encode_pairs(long, Cuts(truncate=True, side="left", bounds=TokenBounds(second=4096)))


@pytest.mark.parametrize("tokens", [1, 5, 900])
def test_of_a_long_text_the_first_tokens_are_found_in_an_excerpt(tokenizer, tokens):
    excerpts = Excerpts(tokenizer._fast)
    text = "The quick brown fox, jumping. " * 2000
    first = excerpts.first_characters(text, tokens)
    ids = excerpts.encode(text).ids[:tokens]
    assert excerpts.encode(first).ids == ids
    assert excerpts.first_characters("one two", tokens) == ("one" if tokens == 1 else "one two")
