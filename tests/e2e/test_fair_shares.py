"""Keys with names, shares and a quota: that they reach the replica. Who gets how much is judged in virtual time."""

import pytest

from calibration.load import burst, request_bytes
from tests.kit.service import TEXT, emulating, wait_until

KEYS = "quiet: sk-quiet\ngreedy: sk-greedy\nmetered: sk-metered tokens_per_minute=600\n"
SLO_S = 10.0
DEVICE = {"alpha_s": 0.02, "beta_s": 2.0, "pass_queries": 8}  # about 250 queries within the SLO


@pytest.fixture(scope="module")
def service(shared, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(KEYS)
    config = emulating(SLO_S, accelerator=DEVICE)
    config["applications"][0]["args"]["api_keys"] = f"file:{file}"
    return shared.serve(config, {"authorization": "Bearer sk-quiet"})


def asked_by(name, count):
    headers = [("authorization", f"Bearer sk-{name}")]
    return [request_bytes({"input": f"{TEXT}{number}"}, headers=headers) for number in range(count)]


def test_who_asks_for_too_much_leaves_room_for_another(service, figure):
    """Ten of the one, then hundreds of the other, then ten more of the first."""
    assert {reply.status for reply in burst(service.address, asked_by("quiet", 10))} == {200}
    replies = burst(service.address, [*asked_by("quiet", 10), *asked_by("greedy", 600), *asked_by("quiet", 10)])
    quiet, greedy = replies[:10] + replies[-10:], replies[10:-10]
    refused = [reply.json()["error"]["code"] for reply in greedy if reply.status == 429]
    figure(f"20 queries beside 600 of another: {len(refused)} of these are refused")
    assert {reply.status for reply in quiet} == {200}
    assert {reply.status for reply in greedy} == {200, 429}
    assert "over_share" in refused
    wait_until(lambda: service.samples()["key_queries_total", (("key", "greedy"), ("outcome", "share"))], "its metric")
    used_s = {key: service.samples()["key_device_seconds_total", (("key", key),)] for key in ("quiet", "greedy")}
    figure(f"device seconds by key: {used_s}")
    assert min(used_s.values()) > 0


def test_a_quota_holds_and_says_so(service):
    """Ten tokens a second: the bucket holds 50."""
    headers = [("authorization", "Bearer sk-metered")]
    asking = request_bytes({"input": "a " * 250}, headers=headers)
    first, second = (burst(service.address, [asking])[0] for _ in range(2))
    assert (first.status, second.status) == (200, 429)
    assert second.json()["error"]["code"] == "over_quota"
    assert int(second.headers["retry-after-ms"]) > 1000
