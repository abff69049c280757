import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import EmptyInput, InvalidInput, UnknownModel
from serve_app.fields import Rules
from serve_app.requests import (
    CohereEmbedRequest,
    CohereRerankRequest,
    DecodeRequest,
    EmbedRequest,
    EncodeRequest,
    OllamaEmbedRequest,
    OpenAIRequest,
    PredictRequest,
    RerankRequest,
    RootRequest,
    SimilarityRequest,
    TokenizeRequest,
    admission,
)

TYPES = (
    OpenAIRequest,
    EmbedRequest,
    EncodeRequest,
    SimilarityRequest,
    RootRequest,
    RerankRequest,
    CohereRerankRequest,
    CohereEmbedRequest,
    OllamaEmbedRequest,
    PredictRequest,
    TokenizeRequest,
    DecodeRequest,
)
RULES = Rules(model="m", dimension=8, max_inputs=3)


@pytest.mark.parametrize(
    ("body", "queries"),
    [
        (b'{"input": "a"}', ["a"]),
        (b'{"input": ["a", "b"]}', ["a", "b"]),
        (b'{"input": [1, 2, 3, 4, 5]}', [[1, 2, 3, 4, 5]]),  # one list of ids is one query, however long
        (b'{"input": [[1], [2, 3]]}', [[1], [2, 3]]),
        (b'{"input": ["a", [2]]}', ["a", [2]]),
        (b'{"input": "a", "model": null, "user": "u", "dimensions": null, "encoding_format": null}', ["a"]),
        (b'{"input": "a", "model": "m", "something": {"else": 1}}', ["a"]),
    ],
)
def test_what_clients_send(body, queries):
    asked = OpenAIRequest.parse(body, RULES)
    assert list(asked.queries) == queries
    assert (asked.encoding_format, asked.dimensions, asked.truncate) == ("float", None, None)


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        (b"", InvalidInput, "the body is empty; send a JSON object"),
        (b"{", InvalidInput, "the body is not valid JSON: "),
        (b'{"input": NaN}', InvalidInput, "the body is not valid JSON: "),
        (b'{"input": [Infinity]}', InvalidInput, "the body is not valid JSON: "),
        (b"[1]", InvalidInput, "the body must be an object with input, not a list"),
        (b"{}", InvalidInput, "input is missing; send a string, a list of strings or a list of token ids"),
        (b'{"input": null}', InvalidInput, "input is missing; send a string, a list of strings or a list of token ids"),
        (b'{"input": ""}', EmptyInput, "input is an empty string"),
        (b'{"input": []}', EmptyInput, "input is an empty list; send at least one item"),
        (b'{"input": ["a", ""]}', EmptyInput, "input[1] is an empty string"),
        (b'{"input": [[]]}', EmptyInput, "input[0] is an empty list; send at least one item"),
        (b'{"input": 5}', InvalidInput, "input must be a string, a list of strings or a list of token ids, not 5"),
        (
            b'{"input": {"a": 1}}',
            InvalidInput,
            "input must be a string, a list of strings or a list of token ids, not an object",
        ),
        (
            b'{"input": true}',
            InvalidInput,
            "input must be a string, a list of strings or a list of token ids, not true or",
        ),
        (b'{"input": ["a", null]}', InvalidInput, "input[1] must be a string or a list of token ids, not null"),
        (b'{"input": ["a", 1]}', InvalidInput, "input[1] must be a string or a list of token ids, not 1"),
        (b'{"input": [1, "a"]}', InvalidInput, "input[1] must be a token id (a whole number from 0), not 'a'"),
        (
            b'{"input": [1.5]}',
            InvalidInput,
            "input[0] must be a token id (a whole number from 0), not 1.5",
        ),
        (b'{"input": [1e400]}', InvalidInput, ""),
        (
            b'{"input": [-1]}',
            InvalidInput,
            "input[0] must be a token id (a whole number from 0), not -1",
        ),
        (b'{"input": [[true]]}', InvalidInput, "input[0][0] must be a token id (a whole number from 0), not true or"),
        (b'{"input": [1, 1, 1, 1, -1]}', InvalidInput, "input[4] must be a token id (a whole number from 0), not -1"),
        (b'{"input": ' + b"[" * 999 + b"]" * 999 + b"}", InvalidInput, "input[0][0] must be a token id"),
        (b'{"input": ' + b"[" * 9999 + b"]" * 9999 + b"}", InvalidInput, "the body is not valid JSON: depth limit"),
        (b'{"input": "\\ud800"}', InvalidInput, "the body is not valid JSON: no low surrogate"),
        (b'{"input": [1' + b"0" * 400 + b"]}", InvalidInput, "the body is not valid JSON: number is infinity"),
        (b'{"input": [99999999999]}', InvalidInput, "input[0] must be a token id"),
        (b'{"input": ["a","b","c","d"]}', InvalidInput, "input has 4 items and this server takes 3 in one request"),
        (b'{"input": "a", "model": "n"}', UnknownModel, "there is no model 'n' here; this server has 'm'"),
        (b'{"input": "a", "model": 3}', InvalidInput, "model must be a string, not 3"),
        (b'{"input": "a", "dimensions": 9}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "dimensions": 0}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "dimensions": 2.0}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "dimensions": true}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (
            b'{"input": "a", "encoding_format": "int8"}',
            InvalidInput,
            "encoding_format must be 'float' or 'base64', not 'int8'",
        ),
        (b'{"input": "a", "encoding_format": ["float"]}', InvalidInput, "encoding_format must be 'float' or 'base64'"),
        (
            b'{"input": "a", "truncate": "yes"}',
            InvalidInput,
            "truncate must be true or false or 'NONE', 'START' or 'END'",
        ),
    ],
)
def test_bad_input_gets_one_plain_sentence(body, kind, sentence):
    with pytest.raises(kind) as caught:
        OpenAIRequest.parse(body, RULES)
    assert caught.value.message.startswith(sentence)
    assert "\n" not in caught.value.message


def test_tei_fields():
    asked = EmbedRequest.parse(
        b'{"inputs": ["a"], "normalize": false, "truncate": true, "dimensions": 4, "prompt": 1}', RULES
    )
    assert (asked.normalize, asked.truncate, asked.dimensions) == (False, True, 4)
    assert EmbedRequest.parse(b'{"inputs": "a", "normalize": null}', RULES).normalize is True
    with pytest.raises(InvalidInput, match="inputs is missing"):
        EmbedRequest.parse(b'{"input": "a"}', RULES)
    with pytest.raises(EmptyInput) as caught:
        EmbedRequest.parse(b'{"inputs": [""]}', RULES)
    assert caught.value.param == "inputs"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)
NAMES = (
    "input inputs model dimensions encoding_format truncate truncation_direction prompt_name parameters "
    "source_sentence sentences ids skip_special_tokens add_special_tokens query texts documents text top_n raw_scores "
    "content input_type embedding_type embedding_types output_dimension embed_dtype modality images max_tokens"
)
fields = st.sampled_from(NAMES.split())
bodies = st.recursive(json_values, lambda values: st.dictionaries(fields, values)).map(
    lambda sent: json.dumps(sent).encode()
)


@pytest.mark.parametrize("takes", TYPES)
@given(body=st.one_of(st.binary(), bodies))
def test_nothing_but_invalid_input_is_raised(takes, body):
    with contextlib.suppress(InvalidInput):
        takes.parse(body, RULES)


@pytest.mark.parametrize(
    ("side", "expected"),
    [(None, "right"), ("right", "right"), ("Right", "right"), ("left", "left"), ("Left", "left")],
)
def test_the_side_and_the_prompt(side, expected):
    body = json.dumps({"inputs": "a", "truncation_direction": side, "prompt_name": "query"}).encode()
    asked = EmbedRequest.parse(body, RULES)
    assert (asked.side, asked.prompt_name) == (expected, "query")
    similar = json.dumps(
        {
            "inputs": {"source_sentence": "a", "sentences": ["b", "c"]},
            "parameters": {"truncation_direction": side, "prompt_name": "query", "truncate": True},
        }
    ).encode()
    asked = SimilarityRequest.parse(similar, RULES)
    assert list(asked.queries) == ["a", "b", "c"]
    options = asked.parameters
    assert (options.side, options.prompt_name, options.truncate) == (expected, "query", True)


def test_token_requests():
    assert TokenizeRequest.parse(b'{"inputs": "a"}', RULES).texts == ["a"]
    asked = TokenizeRequest.parse(b'{"inputs": ["a", "b"], "add_special_tokens": false, "prompt_name": "p"}', RULES)
    assert (asked.texts, asked.add_special_tokens, asked.prompt_name) == (["a", "b"], False, "p")
    assert DecodeRequest.parse(b'{"ids": [1, 2, 3, 4]}', RULES).id_lists == [[1, 2, 3, 4]]
    asked = DecodeRequest.parse(b'{"ids": [[1], [2]], "skip_special_tokens": false}', RULES)
    assert (asked.id_lists, asked.skip_special_tokens) == ([[1], [2]], False)


def pair(source, sentences):
    return {"inputs": {"source_sentence": source, "sentences": sentences}}


@pytest.mark.parametrize(
    ("takes", "body", "kind", "sentence"),
    [
        (
            EmbedRequest,
            {"inputs": "a", "truncation_direction": "up"},
            InvalidInput,
            "truncation_direction must be 'left'",
        ),
        (
            EmbedRequest,
            {"inputs": "a", "truncation_direction": [1]},
            InvalidInput,
            "truncation_direction must be 'left'",
        ),
        (EmbedRequest, {"inputs": "a", "prompt_name": 1}, InvalidInput, "prompt_name must be a string, not 1"),
        (SimilarityRequest, {"inputs": ["a"]}, InvalidInput, "inputs must be an object with source_sentence"),
        (SimilarityRequest, pair("a", None), InvalidInput, "inputs.sentences is missing; send a list of strings"),
        (SimilarityRequest, pair("", ["b"]), EmptyInput, "inputs.source_sentence is an empty string"),
        (SimilarityRequest, pair(None, ["b"]), InvalidInput, "inputs.source_sentence is missing; send a string"),
        (SimilarityRequest, pair("a", []), EmptyInput, "inputs.sentences is an empty list"),
        (SimilarityRequest, pair("a", ["b", ""]), EmptyInput, "inputs.sentences[1] is an empty string"),
        (
            SimilarityRequest,
            pair("a", ["b", "c", "d"]),
            InvalidInput,
            "inputs.sentences has 3 items and this server takes 2",
        ),
        (SimilarityRequest, {**pair("a", ["b"]), "parameters": 3}, InvalidInput, "parameters must be an object, not 3"),
        (TokenizeRequest, {"inputs": [1, 2]}, InvalidInput, "inputs[0] must be a string, not 1"),
        (TokenizeRequest, {}, InvalidInput, "inputs is missing; send a string or a list of strings"),
        (DecodeRequest, {}, InvalidInput, "ids is missing; send a list of token ids or a list of such lists"),
        (DecodeRequest, {"ids": []}, EmptyInput, "ids is an empty list"),
        (DecodeRequest, {"ids": [[1], 2]}, InvalidInput, "ids[1] must be a list of token ids, not 2"),
        (DecodeRequest, {"ids": [-1]}, InvalidInput, "ids[0] must be a token id (a whole number from 0), not -1"),
        (DecodeRequest, {"ids": ["a"]}, InvalidInput, "ids[0] must be a token id (a whole number from 0) or a list"),
    ],
)
def test_other_bad_input_names_the_field(takes, body, kind, sentence):
    with pytest.raises(kind) as caught:
        takes.parse(json.dumps(body).encode(), RULES)
    assert caught.value.message.startswith(sentence)
    assert caught.value.param == re.split(r"\W", sentence)[0]


@pytest.mark.parametrize(
    ("rules", "sent", "known"),
    [
        (Rules("m", 8, 3, aliases=("a", "b")), "m", True),
        (Rules("m", 8, 3, aliases=("a", "b")), "b", True),
        (Rules("m", 8, 3, aliases=("a", "b")), "c", False),
        (Rules("m", 8, 3, any_name=True), "c", True),
        (Rules("m", 8, 3), "any", False),
    ],
)
def test_names_of_the_model(rules, sent, known):
    body = json.dumps({"input": "a", "model": sent}).encode()
    if known:
        assert OpenAIRequest.parse(body, rules).model == sent
        return
    with pytest.raises(UnknownModel) as caught:
        OpenAIRequest.parse(body, rules)
    has = "'m', 'a' and 'b'" if rules.aliases else "'m'"
    assert str(caught.value) == f"there is no model '{sent}' here; this server has {has}"


def test_headers_of_admission():
    assert admission({}) == {}
    assert admission({b"x-windve-priority": b"bulk"}) == {"bulk": True}
    assert admission({b"x-request-timeout-ms": b"1500", b"x-windve-priority": b"normal"}) == {
        "bulk": False,
        "timeout_s": 1.5,
    }


@pytest.mark.parametrize("given", [b"", b"0", b"-1", b"1.5", b"1e3", b"9999999999", b"\xb2", b"soon"])
def test_bad_timeouts(given):
    with pytest.raises(InvalidInput, match="the header x-request-timeout-ms should be whole milliseconds from 1"):
        admission({b"x-request-timeout-ms": given})
