"""What travels between Routers and replicas."""

import contextlib
import math
import struct
from itertools import chain
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from deployments.admission.fair_share import Tenant
from deployments.embedding import frames
from deployments.embedding.frames import Answered, Offer, Offers, PassAnswers, Report
from deployments.embedding.scheduler.state import ReplicaState
from deployments.models.outputs import TEXT
from deployments.serving.connections import Peer
from deployments.serving.frames import HEAD, SIZE, WIRE, encode_head, frame_of, head_of, speaks

STATE = ReplicaState(0.25, 0.5, 0.1, 3, 2, 7, 5, (0.0, 0.001, 0.0, 0.27), 1.1, 0.02, (1, 2, 3))


def packed(head, arrays=()):
    """A frame with any head."""
    return b"".join(frame_of(encode_head(head), [array.tobytes() for array in arrays]))


def through(offers):
    return Offers.decode(b"".join(offers.encode()))


def ids(*numbers):
    return np.array(numbers, np.int32)


def passed(*answers):
    """The answers of a pass. Each: offer, query, numbers."""
    offers, queries, numbers = map(list, zip(*answers, strict=True))
    sizes, many = list(map(len, numbers)), len(answers)
    norms, queue_s = [1.25 + at for at in range(many)], [0.1 * at for at in range(many)]
    return PassAnswers(offers, queries, norms, queue_s, sizes, np.concatenate(numbers, dtype=np.float32), 0.2, many, 75)


def test_an_empty_frame():
    assert through(Offers()) == Offers()
    (frame,) = Report(STATE, 5).encode()
    report = Report.decode(b"".join(frame))
    assert (report.seen, report.answered, report.refused) == (5, [], [])
    assert [*report.state] == [
        *[*STATE][:7], list(STATE.model), 1.1, 0.02, list(STATE.refusals), 0.0, [], 1, None, 0.0, 0.0, 0.0, False,
    ]  # fmt: skip


@pytest.mark.parametrize("more", [[], ["of a later version"]])
def test_what_a_neighbouring_version_lacks_has_its_default_and_what_it_has_more_is_passed_over(more):
    offer = [1, 0.5, [2], ["text"], False, *(more and [False, False, None, False, None, *more])]
    offers = Offers.decode(packed([[offer], *(more and [[], [], {}, None, False, {}, *more])], [ids(7, 8)]))
    assert (offers.asks, offers.refused_s, len(offers.offers)) == (False, {}, 1)
    assert astuple(replace(offers.offers[0], queries=())) == (1, 0.5, (), *astuple(Offer(1, 0.5, []))[3:])
    state = [*STATE][: 19 if more else 11] + more
    answer = [[1], [0], [1.0], [0.1], [2], 2, 0.2, *(more and [1, 0, *more])]
    report = Report.decode(
        packed([state, 5, [], [], [], [answer], *(more and [[], [], *more])], [np.ones(2, np.float32)])
    )
    assert report.state == STATE._replace(
        model=[*STATE.model], refusals=[*STATE.refusals], over_share=report.state.over_share
    )
    assert [*report.state.over_share] == []
    ((one,),) = report.answered
    assert astuple(one)[3:] == (1.0, 0.1, 0.2, 1, 0)


def test_offers_come_back_as_they_went():
    sent = Offers(
        [
            Offer(1, 0.75, [ids(1, 2, 3), ids(4)]),
            Offer(2, 600.0, [ids(5)], outputs=("tokens",), bulk=True, partial=True, again=True),
            Offer(3, 1.0, [ids(6, 7)]),
            Offer(4, 1.0, [ids(8)], tenant=Tenant("search", 3.0)),
        ],
        called_off=[9],
        confirmed=[8],
        refused_s={None: 0.125, Tenant("batch", 2.0): 0.5},
        settings={"router": "r", "slo_s": 1.0},
        asks=True,
        refused_sizes={75: 3, 512: 1},
    )
    came = through(sent)
    assert (came.called_off, came.confirmed, came.refused_s, came.settings, came.asks, came.refused_sizes) == (
        [9], [8], {None: 0.125, Tenant("batch", 2.0): 0.5}, {"router": "r", "slo_s": 1.0}, True, {75: 3, 512: 1},
    )  # fmt: skip
    for one, other in zip(sent.offers, came.offers, strict=True):
        assert replace(one, queries=()) == replace(other, queries=())
        assert [query.tolist() for query in one.queries] == [query.tolist() for query in other.queries]
        assert all(query.dtype == np.int32 for query in other.queries)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), max_size=8))
def test_no_query_gets_the_tokens_of_another(lengths):
    chance = np.random.default_rng(0)
    sent = [
        Offer(number, 1.0, [chance.integers(0, 30_000, size, dtype=np.int32) for size in sizes])
        for number, sizes in enumerate(lengths)
    ]
    came = through(Offers(sent)).offers
    assert [[q.tolist() for q in o.queries] for o in came] == [[q.tolist() for q in o.queries] for o in sent]


def reports(report):
    return [Report.decode(b"".join(frame)) for frame in report.encode()]


def test_a_report_with_all_that_it_may_hold():
    sent = Report(
        STATE._replace(opens_s=math.inf), 3, [(1, True)], [(2, 5)], [(3, "it broke")],
        [passed((5, 0, [1, 2]), (6, 1, [3, 4, 5])), passed((5, 1, [9, 10]))],
    )  # fmt: skip
    (came,) = reports(sent)
    assert came.state.opens_s == math.inf
    assert (came.refused, came.admitted, came.failed) == ([(1, True)], [(2, 5)], [(3, "it broke")])
    assert (came.answers, [len(some) for some in came.answered]) == (3, [2, 1])
    assert [astuple(replace(one, numbers=one.numbers.tolist())) for one in chain(*came.answered)] == [
        (5, 0, [1, 2], 1.25, 0.0, 0.2, 2, 75),
        (6, 1, [3, 4, 5], 2.25, 0.1, 0.2, 2, 75),
        (5, 1, [9, 10], 1.25, 0.0, 0.2, 1, 75),
    ]


def test_much_is_cut_into_several_frames_and_says_all_else_once(monkeypatch):
    monkeypatch.setattr(frames, "CUT_BYTES", 1000)
    more = {"refused": [(9, False)], "failed": [(7, "no"), (8, "no")], "broken": [7], "suspect": [8]}
    sent = Report(
        STATE,
        1,
        **more,
        answered=[passed(*((i, 0, [float(i)] * 100) for i in some)) for some in (range(7), range(7, 20))],
    )
    came = reports(sent)
    assert [report.answers for report in came] == [3, 3, 3, 3, 3, 3, 2]
    every = [one for report in came for one in chain(*report.answered)]
    assert [one.number for one in every] == list(range(20))
    assert [one.numbers.tolist() for one in every] == [[at] * 100 for at in range(20)]
    assert [(one.norm, one.batch_queries) for one in every[6:8]] == [(7.25, 7), (1.25, 13)]
    for name, once in more.items():
        assert [getattr(report, name) for report in came] == [once, *[[]] * 6]


def test_a_frame_that_has_more_than_16_mib_takes_nothing_more():
    full, one = np.zeros(2**22, np.float32), np.zeros(1, np.float32)
    sent = Report(STATE, answered=[PassAnswers.of_one(Answered(0, 0, few, 1.0, 0.0, 0.0)) for few in (full, one, one)])
    assert [report.answers for report in reports(sent)] == [2, 1]


@pytest.mark.parametrize(("size", "closed"), [(7, True), (8, False), (2**28, False), (2**28 + 1, True)])
def test_a_frame_of_more_than_256_mib_is_none_of_ours(size, closed):
    transport, peer = Mock(get_extra_info=lambda _: None, is_closing=lambda: False), Peer()
    peer.decode = peer.hear = lambda frame: None
    peer.connection_made(transport)
    peer.data_received(SIZE.pack(size) + bytes(4))
    assert transport.abort.called == closed


@pytest.mark.parametrize(("version", "is_understood"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_neighbouring_versions_understand_each_other(version, is_understood):
    assert speaks({"wire": WIRE + version}) is is_understood
    assert not speaks({})  # as before there were versions


@pytest.mark.parametrize("length", range(8))
def test_arrays_begin_at_a_multiple_of_four(length):
    frame = b"".join(frame_of(b"x" * length, [b"1234"]))
    assert head_of(frame) == (b"x" * length, 8 + 4 * math.ceil(length / 4))
    assert (frame[-4:], SIZE.unpack_from(frame)) == (b"1234", (len(frame),))
    assert len(frame) == 12 + 4 * math.ceil(length / 4)


def test_what_is_so_unless_it_is_said():
    assert astuple(Offer(1, 1.0, []))[3:] == (TEXT, False, False, False, None)
    assert astuple(Answered(1, 0, [], 1.0, 0.0, 0.0))[6:] == (1, 0)
    assert astuple(PassAnswers([], [], [], [], [], [], 0.0))[7:] == (1, 0)
    assert Report(STATE) == Report(STATE, 0, [], [], [], [])
    assert Offers() == Offers([], [], [], {}, None, False, {})


@pytest.mark.parametrize(
    ("offers", "is_sent"),
    [
        (Offers(), False),
        (Offers(refused_s={None: 1.0}, refused_sizes={75: 1}), False),  # it waits for a frame that has to be sent
        (Offers([Offer(1, 1.0, [])]), True),
        (Offers(called_off=[1]), True),
        (Offers(confirmed=[1]), True),
        (Offers(settings={"slo_s": 1.0}), True),
        (Offers(asks=True), True),
    ],
)
def test_when_a_frame_has_something_to_say(offers, is_sent):
    assert bool(offers) == is_sent


def test_times_are_exact():
    assert through(Offers([Offer(1, 0.12345678, [ids(1)])])).offers[0].left_s == 0.12345678


DAMAGE = (ValueError, TypeError, LookupError, struct.error)
ABOUT = [1.0, TEXT, False, False, False, None, False, None]  # of an offer, without its number and size


def offers_of(*sizes, arrays=()):
    """A frame that says of each offer how long its queries are, with these arrays."""
    heads = [[number, ABOUT[0], size, *ABOUT[1:]] for number, size in enumerate(sizes)]
    return packed([heads, [], [], {}, None, False], arrays)


def test_a_frame_as_the_damaged_ones_are_made():
    assert len(Offers.decode(offers_of([2], [1], arrays=[ids(7, 8, 9)])).offers) == 2
    assert Offers.decode(offers_of([], arrays=[])).offers[0].queries == []


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\0",
        HEAD.pack(8, 0),
        packed({}),
        packed(7),
        offers_of(2, arrays=[ids(1, 2)]),  # no lengths
        offers_of([1, 1]),  # two queries, no tokens
        offers_of([3], arrays=[ids(1, 2)]),  # 3 of 2 tokens
        offers_of([1], arrays=[ids(1, 2)]),  # 1 of 2
        offers_of([0]),
        offers_of([3, -1], arrays=[ids(1, 2)]),
        offers_of([1.0], arrays=[ids(1)]),
        packed([[[1]], [], [], {}, None, False]),
        packed([[], [], [], {}, None, False], [np.array([1, 2, 3], np.uint8)]),
        packed([[], [], [], {None: math.nan}, None, False]),
        packed([[], [], [], {None: -1.0}, None, False]),
        packed([[], [], [], {}, None, False, {75: -1}]),
    ],
)
def test_damaged_offers_say_so(frame):
    with pytest.raises(DAMAGE):
        Offers.decode(frame)


def report_of(*columns, numbers=0):
    return packed([list(STATE), 0, [], [], [], [[*columns, 0.2]]], [np.ones(numbers, np.float32)])


def test_a_report_as_the_damaged_ones_are_made():
    assert Report.decode(report_of([1], [0], [1.0], [0.1], [2], 2, numbers=2)).answers == 1


@pytest.mark.parametrize(
    "frame",
    [
        packed([]),
        report_of([1], [0], [1.0], [0.1], [2], 2),  # no numbers
        report_of([1], [0], [1.0], [0.1], [1], 2, numbers=2),  # of one of them it is not said whose it is
        report_of([1], [0], [1.0], [0.1], [-1], 0),
        report_of([1, 2], [0], [1.0], [0.1], [2], 2, numbers=2),
        report_of([1], [0, 1], [1.0], [0.1], [2], 2, numbers=2),
        report_of([1], [0], [1.0, 1.0], [0.1], [2], 2, numbers=2),
        report_of([1], [0], [1.0], [0.1, 0.1], [2], 2, numbers=2),
        report_of([1], [0], [1.0], [0.1], [1, 1], 2, numbers=2),
        packed([list(STATE)[:3], 0, [], [], [], []]),
        packed([7, 0, [], [], [], []]),
        report_of([1], [0]),
    ],
)
def test_damaged_reports_say_so(frame):
    with pytest.raises(DAMAGE):
        Report.decode(frame)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_bit_that_flipped_is_damage_or_another_frame(data):
    frame = bytearray(b"".join(Offers([Offer(1, 1.0, [ids(1, 2), ids(3)])], [4]).encode()))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(DAMAGE):
        Offers.decode(bytes(frame))
