import pytest

from deployments.hardware.device_detector import decide_topology, probe_machine


@pytest.mark.parametrize(
    ("accelerators", "cpus", "wanted", "pools", "in_force"),
    [
        (2, 1, True, ("accelerator", "cpu"), True),
        (2, 1, False, ("accelerator",), False),  # the printed branch says CPU; the prose is right
        (2, 0, True, ("accelerator",), False),
        (2, 0, False, ("accelerator",), False),
        (0, 3, True, ("cpu",), False),  # one kind of device: forced off
        (0, 3, False, ("cpu",), False),
    ],
)
def test_algorithm_2_by_the_prose_of_section_iv_c(accelerators, cpus, wanted, pools, in_force):
    topology = decide_topology(accelerators, cpus, cpu_overflow=wanted)
    assert (topology.pools, topology.cpu_overflow) == (pools, in_force)
    counts = {"accelerator": accelerators, "cpu": cpus}
    assert dict(topology.replicas) == {pool: counts[pool] for pool in pools}


def test_nothing_there():
    with pytest.raises(ValueError, match="neither"):
        decide_topology(0, 0, cpu_overflow=True)


def test_probe_sees_this_machine():
    machine = probe_machine()
    assert machine.cpu.usable >= 1
    assert machine.numa_nodes >= 1
    assert machine.memory_gib > 0
