"""What the fault tests decide by: the order of faults, the verdict on a request, the table, the slope of memory."""

import itertools

import pytest

from tests.faults import memory
from tests.faults.agenda import agenda, capacity
from tests.faults.memory import Life
from tests.faults.truth import Truth
from tests.faults.verdict import (
    BEGUN,
    BROKEN,
    GRPC,
    HEAD,
    HTTP,
    LARGE,
    REFUSED,
    SILENT,
    Ended,
    Fault,
    Phase,
    broken_promise,
    longest_gap_s,
    markdown,
    problems_of,
    rows_of,
)

CUT = Fault("a node cut off", frozenset({LARGE, GRPC, BEGUN}))


def ended(status, *, via=HTTP, at=(10.0, 11.0), kind="single", **more):
    return Ended(kind, via, *at, status, right=more.pop("right", status == 200), **more)


def phase(*some, fault=CUT, injected_at=10.0, healed_at=15.0, whole_s=2.0, problems=()):
    return Phase(fault, injected_at, healed_at, some, whole_s, problems)


@pytest.mark.parametrize(
    ("one", "problem"),
    [
        (ended(200), None),
        (ended(200, right=False), "a wrong answer"),
        (ended(429, come_back=True), None),
        (ended(429), "429 without the time to come back"),
        (ended(503, come_back=True), None),
        (ended(503), "503 without the time to come back"),
        (ended(503, via=GRPC), None),  # by Serve's own proxy
        (ended(504, own_time=True), None),
        (ended(504), "504"),
        (ended(500, detail="Internal Server Error"), "500 (Internal Server Error)"),
        (ended(BROKEN), "broken"),
        (ended(SILENT), "silent"),
        # What the fault may break: a way, a kind of request, a reason.
        (ended(BROKEN, via=GRPC), None),
        (ended(SILENT, via=GRPC), None),
        (ended(BROKEN, kind=LARGE), None),
        (ended(BROKEN, detail=BEGUN), None),
        (ended(BROKEN, detail=REFUSED), f"broken ({REFUSED})"),
        # From the fault at 10 s until the service is whole at 17 s; a gRPC client backs off for a second more.
        (ended(BROKEN, kind=LARGE, at=(8.0, 9.9)), "broken"),
        (ended(BROKEN, kind=LARGE, at=(8.0, 10.0)), None),
        (ended(BROKEN, kind=LARGE, at=(17.0, 17.1)), None),
        (ended(BROKEN, kind=LARGE, at=(17.1, 17.2)), "broken"),
        (ended(BROKEN, via=GRPC, at=(18.0, 18.1)), None),
        (ended(BROKEN, via=GRPC, at=(18.1, 18.2)), "broken"),
    ],
)
def test_what_breaks_a_promise(one, problem):
    assert broken_promise(one, phase(one)) == problem


def test_what_silent_replicas_have_is_late():
    silent = Fault("an embedder stopped", silences=True)
    assert broken_promise(ended(504), phase(fault=silent)) is None
    assert broken_promise(ended(504, at=(1.0, 2.0)), phase(fault=silent)) == "504"


def test_a_service_that_is_not_whole_excuses_what_the_fault_breaks_only():
    lost = [ended(BROKEN, via=via, at=(90.0, 91.0)) for via in (GRPC, HTTP)]
    assert [broken_promise(one, phase(one, whole_s=None)) for one in lost] == [None, "broken"]


def test_problems_name_the_fault_and_what_is_still_in_flight():
    found = problems_of(phase(ended(500), ended(500), whole_s=None, problems=["1 waits"]))
    assert found == [
        "a node cut off: 2 x single by http: 500",
        "a node cut off: the service did not become whole again",
        "a node cut off: 1 waits",
    ]
    assert problems_of(phase(ended(200))) == []


def test_the_longest_gap_counts_from_the_fault():
    answers = [ended(200, at=(9.0, end)) for end in (9.5, 13.0, 14.0, 19.0)]
    assert longest_gap_s(phase(*answers)) == 5.0
    assert longest_gap_s(phase(*answers[:2])) == 3.0
    assert longest_gap_s(phase()) == 0.0


def test_the_table_has_one_row_a_fault():
    again = phase(ended(BROKEN, via=GRPC), ended(200, at=(15.5, 16.0)), whole_s=3.5)
    other = phase(ended(429, come_back=True), fault=Fault("other"), whole_s=None)
    rows = rows_of([phase(ended(200), ended(500)), other, again])
    assert [dict(zip(HEAD, row, strict=True)) for row in rows] == [
        {"fault": "a node cut off", "times": "2", "requests": "4", "right": "2", "429": "0", "503": "0", "504": "0",
         "broken": "1", "wrong": "1", "gap, s": "6.0", "whole, s": "3.5"},
        {"fault": "other", "times": "1", "requests": "1", "right": "0", "429": "1", "503": "0", "504": "0",
         "broken": "0", "wrong": "0", "gap, s": "0.0", "whole, s": "never"},
    ]  # fmt: skip
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_no_fault_comes_again_before_all_others_have_come():
    came = list(itertools.islice(agenda("abcde", seed=3), 20))
    rounds = ["".join(came[first : first + 5]) for first in range(0, 20, 5)]
    assert rounds[0] == "abcde"
    assert all(sorted(some) == list("abcde") for some in rounds)
    assert len(set(rounds)) > 1


def test_capacity_is_that_of_the_simulated_devices():
    assert capacity([(0.05, 0.2)], 2.0) == pytest.approx(18)
    assert capacity([(0.05, 0.2), (0.2, 0.2)], 2.0) == pytest.approx(22.5)


def life(grows_an_hour, minutes=60, first=2**20 * 100):
    at = range(0, minutes * 60, 10)
    return Life("Router", 7, [(float(s), round(first * (1 + grows_an_hour * s / 3600))) for s in at])


def test_memory_is_judged_after_ten_minutes_and_by_its_slope():
    assert memory.growing([life(0.0), life(0.005), life(-0.3)]) == []
    assert memory.growing([life(0.05)]) == ["Router (7) grows by 4.9 % an hour"]
    dead = [life(0.0, minutes=5)] * 100
    assert memory.growing([life(0.05), *dead]) == []  # 100 MiB may grow by 6.25 more
    assert memory.growing([life(0.09), *dead]) == ["Router (7) grows by 8.6 % an hour"]
    young = life(0.0)
    young.samples[:60] = [(s, size // 2 + int(s) * 10_000) for s, size in young.samples[:60]]
    assert memory.growing([young]) == []
    assert memory.judged(life(0.5, minutes=29)) is None
    assert memory.growing([life(0.5, minutes=29)]) == []
    spiky = life(0.0)
    spiky.samples[200] = (2000.0, 2**31)
    assert memory.growing([spiky]) == []
    assert memory.rows_of([life(0.0), life(0.0, minutes=5)]) == [("Router", "2", "59.8", "100", "100", "+0.00")]
    assert memory.picture([life(0.0)], [30.0]).axes


@pytest.mark.parametrize(
    ("name", "command", "role"),
    [
        ("raylet", ["/x/raylet", "--a"], "raylet"),
        ("haproxy", ["haproxy", "-f", "x"], "haproxy"),
        ("ray::ServeRepli", ["ray::ServeReplica:windve:Router"], "Router"),
        ("ray::ServeRepli", ["ray::ServeReplica:windve:CpuEmbedder.check_health"], "CpuEmbedder"),
        ("ray::ServeContr", ["ray::ServeController.listen_for_change"], "ServeController"),
        ("ray::IDLE", ["ray::IDLE"], None),
        ("python", ["python", "-u", "/x/ray/dashboard/dashboard.py", "--host=127.0.0.1"], "dashboard"),
        ("sh", ["sh", "-c", "sleep 1"], None),
    ],
)
def test_what_a_process_is(name, command, role):
    assert memory.role_of(name, command) == role


def test_the_truth_tells_texts_and_their_order_apart():
    truth = Truth()
    one, other = truth.vector("a river"), truth.vector("a stone")
    assert truth.agrees(["a river", "a stone"], [one, other])
    for texts, vectors in (
        (["a river", "a stone"], [other, one]), (["a river"], [one, other]), (["a river"], None),
        (["a river"], [["x"] * 384]),
    ):  # fmt: skip
        assert not truth.agrees(texts, vectors)
