"""Answers that a grammar binds: whatever the logits are, they are JSON of the schema; and what is refused."""

import json

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from deployments.errors import InvalidInput
from deployments.generation.text.detokenizer import Detokenizer
from deployments.generation.text.grammar import MOST_CHARACTERS, Grammars, json_grammar
from deployments.generation.text.logit_rules import rules_of
from deployments.generation.text.sampling import RowSamplers, Sampler, Sampling, pick
from deployments.models.tokenizer_files import read_tokenizer
from serve_app.generation.formats import grammar_of
from serve_app.generation.requests import ChatRequest, CompletionRules
from tests.kit.tiny_tokenizers import llama, qwen

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LONGEST = 40  # characters of a token
MORE = 70  # tokens that the model has beside its tokenizer's


def of_short_tokens(folder):
    """The tokenizer without tokens that are longer than any model's."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    raw["model"]["vocab"] = {token: number for token, number in vocab.items() if len(token) <= LONGEST}
    raw["model"]["merges"] = [pair for pair in raw["model"]["merges"] if len("".join(pair)) <= LONGEST]
    return Tokenizer.from_str(json.dumps(raw))


@pytest.fixture(scope="module", params=["qwen", "llama"])
def tokens(request, tmp_path_factory):
    """(tokenizer, end token, words of the model, grammars)"""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen":
        qwen(folder)
    else:
        llama(folder, add_eos_token=False)
    tokenizer = read_tokenizer(folder) if request.param == "qwen" else of_short_tokens(folder)
    end = tokenizer.token_to_id("<|im_end|>" if request.param == "qwen" else "</s>")
    words = tokenizer.get_vocab_size() + MORE
    grammars = Grammars(lambda: tokenizer, words, [end])
    yield tokenizer, end, words, grammars
    grammars.close()


def drawn(tokens, asked, most=600, ends=None):
    """The tokens of an answer to random logits; None at the end if it failed."""
    _, end, words, grammars = tokens
    random, ends = np.random.default_rng(asked.seed), ends or [end]
    rule = grammars.rule(asked.grammar, ends)
    sampler = Sampler(asked, 0, ends, rules_of(asked, np.zeros(0, np.int32), ends, rule))
    found = []
    while not sampler.ended and len(found) < most:
        picked = pick((random.standard_normal(words) * 2).astype(np.float32), RowSamplers([sampler], None))
        found.append(None if picked is None else picked[0].id)
        sampler.drew(found[-1])
    return found


def text_of(tokenizer, ids):
    stream = Detokenizer(tokenizer)
    return "".join(map(stream.add, ids)) + stream.end()


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"anyOf": [{"const": "x"}, {"type": "boolean"}, {"type": "null"}]},
        {"$ref": "#/$defs/on", "$defs": {"on": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}}},
        {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        {"type": "string", "format": "uuid"},
    ],
)
def test_whatever_the_logits_are_answers_are_json_of_the_schema_and_end(tokens, schema):
    grammar = json_grammar(schema)
    for seed in range(5):
        *ids, last = drawn(tokens, Sampling(1.0, seed=seed, grammar=grammar))
        assert last == tokens[1]
        jsonschema.validate(json.loads(text_of(tokens[0], ids)), schema)


def test_other_options_act_within_the_grammar(tokens):
    grammar = json_grammar({"enum": [17, 175]})
    found = {
        text_of(tokens[0], drawn(tokens, Sampling(temperature, seed=seed, min_p=0.9, grammar=grammar))[:-1])
        for seed in range(20)
        for temperature in (0.0, 1.0)
    }
    assert {text.strip() for text in found} == {"17", "175"}
    further = 3  # an id of `stop_token_ids` ends an answer only where it is whole
    *ids, last = drawn(tokens, Sampling(0.0, grammar=grammar, logit_bias=((further, 99.0),)), ends=[further])
    assert (text_of(tokens[0], ids).strip() in {"17", "175"}, last) == (True, further)


def test_an_answer_fails_where_no_token_is_left(tokens):
    long = json_grammar({"type": "string", "pattern": "^(a?){5000}a{5000}$"})  # takes more than the limits
    assert drawn(tokens, Sampling(1.0, seed=1, grammar=long))[-1] is None
    short = Sampling(1.0, seed=1, min_tokens=50, grammar=json_grammar({"const": 1}))
    assert drawn(tokens, short)[-1] is None


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "banana"}, "Invalid type: banana"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "http://example.org/x"}, "not present"),
        ({"$ref": "#"}, "NoExtension"),
        (
            {"allOf": [{"anyOf": [{"properties": {f"k{n}{m}": {}}} for n in range(9)]} for m in range(9)]},
            "schema too large",
        ),
        (json.loads('{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(tokens, schema, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        tokens[-1].compile(json_grammar(schema)).result()
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_llguidance_cannot_read_is_named(tmp_path):
    llama(tmp_path, add_eos_token=False)  # with tokens of more than 256 bytes
    grammars = Grammars(lambda: read_tokenizer(tmp_path), 1000, [2])
    with pytest.raises(ValueError, match="cannot read this model's tokenizer"):
        grammars.compile(json_grammar({})).result()
    grammars.close()


def asked(**fields):
    messages = {"messages": [{"role": "user", "content": "x"}]}
    rules = CompletionRules("m", 0, 1, default_tokens=1, max_answers=1)
    return ChatRequest.parse({**messages, **fields}, rules)


@pytest.mark.parametrize(
    ("asks", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": PERSON}}, PERSON),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": PERSON}}, PERSON),
    ],
)
def test_response_format(asks, schema):
    found = asked(response_format=asks)
    wanted = "" if schema is None else json_grammar(schema)
    assert found.grammar_in(None) == wanted


@pytest.mark.parametrize(
    "asks",
    [
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": {"schema": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * MOST_CHARACTERS]}}},
    ],
)
def test_another_response_format_is_refused_by_name(asks):
    with pytest.raises(InvalidInput, match="response_format") as caught:
        grammar_of(asks)
    assert caught.value.param == "response_format"


def test_an_answer_of_json_ends():
    with pytest.raises(InvalidInput, match="ignore_eos with response_format or tool_choice is not supported"):
        assert asked(response_format={"type": "json_object"}, ignore_eos=True).grammar_in(None)
