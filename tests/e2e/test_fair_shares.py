"""Keys with names, shares and a quota: that they reach the replica. Who gets how much is judged in virtual time."""

import time

import pytest
from steady_load import streaming

from calibration.load import burst, request_bytes
from tests.kit.service import ROUTERS, emulating, wait_until

KEYS = "quiet: sk-quiet\ngreedy: sk-greedy\nmetered: sk-metered tokens_per_minute=600\n"
SLO_S = 10.0
DEVICE = {"alpha_s": 0.2, "beta_s": 2.0, "micro_batch_queries": 8}  # two of them: about eight queries a second
QUIET_S, GREEDY_S = 1, 20  # queries a second
SETTLED_S = 5.0


@pytest.fixture(scope="module")
def service(shared, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(KEYS)
    config = emulating(SLO_S, accelerator=DEVICE)
    config["applications"][0]["args"]["api_keys"] = f"file:{file}"
    return shared.serve(config, {"authorization": "Bearer sk-quiet"})


def key_of(name):
    return [("authorization", f"Bearer sk-{name}")]


def admitted_of(stream, since):
    statuses = [status for when, status in stream.answers if when > since]
    assert set(statuses) <= {200, 429}
    return statuses.count(200) / len(statuses)


def test_who_asks_for_too_much_leaves_room_for_another(service, figure):
    """Asked for is 2.6 times what the devices can do. Half of them would be enough for four times the quiet one."""
    with streaming(service.address, QUIET_S, headers=key_of("quiet")) as quiet:
        time.sleep(SETTLED_S)
        with streaming(service.address, GREEDY_S, headers=key_of("greedy")) as greedy:
            time.sleep(SETTLED_S)
            settled_at = time.monotonic()
            time.sleep(2 * SETTLED_S)
    figure(f"greedy: {greedy}; quiet: {quiet}")
    admitted = {name: admitted_of(stream, settled_at) for name, stream in (("quiet", quiet), ("greedy", greedy))}
    assert admitted["greedy"] < 0.6
    assert admitted["quiet"] > 0.8
    assert greedy.refusals["over_share"]
    assert not greedy.strange + quiet.strange
    wait_until(
        lambda: service.samples()["tenant_queries_total", (("outcome", "share"), ("tenant", "greedy"))], "its metric"
    )
    used_s = {key: service.samples()["tenant_device_seconds_total", (("tenant", key),)] for key in ("quiet", "greedy")}
    assert min(used_s.values()) > 0


def test_a_quota_holds_and_says_so(service):
    """Ten tokens a second: the bucket holds 50, and each Router has its part of it. Both are used up by the last."""
    asking = request_bytes({"input": "a " * 250}, headers=key_of("metered"))
    first, *_, last = (burst(service.address, [asking])[0] for _ in range(ROUTERS + 1))
    assert (first.status, last.status) == (200, 429)
    assert last.json()["error"]["code"] == "over_quota"
    assert int(last.headers["retry-after-ms"]) > 1000
