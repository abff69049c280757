"""The level of max-min fairness, who stands where to it, and the room that those above leave to the others."""

import math

import pytest

from deployments.admission.fair_share import Kind, Shares, Tenant

QUIET, UNDER, OVER = Kind
FADED = math.exp(-0.006)  # of what is remembered for 10 s, after 0.06 s


def divided(*tenants, at=0.06):
    """`tenants`: device seconds asked for and got at 0 s, and the weight, of a, b, c and so on."""
    shares = Shares()
    for name, (offered_s, used_s, *weight) in zip("abcdefgh", tenants, strict=False):
        shares.account(0.0, Tenant(name, *weight)).count(offered_s, used_s)
    shares.account(at, Tenant("nobody"))
    return shares


@pytest.mark.parametrize(
    ("tenants", "level", "kinds"),
    [
        # More than one part in a hundred was refused, or all get what they ask for.
        ([(2.0, 2.0), (98.0, 97.1)], math.inf, [QUIET, QUIET]),
        ([(2.0, 2.0), (98.0, 96.9)], 96.9, [QUIET, UNDER]),
        # Who asks for less than the level drops out, and the others share the rest.
        ([(1.0, 0.9), (9.0, 4.0), (9.0, 5.1)], 4.5, [QUIET, UNDER, OVER]),
        ([(9.0, 5.1), (1.0, 0.9), (9.0, 4.0)], 4.5, [OVER, QUIET, UNDER]),
        ([(1.0, 1.0), (3.0, 3.0), (9.0, 5.0), (9.0, 5.0)], 5.0, [QUIET, QUIET, UNDER, UNDER]),
        ([(5.0, 5.0), (15.0, 5.0)], 5.0, [UNDER, UNDER]),  # at the level
        # By weight.
        ([(4.0, 4.0, 4.0), (3.0, 2.0)], 2.0, [QUIET, UNDER]),
        ([(9.0, 3.1), (9.0, 5.9, 2.0)], 3.0, [OVER, UNDER]),
        ([(9.0, 2.9), (9.0, 6.1, 2.0)], 3.0, [UNDER, OVER]),
    ],
)
def test_the_level_and_who_is_above_it(tenants, level, kinds):
    shares = divided(*tenants)
    assert shares.level == pytest.approx(level * FADED)
    names = "abcd"[: len(tenants)]
    assert [shares.accounts[name].kind for name in names] == kinds
    assert shares.has_level == (level < math.inf)
    assert shares.over_share == [name for name, kind in zip(names, kinds, strict=True) if kind != QUIET]


GREEDY = [(1.0, 0.9), (9.0, 4.0), (9.0, 5.1)]  # quiet, under and over a level of 4.5


@pytest.mark.parametrize(
    ("name", "within_s", "kept_s"),
    [
        ("a", 0.5, 0.0),
        # The quiet one asks for 0.1 device seconds a second; two queries of the mean cost of 0.02 come unevenly.
        ("b", 0.5, 0.05 * FADED + 0.04),
        # The one under asks for 0.9 a second, and is short of 0.5; it is to have it soon: three times as much.
        ("c", 0.5, (0.05 + 0.45) * FADED + 0.04),
        ("c", 2.0, (0.2 + 1.5) * FADED + 0.04),
    ],
)
def test_those_above_leave_room_for_what_others_will_ask_for(name, within_s, kept_s):
    shares = divided(*GREEDY)
    assert shares.under_share_rho == pytest.approx(0.1 * FADED)
    assert shares.kept_s(shares.accounts[name], 0.02, within_s) == pytest.approx(kept_s)


def test_where_nobody_is_quiet_room_is_left_only_for_those_under_the_level():
    shares = divided((9.0, 4.0), (9.0, 6.0))
    del shares.accounts["nobody"]
    shares.account(0.12, Tenant("a"))
    assert not shares.has_under_share
    faded = FADED**2
    assert [shares.kept_s(shares.accounts[name], 0.02, 0.5) for name in "ab"] == [0, pytest.approx(0.45 * faded)]


def test_while_nothing_is_refused_nobody_counts_as_under_share():
    assert not divided((1.0, 1.0), (9.0, 9.0)).has_under_share


def test_the_level_is_found_anew_every_twentieth_of_a_second():
    assert not divided(*GREEDY, at=0.05).has_level
    assert divided(*GREEDY, at=0.051).has_level


def test_an_account_is_forgotten_when_next_to_nothing_is_left_of_it():
    for at, names in ((92.0, {"a", "nobody"}), (92.2, {"nobody"})):  # 1e-4 device seconds after 92.1 s
        assert set(divided((1.0, 0.5), at=at).accounts) == names
    shares = divided((1.0, 0.5))
    shares.waits(shares.accounts["a"], 0.1)
    shares.account(200.0, Tenant("b"))
    assert set(shares.accounts) == {"a", "b"}


def test_a_key_whose_weight_is_changed_has_it_at_once():
    shares = divided(*GREEDY)
    assert shares.account(0.06, Tenant("a", 3.0)).weight == 3
    assert shares.account(0.06, Tenant("new", 2.0)).weight == 2


def test_what_waits_of_those_who_are_not_under_share():
    shares = divided(*GREEDY)
    a, b, c = (shares.accounts[name] for name in "abc")
    shares.wait([(a, 1.0), (b, 2.0), (c, 3.0)])
    shares.waits(c, 4.0)
    assert shares.others_waiting_s == 9
    shares.wait([(a, 1.0), (b, 2.0)])  # these, and no others
    assert (shares.others_waiting_s, c.waiting_s) == (2, 0)
    a.count(20.0, 0.0)
    shares.account(0.12, Tenant("a"))  # it is quiet no more
    assert shares.others_waiting_s == 3


def test_routers_are_told_of_so_many_only():
    shares = Shares()
    for number in range(40):
        shares.account(0.0, Tenant(str(number))).count(2.0, 1.0)
    shares.account(0.06, Tenant("0"))
    assert shares.over_share == [str(number) for number in range(32)]
