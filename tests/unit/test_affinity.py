import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import SettingsError
from deployments.hardware.affinity import CpuPart, CpuShape, parse_core_list, plan_affinity, read_cpu_shape


def shape(*numa_nodes, allowed=None, quota=None):
    nodes = tuple(tuple(node) for node in numa_nodes)
    cores = tuple(sorted(core for node in nodes for core in node)) if allowed is None else tuple(allowed)
    return CpuShape(cores, nodes, quota)


def plan_alone(machine, **part):
    (plan,) = plan_affinity(machine, [CpuPart(**part)])
    return plan


KUNPENG = shape(range(32), range(32, 64), range(64, 96), range(96, 128))  # 2 x Kunpeng 920


@pytest.mark.parametrize(
    ("machine", "part", "instances", "reserved"),
    [
        # The low quarter is left, and high cores come first.
        (KUNPENG, {}, [range(127, 31, -1)], range(32)),
        (KUNPENG, {"cores": 32}, [range(127, 95, -1)], range(32)),  # no NUMA node is crossed if one is enough
        (KUNPENG, {"cores": 40}, [range(127, 87, -1)], range(32)),  # whole nodes are filled where one is not enough
        (KUNPENG, {"per_numa_node": True}, [range(last, last - 32, -1) for last in (127, 95, 63)], range(32)),
        # Two sockets whose cores alternate, as Xeons number them.
        (shape(range(0, 16, 2), range(1, 16, 2)), {"cores": 5}, [range(15, 6, -2)], range(4)),
        (shape(range(8), allowed=(2, 3, 4, 5)), {}, [(5, 4, 3)], (2,)),  # the process's affinity
        # A container with 4 CPUs on a machine of 64 gets 3 threads, not 48.
        (shape(range(64), quota=4.0), {}, [(63, 62, 61)], (0,)),
        (shape(range(64), quota=0.5), {}, [(63,)], ()),
        # Small machines.
        *((shape(range(cores)), {}, [range(cores - 1, -1, -1)], ()) for cores in (1, 2, 3)),
        (shape(range(4)), {}, [(3, 2, 1)], (0,)),
        (shape(range(8)), {}, [range(7, 1, -1)], (0, 1)),
        # A config that asks for more than three quarters gets them: 44 of the paper's Xeon (Figure 6).
        (shape(range(24), range(24, 48)), {"cores": 44}, [range(47, 3, -1)], range(4)),
        (shape(range(24), range(24, 48)), {"cores": 20}, [range(47, 27, -1)], range(12)),
        (shape(range(8)), {"cores": 7}, [range(7, 0, -1)], (0,)),
        (shape(range(64), quota=4.0), {"cores": 3}, [(63, 62, 61)], (0,)),
    ],
)
def test_the_cores_of_one_model(machine, part, instances, reserved):
    plan = plan_alone(machine, **part)
    assert plan.instances == tuple(map(tuple, instances))
    assert plan.reserved == tuple(reserved)


def test_more_cores_than_there_are():
    with pytest.raises(SettingsError, match=r"args.cpu.cores: the config asks for 9 cores, but 7 are free"):
        plan_alone(shape(range(8)), cores=9)


@given(st.integers(1, 64), st.integers(1, 8), st.one_of(st.none(), st.floats(0.1, 80)), st.booleans())
def test_instances_are_disjoint_allowed_and_never_reserved(cores, nodes, quota, per_node):
    numa = [tuple(range(node, cores, nodes)) for node in range(min(nodes, cores))]
    plan = plan_alone(shape(*numa, quota=quota), per_numa_node=per_node)
    used = [core for instance in plan.instances for core in instance]
    assert len(used) == len(set(used)) >= 1
    assert set(used) <= set(range(cores)) - set(plan.reserved)
    assert len(used) + len(plan.reserved) == (min(cores, max(1, int(quota))) if quota else cores)


@pytest.mark.parametrize(
    ("machine", "parts", "cores"),
    [
        (shape(range(2)), [{}, {}], [(1,), (0,)]),
        (shape(range(8)), [{}, {}], [(7, 6, 5), (4, 3, 2)]),
        (shape(range(8)), [{"share": 2.0}, {}], [(7, 6, 5, 4), (3, 2)]),
        (shape(range(8)), [{}, {"share": 100.0}], [(7,), (6, 5, 4, 3, 2)]),
        (shape(range(8)), [{"cores": 2}, {}], [(7, 6), (4, 3, 2)]),
        (shape(range(2)), [{}, {}, {}], [(1,), (0,), (1,)]),  # fewer cores than models
        (shape(range(1)), [{}, {}], [(0,), (0,)]),
        (shape(range(64), quota=4.0), [{}, {}], [(63, 62), (61,)]),
        (shape(range(4), range(4, 8)), [{}, {}, {}], [(7, 6), (5, 4), (3, 2)]),
    ],
)
def test_the_cores_are_divided_among_models(machine, parts, cores):
    plans = plan_affinity(machine, [CpuPart(**part) for part in parts])
    assert [plan.instances for plan in plans] == [(one,) for one in cores]
    assert {plan.reserved for plan in plans} == {plan_alone(machine).reserved}


def test_each_model_has_its_share_of_each_numa_node_where_one_has_instances_there():
    per_node, crossing = plan_affinity(KUNPENG, [CpuPart(per_numa_node=True), CpuPart(share=3.0)])
    assert [(len(cores), cores[0]) for cores in per_node.instances] == [(8, 127), (8, 95), (8, 63)]
    (cores,) = crossing.instances
    assert len(cores) == 72
    assert set(cores).isdisjoint(set().union(*per_node.instances))


def test_more_cores_than_a_model_has():
    with pytest.raises(SettingsError, match=r"args.cpu.cores: the config asks for 4 cores, but 3 are free"):
        plan_affinity(shape(range(8)), [CpuPart(), CpuPart(cores=4)])


@given(
    st.integers(1, 64),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.1, 10), st.booleans()), min_size=1, max_size=9),
)
def test_models_never_share_cores_where_there_are_enough(cores, nodes, asked):
    numa = [tuple(range(node, cores, nodes)) for node in range(min(nodes, cores))]
    plans = plan_affinity(shape(*numa), [CpuPart(share=share, per_numa_node=per_node) for share, per_node in asked])
    used = [{core for instance in plan.instances for core in instance} for plan in plans]
    assert all(used)
    assert set().union(*used).isdisjoint(plans[0].reserved)
    smallest = cores - len(plans[0].reserved)
    if not any(per_node for _, per_node in asked) and len(asked) <= smallest:
        assert sum(map(len, used)) == len(set().union(*used)) == smallest


def test_kernel_lists():
    assert parse_core_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_core_list("") == ()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/cpu.max": "200000 100000\n"}, 2.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker\n",
                "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        ({}, None),
    ],
)
def test_cgroup_files(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_cpu_shape(tmp_path).quota == quota
