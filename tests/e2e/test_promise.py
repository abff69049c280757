"""The promise in seconds: the rehearsal slowed down, so that the devices' time is what is judged.

At the devices' true speed the SLO of 2 s leaves 0.1 s for all that two shared cores do besides, load generator
included; a machine that is busy with other things takes more. At a quarter of the speed the same depths, the same code
and the same shares of beta leave four times as much, and what is asserted is the system's own.
"""

import asyncio
import statistics

import pytest

from benchmarks.kit.arrivals import burst
from calibration.load import connect, request_bytes
from tests.kit.service import by_depth, load_yaml, runs

pytestmark = pytest.mark.alone

SLOWER = 4
SLO_S = 2.0 * SLOWER
LONE_S = (0.0180 + 0.27) * SLOWER  # alpha + beta of the V100
TRIES = 5
TEXT = "a query of about seventy five tokens, as the paper has them, " * 5


def slowed(config):
    application = config["applications"][0]
    router = application["deployments"][0]["user_config"]
    router["slo_s"] *= SLOWER
    for pool in ("accelerator", "cpu"):
        application["args"][pool]["emulated"]["time_scale"] = SLOWER
        for key in ("alpha_s", "beta_s"):
            router[pool][key] *= SLOWER
    return config


@pytest.fixture(scope="module")
def slow(shared):
    config = by_depth(load_yaml("rehearsal.yaml"), accelerator=90, cpu=18)
    return shared.serve(slowed(config))


def try_until(holds, attempt):
    """The first attempt that holds, or the last: other work on a machine makes times longer, never shorter."""
    for _ in range(TRIES):
        result = attempt()
        if holds(result):
            break
    return result


def test_what_is_admitted_is_answered_within_the_slo(slow, figure):
    def attempt():
        slow.wait_until_idle()
        before = runs(slow)
        replies = burst(slow.address, [request_bytes({"input": f"{TEXT}{number}"}) for number in range(200)])
        slowest = max(reply.seconds for reply in replies if reply.status == 200)
        slowest_busy = max(reply.seconds for reply in replies if reply.status == 429)
        batches = {name: count - before[name] for name, count in runs(slow).items()}
        figure(f"burst of 200 at 1/{SLOWER} speed, SLO {SLO_S} s: slowest {slowest:.3f} s, {batches}")
        assert sum(reply.status == 200 for reply in replies) == 108
        return slowest, slowest_busy, batches

    slowest, slowest_busy, batches = try_until(lambda found: found[0] <= SLO_S, attempt)
    assert slowest <= SLO_S
    assert slowest_busy < 0.1 * SLO_S
    assert batches == {"accelerator": 1, "cpu": 1}, "a burst cut in two pays beta twice"


def test_lone_query_loses_at_most_five_percent(slow, figure):
    async def ask():
        connection = (await connect(slow.address, 1))[0]
        seconds = [(await connection.ask(request_bytes({"input": TEXT}))).seconds for _ in range(5)]
        connection.hang_up()
        return seconds

    slow.wait_until_idle()
    lone_s = try_until(lambda seconds: seconds <= 1.05 * LONE_S, lambda: statistics.median(asyncio.run(ask())))
    figure(f"lone query at 1/{SLOWER} speed: {lone_s:.3f} s, alpha + beta {LONE_S:.3f} s, {lone_s / LONE_S - 1:+.1%}")
    assert lone_s <= 1.05 * LONE_S
