"""The owner's bookkeeping: tables, and any order of what Routers may say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.leases import Depth, Leases, Order, Word, share_out


def depth(places, changes=1):
    return Depth(changes, places)


def shared(*routers, places=12):
    """Routers that have joined and said what they keep: nothing but their share of what is free."""
    leases = Leases()
    for router in routers:
        leases.join(router, depth(places), 0)
    settle(leases)
    return leases


def settle(leases, keep=0):
    """Every Router hears what there is, and answers."""
    for _ in range(3):
        for router in leases.routers:
            order = leases.take_order(router)
            if order is not None:
                parts = not order.sole and leases.is_sole(router)
                leases.hear(router, Word(order.term, depth(1, 0), order.recall, keep=keep if parts else None))


def term(leases, router):
    return leases._accounts[router].term


@pytest.mark.parametrize(
    ("places", "demands", "shares"),
    [
        (12, {"a": 12, "b": 12, "c": 12}, {"a": 4, "b": 4, "c": 4}),
        (12, {"a": 12, "b": 1, "c": 0}, {"a": 11, "b": 1, "c": 0}),
        (12, {"a": 5, "b": 12, "c": 12}, {"a": 4, "b": 4, "c": 4}),
        (12, {"a": 2, "b": 12, "c": 12}, {"a": 2, "b": 5, "c": 5}),
        (1, {"a": 1, "b": 1}, {"a": 1, "b": 0}),
        (7, {"a": 9, "b": 9}, {"a": 4, "b": 3}),
        (9, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (0, {"a": 1}, {"a": 0}),
        (3, {}, {}),
    ],
)
def test_shares(places, demands, shares):
    assert share_out(places, demands, sorted(demands)) == shares


@given(st.integers(0, 40), st.dictionaries(st.sampled_from("abcde"), st.integers(0, 30)))
def test_shares_are_used_up_and_even(places, demands):
    shares = share_out(places, demands, sorted(demands))
    assert sum(shares.values()) == min(places, sum(demands.values()))
    lacking = [shares[name] for name in shares if shares[name] < demands[name]]
    assert all(share <= min(lacking, default=share) + 1 for share in shares.values())


def test_a_lone_router_holds_the_queue_as_a_whole():
    leases = Leases()
    assert leases.join("r1", depth(12), 0) == Order(1 + 1, sole=True, share=12)
    assert leases.free() == 0


def test_nobody_gets_a_place_before_the_first_router_has_said_what_it_keeps():
    leases = Leases()
    leases.join("r1", depth(12), 0)
    joined = leases.join("r2", depth(12), 0)
    assert (joined.sole, joined.granted) == (False, 0)
    assert leases.ask("r2", joined.term, 5) == 0
    leases.answer("r2", joined.term, 5)
    order = leases.take_order("r1")
    assert (order.sole, order.share, order.recall) == (False, 7, 1)
    leases.hear("r1", Word(order.term, depth(12), 1, keep=9))
    assert leases.take_order("r2").granted == 3
    assert leases.take_order("r1").ceiling == 7  # of what comes free there, the other two


def test_what_it_gives_back_before_its_answer_arrives_is_not_lost():
    leases = Leases()
    leases.join("r1", depth(12), 0)
    leases.join("r2", depth(12), 0)
    order = leases.take_order("r1")
    leases.give("r1", order.term, 4)
    leases.hear("r1", Word(order.term, depth(12), order.recall, keep=10))
    assert leases.held("r1") == 6
    assert leases.held("r2") == 6


def test_words_of_an_earlier_term_are_void():
    leases = shared("r1", "r2")
    before = leases.total
    leases.give("r1", term(leases, "r1") - 1, 3)
    assert leases.ask("r1", term(leases, "r1") - 1, 3) == 0
    assert leases.total == before


def test_the_router_that_is_left_is_alone_again():
    leases = shared("r1", "r2")
    leases.close("r2")
    assert leases.take_order("r1").sole


def test_what_a_dead_router_left_running_counts_until_it_ends():
    leases = shared("r1", "r2")
    leases.close("r2", lingering=2)
    assert not leases.is_sole("r1")
    leases.end_lingering(2)
    assert leases.is_sole("r1")


def test_who_is_short_gets_what_others_free_up_to_its_share():
    leases = shared("r1", "r2")
    one, two = term(leases, "r1"), term(leases, "r2")
    leases.give("r2", two, leases.held("r2"))
    leases.ask("r1", one, 12)
    leases.answer("r1", one, 0)
    assert (leases.held("r1"), leases.ask("r2", two, 8)) == (12, 0)
    assert leases.recall({"r2": 8}) == ["r1"]
    assert leases.answer("r2", two, 8) == 0
    order = leases.take_order("r1")
    assert (order.wanted, order.ceiling) == (8, 6)
    leases.give("r1", one, 2)
    assert leases.take_order("r2").granted == 2
    leases.give("r1", one, 4)
    assert leases.take_order("r2").granted == 4
    assert leases.take_order("r1").ceiling is None


def test_the_smallest_of_the_depths_known_holds_and_the_latest_word_counts():
    leases = shared("r1", "r2")
    leases.tell_depth("r1", term(leases, "r1"), depth(5, changes=3))
    leases.tell_depth("r1", term(leases, "r1"), depth(9, changes=2))
    assert leases.depth == 5
    assert leases.take_order("r2").ceiling == 5


def test_a_trial_is_granted_by_its_own_depth_and_nobody_keeps_idle_places():
    leases = shared("r1", "r2")
    one, two = term(leases, "r1"), term(leases, "r2")
    assert leases.ask("r1", one, 30, trial_depth=20) == 8
    assert leases.take_order("r2").exact
    assert leases.take_order("r2") is None
    assert leases.answer("r1", one, 22, 20) == 0
    assert leases.ask("r2", two, 1) == 0
    leases.end_trial()
    assert not leases.take_order("r2").exact


class Owner(RuleBasedStateMachine):
    """Routers that hold no more than they were told, in any order of their words."""

    def __init__(self):
        super().__init__()
        self.leases = Leases()
        self.held = {}  # router -> places, by what it was told
        self.sole = set()
        self.depth = 6
        self.lingering = 0

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.held)))

    @rule(router=st.sampled_from("abc"), in_flight=st.just(0))
    def join(self, router, in_flight):
        if router not in self.held:
            order = self.leases.join(router, depth(self.depth), in_flight)
            self.held[router] = order.granted
            if order.sole:
                self.sole.add(router)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def listen(self, data):
        router = self.pick(data)
        order = self.leases.take_order(router)
        if order is None:
            return
        given, keep = 0, None
        if order.sole:
            self.sole.add(router)
        elif router in self.sole:
            self.sole.discard(router)
            keep = self.held[router] = data.draw(st.integers(0, self.depth))
        else:
            self.held[router] += order.granted
            given = data.draw(st.integers(0, min(order.wanted, self.held[router])))
            self.held[router] -= given
            if self.leases.is_sole(router):
                keep = self.held[router]
        self.leases.hear(router, Word(order.term, depth(self.depth), order.recall, given, keep))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), want=st.integers(1, 9), patient=st.booleans())
    def ask(self, data, want, patient):
        router = self.pick(data)
        if router not in self.sole:
            granted = self.leases.ask(router, term(self.leases, router), want)
            self.leases.recall({router: want - granted}, gently=patient)
            granted += self.leases.answer(router, term(self.leases, router), want - granted, patient=patient)
            self.held[router] += granted

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data):
        router = self.pick(data)
        if router not in self.sole and not self.leases.is_sole(router):
            count = data.draw(st.integers(0, self.held[router]))
            self.held[router] -= count
            self.leases.give(router, term(self.leases, router), count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def die(self, data):
        router = self.pick(data)
        left = data.draw(st.integers(0, 0 if router in self.sole else self.held[router]))
        del self.held[router]
        self.sole.discard(router)
        self.leases.close(router, left)
        self.lingering += left

    @precondition(lambda self: self.lingering)
    @rule()
    def end_lingering(self):
        self.leases.end_lingering(self.lingering)
        self.lingering = 0

    @invariant()
    def no_place_is_held_twice(self):
        assert len(self.sole) <= 1
        if self.sole:
            assert all(places == 0 for router, places in self.held.items() if router not in self.sole)
        else:
            assert sum(self.held.values()) + self.lingering <= self.depth


Owner.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestOwner = Owner.TestCase
