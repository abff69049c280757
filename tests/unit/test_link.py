"""A Router's connection to one replica, and which replicas it follows: what is lost when, over a scripted channel."""

import asyncio
import math
import re
from types import SimpleNamespace

import pytest

from deployments.embedding.config import PoolConfig
from deployments.embedding.frames import Answered, Offer, PassAnswers, Report
from deployments.embedding.link import PendingOffer
from deployments.errors import ReplicaLost
from deployments.serve_adapter import membership
from deployments.serving.frames import WIRE
from tests.kit.scripted_replicas import STATE, pool_of

ANSWERED = Answered(1, 0, [], 1.0, 0.0, 0.0)
ANSWER = PassAnswers.of_one(ANSWERED)
ABOUT = {"node": "n", "wire": WIRE, "channel": {"host": "h", "port": 7, "secret": "s"}}
LOST = r"the accelerator pool lost replica a while the query was on it"


class ScriptedChannel:
    """`told`: what went to the replica."""

    is_open = True

    def __init__(self, on_report, on_lost):
        self._on_report, self._on_lost = on_report, on_lost
        self.pending, self.frames, self.told = {}, 0, []

    def __getattr__(self, word):
        return lambda *what: self.told.append((word, *what))

    def offer(self, offer):
        self.frames += 1
        pending = self.pending[self.frames] = PendingOffer(offer, asyncio.get_running_loop())
        return pending

    def reports(self, seen=0, **what):
        self._on_report(Report(STATE, seen, **what))

    def breaks(self):
        left, self.pending = list(self.pending.values()), {}
        self._on_lost(left)

    @property
    def asked(self):
        return self.told.count(("ask",))


class Followed:
    """A pool and its channels. `outcomes`: of attempts to connect; None: it is reached."""

    def __init__(self, *outcomes):
        self.outcomes, self.channels, self.tried, self.changes = list(outcomes), [], [], []
        self.pool = pool_of("accelerator", on_change=lambda: self.changes.append(len(self.pool.live)))
        self.pool.open_channel = self.open

    async def open(self, address, secret, on_report, on_lost):
        assert (address, secret) == (("h", 7), "s")
        self.tried.append(round(asyncio.get_running_loop().time(), 6))
        if self.outcomes and (outcome := self.outcomes.pop(0)):
            raise outcome
        self.channels.append(ScriptedChannel(on_report, on_lost))
        return self.channels[-1]

    async def follow(self, *names, died=None):
        self.pool.follow(dict.fromkeys(names, ABOUT), died)
        await asyncio.sleep(1e-4)
        return self.pool.links.get("a")

    async def live(self):
        link = await self.follow("a")
        self.channels[-1].reports()
        await asyncio.sleep(0.01)
        return link, self.channels[-1]


def offer(*lengths, left_s=1.0, bulk=False):
    return Offer(0, left_s, [range(tokens) for tokens in lengths], bulk=bulk)


async def test_a_replica_that_comes_is_configured_and_lives_with_its_first_report():
    world = Followed()
    link = await world.follow("a")
    (channel,) = world.channels
    assert channel.told == [("configure", world.pool.policy), ("ask",)]
    assert (link.is_live, world.pool.live, link.view.rank[0]) == (False, [], False)
    world.pool.configure(PoolConfig(queue_depth=7), {})
    assert channel.told[2:] == [("configure", world.pool.policy)]
    channel.reports()
    assert (link.is_live, world.pool.live, world.changes) == (True, [link], [0, 1])
    assert (link.answered, link.bulk_parts, link.bulk_again_at) == (0, 0, 0.0)
    channel.reports(answered=[ANSWER, ANSWER])
    assert (link.answered, world.changes) == (2, [0, 1])
    assert link.describe() == {
        "node": "n", "wire": WIRE, "channel": "port 7",
        "queries": 2, "in_flight": 0, "waiting": 0, "most_in_flight": 0, "batches": 0,
        "opens_s": 0.0, "slowdown": 1.0, "safety_margin": 0.0, "ejected_s": 0.0,
        "refusals": {"full": 0, "never": 0, "closed": 0},
    }  # fmt: skip
    link.view.hear(0.0, STATE._replace(opens_s=float("inf"), slowdown=1.23456, margin=0.12345, refusals=(1, 2, 3)), 0)
    shown = link.describe()
    assert [shown[key] for key in ("opens_s", "slowdown", "safety_margin")] == [None, 1.2346, 0.1235]
    assert shown["refusals"] == {"full": 1, "never": 2, "closed": 3}


@pytest.mark.parametrize(("version", "is_reached"), [(-2, False), (-1, True), (2, False)])
async def test_a_replica_of_another_version_is_refused_once_and_a_neighbour_is_reached(version, is_reached, caplog):
    world = Followed()
    for _ in range(2):
        world.pool.follow({"a": {**ABOUT, "wire": WIRE + version}}, None)
        await asyncio.sleep(5.0)
    assert len(world.channels) == is_reached
    assert caplog.text.count("upgrade through consecutive versions of windve") == (not is_reached)
    world.pool.follow({}, None)
    assert world.pool.links == {}


async def test_what_is_sent_counts_until_it_is_read_and_a_silent_replica_is_asked():
    link, channel = await Followed().live()
    link.offer(offer(75, 25), [0])
    assert link.view.finish_s(0.0, []) == pytest.approx(0.3, abs=1e-3)
    await asyncio.sleep(0.24)
    link.offer(offer(50), [0])
    assert link.view.finish_s(0.0, []) == pytest.approx(0.35, abs=1e-3)
    assert channel.asked == 1
    await asyncio.sleep(0.3)
    assert channel.asked == 2
    await asyncio.sleep(2.0)
    assert channel.asked == 2  # once is enough
    channel.reports(seen=1)
    await asyncio.sleep(0.6)
    assert channel.asked == 3
    channel.reports(seen=2)
    await asyncio.sleep(2.0)
    assert channel.asked == 4  # it has read all, and answered nothing
    channel.pending.clear()
    channel.reports(seen=2)
    await asyncio.sleep(2.0)
    assert channel.asked == 4
    link.offer(offer(50), [0])
    await asyncio.sleep(0.3)
    assert channel.asked == 5


@pytest.mark.parametrize(
    ("slo_s", "hung_s"),
    # It needs 0.275 s for 75 tokens: twice that, or half of the SLO; it is looked at every quarter of a second.
    [(1.0, 0.75), (1.49, 0.75), (1.51, 1.0), (0.1, 0.75)],
)
async def test_a_replica_that_answers_nothing_for_twice_what_it_needs_hangs(slo_s, hung_s, caplog):
    world = Followed()
    link, channel = await world.live()
    world.pool.policy["slo_s"] = slo_s
    await asyncio.sleep(2.0)
    first = link.offer(offer(75), [0])
    await asyncio.sleep(hung_s - 0.1)
    second = link.offer(offer(75), [0])
    assert not first.overdue
    await asyncio.sleep(0.15)
    assert (first.overdue, second.overdue, first.ended, channel.told.count(("call_off", first))) == (
        True,
        True,
        False,
        0,
    )
    third = link.offer(offer(75), [0])
    await asyncio.sleep(1.0)
    assert third.overdue
    (quiet_s,) = re.findall("has answered nothing for (.*?) s", caplog.text)
    assert float(quiet_s) == pytest.approx(hung_s, abs=0.051)
    first.answer(ANSWERED)
    assert len(await first.outcome) == 1


async def test_of_a_replica_that_hangs_what_may_wait_stands_and_what_is_not_admitted_is_lost():
    world = Followed()
    link, channel = await world.live()
    world.pool.policy["slo_s"] = 1.0
    kinds = [{"bulk": True}, {"partial": True}, {"partial": True}]
    bulk, held, unknown = [link.offer(Offer(0, 1.0, [range(75)], **kind), [0]) for kind in kinds]
    held.admit(1)
    await asyncio.sleep(2.0)
    assert [one.overdue for one in (bulk, held, unknown)] == [False, True, False]
    with pytest.raises(ReplicaLost, match="the accelerator pool's replica a makes no progress"):
        await unknown.outcome
    assert ("call_off", unknown) in channel.told


async def test_what_is_on_a_replica_that_cannot_be_reached_is_overdue_when_it_would_be_on_a_hung_one():
    """Until then its client waited for `request_timeout_s`, whatever its deadline."""
    world = Followed(None, *[TimeoutError()] * 9)
    link, channel = await world.live()
    world.pool.policy["slo_s"] = 1.0
    admitted, bulk, undecided = [
        link.offer(Offer(0, 1.0, [range(75)], **kind), [0]) for kind in ({}, {"bulk": True}, {"partial": True})
    ]
    hangs_at = link._hangs_at - asyncio.get_running_loop().time()
    await asyncio.sleep(0.1)
    channel.breaks()
    await asyncio.sleep(hangs_at - 0.11)
    assert [one.overdue or one.ended for one in (admitted, bulk, undecided)] == [False] * 3
    await asyncio.sleep(0.02)
    assert [one.overdue for one in (admitted, bulk, undecided)] == [True, False, False]
    with pytest.raises(ReplicaLost, match="the accelerator pool's replica a makes no progress"):
        await undecided.outcome
    await world.follow(died="a")
    assert admitted.ended
    assert bulk.ended


async def test_what_is_on_a_replica_that_was_reached_again_meanwhile_has_time_of_its_own():
    world = Followed(None, None, *[TimeoutError()] * 9)
    link, channel = await world.live()
    world.pool.policy["slo_s"] = 1.0
    lost = link.offer(offer(75), [0])
    hangs_s = link._hangs_at - asyncio.get_running_loop().time()
    channel.breaks()
    await asyncio.sleep(0.3)
    world.channels[1].reports()
    with pytest.raises(ReplicaLost, match=LOST):
        await lost.outcome
    pending = link.offer(offer(75), [0])
    world.channels[1].breaks()
    await asyncio.sleep(hangs_s - 0.01)
    assert not pending.overdue
    await asyncio.sleep(0.02)
    assert pending.overdue


@pytest.mark.parametrize(
    ("report", "is_hung"),
    [
        ({"answered": [ANSWER]}, False),
        ({"state": STATE._replace(runs=1)}, False),
        ({}, True),  # it lives, and its device does not answer
    ],
)
async def test_a_replica_that_gets_on_does_not_hang(report, is_hung):
    world = Followed()
    link, channel = await world.live()
    world.pool.policy["slo_s"] = 1.0
    pending = link.offer(offer(75), [0])
    await asyncio.sleep(0.45)
    channel._on_report(Report(**{"state": STATE, "seen": 1, **report}))
    await asyncio.sleep(0.4)
    assert pending.overdue == is_hung
    await asyncio.sleep(0.4)
    assert pending.overdue


async def test_failures_by_the_engines_fault_are_counted_until_something_is_answered():
    link, channel = await Followed().live()
    counts = []
    for report in (
        {"broken": [1, 2]},
        {"failed": [(3, "no")]},
        {"broken": [4]},
        {"suspect": [5]},  # it is well
        {"broken": [6]},
        {"answered": [ANSWER], "suspect": [7]},
        {"broken": [8]},
        {"answered": [ANSWER]},
    ):
        channel.reports(**report)
        counts.append(link.view.outlier.failures)
    assert counts == [2, 2, 3, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("before", "allowed_s", "sizes"),
    [
        ([], 0.5, [75, 20]),  # nothing else says what is usual
        ([0.5], 0.5, [75, 20]),
        ([1.0], 0.9, ()),
        ([9.0], 0.96, [75, 20]),  # the SLO at most
        ([9.0], 0.9, ()),
    ],
)
@pytest.mark.parametrize("is_offered", [True, False])
async def test_no_sizes_are_told_of_refused_queries_with_less_time_than_usual(before, allowed_s, sizes, is_offered):
    link, channel = await Followed().live()
    link.pool.policy["slo_s"] = 1.0
    for left_s in before:
        if is_offered:
            link.offer(offer(75, left_s=left_s), [0])
        else:
            link.refuse_here([75], left_s, None)
    link.offer(offer(75, left_s=0.1, bulk=True), [0])  # says nothing
    del channel.told[:]
    link.refuse_here([75, 20], allowed_s, None)
    assert channel.told == [("note_refused", link.view.model.work([75, 20]), None, sizes)]


async def test_what_is_said_of_an_offer_goes_to_its_connection():
    world = Followed(None, *[OSError()] * 9)
    link, channel = await world.live()
    link.pool.policy["slo_s"] = 1.0
    pending = link.offer(offer(75), [0])
    del channel.told[:]
    link.confirm(pending)
    link.refuse_here([75, 20, 795], 1.0, None)  # an idle one would refuse the last, too
    pending.call_off()
    refused = ("note_refused", link.view.model.work([75, 20]), None, [75, 20])
    assert channel.told == [("confirm", pending), refused, ("call_off", pending)]
    assert pending.ended
    channel.breaks()
    for word, what in (
        ("confirm", [pending]),
        ("refuse_here", [[75, 20], 1.0, None]),
        ("call_off", [pending]),
        ("configure", []),
    ):
        getattr(link, word)(*what)
    await link.ask_state()
    assert len(channel.told) == 3


async def test_its_state_is_waited_for_half_a_second_at_most():
    loop, (link, channel) = asyncio.get_running_loop(), await Followed().live()
    for report_s, took_s in ((0.3, 0.3), (0.4, 0.4), (0.7, 0.5)):
        began, asked = loop.time(), channel.asked
        loop.call_later(report_s, channel.reports)
        await asyncio.gather(link.ask_state(), link.ask_state())
        assert (loop.time() - began, channel.asked) == (pytest.approx(took_s, abs=1e-3), asked + 2)
        await asyncio.sleep(1)


async def test_all_who_ask_a_replica_that_answers_nothing_wait_for_one_report():
    link, channel = await Followed().live()
    await link.ask_state()
    waited_for = link._asking
    for _ in range(3):
        gives_up = asyncio.ensure_future(link.ask_state())
        await asyncio.sleep(0.1)
        gives_up.cancel()
        await link.ask_state()
        assert link._asking is waited_for
    channel.reports()
    assert waited_for.done()
    assert link._asking is None


@pytest.mark.parametrize(
    ("outcomes", "died", "is_lost_at"),
    [
        ([None, None], None, 0.0),  # it is reached again, and reports: it has dropped them
        ([None, TimeoutError(), TimeoutError(), None], None, 0.3),
        ([None, ConnectionRefusedError(), TimeoutError(), TimeoutError()], None, 0.0),  # nobody listens there
        ([None, *[TimeoutError()] * 9], "a", 0.5),  # Serve says so
    ],
)
async def test_what_was_there_when_a_connection_broke_is_lost_when_it_is_known_not_to_run(outcomes, died, is_lost_at):
    world = Followed(*outcomes)
    link, channel = await world.live()
    pending = link.offer(offer(75), [0])
    channel.breaks()
    assert (link.is_live, link.view.state, world.pool.live) == (False, None, [])
    found = []
    for step in range(10):
        await asyncio.sleep(0.01)
        if died and step == 5:
            await world.follow(died=died)
        if len(world.channels) > 1 and not link.is_live:
            world.channels[1].reports()
        if pending.ended:
            found.append(step / 10)
        await asyncio.sleep(0.09)
    assert found[0] == pytest.approx(is_lost_at, abs=0.11)
    with pytest.raises(ReplicaLost, match=LOST):
        pending.outcome.result()


async def test_a_replica_is_tried_again_and_again(caplog):
    world = Followed(TimeoutError(), ConnectionRefusedError("no"), *[OSError()] * 6)
    await world.follow("a")
    await asyncio.sleep(9.2)
    assert world.tried == [pytest.approx(at, abs=1e-6) for at in (0, 0.1, 0.3, 0.7, 1.5, 3.1, 5.1, 7.1, 9.1)]
    assert len(world.channels) == 1
    (told,) = [text for text in caplog.messages if "cannot reach" in text]
    assert "the accelerator pool's replica a at h:7 (no answer)" in told


async def test_a_connection_that_breaks_before_it_reports_is_made_again_ever_later():
    world = Followed()
    link, channel = await world.live()
    channel.breaks()
    await asyncio.sleep(1e-4)
    for wait_s in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        world.channels[-1].breaks()
        await asyncio.sleep(wait_s + 1e-3)
        assert world.tried[-1] - world.tried[-2] == pytest.approx(wait_s, abs=2e-3)
    world.channels[-1].reports()
    assert link.is_live
    world.channels[-1].breaks()
    await asyncio.sleep(1e-3)
    assert world.tried[-1] - world.tried[-2] < 0.01  # at once


async def test_a_replica_that_serve_counts_out_answers_what_it_has():
    world = Followed()
    link, channel = await world.live()
    pending = link.offer(offer(75), [0])
    asked = channel.asked
    await world.follow()
    assert (world.pool.links, world.pool.live, channel.asked) == ({}, [], asked + 1)
    channel.reports()
    await asyncio.sleep(2.0)
    assert ("close",) not in channel.told
    assert await world.follow("a") is link  # counted in again
    assert (channel.told[-1], world.pool.live) == (("configure", world.pool.policy), [link])
    await world.follow()
    channel.pending.pop(1)
    pending.answer(ANSWERED)
    channel.breaks()
    assert await pending.outcome
    assert (world.pool._draining, len(world.tried)) == ({}, 1)


@pytest.mark.parametrize("space", ["another", None])
async def test_a_replica_of_another_model_is_never_reached(space, caplog):
    caplog.set_level("INFO", "ray.serve")
    world = Followed()
    world.pool.space = "mine"
    neighbours = {"a": {**ABOUT, "space": space} if space else ABOUT, "b": {**ABOUT, "space": "mine"}}
    world.pool.follow(neighbours, None)
    await asyncio.sleep(5.0)
    assert len(world.channels) == 1
    world.channels[0].reports()
    assert [link.view.replica for link in world.pool.live] == ["b"]
    assert caplog.text.count("serves another model") == 1


@pytest.mark.parametrize(
    ("needed_s", "patience_s", "left_s"), [(0.0, 5.0, 1.0), (2.5, 5.0, 3.0), (99.0, 5.0, 5.0), (19.5, math.inf, 20.0)]
)
async def test_one_that_serve_stops_stays_while_nothing_else_answers(needed_s, patience_s, left_s):
    world, now = Followed(), asyncio.get_running_loop().time
    link, channel = await world.live()
    stopped = now()
    world.pool.nothing_else_answers, world.pool.patience_s = lambda: now() < stopped + needed_s, patience_s
    await world.follow()
    await asyncio.sleep(left_s - 0.01)
    assert (world.pool.live, world.pool.has_listed_replica) == ([link], False)
    await world.follow()  # Serve says it again
    await asyncio.sleep(0.02)
    assert (world.pool.live, channel.told[-1]) == ([], ("close",))


async def test_one_that_serve_stops_is_let_go_once_it_has_answered():
    """It ends only then."""
    world = Followed()
    link, channel = await world.live()
    pending = link.offer(offer(75), [0])
    await world.follow()
    await asyncio.sleep(0.5)
    channel.reports()  # it does not hang
    await asyncio.sleep(9.0)
    assert ("close",) not in channel.told
    channel.pending.pop(1)
    pending.answer(ANSWERED)
    await asyncio.sleep(0.1)
    assert channel.told[-1] == ("close",)
    assert world.pool._draining == {}


async def test_one_that_is_broken_frees_its_device_at_once():
    world = Followed()
    link, channel = await world.live()
    world.pool.nothing_else_answers = lambda: True
    link.view.outlier.until = asyncio.get_running_loop().time() + 60
    await world.follow()
    assert (world.pool.live, channel.told[-1]) == ([], ("close",))


@pytest.mark.parametrize("died", [False, True])
async def test_one_that_stays_and_dies_or_is_counted_in_again(died):
    world = Followed()
    link, channel = await world.live()
    world.pool.nothing_else_answers = lambda: True
    await world.follow()
    if died:
        channel.breaks()
        await asyncio.sleep(10.0)
        assert (world.pool.links, world.pool.live) == ({}, [])
    else:
        assert await world.follow("a") is link
        await asyncio.sleep(10.0)
        assert (world.pool.live, world.pool.has_listed_replica) == ([link], True)


async def test_one_that_has_nothing_ends_at_once():
    world = Followed()
    _, channel = await world.live()
    await world.follow()
    assert channel.told[-1] == ("close",)
    assert world.pool._draining == {}


@pytest.mark.parametrize(("reports", "is_lost"), [(False, True), (True, False)])
async def test_a_hung_one_that_serve_counts_out_is_given_up(reports, is_lost):
    """Serve ends its process half a minute later; its queries do not wait for that."""
    world = Followed()
    link, channel = await world.live()
    pending = link.offer(offer(75), [0])
    await world.follow()
    if reports:
        channel.reports()
    await asyncio.sleep(1.49)
    assert not pending.ended
    await asyncio.sleep(0.02)
    assert pending.ended == is_lost
    assert (("close",) in channel.told) == is_lost
    assert (world.pool._draining == {}) == is_lost
    if is_lost:
        with pytest.raises(ReplicaLost, match=LOST):
            pending.outcome.result()


async def test_one_that_breaks_while_it_is_counted_out_has_ended():
    world = Followed()
    link, channel = await world.live()
    pending = link.offer(offer(75), [0])
    await world.follow()
    channel.breaks()
    with pytest.raises(ReplicaLost, match=LOST):
        await pending.outcome
    await asyncio.sleep(1)
    assert (world.pool._draining, len(world.tried)) == ({}, 1)


async def test_one_that_is_dead_for_sure_is_gone_and_not_taken_in_again():
    world = Followed()
    link, channel = await world.live()
    pending = link.offer(offer(75), [0])
    await world.follow("a", "b", died="a")
    assert set(world.pool.links) == {"b"}
    assert channel.told[-1] == ("close",)
    with pytest.raises(ReplicaLost, match=LOST):
        await pending.outcome
    await world.follow("b")
    channel.breaks()  # its end is known already
    assert world.changes == [0, 1, 0, 0]


async def test_a_pool_follows_what_serve_says_and_wakes_its_handle(monkeypatch, caplog):
    woken, watched = [], {}
    monkeypatch.setattr(membership, "watch", watched.__setitem__)

    async def remote():
        woken.append(True)
        raise RuntimeError("not yet")

    world = Followed()
    caplog.set_level("INFO", "ray.serve")
    world.pool._handle = SimpleNamespace(options=lambda method_name: SimpleNamespace(remote=remote))
    world.pool.connect()
    await asyncio.sleep(0.01)
    assert woken
    assert "first call failed: not yet" in caplog.text
    watched["accelerator"]({"a": ABOUT}, None)
    await asyncio.sleep(0.01)
    assert set(world.pool.links) == {"a"}
    assert "the accelerator pool has 1 live replicas" in caplog.text
    assert not world.pool._tasks or all(not task.done() for task in world.pool._tasks)
