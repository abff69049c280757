"""Unmodified client libraries against the generation routes over real HTTP: docs/use.md's lines, answers, errors."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from typing import Literal

import litellm
import openai
import pydantic
import pytest
import uvicorn
from langchain_openai import ChatOpenAI
from loopback import only_loopback
from npm import scripts

from deployments.errors import Busy, EngineFailed, Unavailable
from serve_app.api_keys import ApiKeys
from serve_app.generation.api import CompletionsApi
from tests.kit.generating import ANSWER, Generating, settings_of
from tests.kit.service import ROOT, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # few of them close what they open

SECTION = (ROOT / "docs" / "use.md").read_text().partition("\n## Generation\n")[2].partition("\n## ")[0]
SHARED = re.search(r"^question = .*$", SECTION, re.MULTILINE)[0]
EXAMPLES = dict(re.findall(r"^### (\S+) \(generation\)\n\n```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
OF_NPM = re.search(r"^```js\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)[1]
LLAMA_INDEX = ("llama-index-llms-openai-like==0.8.1", "llama-index-llms-openai==0.8.3", "openai==2.8.1")
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Where does the overflow go?"}]}
CONTEXT = 200_000
UNUSABLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}


class Server:
    """A Router that generates without a model, behind the real routes and real HTTP."""

    def __init__(self, folder):
        self.world = Generating(folder, context=CONTEXT)
        settings = settings_of(max_prompts=4, sse_keepalive_s=0.2, slow_reader_s=1.0, max_body_bytes=16 * 2**20)
        self.api = CompletionsApi(self.world, settings, ApiKeys(["none"]))
        config = uvicorn.Config(self.api, host="127.0.0.1", port=0, log_level="error", timeout_keep_alive=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started, "the server")
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}/v1"

    def close(self):
        self.server.should_exit = True
        self.thread.join(10)
        self.api.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with only_loopback():
        server = Server(tmp_path_factory.mktemp("generating") / "model")
        yield server
        server.close()


@pytest.fixture
def server(running):
    running.world.reset()
    yield running
    wait_until(lambda: running.world.open == 0, "the end of all generations")


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base, api_key="none", max_retries=0) as found:
        yield found


def example(client, port):
    assert EXAMPLES[client].count("http://127.0.0.1:8000") == 1
    return SHARED + "\n" + EXAMPLES[client].replace("127.0.0.1:8000", f"127.0.0.1:{port}")


@pytest.mark.parametrize("client", ["openai", "langchain-openai", "litellm"])
def test_documented_lines_give_the_answer(server, client):
    names = {}
    exec(example(client, server.port), names)
    assert names["text"] == ANSWER


def test_documented_lines_of_llama_index(server, tmp_path):
    """It pins an older openai, so that it has a folder of its own."""
    installs = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *LLAMA_INDEX]
    done = subprocess.run(installs, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot fetch it here: {done.stderr.strip().splitlines()[-1]}")
    lines = example("llama-index-llms-openai-like", server.port) + "\nprint(text)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.stdout.strip() == ANSWER, done.stderr


def test_openai_from_npm(server, tmp_path):
    run = scripts(tmp_path, {"openai": "7.57.0"})
    question = f"const question = {json.dumps(ASK['messages'])};\n"
    lines = question + OF_NPM.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    assert run(lines, "text") == ANSWER
    whole = lines + 'const all = await client.completions.create({ model: "tiny", prompt: "x", n: 2, stop: "CPU" });'
    server.world.says = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    tools = "[{ type: 'function', function: { name: 'now', parameters: { type: 'object', properties: {} } } }]"
    asked = f"{{ model: 'tiny', messages: question, tools: {tools}, stream: true }}"
    calls = f"{lines}const called = await client.chat.completions.stream({asked}).finalChatCompletion();"
    assert run(calls, "called.choices[0].message.tool_calls[0].function.name") == "now"
    server.world.says = ANSWER
    assert run(whole, "all.choices.map((one) => one.text)") == [f"{n}: The overflow goes to the " for n in (0, 1)]


def test_openai_whole_answers(server, client):
    done = client.chat.completions.create(**ASK, n=2, logprobs=True, top_logprobs=2, seed=3, stop=["the CPU"])
    assert [one.message.content for one in done.choices] == [f"{n}: The overflow goes to " for n in (0, 1)]
    assert {one.finish_reason for one in done.choices} == {"stop"}
    assert len(done.choices[0].logprobs.content[0].top_logprobs) == 2
    assert done.system_fingerprint.startswith("fp_")
    done = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=1, extra_body={"top_k": 5})
    assert [(one.finish_reason, len(one.logprobs.tokens)) for one in done.choices] == [("length", 3)] * 2
    assert server.world.asked[-1].sampling.top_k == 5
    assert [one.id for one in client.models.list()] == ["tiny", "gpt-4o"]


class Overflow(pydantic.BaseModel):
    """Where a query goes."""

    device: Literal["CPU", "NPU"]
    waits: bool


def test_structured_answers(server, client):
    server.world.says = '{"device": "CPU", "waits": false}'
    wanted = Overflow(device="CPU", waits=False)
    assert client.chat.completions.parse(**ASK, response_format=Overflow).choices[0].message.parsed == wanted
    asked = [server.world.asked[-1].sampling.grammar]
    chat = ChatOpenAI(base_url=server.base, api_key="none", model="tiny")
    assert chat.with_structured_output(Overflow, method="json_schema").invoke("Where?") == wanted
    asked.append(server.world.asked[-1].sampling.grammar)
    of_litellm = {"model": "openai/tiny", "api_base": server.base, "api_key": "none"}
    said = litellm.completion(messages=ASK["messages"], response_format=Overflow, **of_litellm)
    assert Overflow.model_validate_json(said.choices[0].message.content) == wanted
    asked.append(server.world.asked[-1].sampling.grammar)
    assert all('"waits"' in grammar for grammar in asked)
    with pytest.raises(openai.BadRequestError, match="response_format cannot be used: Unimplemented keys"):
        client.completions.create(model="tiny", prompt="x", extra_body={"response_format": UNUSABLE})


def test_tools(server, client):
    called = '{"name": "Overflow", "arguments": {"device": "CPU", "waits": false}}'
    server.world.says = f"I ask.\n<tool_call>\n{called}\n</tool_call>"
    tools = [openai.pydantic_function_tool(Overflow)]
    done = client.chat.completions.parse(**ASK, tools=tools)
    (call,) = done.choices[0].message.tool_calls
    wanted = Overflow(device="CPU", waits=False)
    assert (call.function.parsed_arguments, done.choices[0].finish_reason) == (wanted, "tool_calls")
    assert done.choices[0].message.content == "I ask."
    assert server.world.asked[-1].sampling.grammar == ""
    with client.chat.completions.stream(**ASK, tools=tools, tool_choice="required") as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == wanted
    assert "Overflow" in server.world.asked[-1].sampling.grammar
    result = {"role": "tool", "tool_call_id": call.id, "content": "It does."}
    turns = [*ASK["messages"], done.choices[0].message.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="tiny", messages=turns, tools=tools)
    prompt = server.world.tokenizer.decode(server.world.asked[-1].ids.tolist())
    assert re.search(r'Where a query goes.*<tool_call>.*"device": "CPU".*tool\nIt does.', prompt, re.DOTALL)


def test_tools_of_other_clients(server):
    server.world.says = '<tool_call>{"name": "Overflow", "arguments": {"device": "CPU", "waits": false}}</tool_call>'
    chat = ChatOpenAI(base_url=server.base, api_key="none", model="tiny")
    (call,) = chat.bind_tools([Overflow]).invoke("Where?").tool_calls
    assert call["args"] == {"device": "CPU", "waits": False}
    structured = chat.with_structured_output(Overflow, method="function_calling")
    assert structured.invoke("Where?") == Overflow(device="CPU", waits=False)
    assert "Overflow" in server.world.asked[-1].sampling.grammar
    chunks = list(chat.bind_tools([Overflow]).stream("Where?"))
    assert [one["args"] for chunk in chunks for one in chunk.tool_calls] == [call["args"]]
    tools = [openai.pydantic_function_tool(Overflow)]
    of_litellm = {"model": "openai/tiny", "api_base": server.base, "api_key": "none", "tools": tools}
    said = litellm.completion(messages=ASK["messages"], **of_litellm).choices[0]
    assert (said.message.tool_calls[0].function.name, said.finish_reason) == ("Overflow", "tool_calls")


def test_openai_without_v1_and_with_a_role_of_its_own(server, client):
    turns = [*ASK["messages"], {"role": "tool", "tool_call_id": "1", "content": "42"}]
    bare = client.with_options(base_url=server.base.removesuffix("/v1"))
    asked = {"model": "tiny", "messages": turns, "extra_headers": {"x-request-id": "order-7"}}
    done = bare.chat.completions.create(**asked)
    assert (done.choices[0].message.content, done.id) == (ANSWER, "chatcmpl-order-7")
    assert "tool\n42" in server.world.tokenizer.decode(server.world.asked[-1].ids.tolist())
    assert [one.id for one in bare.models.list()] == ["tiny", "gpt-4o"]
    assert bare.completions.create(model="tiny", prompt="a", max_tokens=3).choices[0].finish_reason == "length"


def test_openai_streams_usage_and_logprobs(server, client):
    server.world.pauses = {5: 0.5}  # pings come between
    asked = {**ASK, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 30}
    *chunks, last = client.chat.completions.create(**asked, stream=True)
    assert last.usage.completion_tokens == 60
    texts = ["", ""]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert [text[:20] for text in texts] == ["0: The overflow goes", "1: The overflow goes"]
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices[0].logprobs) == 60


@pytest.mark.parametrize(
    ("key", "changes", "refuses", "error", "sentence"),
    [
        ("none", {"max_tokens": CONTEXT}, None, openai.BadRequestError, "the model.s context is 200000"),
        ("none", {"model": "other"}, None, openai.NotFoundError, "no model 'other'"),
        ("wrong", {}, None, openai.AuthenticationError, "key"),
        ("none", {"stream": True}, Busy("x", retry_after_s=0.1), openai.RateLimitError, "x"),
        ("none", {}, Unavailable("x"), openai.InternalServerError, "x"),
    ],
)
def test_openai_is_told_each_error_as_its_own(server, client, key, changes, refuses, error, sentence):
    server.world.refuses = refuses
    with pytest.raises(error, match=sentence):
        client.with_options(api_key=key).chat.completions.create(**{**ASK, **changes})


def test_openai_waits_and_comes_again_where_it_is_busy(server, client, monkeypatch):
    async def refuse_once(asked):
        monkeypatch.undo()
        raise Busy("x", retry_after_s=0.3)

    monkeypatch.setattr(server.world, "begin", refuse_once)
    started = time.monotonic()
    done = client.with_options(max_retries=2).chat.completions.create(**ASK)
    assert done.choices[0].message.content == ANSWER
    assert time.monotonic() - started >= 0.3


def test_a_stream_that_breaks_raises_in_the_client(server, client):
    server.world.breaks = (5, EngineFailed("the step failed"))
    got = []
    with pytest.raises(openai.APIError, match="the step failed"):
        got.extend(client.chat.completions.create(**ASK, stream=True))
    assert len(got) > 1
