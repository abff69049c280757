"""The level of max-min fairness, who stands where to it, and the room that those above leave to the others."""

import math

import pytest

from deployments.admission.fair_share import Shares, Tenant

FADED = math.exp(-0.006)  # of what is remembered for 10 s, after 0.06 s


def divided(*tenants, at=0.06):
    """`tenants`: device seconds asked for and got at 0 s, and the weight, of a, b, c and so on."""
    shares = Shares()
    for name, (offered_s, used_s, *weight) in zip("abcdefgh", tenants, strict=False):
        shares.account(0.0, Tenant(name, *weight)).count(offered_s, used_s)
    shares.account(at, Tenant("nobody"))
    return shares


@pytest.mark.parametrize(
    ("tenants", "level", "over_share"),
    [
        # More than one part in a hundred was refused, or all get what they ask for.
        ([(2.0, 2.0), (98.0, 97.1)], math.inf, ""),
        ([(2.0, 2.0), (98.0, 96.9)], 96.9, "b"),
        # Who asks for less than the level drops out, and the others share the rest.
        ([(1.0, 0.9), (9.0, 4.0), (9.0, 5.1)], 4.5, "bc"),
        ([(9.0, 5.1), (1.0, 0.9), (9.0, 4.0)], 4.5, "ca"),
        ([(1.0, 1.0), (3.0, 3.0), (9.0, 5.0), (9.0, 5.0)], 5.0, "cd"),
        ([(5.0, 5.0), (15.0, 5.0)], 5.0, "ab"),  # at the level
        # By weight.
        ([(4.0, 4.0, 4.0), (3.0, 2.0)], 2.0, "b"),
        ([(9.0, 3.1), (9.0, 5.9, 2.0)], 3.0, "ba"),
        ([(9.0, 2.9), (9.0, 6.1, 2.0)], 3.0, "ab"),
    ],
)
def test_the_level_and_who_asks_for_more_in_the_order_in_which_they_are_served(tenants, level, over_share):
    shares = divided(*tenants)
    assert shares.level == pytest.approx(level * FADED)
    assert shares.has_level == (level < math.inf)
    assert shares.named == [*over_share]
    assert {name for name, account in shares.accounts.items() if account.is_over_share} == {*over_share}


GREEDY = [(1.0, 0.9), (9.0, 4.0), (9.0, 5.1)]  # under its share, and two over theirs: the first has got less


@pytest.mark.parametrize(
    ("name", "within_s", "kept_s"),
    [
        ("a", 0.5, 0.0),
        # Who is under its share asks for 0.1 device seconds a second, in requests of a second each.
        ("b", 0.5, 0.05 * FADED + 3 * math.sqrt(0.05 * FADED)),
        # Before the third one the second is served, too, which asks for 0.9 a second.
        ("c", 0.5, (0.05 + 0.45) * FADED + 3 * math.sqrt(0.5 * FADED)),
        ("c", 2.0, (0.2 + 1.8) * FADED + 3 * math.sqrt(2.0 * FADED)),
    ],
)
def test_a_tenant_leaves_room_for_what_those_before_it_will_ask_for(name, within_s, kept_s):
    shares = divided(*GREEDY)
    assert shares.under_share_rho == pytest.approx(0.1 * FADED)
    assert shares.kept_s(shares.accounts[name], within_s) == pytest.approx(kept_s)
    assert shares.accounts["b"].rho == pytest.approx(0.9 * FADED)


def test_where_nobody_is_under_its_share_room_is_left_only_for_those_who_got_less():
    shares = divided((9.0, 4.0), (9.0, 6.0))
    del shares.accounts["nobody"]
    shares.account(0.12, Tenant("a"))
    assert not shares.has_under_share
    faded = FADED**2
    assert [shares.kept_s(shares.accounts[name], 0.5) for name in "ab"] == [0, pytest.approx(0.45 * faded)]


def test_the_usual_request_is_the_mean_weighted_by_cost():
    shares = Shares()
    for name, costs in {"a": (0.1, 0.3), "b": (8.0,)}.items():
        for cost_s in costs:
            shares.account(0.0, Tenant(name)).count(cost_s, 0.5 * cost_s)
    shares.account(0.06, Tenant("a"))
    assert shares.under_share_cost_s == pytest.approx((0.1**2 + 0.3**2) / 0.4)


def test_while_nothing_is_refused_nobody_counts_as_under_share():
    assert not divided((1.0, 1.0), (9.0, 9.0)).has_under_share


@pytest.mark.parametrize(("capacity_rho", "is_shared"), [(0.0, True), (9.9, True), (11.0, False)])
def test_a_device_below_its_capacity_is_not_contended_whatever_was_refused(capacity_rho, is_shared):
    """Room that is kept causes refusals too, and would be kept for ever."""
    shares = Shares(capacity_rho=capacity_rho)
    for at in range(400):  # 10 device seconds a second are asked for
        for name, offered_s, used_s in (("a", 0.1, 0.1), ("b", 0.9, 0.5)):
            shares.account(0.1 * at, Tenant(name)).count(offered_s, used_s)
    assert shares.has_level == is_shared


def test_the_level_is_found_anew_every_twentieth_of_a_second():
    assert not divided(*GREEDY, at=0.05).has_level
    assert divided(*GREEDY, at=0.051).has_level


def test_an_account_is_forgotten_ten_seconds_after_its_last_query():
    for at, names in ((10.0, {"a", "nobody"}), (10.01, {"nobody"})):
        assert set(divided((1.0, 0.5), at=at).accounts) == names
    shares = divided((1.0, 0.5))
    shares.waits(shares.accounts["a"], 0.1)
    shares.account(200.0, Tenant("b"))
    assert set(shares.accounts) == {"a", "b"}


def test_a_key_whose_weight_is_changed_has_it_at_once():
    shares = divided(*GREEDY)
    assert shares.account(0.06, Tenant("a", 3.0)).weight == 3
    assert shares.account(0.06, Tenant("new", 2.0)).weight == 2


def test_what_waits_of_those_over_their_share():
    shares = divided(*GREEDY)
    a, b, c = (shares.accounts[name] for name in "abc")
    shares.wait([(a, 1.0), (b, 2.0), (c, 3.0)])
    shares.waits(c, 4.0)
    assert shares.others_waiting_s == 9
    shares.wait([(a, 1.0), (b, 2.0)])  # these, and no others
    assert (shares.others_waiting_s, c.waiting_s) == (2, 0)
    a.count(20.0, 0.0)
    shares.account(0.12, Tenant("a"))  # it asks for more than its share now
    assert shares.others_waiting_s == 3


def test_routers_are_told_of_so_many_only():
    shares = Shares()
    for number in range(40):
        shares.account(0.0, Tenant(str(number))).count(2.0, 1.0)
    shares.account(0.06, Tenant("0"))
    assert shares.named == [str(number) for number in range(32)]
