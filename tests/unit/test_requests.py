"""The bodies of requests, and their headers: what is taken, and the sentence that refuses what is not."""

import contextlib
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import EmptyInput, InvalidInput, UnknownModel
from serve_app.embedding.ollama import OllamaEmbedRequest, OllamaPromptRequest
from serve_app.embedding.requests import (
    CohereEmbedRequest,
    EmbedRequest,
    EncodeRequest,
    InfinityRequest,
    MultiVectorRequest,
    OpenAIRequest,
    PoolingRequest,
    RootRequest,
    SeveralRequest,
    SimilarityRequest,
)
from serve_app.embedding.scoring_requests import (
    ClassifyRequest,
    CohereRerankRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
)
from serve_app.generation.requests import ChatRequest, CompletionRequest, CompletionRules
from serve_app.web.fields import Rules
from serve_app.web.request_headers import admission
from serve_app.web.tokenizer_routes import DecodeRequest, DetokenizeRequest, TokenizePromptRequest, TokenizeRequest

RULES = Rules(model="m", dimension=8, max_inputs=3)
GENERATION_RULES = CompletionRules("m", 0, 3, default_tokens=100, max_answers=4, most_messages=5)
TURN = {"role": "user", "content": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
GOOD = {  # a body of each type, of which tests change something
    OpenAIRequest: {"input": "a"},
    InfinityRequest: {"input": "a"},
    EmbedRequest: {"inputs": "a"},
    EncodeRequest: {"inputs": "a"},
    SeveralRequest: {"inputs": "a"},
    MultiVectorRequest: {"input": "a"},
    PoolingRequest: {"input": "a"},
    SimilarityRequest: {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    RootRequest: {"inputs": "a"},
    RerankRequest: {"query": "q", "texts": ["a"]},
    CohereRerankRequest: {"query": "q", "documents": ["a"]},
    CohereEmbedRequest: {"texts": ["a"]},
    OllamaEmbedRequest: {"input": "a"},
    OllamaPromptRequest: {"prompt": "a"},
    PredictRequest: {"inputs": "a"},
    ScoreRequest: {"text_1": "q", "text_2": ["a"]},
    ClassifyRequest: {"input": "a"},
    TokenizeRequest: {"inputs": "a"},
    TokenizePromptRequest: {"prompt": "a"},
    DecodeRequest: {"ids": [1]},
    DetokenizeRequest: {"tokens": [1]},
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": [TURN]},
}


def parse(takes, body, rules=None):
    """`body`: its bytes, or what differs from the good one."""
    sent = body if isinstance(body, bytes) else json.dumps({**GOOD[takes], **body}).encode()
    return takes.parse(sent, rules or (GENERATION_RULES if takes in (CompletionRequest, ChatRequest) else RULES))


# --- what is taken ----------------------------------------------------------------------------------------------------


EVERY_ID = [1, 2, 3, 4, 5]  # one list of ids is one query, however long
USUAL = {"queries": ["a"], "encoding_format": "float", "dimensions": None, "truncate": None}
ABSENT = {"model": None, "user": "u", "dimensions": None, "encoding_format": None}
TO_TEI = {"normalize": False, "truncate": True, "dimensions": 4, "truncation_direction": "Left", "prompt_name": "p"}


@pytest.mark.parametrize(
    ("takes", "body", "found"),
    [
        (OpenAIRequest, {}, USUAL),
        (OpenAIRequest, ABSENT, USUAL),
        (OpenAIRequest, {"model": "m", "something": {"else": 1}}, USUAL),
        (InfinityRequest, {"dimensions": 0}, USUAL),
        (OpenAIRequest, {"input": ["a", "b"]}, {"queries": ["a", "b"]}),
        (OpenAIRequest, {"input": EVERY_ID}, {"queries": [EVERY_ID]}),
        (OpenAIRequest, {"input": [[1], [2, 3]]}, {"queries": [[1], [2, 3]]}),
        (OpenAIRequest, {"input": ["a", [2]]}, {"queries": ["a", [2]]}),
        (EmbedRequest, TO_TEI, {"normalize": False, "truncate": True, "dimensions": 4, "side": "left"}),
        (EmbedRequest, {"normalize": None, "prompt": 1}, {"normalize": True, "side": None, "prompt_name": None}),
        (EmbedRequest, {"truncation_direction": "Right"}, {"side": "right"}),
        (EmbedRequest, {"truncation_direction": "left"}, {"side": "left"}),
        (SimilarityRequest, {"parameters": TO_TEI}, {"queries": ["a", "b"]}),
        (TokenizeRequest, {}, {"texts": ["a"], "add_special_tokens": True, "prompt_name": None}),
        (TokenizeRequest, {"inputs": ["a", "b"], "prompt_name": "p"}, {"texts": ["a", "b"], "prompt_name": "p"}),
        (TokenizeRequest, {"add_special_tokens": False}, {"add_special_tokens": False}),
        (DecodeRequest, {"ids": [1, 2, 3, 4]}, {"id_lists": [[1, 2, 3, 4]], "skip_special_tokens": True}),
        (DecodeRequest, {"ids": [[1], [2]], "skip_special_tokens": False}, {"skip_special_tokens": False}),
        (DecodeRequest, {"ids": [[1], [2]]}, {"id_lists": [[1], [2]]}),
    ],
)
def test_what_clients_send(takes, body, found):
    asked = parse(takes, body)
    assert {name: list(asked.queries) if name == "queries" else getattr(asked, name) for name in found} == found


def test_a_similarity_has_its_options_in_an_object():
    options = parse(SimilarityRequest, {"parameters": TO_TEI}).parameters
    assert (options.side, options.prompt_name, options.truncate) == ("left", "p", True)


def test_what_changes_nothing_in_a_generation_is_ignored():
    nothing = dict.fromkeys(("best_of", "stop", "functions", "top_k", "frequency_penalty"))
    usual = {"presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "none", "min_tokens": 0}
    unknown = {"store": True, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True}
    for changes in (nothing, usual, unknown, {"response_format": {"type": "text"}}, {"best_of": 2, "n": 2}):
        for takes in (CompletionRequest, ChatRequest):
            parse(takes, changes)


def test_an_unknown_model_is_told_the_names_there_are():
    with pytest.raises(UnknownModel, match=r"there is no model 'c' here; this server serves 'm', 'a' and 'b'$"):
        parse(OpenAIRequest, {"model": "c"}, Rules("m", 8, 3, aliases=("a", "b")))


# --- what is refused --------------------------------------------------------------------------------------------------

BODIES = [  # what is no object with the right fields
    (b"", "the body is empty; send a JSON object"),
    (b"{", "the body is not valid JSON: "),
    (b'{"input": NaN}', "the body is not valid JSON: "),
    (b'{"input": [Infinity]}', "the body is not valid JSON: "),
    (b'{"input": [1e400]}', "the body is not valid JSON: "),
    (b'{"input": [1' + b"0" * 400 + b"]}", "the body is not valid JSON: number is infinity"),
    (b'{"input": ' + b"[" * 9999 + b"]" * 9999 + b"}", "the body is not valid JSON: depth limit"),
    (b'{"input": "\\ud800"}', "the body is not valid JSON: no low surrogate"),
    (b"[1]", "the body must be an object with input, not a list"),
    (b"{}", "input is missing; send a string, a list of strings or a list of token ids"),
    (b'{"input": ' + b"[" * 999 + b"]" * 999 + b"}", "input[0][0] must be a token id"),
]
ID = "must be a token id (a whole number from 0), not"
DIMENSIONS = "dimensions must be a whole number from 1 to 8"
TRUNCATE = "truncate must be true or false or 'NONE', 'START' or 'END', not"
EMBEDDINGS = [
    (OpenAIRequest, {"input": ""}, "input is an empty string; send text"),
    (OpenAIRequest, {"input": []}, "input is an empty list; send at least one item"),
    (OpenAIRequest, {"input": ["a", ""]}, "input[1] is an empty string"),
    (OpenAIRequest, {"input": [[]]}, "input[0] is an empty list; send at least one item"),
    (OpenAIRequest, {"input": {"a": 1}}, "input must be a string, a list of strings or a list of token ids, not an "),
    (OpenAIRequest, {"input": True}, "input must be a string, a list of strings or a list of token ids, not true or"),
    (OpenAIRequest, {"input": ["a", None]}, "input[1] must be a string or a list of token ids, not null"),
    (OpenAIRequest, {"input": [1, "a"]}, f"input[1] {ID} 'a'"),
    (OpenAIRequest, {"input": [1.5]}, f"input[0] {ID} 1.5"),
    (OpenAIRequest, {"input": [[True]]}, f"input[0][0] {ID} true or"),
    (OpenAIRequest, {"input": [1, 1, 1, 1, -1]}, f"input[4] {ID} -1"),
    (OpenAIRequest, {"input": [2**31]}, f"input[0] {ID} 2147483648"),
    (OpenAIRequest, {"input": ["a"] * 4}, "input has 4 items and this server accepts 3 per request"),
    (OpenAIRequest, {"model": "n"}, "there is no model 'n' here; this server serves 'm'"),
    (OpenAIRequest, {"model": 3}, "model must be a string, not 3"),
    *((OpenAIRequest, {"dimensions": bad}, f"{DIMENSIONS} (this model's own), not") for bad in (9, 0, -1, 2.0, True)),
    (InfinityRequest, {"dimensions": -1}, DIMENSIONS),
    (EmbedRequest, {"dimensions": 0}, DIMENSIONS),
    (OpenAIRequest, {"encoding_format": "int8"}, "encoding_format must be 'float' or 'base64', not 'int8'"),
    (OpenAIRequest, {"truncate": "yes"}, f"{TRUNCATE} 'yes'"),
    (OpenAIRequest, {"embedding_type": "int4"}, "embedding_type must be 'float', 'int8', 'uint8', 'binary' or "),
    (OpenAIRequest, {"encoding_format": "bytes"}, "encoding_format 'bytes' is not supported here: base64 has the same"),
    (OpenAIRequest, {"embed_dtype": "fp8_e4m3"}, "embed_dtype 'fp8_e4m3' is not supported here: float16 and bfloat16"),
    (OpenAIRequest, {"embed_dtype": "float64"}, "embed_dtype must be 'float32', 'float16' or 'bfloat16', not 'float64"),
    (OpenAIRequest, {"modality": "image"}, "modality 'image' is not supported here: only text can be embedded"),
    (OpenAIRequest, {"modality": ["text", "image"]}, "modality[1] must be 'text', not 'image'"),
    (OpenAIRequest, {"input_type": "image"}, "input_type must be 'search_query', "),
    (OpenAIRequest, {"padding": "max_length"}, "padding is not supported here: texts are never padded"),
    (OpenAIRequest, {"late_chunking_params": {"a": 2}}, "late_chunking_params is not supported here: each text is"),
    (OpenAIRequest, {"late_chunking": True}, "late_chunking is not supported here: each text is embedded by itself"),
    (OpenAIRequest, {"add_special_tokens": False}, "add_special_tokens is not supported here: models need the spec"),
    (OpenAIRequest, {"messages": []}, "messages is not supported here: only texts are read here, not chats"),
    (OpenAIRequest, {"task": "no-such"}, "task must be 'retrieval.query', 'retrieval.passage', "),
    (OpenAIRequest, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be a whole number from 1, or -1"),
    (OpenAIRequest, {"normalize": True, "use_activation": False}, "normalize and use_activation have different"),
    (EmbedRequest, {"inputs": None, "input": "a"}, "inputs is missing"),
    (EmbedRequest, {"truncation_direction": "up"}, "truncation_direction must be 'left'"),
    (EmbedRequest, {"prompt_name": 1}, "prompt_name must be a string, not 1"),
    (PoolingRequest, {"task": "classify"}, "task 'classify' is not supported here: /v1/embeddings and /classify have"),
    (PoolingRequest, {"task": "no-such"}, "task must be 'token_embed', not 'no-such'"),
    (
        PoolingRequest,
        {"encoding_format": "base64"},
        "encoding_format 'base64' is not supported here: the answer is num",
    ),
    (RootRequest, {"inputs": None}, "inputs is missing; send a string, a list of strings, a list of token ids or an "),
    (RootRequest, {"inputs": {"source_sentence": "a"}}, "inputs.sentences is missing; send a list of strings"),
]


def compared(source, sentences):
    return SimilarityRequest, {"inputs": {"source_sentence": source, "sentences": sentences}}


ONE_OF_TWO = "send either texts or inputs, not both"
IN_PARTS = {"texts": None, "inputs": [{"content": [{"type": "text", "text": "a"}]}]}
OTHERS = [
    (SimilarityRequest, {"inputs": ["a"]}, "inputs must be an object with source_sentence"),
    (*compared("a", None), "inputs.sentences is missing; send a list of strings"),
    (*compared("", ["b"]), "inputs.source_sentence is an empty string"),
    (*compared(None, ["b"]), "inputs.source_sentence is missing; send a string"),
    (*compared("a", []), "inputs.sentences is an empty list"),
    (*compared("a", ["b", ""]), "inputs.sentences[1] is an empty string"),
    (*compared("a", ["b", "c", "d"]), "inputs.sentences has 3 items and this server accepts 2"),
    (SimilarityRequest, {"parameters": 3}, "parameters must be an object, not 3"),
    (TokenizeRequest, {"inputs": [1, 2]}, "inputs[0] must be a string, not 1"),
    (TokenizeRequest, {"inputs": None}, "inputs is missing; send a string or a list of strings"),
    (DecodeRequest, {"ids": None}, "ids is missing; send a list of token ids or a list of such lists"),
    (DecodeRequest, {"ids": [[1], 2]}, "ids[1] must be a list of token ids, not 2"),
    (DecodeRequest, {"ids": ["a"]}, "ids[0] must be a token id (a whole number from 0) or a list"),
    (RerankRequest, {"query": None}, "query is missing; send a string"),
    (RerankRequest, {"texts": None}, "texts is missing; send a list of strings"),
    (RerankRequest, {"texts": []}, "texts is an empty list"),
    (RerankRequest, {"texts": ["a"] * 4}, "texts has 4 items and this server accepts 3"),
    (RerankRequest, {"raw_scores": 1}, "raw_scores must be true or false"),
    (CohereRerankRequest, {"documents": [{"title": "a"}]}, "documents[0].text is missing; send a string"),
    *(
        (CohereRerankRequest, {name: value}, f"{name} is not supported here: ")
        for name, value in (("rank_fields", ["title"]), ("max_chunks_per_doc", 5), ("relevant_spans", True))
    ),
    (OllamaEmbedRequest, {"options": {"num_ctx": "5"}}, "options.num_ctx must be "),
    (CohereEmbedRequest, {"priority": 3}, "priority is not supported here: the header x-windve-priority: bulk"),
    (CohereRerankRequest, {"top_n": -1}, "top_n must be a whole number from 0, not -1"),
    (PredictRequest, {"inputs": None}, "inputs is missing; send a string, a list of one or two strings or a list of "),
    (PredictRequest, {"inputs": ""}, "inputs is an empty string"),
    (PredictRequest, {"inputs": ["a", "b", "c"]}, "inputs is a list of 3 strings, but a pair has 2"),
    (PredictRequest, {"inputs": [["a"], 1]}, "inputs[1] must be a string or a list of one or two strings"),
    (PredictRequest, {"inputs": [["a"], []]}, "inputs[1] is a list of 0 strings"),
    (ScoreRequest, {"text_2": None}, "text_2 is missing; send a string or a list of strings"),
    (ScoreRequest, {"text_2": []}, "text_2 is an empty list; send at least one item"),
    (ScoreRequest, {"text_1": ["a"] * 4}, "text_1 has 4 items and this server accepts 3 per request"),
    (ScoreRequest, {"queries": ["b"]}, "text_1 and queries have different values; send only one of them"),
    (ScoreRequest, {"instruction": "x"}, "instruction is not supported here: it is a setting of the server"),
    (ScoreRequest, {"text_1": {"content": [IMAGE]}}, "text_1 must be a string or a list of strings, not an object"),
    (ClassifyRequest, {"input": []}, "input is an empty list; send at least one item"),
    (ClassifyRequest, {"messages": [TURN]}, "messages is not supported here: only texts are read here, not chats"),
    (TokenizePromptRequest, {"prompt": ""}, "prompt is an empty string"),
    (TokenizePromptRequest, {"messages": [TURN]}, "messages is not supported here: only texts can be tokenized here"),
    (TokenizePromptRequest, {"return_token_strs": True}, "return_token_strs is not supported here: inputs instead"),
    (DetokenizeRequest, {"tokens": "a"}, "tokens must be a list of token ids, not 'a'"),
    (DetokenizeRequest, {"model": {}}, "model must be a string, not an object"),
    (CohereEmbedRequest, {"texts": None}, ONE_OF_TWO),
    (CohereEmbedRequest, {**IN_PARTS, "texts": ["a"]}, ONE_OF_TWO),
    (CohereEmbedRequest, {"images": ["data:image/png;base64,AA=="]}, "images is not supported here: only texts are"),
    (CohereEmbedRequest, {**IN_PARTS, "inputs": [{"content": [IMAGE]}]}, "only text can be embedded here, not images"),
    (CohereEmbedRequest, {**IN_PARTS, "inputs": [{"content": []}]}, "inputs[0].content is an empty list"),
    (CohereEmbedRequest, {**IN_PARTS, "inputs": [{"content": [{}]}]}, "inputs[0].content[0].text is missing; send a"),
    (CohereEmbedRequest, {"texts": "a"}, "texts must be a list of strings, not 'a'"),
    (CohereEmbedRequest, {"texts": ["a", ""]}, "texts[1] is an empty string"),
    (CohereEmbedRequest, {"texts": ["a"] * 4}, "texts has 4 items and this server accepts 3 per request"),
    (CohereEmbedRequest, {"embedding_types": ["int4"]}, "embedding_types[0] must be 'float', 'int8', 'uint8', 'bin"),
    (CohereEmbedRequest, {"input_type": "image"}, "input_type must be 'search_query', 'search_document', "),
    (CohereEmbedRequest, {"output_dimension": 9}, "output_dimension must be a whole number from 1 to 8"),
    (CohereEmbedRequest, {"max_tokens": 0}, "max_tokens must be a whole number from 1, not 0"),
    (CohereEmbedRequest, {"truncate": "MIDDLE"}, f"{TRUNCATE} 'MIDDLE'"),
]
GENERATION = [
    ({"frequency_penalty": 2.5}, "frequency_penalty must be a number from -2 to 2, not 2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, up to 100, not 0"),
    ({"min_p": 1.5}, "min_p must be a number from 0 to 1, not 1.5"),
    ({"min_tokens": -1}, "min_tokens must be a whole number from 0, not -1"),
    ({"logit_bias": {"5": 101}}, "logit_bias must be an object of at most 1024 token ids, each with a number from -"),
    ({"logit_bias": {"five": 1}}, "logit_bias must be an object of at most 1024 token ids"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias must be an object of at most 1024 token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] must be a token id"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids has 129 items and this server accepts 128 per request"),
    ({"bad_words": ["x"]}, "bad_words is not supported here; leave it out"),
    ({"regex": "a+"}, "regex is not supported here; leave it out"),
    ({"ebnf": "root ::= 'a'"}, "ebnf is not supported here; leave it out"),
    ({"repeat_penalty": 1.1}, "repeat_penalty is not supported here; leave it out"),
    ({"best_of": 3}, "best_of other than n is not supported here: all n answers are returned; leave it out"),
    ({"temperature": 3}, "temperature must be a number from 0 to 2, not 3"),
    ({"temperature": "hot"}, "temperature must be a number from 0 to 2, not 'hot'"),
    ({"top_p": 0}, "top_p must be a number above 0, up to 1, not 0"),
    ({"n": 5}, "n must be a whole number from 1 to 4 (this server's bound), not 5"),
    ({"grammar": "root ::= 'a'"}, "grammar is not supported here; leave it out"),
    ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is not supported here; leave it out"),
    ({"max_new_tokens": 5}, "max_new_tokens is not supported here: send max_tokens; leave it out"),
    ({"n_predict": 5}, "n_predict is not supported here: send max_tokens; leave it out"),
    ({"request_id": "x" * 129}, "request_id has 129 characters and this server accepts 128"),
    ({"seed": 2**63}, "seed must be a whole number of 64 bits"),
    ({"stop": ["x"] * 17}, "stop may have at most 16 strings of at most 256 characters"),
    ({"stop": "x" * 257}, "stop may have at most 16 strings of at most 256 characters"),
    ({"stop": [1]}, "stop must be a string or a list of strings"),
    ({"stream": "yes"}, "stream must be true or false, not 'yes'"),
    ({"model": "other"}, "there is no model 'other' here; this server serves 'm'"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage must be true or false"),
]
CHATS = [
    ({"max_tokens": 0}, "max_tokens 0 is not supported here: an answer has at least one token"),
    ({"max_tokens": -1}, "max_tokens must be a whole number from 1, not -1"),
    ({"tools": [{"type": "function"}]}, "tools[0].function is missing; send an object with name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name must be 1 to 64 letters"),
    ({"tool_choice": "any"}, "tool_choice must be none, auto, required or"),
    ({"response_format": "json"}, "response_format must be an object with type, not 'json'"),
    ({"messages": []}, "messages is an empty list; send at least one item"),
    ({"messages": [TURN] * 6}, "messages has 6 items and this server accepts 5 per request"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing; send a string"),
    ({"messages": [{**TURN, "role": ""}]}, "messages[0].role is an empty string"),
    ({"messages": [{**TURN, "role": "x" * 65}]}, "messages[0].role has 65 characters and this server accepts 64"),
    ({"messages": [{**TURN, "role": 7}]}, "messages[0].role must be a string, not 7"),
    ({"messages": [{**TURN, "function_call": {"name": "x"}}]}, "function_call in messages is not supported"),
    ({"messages": [{**TURN, "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{**TURN, "content": [IMAGE]}]}, "only text is supported here, not images, audio or files; send"),
]
TEXTS = [
    ({"max_tokens": 0}, "max_tokens 0 without echo is not supported here: an answer has at least one token"),
    ({"max_tokens": -1}, "max_tokens must be a whole number from 0, not -1"),
    ({"prompt": ""}, "prompt is an empty string"),
    ({"prompt": None}, "prompt is missing"),
    ({"prompt": ["a"] * 4}, "prompt has 4 items and this server accepts 3"),
    ({"logprobs": 21}, "logprobs must be a whole number up to 20, not 21"),
]
CHUNKS = "chunks must be a list of up to 64 pairs of whole numbers, [start, tokens]"


@pytest.mark.parametrize(
    ("takes", "body", "sentence"),
    [
        *((OpenAIRequest, *row) for row in BODIES),
        *EMBEDDINGS,
        *OTHERS,
        *((takes, *row) for takes in (CompletionRequest, ChatRequest) for row in GENERATION),
        *((ChatRequest, *row) for row in CHATS),
        *((CompletionRequest, *row) for row in TEXTS),
    ],
)
def test_bad_input_gets_one_plain_sentence(takes, body, sentence):
    with pytest.raises(InvalidInput) as caught:
        parse(takes, body)
    error = caught.value
    assert error.message.startswith(sentence)
    assert "\n" not in error.message
    kinds = {"is an empty": EmptyInput, "there is no model": UnknownModel}
    assert type(error) is next((kind for words, kind in kinds.items() if words in sentence), InvalidInput)
    assert error.param in (body if isinstance(body, dict) else (None, "input"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=3),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "type", "content", "role", "sentences", "rows", "chunks"]), values)
    ),
    max_leaves=6,
)


@st.composite
def bodies(draw, takes):
    """Good ones in which some fields are something else, and bytes of all kinds."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary())
    names = [*takes.model_fields, "tool_choice", "best_of"]
    changes = draw(st.dictionaries(st.sampled_from(names), json_values, max_size=3))
    return json.dumps({**GOOD[takes], **changes}).encode()


@pytest.mark.parametrize("takes", GOOD)
@settings(max_examples=40)
@given(data=st.data())
def test_nothing_but_invalid_input_is_raised(takes, data):
    with contextlib.suppress(InvalidInput):
        parse(takes, data.draw(bodies(takes)))


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        ({}, {}),
        ({b"x-windve-priority": b"bulk"}, {"bulk": True}),
        ({b"x-request-timeout-ms": b"1500", b"x-windve-priority": b"normal"}, {"bulk": False, "timeout_s": 1.5}),
        ({b"x-request-timeout-ms": b"1"}, {"timeout_s": 0.001}),
        ({b"x-request-timeout-ms": b"999999999"}, {"timeout_s": 999_999.999}),
    ],
)
def test_headers_of_admission(headers, asked):
    assert admission(headers) == asked


HERE = socket.gethostname().encode()


@pytest.mark.parametrize(
    ("start", "waited_s"),
    [
        (b"t=1700000000250000 " + HERE, 0.75),
        (b"t=1700000000250000 " + HERE + b" 4711", 0.75),
        (b"t=1700000009000000 " + HERE, 0.0),  # the clock was set back
        (b"t=1700000000250000 another-host", 0.0),  # whose clock may be another
        (b"t=1700000000250000 " + HERE + b"-2 4711", 0.0),
        (b"t=1700000000250000", 0.0),
        (b"t=-5 " + HERE, 0.0),
        (b"t=" + b"9" * 17 + b" " + HERE, 0.0),
        (b"t=\xb2 " + HERE, 0.0),
        (b"", 0.0),
    ],
)
def test_how_long_a_request_waited_for_the_router(start, waited_s):
    found = admission({b"x-request-start": start}, lambda: 1_700_000_001.0)
    assert found == {"waited_s": pytest.approx(waited_s)}


@pytest.mark.parametrize("given", [b"", b"0", b"-1", b"1.5", b"1e3", b"9999999999", b"\xb2", b"soon"])
def test_bad_headers(given):
    with pytest.raises(
        InvalidInput, match="the header x-request-timeout-ms must be a whole number of milliseconds from 1"
    ):
        admission({b"x-request-timeout-ms": given})
    with pytest.raises(InvalidInput, match="the header x-windve-priority must be 'bulk' or 'normal', not "):
        admission({b"x-windve-priority": given})
