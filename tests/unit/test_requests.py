from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import EmptyInput, InvalidInput, UnknownModel
from serve_app.requests import Rules, parse_openai, parse_tei

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
    asked = parse_openai(body, RULES)
    assert list(asked.queries) == queries
    assert (asked.encoding_format, asked.dimensions, asked.truncate) == ("float", None, None)


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        (b"", InvalidInput, "the body is empty; send a JSON object"),
        (b"{", InvalidInput, "the body is not valid JSON: "),
        (b'{"input": NaN}', InvalidInput, "the body is not valid JSON: "),
        (b'{"input": [Infinity]}', InvalidInput, "the body is not valid JSON: "),
        (b"[1]", InvalidInput, "the body must be a JSON object, not a list"),
        (b"{}", InvalidInput, "input is missing; send a string or a list of strings"),
        (b'{"input": null}', InvalidInput, "input is missing; send a string or a list of strings"),
        (b'{"input": ""}', EmptyInput, "input is an empty string"),
        (b'{"input": []}', EmptyInput, "input is an empty list; send at least one text"),
        (b'{"input": ["a", ""]}', EmptyInput, "input[1] is an empty string"),
        (b'{"input": [[]]}', EmptyInput, "input[0] is an empty list of token ids"),
        (b'{"input": 5}', InvalidInput, "input must be a string, a list of strings or token ids, not a number"),
        (b'{"input": {"a": 1}}', InvalidInput, "input must be a string, a list of strings or token ids, not an object"),
        (b'{"input": true}', InvalidInput, "input must be a string, a list of strings or token ids, not true or false"),
        (b'{"input": ["a", null]}', InvalidInput, "input[1] must be a string or a list of token ids, not null"),
        (b'{"input": ["a", 1]}', InvalidInput, "input[1] must be a string or a list of token ids, not a number"),
        (b'{"input": [1, "a"]}', InvalidInput, "input[1] must be a token id (a whole number from 0), not a string"),
        (b'{"input": [1.5]}', InvalidInput, "input[0] must be a token id (a whole number from 0), not 1.5"),
        (b'{"input": [1e400]}', InvalidInput, ""),
        (b'{"input": [-1]}', InvalidInput, "input[0] must be a token id (a whole number from 0), not -1"),
        (b'{"input": [[true]]}', InvalidInput, "input[0][0] must be a token id (a whole number from 0), not true or"),
        (b'{"input": [99999999999]}', InvalidInput, "input[0] must be a token id"),
        (b'{"input": ["a","b","c","d"]}', InvalidInput, "input has 4 items and this server takes 3 in one request"),
        (b'{"input": "a", "model": "n"}', UnknownModel, "there is no model 'n' here; this server has 'm'"),
        (b'{"input": "a", "model": 3}', InvalidInput, "model must be a string, not a number"),
        (b'{"input": "a", "dimensions": 9}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "dimensions": 0}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "dimensions": 2.0}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "dimensions": true}', InvalidInput, "dimensions must be a whole number from 1 to 8"),
        (b'{"input": "a", "encoding_format": "int8"}', InvalidInput, "encoding_format must be 'float' or 'base64'"),
        (b'{"input": "a", "encoding_format": ["float"]}', InvalidInput, "encoding_format must be 'float' or 'base64'"),
        (b'{"input": "a", "truncate": "yes"}', InvalidInput, "truncate must be true or false, not a string"),
    ],
)
def test_bad_input_gets_one_plain_sentence(body, kind, sentence):
    with pytest.raises(kind) as caught:
        parse_openai(body, RULES)
    assert caught.value.message.startswith(sentence)
    assert "\n" not in caught.value.message


def test_tei_fields():
    asked = parse_tei(b'{"inputs": ["a"], "normalize": false, "truncate": true, "dimensions": 4, "prompt": 1}', RULES)
    assert (asked.normalize, asked.truncate, asked.dimensions) == (False, True, 4)
    assert parse_tei(b'{"inputs": "a", "normalize": null}', RULES).normalize is True
    with pytest.raises(InvalidInput, match="inputs is missing"):
        parse_tei(b'{"input": "a"}', RULES)
    with pytest.raises(EmptyInput) as caught:
        parse_tei(b'{"inputs": [""]}', RULES)
    assert caught.value.param == "inputs"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)
fields = st.sampled_from(["input", "model", "dimensions", "encoding_format", "truncate"])


@given(st.one_of(st.binary(), st.dictionaries(fields, json_values).map(lambda sent: json.dumps(sent).encode())))
def test_nothing_but_invalid_input_is_raised(body):
    with contextlib.suppress(InvalidInput):
        parse_openai(body, RULES)
