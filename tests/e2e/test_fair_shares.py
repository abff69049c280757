"""Two clients of one service, told apart by the names of their keys, at twice what its device can do."""

import asyncio
import time

import pytest

from benchmarks.kit.arrivals import Load
from calibration.load import burst, request_bytes
from tests.kit.service import load_yaml
from tests.kit.simulation.arrivals import poisson

pytestmark = pytest.mark.alone

KEYS = "quiet: sk-quiet\ngreedy: sk-greedy\nmetered: sk-metered tokens_per_minute=600\n"
ALPHA_S, BETA_S, SLO_S = 0.00904, 0.24, 1.0  # of an Atlas 300I DUO, which answers in passes of eight queries
CAPACITY_S = (SLO_S - BETA_S) / ALPHA_S / SLO_S  # queries a second
QUIET_S, GREEDY_S = 2 * CAPACITY_S / 11, 20 * CAPACITY_S / 11
SETTLED_S = 5.0


@pytest.fixture(scope="module")
def service(shared, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(KEYS)
    config = load_yaml("rehearsal.yaml")
    application = config["applications"][0]
    application["args"] |= {"api_keys": f"file:{file}", "heterogeneous": False}
    application["args"]["accelerator"]["emulated"] = {"alpha_s": ALPHA_S, "beta_s": BETA_S, "pass_queries": 8}
    (router,) = application["deployments"]
    router["user_config"] = {
        "slo_s": SLO_S,
        "accelerator": {"alpha_s": ALPHA_S, "beta_s": BETA_S},
        "fair_share": {"run": 0.04},
    }
    return shared.serve(config, {"authorization": "Bearer sk-quiet"})


def serve(service, seconds, **rates):
    """name -> (share admitted, share late of these, p95 in s, what the others were told)"""

    async def run():
        clients = {name: Load(str(service.address), [("authorization", f"Bearer sk-{name}")]) for name in rates}
        try:
            streams = [
                clients[name].send(list(poisson(rate, seconds, allowed_s=SLO_S, seed=number)))
                for number, (name, rate) in enumerate(rates.items(), 1)
            ]
            return await asyncio.gather(*streams)
        finally:
            for client in clients.values():
                client.hang_up()

    found = {}
    for name, ended in zip(rates, asyncio.run(run()), strict=True):
        mine = [one for one in ended if one.arrival.at > SETTLED_S]
        waits = sorted(one.reply.seconds for one in mine if one.ok)
        late = sum(wait > SLO_S for wait in waits)
        codes = {one.reply.json()["error"]["code"] for one in mine if one.busy}
        found[name] = (len(waits) / len(mine), late / len(waits), waits[int(0.95 * len(waits))], codes)
    return found


def test_the_quiet_one_is_served_in_time_as_if_it_were_alone(service, figure):
    for _ in range(3):  # in virtual time it is 1.14 to 1.18 times: a busy machine's clock has no room for more
        alone = serve(service, 20.0, quiet=QUIET_S)["quiet"]
        beside = serve(service, 30.0, quiet=QUIET_S, greedy=GREEDY_S)
        for name, (admitted, late, p95_s, _) in {"alone": alone, **beside}.items():
            figure(f"{name}: {admitted:.1%} admitted, {late:.1%} of these late, p95 {p95_s:.3f} s")
        assert beside["quiet"][0] >= 0.99
        assert beside["quiet"][1] <= 0.01
        if beside["quiet"][2] <= 1.2 * alone[2]:
            break
    assert beside["quiet"][2] <= 1.2 * alone[2]
    assert "over_share" in beside["greedy"][3]
    assert beside["greedy"][0] > 0.05
    ends = time.monotonic() + 30
    while ("key_queries_total", (("key", "greedy"), ("outcome", "share"))) not in service.samples():
        assert time.monotonic() < ends, "no metrics of the keys"
        time.sleep(0.5)
    used_s = {key: service.samples()["key_device_seconds_total", (("key", key),)] for key in ("quiet", "greedy")}
    figure(f"device seconds by key: {used_s}")
    assert min(used_s.values()) > 1


def test_a_quota_holds_and_says_so(service):
    asking = request_bytes({"input": "a " * 70}, headers=[("authorization", "Bearer sk-metered")])
    replies = [burst(service.address, [asking])[0] for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 429, 429]  # the bucket holds 50 tokens
    assert replies[1].json()["error"]["code"] == "over_quota"
    assert int(replies[1].headers["retry-after-ms"]) > 1000
