"""An accelerator whose host holds a part of its cache, on real Ray: emulated by the very executor of real models."""

import asyncio
import random

import openai
import pytest
import yaml
from test_generation import client, pools, stream, wait_until

from benchmarks.kit.emulated_text import EmulatedText
from tests.kit.service import ROOT, Service

BLOCKS, HOST_BLOCKS, TOKENS = 8, 80, 40
EMULATED = {"beta_s": 0.01, "row_s": 0.0002, "kv_token_s": 4e-6, "prompt_token_s": 2e-5, "knee": 32}
HOST = {"row_s": 5e-4, "kv_token_s": 4e-6, "copy_token_s": 1e-6, "layers": 4}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    config = yaml.safe_load((ROOT / "serve_app" / "generation_rehearsal.yaml").read_text())
    (application,) = config["applications"]
    application["args"]["heterogeneous"] = False
    application["args"]["accelerator"] |= {
        "blocks": BLOCKS, "host_blocks": HOST_BLOCKS, "emulated": {**EMULATED, "host": HOST},
    }  # fmt: skip
    application["deployments"][0]["user_config"] = {"ttft_s": 4.0, "tpot_s": 0.2}
    service = Service(config, tmp_path_factory.mktemp("hybrid"))
    try:
        service.start("max_tokens")
        yield service
    finally:
        service.stop()


def replica(service):
    """What /info says of the only one."""
    (one,) = pools(service)["accelerator"]["replicas"].values()
    return one


def is_free(service):
    told = replica(service)
    host = told["host"]
    free = told["free_blocks"], host["free_blocks"]
    return (told["rows"], told["waiting"], host["rows"], host["parked"], *free) == (0, 0, 0, 0, BLOCKS, HOST_BLOCKS)


async def answered(to, prompt, *, bulk):
    """The text of one that comes back until there is room."""
    headers = {"x-windve-priority": "bulk"} if bulk else {}
    while True:
        try:
            answer = await to.completions.create(
                model="emulated", prompt=prompt, max_tokens=TOKENS, temperature=0, extra_headers=headers
            )
        except openai.RateLimitError as error:
            await asyncio.sleep(float(error.response.headers["retry-after-ms"]) / 1000)
        else:
            return answer.choices[0].text


def test_what_the_accelerator_has_no_room_for_its_host_takes_and_all_of_it_is_right(service):
    rule, draw = EmulatedText(), random.Random(17)
    prompts = [[draw.randrange(rule.vocabulary) for _ in range(draw.choice([60, 150, 200]))] for _ in range(36)]

    async def main():
        async with client(service) as to:
            return await asyncio.gather(*[answered(to, one, bulk=number % 2) for number, one in enumerate(prompts)])

    assert asyncio.run(main()) == [rule.text(prompt, TOKENS) for prompt in prompts]
    wait_until(lambda: is_free(service), 5)
    told = replica(service)
    host = told["host"]
    assert (told["blocks"], host["blocks"]) == (BLOCKS, HOST_BLOCKS)
    assert f"{BLOCKS} + {HOST_BLOCKS} of the host" in service.log.read_text()
    assert sum(host["steps"].values()) == told["steps"]
    assert host["steps"]["pipelined"] + host["steps"]["asynchronous"] > 0
    assert host["tokens"] > 10 * TOKENS
    assert pools(service)["accelerator"]["host_time"] is None
    assert told["host_warm_up"] == HOST
    wait_until(lambda: of_host(service, "host_tokens_total").get(()) == host["tokens"], 30)
    steps = of_host(service, "mode_steps_total")
    assert {mode: steps[(mode,)] for mode in host["steps"] if host["steps"][mode]} == {
        mode: count for mode, count in host["steps"].items() if count
    }
    assert of_host(service, "host_blocks_free")[()] == HOST_BLOCKS
    gained = of_host(service, "hybrid_tokens_total")[()] - of_host(service, "alone_tokens_total")[()]
    assert round(gained) == pytest.approx(host["gained_tokens"], abs=1)


def of_host(service, name):
    """{values of the tags behind the pool: the metric's}."""
    return {
        tuple(value for _, value in tags[:-1]): told for (own, tags), told in service.samples().items() if own == name
    }


def test_who_hangs_up_leaves_nothing_behind_at_the_host(service):
    rule = EmulatedText()
    prompts = [[number] * 150 for number in range(1, 25)]

    async def main():
        async with client(service) as to:
            leaving = [
                stream(to, "emulated", prompt, 100, leave_after=2, extra_headers={"x-windve-priority": "bulk"})
                for prompt in prompts
            ]
            stays, *found = await asyncio.gather(answered(to, [5] * 100, bulk=False), *leaving)
            assert stays == rule.text([5] * 100, TOKENS)
            return sum(how == "left" for _, how, _ in found)

    assert asyncio.run(main()) > BLOCKS
    wait_until(lambda: is_free(service), 5)
