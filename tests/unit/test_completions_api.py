"""OpenAI's routes over a Router that generates at once: what is asked of it, answers, streams, errors, hang-ups."""

import asyncio
import contextlib
import copy
import dataclasses
import json
import math
import re
from itertools import product
from unittest import mock

import jsonschema
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.simulation.virtual_time import virtual
from deployments.errors import Busy, EngineFailed, ReplicaLost, TimedOut
from deployments.generation.text.sampling import Sampling
from serve_app.api_keys import UNNAMED, ApiKey, ApiKeys
from serve_app.generation.api import CompletionsApi
from serve_app.generation.requests import ChatRequest, CompletionRequest
from serve_app.version import VERSION
from serve_app.web import event_stream
from serve_app.web.asgi import ClientGone
from serve_app.web.event_stream import EventStream, StreamBounds
from tests.kit.asgi_client import ask, call, get, post
from tests.kit.fake_router import SPACE
from tests.kit.generating import ANSWER, Generating, settings_of
from tests.kit.observed import observed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "Where does the overflow go?"}]}
PROMPT = {"prompt": "Where does the overflow go?"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    router = Generating(tmp_path_factory.mktemp("generating") / "model")
    with contextlib.closing(CompletionsApi(router, settings_of())) as api:
        yield api


@pytest.fixture
def api(served):
    served._router.reset()
    return served


@pytest.fixture
def world(api):
    return api._router


@pytest.fixture
def opened(world):
    """Another API; it is closed at the end."""
    with contextlib.ExitStack() as ends:

        def made(*more, router=world, **limits):
            api = CompletionsApi(router, settings_of(**limits), *more)
            return ends.enter_context(contextlib.closing(api))

        yield made


def events(reply):
    """The JSON of each event; the last must be [DONE] unless it is an error."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.body.decode().split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    found = [line.removeprefix("data: ") for line in lines]
    if found[-1] == "[DONE]":
        return [json.loads(one) for one in found[:-1]]
    last = json.loads(found[-1])
    assert set(last) == {"error"}
    return [*map(json.loads, found[:-1]), last]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_chat(api, world):
    reply = post(api, CHAT, {"model": "gpt-4o", **ASK})
    told = reply.json
    (asked,) = world.asked
    text = world.tokenizer.decode(asked.ids.tolist(), skip_special_tokens=False)
    assert text == "<|im_start|>user\nWhere does the overflow go?<|im_end|>\n<|im_start|>assistant\n"
    tokens = len(world.answer(0, asked))
    assert told["id"].startswith("chatcmpl-")
    assert re.fullmatch("fp_[0-9a-f]{10}", told["system_fingerprint"])
    assert (told["object"], told["model"]) == ("chat.completion", "tiny")
    message = {"role": "assistant", "content": ANSWER, "refusal": None}
    assert told["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    usage = {"prompt_tokens": len(asked.ids), "completion_tokens": tokens, "total_tokens": len(asked.ids) + tokens}
    assert told["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert reply.headers["content-length"] == str(len(reply.body))
    assert world.open == 0


def test_what_is_asked_of_the_router(world, opened):
    api = opened(ApiKeys([ApiKey("secret", "search")]))
    key = (b"authorization", b"Bearer secret")
    sampling = {"temperature": 0, "top_p": 0.5, "top_k": -1, "seed": -3, "logprobs": True, "top_logprobs": 2}
    ends = {"stop": ["a", ""], "ignore_eos": True, "max_tokens": 7, "max_completion_tokens": 6}
    headers = [key, (b"x-request-timeout-ms", b"1500"), (b"x-windve-priority", b"bulk")]
    post(api, CHAT, {**ASK, **sampling, **ends, "n": 2}, headers=headers)
    post(api, TEXT, {**PROMPT, "temperature": None, "stop": "x", "logprobs": 0}, headers=[key])
    first, second = world.asked
    assert first.sampling == Sampling(0.0, 0, 0.5, -3)
    assert (first.answers, first.stops, first.ignore_end, first.logprobs) == (2, ("a",), True, 2)
    assert (first.most_tokens, first.timeout_s, first.bulk, first.client.tenant.name) == (6, 1.5, True, "search")
    assert second.sampling == Sampling(0.7, 0, 1.0, None)  # the model's own
    assert (second.answers, second.stops, second.logprobs, second.most_tokens) == (1, ("x",), 0, 100)
    assert (second.timeout_s, second.bulk) == (None, False)


def test_who_shares_what_is_cached(world, opened):
    keys = ApiKeys(
        [ApiKey("one", "a"), ApiKey("two", "a"), ApiKey("three", "b"), ApiKey("four"), ApiKey("five", UNNAMED)]
    )
    named, alone, scopes = opened(keys), opened(), {}
    for key, salt in product(("one", "two", "three", "four", "five", None), (None, "x", "y")):
        api, headers = (named, [(b"authorization", b"Bearer " + key.encode())]) if key else (alone, [])
        post(api, TEXT, {**PROMPT, "cache_salt": salt}, headers=headers)
        scopes[key, salt] = world.asked[-1].cache_scope
    assert [one for one, scope in scopes.items() if scope is None] == [("four", None), ("five", None), (None, None)]
    for (key, salt), scope in scopes.items():
        owner = {"one": "a", "two": "a", "three": "b"}.get(key)  # all others are nobody in particular
        same = [one for one in scopes if scopes[one] == scope]
        owners = {{"one": "a", "two": "a", "three": "b"}.get(other) for other, _ in same}
        assert scope is None or (owners, {other for _, other in same}) == ({owner}, {salt})
    told = post(alone, TEXT, {**PROMPT, "cache_salt": ""})
    assert (told.status, "cache_salt" in told.json["error"]["message"]) == (400, True)


def test_tokens_of_the_prompt_that_were_cached_are_told_in_each_kind_of_answer(api, world):
    world.cached = 128
    body = {"prompt": ["one", "two"], "stream_options": {"include_usage": True}}
    last = events(post(api, TEXT, {**body, "stream": True}))[-1]
    for told in (post(api, TEXT, body).json, last):
        assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}


def test_what_changes_the_logits_is_asked_of_the_router(world, opened):
    api = opened()
    world.card = dataclasses.replace(world.card, defaults=Sampling(0.7, 0, 1.0, min_p=0.1, repetition_penalty=1.1))
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"5": -100, "6": 2.5}, "min_tokens": 3}
    post(opened(router=world), CHAT, {**ASK, **asked, "stop_token_ids": [9], "seed": 4})
    post(opened(router=world), TEXT, {**PROMPT, "min_p": 0, "repetition_penalty": 1.2})
    first, second = world.asked
    usual = {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.1}
    least = {"presence_penalty": 0.5, "frequency_penalty": -1.0, "min_tokens": 3, "seed": 4}
    assert first.sampling == Sampling(**usual, **least, logit_bias=((5, -100.0), (6, 2.5)))
    assert (first.stop_tokens, first.continues) == ((9,), False)
    assert (second.sampling, second.continues) == (Sampling(0.7, repetition_penalty=1.2), True)
    known = world.card.model.vocab_size
    for changes, problem in (
        ({"logit_bias": {str(known): 1}}, f"logit_bias has token id {known}, outside this model's vocabulary"),
        ({"stop_token_ids": [1, known]}, f"stop_token_ids has token id {known}, outside"),
        ({"min_tokens": 8, "max_tokens": 7}, "min_tokens is 8 and max_tokens 7"),
    ):
        reply = post(api, CHAT, {**ASK, **changes})
        assert (reply.status, reply.json["error"]["param"]) == (400, next(iter(changes)))
        assert problem in reply.json["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids_of_prompts_and_answers(api, world, path):
    body = {**(ASK if path == CHAT else {"prompt": ["one", [5, 6, 7]]}), "n": 2, "return_token_ids": True}
    told = post(api, path, body).json
    prompts = [one.ids.tolist() for one in world.asked for _ in range(2)]
    answers = [world.answer(number, one) for one in world.asked for number in range(2)]
    assert [one["token_ids"] for one in told["choices"]] == answers
    if path == CHAT:
        assert told["prompt_token_ids"] == prompts[0]
    else:
        assert [one["prompt_token_ids"] for one in told["choices"]] == prompts
    streamed = events(post(api, path, {**body, "stream": True}))
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        chunks = [(chunk, one) for chunk in streamed for one in chunk["choices"] if one["index"] == index]
        assert [token for _, one in chunks for token in one["token_ids"]] == answer
        places = [one if path == TEXT else chunk for chunk, one in chunks]
        assert [place.get("prompt_token_ids") for place in places] == [prompt, *[None] * (len(chunks) - 1)]
    assert "token_ids" not in post(api, path, {**body, "return_token_ids": False}).body.decode()


def test_a_chat_may_end_within_its_last_message(api, world):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " The over "}]
    texts = []
    for changes in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        post(api, CHAT, {"messages": turns, **changes})
        texts.append(world.tokenizer.decode(world.asked[-1].ids.tolist(), skip_special_tokens=False))
    answer, turn, within = texts
    assert answer.startswith(turn)
    assert turn.startswith(within)
    assert within.rstrip().endswith("The over")
    assert len(within) < len(turn) < len(answer)
    assert world.asked[-1].continues
    for changes, problem in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true; send only one"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": " "}]}, "cannot be continued"),
    ):
        reply = post(api, CHAT, {"messages": turns, **changes})
        assert reply.status == 400
        assert problem in reply.json["error"]["message"]


def test_several_prompts_and_answers_are_choices_in_order(api, world):
    body = {"prompt": ["one", [5, 6, 7]], "n": 2, "echo": True}
    told = post(api, TEXT, body).json
    seven = world.tokenizer.decode([5, 6, 7])
    expected = [f"{prompt}{number}: {ANSWER}" for prompt in ("one", seven) for number in (0, 1)]
    assert told["id"].startswith("cmpl-")
    assert [(one["index"], one["text"]) for one in told["choices"]] == list(enumerate(expected))
    assert told["usage"]["prompt_tokens"] == len(world.tokenizer.encode("one").ids) + 3
    streamed = events(post(api, TEXT, {**body, "stream": True}))
    texts = [
        "".join(choice["text"] for one in streamed for choice in one["choices"] if choice["index"] == index)
        for index in range(4)
    ]
    assert texts == expected
    assert world.open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_stops_are_found_across_tokens_and_not_answered(api, world, stream):
    reply = post(api, CHAT, {**ASK, "stop": ["nowhere", "the CPU 🐟, s"], "stream": stream})
    if stream:
        choices = [one["choices"][0] for one in events(reply)]
        text = "".join(one["delta"].get("content", "") for one in choices)
        finish = [one["finish_reason"] for one in choices if one["finish_reason"]]
    else:
        (choice,) = reply.json["choices"]
        text, finish = choice["message"]["content"], [choice["finish_reason"]]
    assert (text, finish) == ("The overflow goes to ", ["stop"])


def test_logprobs_of_chats_and_texts(api, world):
    told = post(api, CHAT, {**ASK, "logprobs": True, "top_logprobs": 2}).json
    content = told["choices"][0]["logprobs"]["content"]
    ids = world.answer(0, world.asked[0])
    assert [one["token"] for one in content] == [world.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert bytes(byte for one in content[:-1] for byte in one["bytes"]).decode() == ANSWER  # a fish is several tokens
    assert all(one["logprob"] == -0.5 and len(one["top_logprobs"]) == 2 for one in content)
    streamed = events(post(api, CHAT, {**ASK, "logprobs": True, "stream": True}))
    pieces = [one["choices"][0]["logprobs"] for one in streamed]
    assert [one["token"] for some in pieces if some for one in some["content"]] == [one["token"] for one in content]
    told = post(api, TEXT, {**PROMPT, "logprobs": 1}).json
    found = told["choices"][0]["logprobs"]
    assert found["tokens"] == [one["token"] for one in content]
    assert set(found["token_logprobs"]) == {-0.5}
    assert found["text_offset"] == [sum(map(len, found["tokens"][:place])) for place in range(len(ids))]
    assert all(token in others for token, others in zip(found["tokens"], found["top_logprobs"], strict=True))


def lm_eval_s(told, ctxlens):
    """lm-evaluation-harness' `LocalCompletionsAPI.parse_logprobs` (lm_eval/models/openai_completions.py, 0.4.13): the
    log probability of what follows the first `ctxlen` tokens, and whether it is what greedy decoding gives.
    """
    for choice, ctxlen in zip(sorted(told["choices"], key=lambda one: one["index"]), ctxlens, strict=True):
        logprobs, tops = (choice["logprobs"][name][ctxlen:-1] for name in ("token_logprobs", "top_logprobs"))
        yield sum(logprobs), all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))


def test_a_prompt_is_echoed_with_logprobs_as_lm_eval_reads_them(api, world):
    """The body is that of its `_create_payload`."""
    prompts = [[40, 2, 3, 50], [7, 8, 302, 9, 10, 11]]
    lm_eval = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    told = post(api, TEXT, {**lm_eval, "echo": True}).json
    for choice, prompt in zip(told["choices"], prompts, strict=True):
        found = choice["logprobs"]
        names = [world.tokenizer.decode([one], skip_special_tokens=False) for one in prompt]
        assert found["tokens"][:-1] == names
        assert found["token_logprobs"] == [None, *[-1.0] * (len(prompt) - 1), -0.5]
        assert found["top_logprobs"][0] is None
        assert all(found["top_logprobs"][at][name] == -1.0 for at, name in enumerate(names) if at)
        assert found["text_offset"] == [sum(map(len, found["tokens"][:at])) for at in range(len(prompt) + 1)]
        assert choice["text"] == world.tokenizer.decode(prompt) + found["tokens"][-1]
    assert list(lm_eval_s(told, [2, 3])) == [(-2.0, False), (-3.0, False)]
    assert [(one.bulk, one.cache_scope, one.prompt_logprobs, one.most_tokens) for one in world.asked] == [
        (True, None, 1, 1)
    ] * 2


def test_alternatives_with_the_text_of_a_token_do_not_make_it_the_likeliest(api, world, monkeypatch):
    """Several tokens that are parts of characters have the same text."""
    monkeypatch.setattr(api.names, "text", lambda _: "same")
    told = post(api, TEXT, {"prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 1, "echo": True}).json
    assert told["choices"][0]["logprobs"]["top_logprobs"][1:-1] == [{"same": -0.5}] * 2
    assert list(lm_eval_s(told, [1])) == [(-2.0, False)]


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_prompt_with_max_tokens_0(api, world, stream):
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 0, "echo": True, "return_token_ids": True}
    texts = [world.tokenizer.decode(one) for one in body["prompt"] for _ in range(2)]
    if stream:
        found = events(post(api, TEXT, {**body, "stream": True}))
        said = [(one["choices"][0]["index"], one["choices"][0]["text"]) for one in found]
        assert sorted(one for one in said if one[1]) == list(enumerate(texts))
        return
    told = post(api, TEXT, {**body, "logprobs": 0}).json
    assert [one["text"] for one in told["choices"]] == texts
    assert [one["logprobs"]["token_logprobs"] for one in told["choices"]] == [[None, -1, -1]] * 2 + [[None, -1]] * 2
    assert {(one["finish_reason"], *one["token_ids"]) for one in told["choices"]} == {("length",)}
    assert told["usage"]["completion_tokens"] == 0
    assert [one.most_tokens for one in world.asked] == [1, 1]


def test_prompt_logprobs_are_named_once_for_all_answers_to_a_prompt(api, monkeypatch):
    named, text, prompts = [], api.names.text, [[40, 2, 50], [40, 2, 51, 52]]
    monkeypatch.setattr(api.names, "text", lambda token: named.append(token) or text(token))
    body = {"prompt": prompts, "prompt_logprobs": 2, "max_tokens": 1, "n": 4}
    found = [one["prompt_logprobs"] for one in post(api, TEXT, body).json["choices"]]
    assert [[int(next(iter(one))) for one in some[1:]] for some in found] == [p[1:] for p in prompts for _ in range(4)]
    assert len(named) == 3 * (2 + 3)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_logprobs_as_vllm_returns_them(api, world, path):
    body = ASK if path == CHAT else {"prompt": [40, 2, 50], "logprobs": 4, "echo": True}
    told = post(api, path, {**body, "prompt_logprobs": 2, "max_tokens": 1}).json
    (asked,) = world.asked
    assert (asked.bulk, asked.prompt_logprobs) == (True, 2 if path == CHAT else 4)
    found = (told if path == CHAT else told["choices"][0])["prompt_logprobs"]
    assert len(found) == len(asked.ids)
    assert found[0] is None
    for token, said in zip(asked.ids[1:].tolist(), found[1:], strict=True):
        others = [(token + 1) % 300, (token + 2) % 300]
        assert list(said) == [str(one) for one in (token, *others)]
        assert [one["rank"] for one in said.values()] == [2, 1, 2]
        assert [one["logprob"] for one in said.values()] == [-1.0, -0.5, -1.5]
        assert said[str(token)]["decoded_token"] == api.names.text(token)
    assert "prompt_logprobs" not in str(post(api, path, body).json)


def test_a_stream_of_a_chat(api, world):
    found = events(post(api, CHAT, {**ASK, "stream": True, "stream_options": {"include_usage": True}}))
    *chunks, last = found
    assert len({(one["id"], one["system_fingerprint"]) for one in found}) == 1
    assert {one["object"] for one in found} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == ANSWER
    assert [one["choices"][0]["finish_reason"] for one in chunks if one["choices"][0]["finish_reason"]] == ["stop"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(one["usage"] is None for one in chunks)
    asked = world.asked[0]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len(world.answer(0, asked)))
    assert "usage" not in events(post(api, CHAT, {**ASK, "stream": True}))[0]


def test_a_stream_that_says_its_usage_in_each_chunk(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(post(api, CHAT, {**ASK, "stream": True, "stream_options": options}))
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, counts[-2])
    assert counts[-1] > 0


def test_parts_developers_and_template_variables(world, opened):
    template = "{{ messages[0].role }}|{{ messages[-1].content }}|{{ enable_thinking }}"
    world = Generating(world.card.model.folder, template=template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "name": "eve", "content": parts}]
    asked = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    post(opened(router=world), CHAT, asked)
    assert world.tokenizer.decode(world.asked[0].ids.tolist()) == "system|a\nb|False"


@pytest.mark.parametrize(("path", "prefix", "body"), [(CHAT, "chatcmpl-", ASK), (TEXT, "cmpl-", PROMPT)])
def test_an_answer_has_the_name_that_the_request_has(api, path, prefix, body):
    header = [(b"x-request-id", b"order-7")]
    assert post(api, path, body, headers=header).json["id"] == f"{prefix}order-7"
    named = {**body, "request_id": "mine"}
    assert post(api, path, named, headers=header).json["id"] == f"{prefix}mine"
    assert {one["id"] for one in events(post(api, path, {**named, "stream": True}))} == {f"{prefix}mine"}
    assert len({post(api, path, body).json["id"] for _ in range(2)}) == 2


@pytest.mark.parametrize(("path", "body"), [(CHAT, ASK), (TEXT, PROMPT), ("/v1/models", None)])
def test_routes_without_v1(api, path, body):
    """As llama.cpp has them."""
    short = path.removeprefix("/v1")
    if body is None:
        assert get(api, short).json == get(api, path).json
        return
    assert post(api, short, body).json["choices"] == post(api, path, body).json["choices"]
    assert events(post(api, short, {**body, "stream": True}))
    refused = post(api, short, {**body, "model": "other"})
    assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
    assert get(api, short).status == 405


@pytest.mark.parametrize("role", ["tool", "user_context"])
def test_a_role_of_the_templates_own(world, opened, role):
    """The template of `Generating` writes any role; this one has user and tool, and drops what else comes."""
    template = "{% for m in messages if m.role in ('user', 'tool') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    picky = opened(router=Generating(world.card.model.folder, template=template))
    turn = {"role": role, "tool_call_id": "1", "content": "42"}
    asked = {"messages": [*ASK["messages"], turn]}
    assert post(opened(), CHAT, asked).status == 200
    reply = post(picky, CHAT, asked)
    if role == "tool":
        assert picky._router.tokenizer.decode(picky._router.asked[-1].ids.tolist()).endswith("<tool>42")
    else:
        told = reply.json["error"]
        assert (reply.status, told["param"]) == (400, "messages")
        assert told["message"].startswith("the model's chat template has no role 'user_context'; ")


async def test_a_first_token_is_due_from_when_the_request_had_come(api, world, monkeypatch):
    made, waited = api.asking._prompts.of_text, []

    async def slow(*asked):
        await asyncio.sleep(0.25)
        return await made(*asked)

    async def begin(asked):
        waited.append(asyncio.get_running_loop().time() - asked.received)
        return await Generating.begin(world, asked)

    monkeypatch.setattr(api.asking._prompts, "of_text", slow)
    monkeypatch.setattr(world, "begin", begin, raising=False)
    assert (await ask(api, "POST", TEXT, PROMPT)).status == 200
    assert waited == [pytest.approx(0.25)]


# --- what is refused: test_requests.py has the rest -------------------------------------------------------------------


BAD, LONG = "invalid_input", "context_length_exceeded"
TOO_MUCH = (
    "the prompt has 8 tokens and max_tokens is 400, but the model's context is 400; "
    "shorten the prompt, or set max_tokens to at most 392"
)


@pytest.mark.parametrize(
    ("path", "changes", "code", "sentence"),
    [
        (CHAT, {"top_logprobs": 2}, BAD, "top_logprobs requires logprobs: true; send both"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, BAD, "chat_template_kwargs cannot set messages"),
        (TEXT, {"prompt": [99999]}, BAD, "token id 99999 is outside this model's vocabulary"),
        (TEXT, {"echo": True, "logprobs": 1, "stream": True}, BAD, "echo with logprobs and stream is not supported"),
        (TEXT, {"prompt_logprobs": 0, "stream": True}, BAD, "prompt_logprobs with stream is not supported here: the"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, BAD, "prompt_logprobs with stream is not supported here: the"),
        (TEXT, {"max_tokens": 0}, BAD, "max_tokens 0 without echo is not supported here: an answer has at least one"),
        (TEXT, {"prompt": [5] * 8, "max_tokens": 400}, LONG, TOO_MUCH),
        (TEXT, {"prompt": [5] * 400}, LONG, "the prompt has 400 tokens, but the model's context is 400; shor"),
        (CHAT, {"messages": [{"role": "user", "content": "🐟" * 300}]}, LONG, "the prompt has "),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 6000}]}, "body_too_large", "the body has more bytes"),
    ],
)
def test_what_is_refused_is_an_error_of_openai_s_shape(api, world, path, changes, code, sentence):
    reply = post(api, path, {**ASK, **PROMPT, **changes})
    told = reply.json["error"]
    status, param = (413, None) if code == "body_too_large" else (400, next(iter(changes)))
    assert (reply.status, told["param"], told["code"]) == (status, param, code)
    assert told["message"].startswith(sentence)
    assert world.asked == []


@pytest.mark.parametrize(("path", "body"), [(TEXT, {"prompt": "a<|im_end|>"}), (CHAT, ASK)])
def test_tokens_that_only_the_tokenizer_has_are_refused(world, opened, path, body):
    """Of the model they would be out of bounds, and break the step of others."""
    other = copy.copy(world)
    known = world.tokenizer.token_to_id("<|im_end|>")
    other.card = dataclasses.replace(world.card, model=dataclasses.replace(world.card.model, vocab_size=known))
    reply = post(opened(router=other), path, body)
    assert reply.status == 400
    assert f"token id {known} is outside this model's vocabulary of {known}" in reply.json["error"]["message"]
    assert not world.asked


def test_without_a_word_of_its_length_an_answer_gets_what_is_left_of_the_context(api, world):
    post(api, TEXT, {"prompt": [5] * 390})
    post(api, TEXT, {"prompt": [5] * 10})
    post(api, CHAT, ASK)
    post(api, CHAT, {**ASK, "max_tokens": 5})
    chat = len(world.asked[2].ids)
    assert [one.most_tokens for one in world.asked] == [10, 100, world.card.context - chat, 5]
    assert [one.may_shorten for one in world.asked] == [True, True, True, False]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role"]), inner),
    max_leaves=5,
)
NAMES = [
    *(*CompletionRequest.model_fields, *ChatRequest.model_fields),
    *("best_of", "tools", "logit_bias", "response_format", "tool_calls", "frequency_penalty"),
]
MESSAGE = st.fixed_dictionaries({"role": ANY | st.just("user"), "content": ANY}, optional={"tool_calls": ANY})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([CHAT, TEXT]), st.dictionaries(st.sampled_from(NAMES), ANY), st.lists(MESSAGE, max_size=3))
def test_whatever_is_sent_is_answered_or_refused_in_a_sentence(api, world, path, changes, messages):
    body = {**ASK, **PROMPT, **({"messages": messages} if messages else {}), **changes}
    try:
        content = orjson.dumps(body)
    except orjson.JSONEncodeError:
        return  # a number too large for it
    reply = post(api, path, content)
    assert reply.status in {200, 400, 404}, reply.body
    assert reply.status == 200 or reply.json["error"]["message"]
    assert world.open == 0


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_not_admitted_gets_a_plain_error(api, world, stream):
    """test_http_api.py has each error's status and headers."""
    world.refuses = Busy("x", retry_after_s=0.25)
    reply = post(api, CHAT, {**ASK, "stream": stream})
    assert (reply.status, reply.json["error"]["code"], reply.headers["retry-after-ms"]) == (429, "busy", "250")


def test_several_prompts_are_admitted_together_or_not_at_all(api, world):
    world.refuses, world.refuses_after = Busy("x", retry_after_s=1), 2
    assert post(api, TEXT, {"prompt": ["a", "b", "c"]}).status == 429
    assert ([one.let_in for one in world.asked], world.open) == ([False, True], 0)


@pytest.mark.parametrize("error", [EngineFailed("x"), ReplicaLost("x"), TimedOut("x")], ids=lambda one: one.code)
@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
def test_an_error_in_the_middle_ends_the_stream_with_one_event(api, world, error, prompts):
    world.breaks = (5, error)
    found = events(post(api, TEXT, {"prompt": prompts, "stream": True}))
    assert found[-1]["error"] == {"message": "x", "type": "server_error", "param": None, "code": error.code}
    assert all("error" not in one for one in found[:-1])
    assert len(found) > 1
    reply = post(api, TEXT, {"prompt": prompts})
    assert (reply.status, reply.json["error"]["code"]) == (error.status, error.code)
    assert world.open == 0


def test_special_tokens_in_chats_are_text_unless_the_settings_allow_them(world, opened):
    ids = []
    for allowed in (False, True):
        body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
        assert post(opened(special_tokens_in_chats=allowed), CHAT, body).status == 200
        ids.append(world.asked[-1].ids.tolist().count(world.tokenizer.token_to_id("<|im_end|>")))
    assert ids == [1, 2]


def test_the_access_log_is_told_at_the_end(world, opened):
    observer, written = observed()
    api = opened(None, observer)
    post(api, CHAT, {**ASK, "stream": True, "max_tokens": 3})
    world.breaks = (2, EngineFailed("x"))
    post(api, CHAT, {**ASK, "stream": True})
    assert [(line["status"], line["error"]) for line in written.lines] == [(200, None), (200, "engine_failed")]
    sizes = {"prompts": 1, "tokens": len(world.asked[0].ids), "answer_tokens": 3, "bulk": False, "offers": 0}
    assert written.lines[0].items() >= sizes.items()


# --- clients that leave, stop reading, or wait ------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["disconnecting", "cancelling"])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_hangs_up_frees_its_place_at_once(world, opened, stream, by):
    (observer, written), leaves = observed(), asyncio.Event()
    world.pace_s = 0.01
    world.at_token = lambda: leaves.set() if world.tokens >= 3 else None
    hangs_up = leaves if by == "disconnecting" else None
    body = {**PROMPT, "stream": stream, "n": 2}
    asking = asyncio.create_task(ask(opened(None, observer), "POST", TEXT, body, leaves=hangs_up))
    await leaves.wait()
    if by == "cancelling":  # as Serve tells it
        asking.cancel()
    await asyncio.wait({asking})
    assert (world.open, world.tokens) == (0, 3)
    assert [(line["status"], line["error"]) for line in written.lines] == [(499, "cancelled")]


@pytest.fixture
def streamed(world, opened):
    """Ask for a stream with these limits."""

    async def stream(takes=None, **limits):
        try:
            return await ask(opened(**limits), "POST", TEXT, {**PROMPT, "stream": True}, takes=takes)
        finally:
            assert world.open == 0

    return stream


async def test_a_reader_that_takes_nothing_is_cut_off(world, streamed):
    world.pace_s = 0.01

    async def never(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await streamed(never, slow_reader_s=0.05)
    assert asyncio.get_running_loop().time() < 1


async def test_who_is_gone_before_the_streams_first_byte_frees_its_place(streamed):
    async def takes(message):
        raise OSError("the connection is closed")

    with pytest.raises(OSError, match="closed"):
        await streamed(takes)


async def test_pauses_get_pings(world, streamed):
    world.pauses = {3: 0.32}
    reply = await streamed(sse_keepalive_s=0.05)
    assert reply.body.count(b": ping\n\n") == 6
    assert "".join(one["choices"][0]["text"] for one in events(reply)) == ANSWER


@given(
    pauses=st.lists(st.sampled_from([None, 0.0, 0.5, 1.0, 2.0]), max_size=12),
    writes=st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 3.0]), max_size=12),
    goes_s=st.sampled_from([math.inf, math.inf, 0.0, 1.0, 2.5]),
    error=st.sampled_from([None, EngineFailed("x"), ZeroDivisionError("ours")]),
    most=st.sampled_from([1, 3, 100]),
)
@example(pauses=[None, 2.0, None], writes=[3.0], goes_s=math.inf, error=None, most=1)  # more, just as it is cut off
@virtual
async def test_a_stream_gives_its_events_in_order_and_is_closed_once(pauses, writes, goes_s, error, most):
    """Readers, events, pings and hang-ups come in one turn of the loop as often as not."""
    written, closed, whole = [], [], [b"%d;" % number for number in range(len(pauses))]
    slow = 3.0 in writes

    async def events():
        for one, pause_s in zip(whole, pauses, strict=True):
            if pause_s is not None:  # else it comes in the same turn of the loop
                await asyncio.sleep(pause_s)
            yield one
        if error is not None:
            raise error

    async def close():
        closed.append(b"".join(written))

    async def write(body):
        await asyncio.sleep(writes.pop() if writes else 0.0)
        written.append(body)

    stream = EventStream(events(), close, StreamBounds(sse_keepalive_s=1.0, slow_s=2.0, most_waiting=most))
    never = asyncio.get_running_loop().create_task(asyncio.sleep(min(goes_s, 1000.0)))
    with mock.patch.object(event_stream.logger, "exception") as logged:
        try:
            end = await stream.run(never, write)
        except ClientGone:
            end = ClientGone
    assert logged.called <= isinstance(error, ZeroDivisionError)
    (came,) = closed
    said, _, problem = came.replace(b": ping\n\n", b"").partition(b"data: ")
    assert b"".join(whole).startswith(said)
    if end is ClientGone:
        assert goes_s < math.inf or slow or most < len(whole)
    elif end is None:
        assert (said, problem, error) == (b"".join(whole), b"", None)
    else:
        assert end.message in problem.decode()
        assert isinstance(end, TimedOut) or said == b"".join(whole)
    assert not came.endswith(b": ping\n\n") or end is ClientGone


# --- what it tells of itself ------------------------------------------------------------------------------------------


def test_models_info_health_and_tokens(api, world):
    names = [(one["id"], one["max_model_len"]) for one in get(api, "/v1/models").json["data"]]
    assert names == [("tiny", 400), ("gpt-4o", 400)]
    assert get(api, "/v1/models/gpt-4o").json["id"] == "gpt-4o"
    assert get(api, "/v1/models/other").status == 404
    info = get(api, "/info").json
    assert (info["model_id"], info["max_input_length"], info["windve"]["open"]) == ("tiny", 400, 0)
    assert info["model_sha"] == info["windve"]["space"] == SPACE
    assert get(api, "/health").json == {"status": "ok"}
    world.live_pools = {"accelerator": False, "cpu": True}
    assert get(api, "/health").json == {"status": "degraded", "missing": ["accelerator"]}
    world.live_pools = {"cpu": False}
    assert get(api, "/health").status == 503
    (tokens,) = post(api, "/tokenize", {"inputs": "a fish"}).json
    ids = [one["id"] for one in tokens]
    assert ids == world.tokenizer.encode("a fish").ids
    assert post(api, "/decode", {"ids": ids}).json == ["a fish"]
    told = post(api, "/tokenize", {"model": "tiny", "prompt": "a fish"}).json
    assert told == {"count": len(ids), "max_model_len": 400, "tokens": ids, "token_strs": None}
    end = [*world.card.end_tokens]
    assert post(api, "/detokenize", {"model": "tiny", "tokens": [*ids, *end]}).json == {"prompt": "a fish<|im_end|>"}
    assert get(api, "/load").json == {"server_load": 0}
    assert world.heard == 2  # for /info, too: a replica tells a Router nothing of what it does for another
    assert get(api, "/version").json == {"version": VERSION}
    assert (get(api, CHAT).status, get(api, "/v1/embeddings").status) == (405, 404)
    assert call(api, "HEAD", "/ping").status == 200


@pytest.mark.parametrize("name", ["inputs", "prompt"])
def test_as_much_is_tokenized_at_once_as_of_embeddings(opened, name):
    """Each token that is listed costs memory, and time of the interpreter."""
    api = opened(max_body_bytes=2**20)
    assert post(api, "/tokenize", {name: "a " * 50_000}).status == 200
    reply = post(api, "/tokenize", {name: "a " * 50_000 + "b"})
    assert reply.status == 422
    assert reply.json["error"].startswith("the inputs have 100001 characters and 100000 are tokenized in one request")


def test_the_document_describes_what_is_sent_and_answered(api):
    document = get(api, "/openapi.json").json
    whole = [
        (CHAT, {**ASK, "n": 2, "stop": "x", "logprobs": True, "top_logprobs": 1}),
        (TEXT, {**PROMPT, "stop": ["x"], "logprobs": 1, "seed": None}),
        ("/tokenize", {"inputs": ["a", "b"]}),
        ("/decode", {"ids": [5, 6]}),
    ]
    for path, body in whole:
        about = document["paths"][path]["post"]
        schema = about["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, {**schema, "components": document["components"]})
        answer = about["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(post(api, path, body).json, answer)
        bad = post(api, path, {"model": 5})
        error = about["responses"][str(bad.status)]["content"]["application/json"]["schema"]
        jsonschema.validate(bad.json, error)
    for path in ("/v1/models", "/info", "/health"):
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(get(api, path).json, schema)
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    with pytest.raises(jsonschema.ValidationError, match="5 is greater than the maximum of 4"):
        jsonschema.validate(5, chat["n"])
    assert b"openapi.json" in get(api, "/docs").body
