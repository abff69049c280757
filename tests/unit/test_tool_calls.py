"""Calls of tools: their text in every split, the grammar that asks for them, and what requests may say of them."""

import itertools
import json

import numpy as np
import pytest

from deployments.errors import InvalidInput
from deployments.generation.text.grammar import Grammars
from deployments.generation.text.sampling import Sampler, Sampling
from deployments.generation.text.tool_calls import Call, CallParser, call_grammar, form_of
from deployments.models.tokenizer_files import read_tokenizer
from serve_app.generation.requests import ChatRequest, CompletionRules
from tests.kit.tiny_tokenizers import qwen

A, B = Call("a", '{"x": 1}'), Call("b", "{}")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
A_TEXT = '{"name": "a", "arguments": {"x": 1}}'
LLAMA_A, LLAMA_B = '{"name": "a", "parameters": {"x": 1}}', '{"name": "b", "parameters": {}}'


def splits(text):
    """In pieces of one and of three characters, and at each two places."""
    yield from ([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 3))
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:first], text[first:second], text[second:]]


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("hermes", f"{OPEN}\n{A_TEXT}\n{CLOSE}", "", [A]),
        ("hermes", f'I look.\n\n{OPEN}{A_TEXT}{CLOSE}\n{OPEN}{{"name": "b"}}{CLOSE}\n', "I look.", [A, B]),
        ("hermes", f"{OPEN}\n{A_TEXT}", "", [A]),  # a stop string or a limit took its end
        ("hermes", f"a < b {OPEN[:6]} c ", f"a < b {OPEN[:6]} c ", []),
        ("hermes", f"x {OPEN}no JSON{CLOSE} y", f"x {OPEN}no JSON{CLOSE} y", []),
        ("hermes", f'{OPEN}{{"name": 5}}', f'{OPEN}{{"name": 5}}', []),
        ("hermes", f'{OPEN}{{"name": "a", "argum', f'{OPEN}{{"name": "a", "argum', []),
        ("hermes", LLAMA_A, LLAMA_A, []),
        ("llama", LLAMA_A, "", [A]),
        ("llama", f" {LLAMA_A}; {LLAMA_B}", "", [A, B]),
        ("llama", '{"answer": 42}', '{"answer": 42}', []),
        ("llama", f"Say {LLAMA_A}", f"Say {LLAMA_A}", []),
        ("llama", LLAMA_A[:-1], LLAMA_A[:-1], []),
    ],
)
def test_calls_are_found_however_the_text_comes(form, text, said, calls):
    for pieces in splits(text):
        parser = CallParser(form)
        *found, last = [*map(parser.add, pieces), parser.end()]
        assert "".join(one for one, _ in (*found, last)) == said, pieces
        assert [call for _, some in (*found, last) for call in some] == calls, pieces


def test_text_is_sent_as_soon_as_it_cannot_be_a_call():
    for form in ("hermes", "llama"):
        parser = CallParser(form)
        assert [parser.add(piece)[0] for piece in ("To", " the CPU")] == ["To", " the CPU"]
    assert parser.add("<tool")[0] == "<tool"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>' }}", None),
        ("{% if tools %}{{ '<tool_call><function=name>' }}", None),
        ("{% if tools is not none %}{{ '\"parameters\": dictionary of argument name and its value' }}", "llama"),
        ("{% if tools %}{{ '[TOOL_CALLS]' }}", None),
    ],
)
def test_the_form_follows_from_the_template(template, form):
    assert form_of(template) == form


CITY = {"enum": ["Rom", "Ulm"]}
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": CITY},
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize("several", [False, True])
def test_a_forced_answer_is_calls_of_its_functions(tmp_path, form, several):
    qwen(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    end, words = tokenizer.token_to_id("<|im_end|>"), tokenizer.get_vocab_size()
    grammars = Grammars(lambda: tokenizer, words, [end])
    counts, names = set(), set()
    for seed in range(12):
        rule = grammars.rule(call_grammar(form, [WEATHER, NOW], several=several), [end])
        sampler, random, ids = Sampler(Sampling(1.0, seed=seed), 0, [end], [rule]), np.random.default_rng(seed), []
        while not sampler.ended:
            ids.append(sampler.pick(random.standard_normal(words).astype(np.float32)))
            sampler.drew(ids[-1])
        parser = CallParser(form)
        texts, found = zip(parser.add(tokenizer.decode(ids[:-1])), parser.end(), strict=True)
        assert not "".join(texts)
        for call in itertools.chain(*found):
            arguments = json.loads(call.arguments)
            assert arguments.get("city") in CITY["enum"] if call.name == "get_weather" else arguments == {}
            names.add(call.name)
        counts.add(sum(map(len, found)))
    assert names == {"get_weather", "now"}
    assert (max(counts) > 1) == (several and form == "hermes")
    grammars.close()


def asked(**fields):
    messages = {"messages": [{"role": "user", "content": "x"}]}
    rules = CompletionRules("m", 0, 1, default_tokens=1, max_answers=1)
    return ChatRequest.parse({**messages, **fields}, rules)


TOOLS = [{"type": "function", "function": one} for one in (WEATHER, NOW)]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "offered", "grammar"),
    [
        ({}, 0, ""),
        ({"tools": []}, 0, ""),
        ({"tools": TOOLS}, 2, ""),
        ({"tools": TOOLS, "tool_choice": "auto"}, 2, ""),
        ({"tools": TOOLS, "tool_choice": "none"}, 0, ""),
        ({"tools": TOOLS, "tool_choice": NAMED}, 2, call_grammar("hermes", [NOW], several=False)),
        ({"tools": TOOLS, "tool_choice": "required"}, 2, call_grammar("hermes", [WEATHER, NOW], several=True)),
        (
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            2,
            call_grammar("hermes", [WEATHER, NOW], several=False),
        ),
    ],
)
def test_what_is_offered_and_asked_for(fields, offered, grammar):
    found = asked(**fields)
    assert (len(found.offered), found.grammar_in("hermes")) == (offered, grammar)


@pytest.mark.parametrize(
    ("fields", "form", "sentence"),
    [
        ({"tools": TOOLS}, None, "tools is not supported here: this model's chat template"),
        ({"tool_choice": "required"}, "hermes", "tool_choice asks for a function that is not in tools"),
        ({"tools": TOOLS[:1], "tool_choice": NAMED}, "hermes", "tool_choice asks for a function that is not in tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "hermes", "response_format with tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True},
            "hermes",
            "ignore_eos with response_format or tool_choice",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(fields, form, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        asked(**fields).grammar_in(form)


def test_calls_and_results_in_messages_reach_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    first, second = (one.plain for one in asked(messages=turns).messages)
    assert first["tool_calls"][0]["function"] == {"name": "a", "arguments": {"x": 1}}
    assert (first["content"], second) == ("", turns[1])
    bad = {**call, "function": {"name": "a", "arguments": "{"}}
    with pytest.raises(InvalidInput, match="the arguments of the tool call a in messages are not JSON"):
        _ = asked(messages=[{"role": "assistant", "tool_calls": [bad]}]).messages[0].plain
