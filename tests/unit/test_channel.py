"""The wire between Router and replica, over real sockets on loopback."""

import asyncio
import contextlib
import inspect

import numpy as np
import pytest

from deployments.embedding.frames import Answered, Offer, Offers, PassAnswers, Report
from deployments.embedding.link import Channel, Refused
from deployments.embedding.scheduler.state import ReplicaState
from deployments.errors import EngineBroken, EngineFailed
from deployments.serving import connections as channels
from deployments.serving.connections import Server, reach
from deployments.serving.frames import HEAD

HOST = "127.0.0.1"
STATE = ReplicaState(0.0, 0.0, 0.0, 0, 0, 0, 0, (0.0, 0.0, 0.0, 0.0), 1.0, 0.0, (0, 0, 0))


class Replica:
    """A server that keeps what it hears; the test says what it answers."""

    def __init__(self):
        self.heard, self.gone, self.client = [], [], None
        self.server = Server(HOST, self.offers, self.gone.append, Offers.decode)

    def offers(self, client, offers):
        self.client = client
        self.heard.append(offers)

    def tell(self, **what):
        self.client.send(Report(STATE, len(self.heard), **what))


class Ends:
    """Both ends of one connection."""

    async def __aenter__(self):
        self.replica, self.reports, self.lost = Replica(), [], []
        self.port = await self.replica.server.start()
        self.channel = await self.open()
        return self

    async def open(self, secret=None):
        shown = secret or self.replica.server.secret
        return await reach(lambda: Channel(self.reports.append, self.lost.append), (HOST, self.port), shown)

    async def offer(self, *sizes, **how):
        pending = [self.channel.offer(Offer(0, 1.0, [np.array([7, 8], np.int32)] * size, **how)) for size in sizes]
        await until(lambda: self.replica.heard and self.replica.heard[-1].offers)
        return pending

    async def __aexit__(self, *_):
        self.channel.close()
        self.replica.server.close()
        await asyncio.sleep(0.01)


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.001)


def over(test):
    async def whole(**given):
        async with asyncio.timeout(20), Ends() as ends:
            await test(ends, **given)

    _, *others = inspect.signature(test).parameters.values()

    def sync(**given):
        asyncio.run(whole(**given))

    sync.__signature__ = inspect.Signature(others)
    return sync


def one(number, query=0, value=1.0):
    return PassAnswers.of_one(Answered(number, query, np.full(2, value, np.float32), 1.0, 0.1, 0.2))


@over
async def test_what_is_said_in_one_turn_of_the_loop_goes_in_one_frame(ends):
    first, second = await ends.offer(1, 3)
    ends.channel.call_off(first)
    ends.channel.confirm(second)
    ends.channel.note_refused(0.5)
    ends.channel.configure({"router": "r"})
    ends.channel.ask()
    await until(lambda: len(ends.replica.heard) == 2)
    offers, rest = ends.replica.heard
    assert [(offer.number, len(offer.queries)) for offer in offers.offers] == [(1, 1), (2, 3)]
    assert (rest.called_off, rest.confirmed, rest.refused_s, rest.settings, rest.asks) == (
        [1], [2], {None: 0.5}, {"router": "r"}, True,
    )  # fmt: skip
    assert ends.channel.frames == 2


@over
async def test_in_a_long_turn_of_the_loop_frames_leave_meanwhile(ends):
    """Or a replica would take the silence for the end of a burst."""
    await ends.offer(1)
    ends.channel.configure({"router": "r"})
    ends.channel._out_since -= 1.0  # so long ago this turn has begun
    ends.channel.offer(Offer(0, 1.0, [np.array([7], np.int32)]))
    ends.channel.note_refused(0.5)  # waits for the next frame
    await until(lambda: len(ends.replica.heard) == 2)
    await asyncio.sleep(0.01)
    await ends.offer(1)
    await until(lambda: len(ends.replica.heard) == 3)
    assert [[offer.number for offer in frame.offers] for frame in ends.replica.heard] == [[1], [2], [3]]
    assert [frame.refused_s for frame in ends.replica.heard] == [{}, {}, {None: 0.5}]


@over
async def test_work_that_a_router_refused_waits_for_the_next_frame(ends):
    ends.channel.note_refused(0.5)
    ends.channel.note_refused(0.25)
    await asyncio.sleep(0.01)
    assert ends.replica.heard == []
    await ends.offer(1)
    assert ends.replica.heard[0].refused_s == {None: 0.75}


@over
async def test_refused_admitted_answered_and_failed(ends):
    refused, never, answered, failed = await ends.offer(1, 1, 2, 1)
    ends.replica.tell(
        refused=[(1, False), (2, True)],
        failed=[(4, "the engine failed: out of memory")],
        answered=[one(3, 1, 5.0), one(3, 0, 4.0)],
    )
    assert await refused.outcome == Refused(never=False)
    assert await never.outcome == Refused(never=True)
    assert [a.numbers[0] for a in await answered.outcome] == [4, 5]  # in the order of the queries
    with pytest.raises(EngineFailed, match="out of memory"):
        await failed.outcome
    assert ends.channel.pending == {}
    assert len(ends.reports) == 1


@over
async def test_what_failed_by_the_engines_fault_or_beside_another_may_be_answered_elsewhere(ends):
    offers = await ends.offer(1, 1, 1)
    ends.replica.tell(failed=[(1, "no"), (2, "no"), (3, "no")], broken=[2], suspect=[3])
    await asyncio.wait([offer.outcome for offer in offers])
    assert [type(offer.outcome.exception()) for offer in offers] == [EngineFailed, EngineBroken, EngineBroken]


@over
async def test_of_an_offer_in_parts_the_first_are_admitted(ends):
    some, none, whole = await ends.offer(5, 5, 2, partial=True)
    ends.replica.tell(admitted=[(1, 2), (2, 0), (3, 2)], answered=[one(3, 0), one(1, 0)])
    assert await some.admitted == 2
    assert await none.admitted == 0
    assert await none.outcome == Refused()
    assert await whole.admitted == 2
    assert not some.ended
    ends.replica.tell(answered=[one(1, 1), one(3, 1)])
    assert len(await some.outcome) == 2
    assert len(await whole.outcome) == 2
    assert ends.channel.pending == {}


@over
async def test_a_caller_that_has_gone_is_no_error(ends):
    first, second = await ends.offer(1, 1)
    first.outcome.cancel()
    second.outcome.cancel()
    ends.channel.call_off(second)
    ends.replica.tell(answered=[one(1), one(2)])
    await until(lambda: ends.reports)
    assert ends.channel.pending == {}
    (third,) = await ends.offer(1)
    ends.replica.tell(answered=[one(3)])
    assert len(await third.outcome) == 1


@over
async def test_calling_off_what_a_broken_connection_had_leaves_the_next_ones_alone(ends):
    """Numbers begin anew with each connection."""
    (old,) = await ends.offer(1)
    ends.channel.transport.abort()
    await until(lambda: ends.lost)
    ends.channel = await ends.open()
    (new,) = await ends.offer(1)
    assert old.number == new.number
    ends.channel.call_off(old)
    ends.channel.confirm(old)
    await asyncio.sleep(0.01)
    assert len(ends.replica.heard) == 2
    ends.replica.tell(answered=[one(new.number)])
    assert len(await new.outcome) == 1


@over
async def test_the_connections_end_hands_over_what_is_placed(ends):
    first, second = await ends.offer(1, 1)
    ends.replica.tell(answered=[one(1)])
    await first.outcome
    ends.replica.client.transport.abort()
    await until(lambda: ends.lost)
    assert ends.lost == [[second]]
    assert not second.ended  # whether it still runs there, nobody knows yet


@over
async def test_the_replica_hears_of_a_routers_end_once(ends):
    await ends.offer(1)
    ends.channel.close()
    await until(lambda: ends.replica.gone)
    assert ends.replica.gone == [ends.replica.client]


@over
async def test_a_damaged_frame_ends_its_own_connection_only(ends):
    other = await ends.open()
    lost = len(ends.lost)
    await ends.offer(1)
    other.transport.write(HEAD.pack(20, 4) + b"[[7]        ")
    await until(lambda: len(ends.lost) > lost)
    ends.replica.tell(answered=[one(1)])
    await until(lambda: ends.reports)
    assert not ends.channel.transport.is_closing()


@over
async def test_what_goes_wrong_with_a_good_frame_is_our_fault_and_is_logged_with_its_place(ends, caplog):
    def offers(client, offers):
        raise ZeroDivisionError

    ends.replica.server.on_offers = offers
    ends.channel.ask()
    await until(lambda: ends.lost)
    (said,) = caplog.records
    assert (said.levelname, said.exc_info[0]) == ("ERROR", ZeroDivisionError)
    assert "damaged" not in said.message


@pytest.mark.parametrize("head", [HEAD.pack(4, 0), HEAD.pack(2**31, 0)])
@over
async def test_a_frame_of_an_impossible_size_ends_it(ends, head):
    ends.channel.transport.write(head)
    await until(lambda: ends.lost)


@pytest.mark.parametrize("secret", ["wrong", "x" * 64, "x" * 5000])
@over
async def test_who_does_not_know_the_secret_is_not_heard(ends, secret):
    stranger = await ends.open(secret)
    stranger.ask()
    await until(lambda: ends.lost)
    await asyncio.sleep(0.01)
    assert ends.replica.heard == []
    assert ends.replica.gone == []


@over
async def test_of_strangers_the_oldest_gives_way(ends, monkeypatch):
    monkeypatch.setattr(channels, "_MOST_UNAUTHENTICATED", 3)
    await ends.offer(1)  # known: no stranger any more
    peers = [await asyncio.open_connection(HOST, ends.port) for _ in range(5)]
    for reader, _ in peers[:2]:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert len(ends.replica.server._unauthenticated) == 3
    assert not ends.channel.transport.is_closing()
    for _, writer in peers:
        writer.close()
    await until(lambda: not ends.replica.server._unauthenticated)
