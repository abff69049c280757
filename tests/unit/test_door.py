"""How many requests a Router takes at once."""

import asyncio
import math
from contextlib import ExitStack

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission.door import SPARE, VISITS, Door, Visits
from deployments.embedding.request import UsualRequest
from deployments.serve_adapter.grpc_handlers import PROXY, _at_once, _counted, _counted_stream, _with_its_status
from deployments.serving.haproxy_agent import HAProxyAgent, Situation
from deployments.serving.metrics import ROUTER_GAUGES
from serve_app.web.asgi import Doorway

HERE, THERE = ("http", b"here"), ("http", b"there")


STAY = ExitStack()  # keeps visits open


def door_with(**in_flight):
    """A door with so many requests of each source, which stay."""
    door = Door(Visits())
    for name, count in in_flight.items():
        for _ in range(count):
            STAY.enter_context(door.visits.visit(("http", name.encode())))
    return door


@pytest.mark.parametrize(
    ("in_flight", "placed", "room", "takes"),
    [
        (0, 0, math.inf, 400 + 27),  # idle: what it reads in a fifth of the SLO, and a fifteenth more
        (0, 0, 30.0, 30 + 2),  # no more than the replicas have room for
        (40, 40, 30.0, 70 + 5),  # what waits for a replica keeps its place
        (40, 15, 30.0, 45 + 3),  # but 25 are in hand
        (40, 15, 30.9, 45 + 4),  # whole requests
        (40, 0, 30.0, 40),  # more in hand than it should have: none is sent away, none added
        (32, 0, 30.0, 32),  # the spare places are taken
        (500, 100, math.inf, 500 + 34),
        (3, 3, 0.0, 3 + 1),  # the replicas are full
        (0, 0, 0.0, 1),  # 0 would mean any number to HAProxy
    ],
)
def test_it_takes_what_is_in_flight_and_what_has_room(in_flight, placed, room, takes):
    door = door_with(here=in_flight)
    assert door.takes(HERE, 0.0, placed=placed, room=room, slo_s=1.0) == takes


@pytest.mark.parametrize(("slo_s", "takes"), [(0.1, 43), (1.0, 427), (10.0, 4267), (1e-6, 2)])
def test_a_shorter_slo_takes_fewer(slo_s, takes):
    assert Door(Visits()).takes(HERE, 0.0, placed=0, room=math.inf, slo_s=slo_s) == takes


def test_what_waits_for_its_client_is_not_in_hand():
    door = door_with(here=5)
    with door.visits.visit(HERE), door.visits.wait():
        assert door.in_hand(placed=2) == 3
        assert door.takes(HERE, 0.0, placed=2, room=10.0, slo_s=1.0) == 14
    assert door.in_hand(placed=2) == 3
    assert door.in_hand(placed=7) == 0  # counted a moment apart


def test_sources_that_are_gone_are_forgotten():
    """HAProxies are replaced, each under a new name, and a client may name ever new ones."""
    visits = Visits()
    with visits.visit("here"):
        for number in range(2500):
            with visits.visit(("http", b"here %d" % number)):
                pass
        assert visits.in_flight["here"] == visits.total == 1
    assert len(visits.entered) <= 1001
    assert visits.entered.total() == 2501


def test_what_it_tells_of_itself():
    """Nothing until a HAProxy has asked."""
    door = door_with(here=5)
    situation = Situation(placed=2, room=10.9, slo_s=1.0)
    agent = HAProxyAgent(door.visits, lambda: situation)
    assert agent.door.describe(**situation._asdict()) == {}

    async def ask():
        return agent.takes("http", b"here")

    takes = asyncio.run(ask())
    told = agent.door.describe(**situation._asdict())
    assert told == {"in_hand": 3, "free": 8}  # nothing of what a request costs, until that has been measured
    assert takes == 5 + told["free"]
    measured(door, (0.0, 5.0, 0), (0.1, 5.1, 3))
    assert door.describe(**situation._asdict()) == told
    short = door_with(here=600)
    measured(short, (0.0, 5.0, 0), (0.1, 5.1, 100))
    told = short.describe(**situation._asdict())
    assert told["read_s"] == 0.00065
    assert {"busy", *told} == ROUTER_GAUGES.keys()


def test_proxies_that_send_share_the_room():
    door = door_with(here=10, there=2)
    ask = {"placed": 12, "room": 20.0, "slo_s": 1.0}
    assert door.takes(HERE, 0.0, **ask) == 33  # it does not know of another yet
    assert door.takes(THERE, 0.0, **ask) == 13
    assert door.takes(HERE, 0.0, **ask) == 21
    assert door.takes(("grpc", b"here"), 0.0, **ask) == 7  # has sent nothing: takes nothing from the others
    assert door.takes(HERE, 0.0, **ask) == 21
    assert door.takes(HERE, 2.1, **ask) == 33  # neither has the other for two seconds


def measured(door, *looks):
    """What a request costs after these looks: (time, CPU seconds since the start, requests at replicas by then)."""
    for now, cpu_s, placed in looks:
        door.measure(now, cpu_s, placed=placed, slo_s=1.0)
    return door.read_s


def test_a_router_that_is_short_learns_what_a_request_costs():
    assert measured(door_with(here=600), (0.0, 5.0, 0), (0.1, 5.1, 100)) == pytest.approx(0.00065)  # 0.3 of the way
    door = door_with(here=4000)
    measured(door, *((0.1 * look, 0.1 * look, 50 * look) for look in range(40)))  # 2 ms each
    assert door.takes(HERE, 9.0, placed=4000, room=math.inf, slo_s=1.0) == 4374


@pytest.mark.parametrize(
    ("in_hand", "handled"),
    [(150, 100), (600, 7)],  # the Router is not short; too few for a measurement so far
)
def test_otherwise_it_learns_nothing(in_hand, handled):
    door = door_with(here=in_hand + handled)
    assert measured(door, (0.0, 0.0, 0), (0.1, 9.0, handled)) == 0.0005


def test_requests_that_cost_much_are_learned_from_few():
    door = door_with(here=600)
    assert measured(door, (0.0, 0.0, 0), (0.9, 0.9, 2), (1.1, 1.0, 2)) == pytest.approx(0.0005 + 0.3 * (0.5 - 0.0005))


@given(
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 50)), max_size=60),
    room=st.floats(0, 1000),
)
def test_together_proxies_get_no_more_than_there_is_room_for(steps, room):
    door, open_visits = Door(Visits()), []
    for name, enters, others in steps:
        if enters:
            visit = door.visits.visit(("http", name.encode()))
            visit.__enter__()
            open_visits.append(visit)
        elif open_visits:
            open_visits.pop(others % len(open_visits)).__exit__(None, None, None)
    sources = [("http", b"a"), ("http", b"b")]
    for source in sources:  # each has asked since it sent something
        door.takes(source, 0.0, placed=0, room=room, slo_s=1.0)
    takes = [door.takes(source, 0.0, placed=len(open_visits), room=room, slo_s=1.0) for source in sources]
    sent = {name for name, enters, _ in steps if enters}
    if len(sent) == 2:
        assert sum(takes) <= len(open_visits) + room + SPARE * (len(open_visits) + room) + 3  # at least one each


def test_http_requests_are_counted_by_the_proxy_that_sent_them():
    door, seen = Door(Visits()), []

    async def app(scope, receive, send):
        seen.append((door.takes(HERE, 0.0, placed=0, room=0.0, slo_s=1.0), door.in_hand(0)))
        while (await receive()).get("more_body"):
            pass

    async def parts():
        for more in (True, True, False):
            yield {"type": "http.request", "body": b"x", "more_body": more}

    async def ask():
        messages = parts()

        async def receive():
            seen.append(door.in_hand(0))
            return await anext(messages)

        scope = {"type": "http", "headers": [(b"x-request-start", b"t=1700000000000000 here")]}
        await Doorway(app, door.visits)(scope, receive, None)

    asyncio.run(ask())
    assert seen == [(1, 1), 1, 0, 0]  # while more of the body is awaited, it is not in hand
    assert door.in_hand(0) == 0


def test_what_is_not_http_is_not_counted():
    door = Door(Visits())

    async def app(scope, receive, send):
        assert door.in_hand(0) == 0

    asyncio.run(Doorway(app, door.visits)({"type": "lifespan"}, None, None))


def test_the_usual_request_follows_the_latest():
    usual = UsualRequest()
    usual.learn(5, 875)
    assert (usual.queries, usual.tokens) == pytest.approx((1.2, 80.0))  # a twentieth of the way


def test_a_refusal_keeps_its_place_in_haproxy_and_needs_nothing_here():
    visits, seen = Visits(), []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": scope["status"], "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(status):
        scope = {"type": "http", "headers": [(b"x-request-start", b"t=1700000000000000 here")], "status": status}

        async def send(message):
            seen.append((message["type"], visits.in_flight[HERE], visits.total))

        call = asyncio.ensure_future(Doorway(app, visits)(scope, None, send))
        await asyncio.sleep(0.01)
        seen.append(("meanwhile", visits.in_flight[HERE], visits.total))
        await call

    asyncio.run(ask(200))
    assert seen == [("http.response.start", 1, 1), ("http.response.body", 1, 1), ("meanwhile", 0, 0)]
    seen.clear()
    asyncio.run(ask(429))
    assert seen == [("meanwhile", 0, 0), ("http.response.start", 1, 1), ("http.response.body", 1, 1)]
    assert (visits.total, visits.in_flight[HERE], visits.entered[HERE]) == (0, 0, 2)


class Refused:
    """The context of a call that is refused, and what the Router counts when it ends."""

    def __init__(self):
        self.in_flight = []

    def invocation_metadata(self):
        return [(PROXY, "here")]

    def code(self):
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self):
        return "busy"

    def trailing_metadata(self):
        return ()

    def time_remaining(self):
        return None

    async def abort(self, *_):
        self.in_flight.append(VISITS.in_flight["grpc", b"here"])


async def answer_one(_request, _context):
    return b""


async def answer_many(_request, _context):
    yield b""


def test_a_refused_call_of_grpc_keeps_its_place_too():
    async def meanwhile(call, context):
        await asyncio.sleep(0.01)
        context.in_flight.append(VISITS.in_flight["grpc", b"here"])
        await call

    async def one(context):
        await _counted(_at_once(answer_one))(b"", context)

    async def many(context):
        assert [message async for message in _counted_stream(_with_its_status(answer_many))(b"", context)] == []

    for call in (one, many):
        context = Refused()

        async def run(call=call, context=context):
            await meanwhile(asyncio.ensure_future(call(context)), context)

        asyncio.run(run())
        assert context.in_flight == [0, 1]
    assert VISITS.total == 0
