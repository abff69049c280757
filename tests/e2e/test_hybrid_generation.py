"""An accelerator whose host holds a part of its cache, on real Ray: emulated by the very executor of real models. What
goes to the host follows from tables and from room, as promises are loose: no time that is measured decides it.
"""

import asyncio
import io
import random

import pytest
from rich.console import Console
from test_generation import client, pools, stream, until_room

from benchmarks.kit.emulated_text import EmulatedText
from serve_app.local.console import _show_model
from tests.kit.service import load_yaml, wait_until

BLOCKS, HOST_BLOCKS, TOKENS = 8, 80, 40
EMULATED = {"beta_s": 0.01, "row_s": 0.0002, "kv_token_s": 4e-6, "prompt_token_s": 2e-5, "knee": 32}
HOST = {"row_s": 5e-4, "kv_token_s": 4e-6, "copy_token_s": 1e-6, "layers": 4}
BULK = {"extra_headers": {"x-windve-priority": "bulk"}}


@pytest.fixture(scope="module")
def service(shared):
    config = load_yaml("generation_rehearsal.yaml")
    (application,) = config["applications"]
    application["args"]["cpu_overflow"] = False
    application["args"]["accelerator"] |= {
        "blocks": BLOCKS, "num_cpu_blocks": HOST_BLOCKS, "emulated": {**EMULATED, "host": HOST},
    }  # fmt: skip
    application["deployments"][0]["user_config"] = {"ttft_s": 20.0, "tpot_s": 2.0}
    return shared.serve(config)


def replica(service):
    """What /info says of the only one."""
    (one,) = pools(service)["accelerator"]["replicas"].values()
    return one


def is_free(service):
    told = replica(service)
    host = told["host"]
    free = told["free_blocks"], host["free_blocks"]
    return (told["rows"], told["waiting"], host["rows"], host["parked"], *free) == (0, 0, 0, 0, BLOCKS, HOST_BLOCKS)


def told_of_host(service):
    """What Prometheus reads: {metric: {its tags' values behind the pool: value}}."""
    found = {}
    for (name, tags), value in service.samples().items():
        found.setdefault(name, {})[tuple(value for _, value in tags[:-1])] = value
    return found


def test_what_the_accelerator_has_no_room_for_its_host_takes_and_all_of_it_is_right(service):
    rule, draw = EmulatedText(), random.Random(17)
    prompts = [[draw.randrange(rule.vocabulary) for _ in range(draw.choice([60, 150, 200]))] for _ in range(36)]

    async def main():
        async with client(service) as to:

            async def answered(number, prompt):
                more = BULK if number % 2 else {}
                return await until_room(lambda: stream(to, "emulated", prompt, TOKENS, **more))

            return await asyncio.gather(*[answered(*one) for one in enumerate(prompts)])

    assert asyncio.run(main()) == [(rule.text(prompt, TOKENS), "length", None) for prompt in prompts]
    wait_until(lambda: is_free(service), "the end")
    told = replica(service)
    host = told["host"]
    assert (told["blocks"], host["blocks"]) == (BLOCKS, HOST_BLOCKS)
    _show_model(console := Console(file=io.StringIO(), width=200), service.get("/info"))
    assert f"{BLOCKS} + {HOST_BLOCKS} of the host" in console.file.getvalue()
    assert sum(host["steps"].values()) == told["steps"]
    assert host["steps"]["pipelined"] + host["steps"]["asynchronous"] > 0
    assert host["tokens"] > TOKENS
    assert pools(service)["accelerator"]["host_time"] is None
    assert told["host_warm_up"] == HOST
    wait_until(lambda: told_of_host(service).get("host_tokens_total") == {(): host["tokens"]}, "its metrics")
    metrics = told_of_host(service)
    steps = {mode: metrics["mode_steps_total"].get((mode,), 0) for mode in host["steps"]}
    assert steps == host["steps"]
    gained = metrics["hybrid_tokens_total"][()] - metrics["alone_tokens_total"][()]
    assert round(gained) == pytest.approx(host["gained_tokens"], abs=1)
