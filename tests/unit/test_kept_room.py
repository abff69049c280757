"""For whom a device keeps room beside a generation that is offered."""

from types import SimpleNamespace

import pytest

from deployments.admission.fair_share import Account, Tenant
from deployments.generation.scheduler.kept_room import KeptRoom
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepPolicy

POLICY = StepPolicy(ttft_s=2.0, tpot_s=0.1)
QUIET, UNDER, OVER = (Account(1.0, is_over_share=over) for over in (False, True, True))


def one(prompt=300, most=20, **more):
    return Generation(prompt, most, 2.0, 0.1, **more)


class Starving:
    """In place of `LongRequests`: room of so many tokens is kept for a long one, of a thousand or more."""

    def __init__(self, tokens=0):
        self.reserve, self.heard = float(tokens), []

    def is_long(self, tokens):
        return tokens >= 1000

    def offered(self, now, tokens, *, refused):
        self.heard.append((now, tokens, not refused))


def kept(cost_s=2.0, longest=0.0, tokens=0, **shares):
    """Of tenants it knows what `shares` say."""
    tenants = {"has_level": True, "has_under_share": False, "expected_s": lambda *_: 0.0, **shares}
    return KeptRoom(_prompt=300, _most=20, _cost_s=cost_s, _longest_under_share=longest,
                    _shares=SimpleNamespace(**tenants), _long=Starving(tokens))  # fmt: skip


def test_the_typical_one_is_as_long_as_the_mean():
    room = KeptRoom()
    assert (room.typical(0.0, POLICY).prompt_tokens, room.typical(0.0, POLICY).most_tokens) == (1, 1)
    room.offered(one(100, 20))
    room.offered(one(200, 40))
    found = room.typical(7.0, POLICY)
    assert (found.prompt_tokens, found.most_tokens, found.due, found.tpot_s) == (105, 21, 9.0, 0.1)
    assert room.typical(7.0, POLICY, 900.4).prompt_tokens == 900


@pytest.mark.parametrize(
    ("tenant", "bulk", "has_one"), [(Tenant("a"), False, True), (Tenant("a"), True, False), (None, False, False)]
)
def test_who_has_an_account(tenant, bulk, has_one):
    account = KeptRoom().account(0.0, one(tenant=tenant, bulk=bulk))
    assert (account is not None) is has_one


TWO = {"expected_s": lambda *_: 4.0}  # seconds: of two generations


@pytest.mark.parametrize(
    ("room", "account", "prompt", "waits", "rests", "prompts"),
    [
        (kept(tokens=600), None, 300, True, False, [600]),
        (kept(tokens=600), None, 300, False, False, []),
        (kept(tokens=600), None, 1000, True, False, []),
        (kept(), None, 300, True, False, []),
        (kept(expected_s=lambda *_: 4.1), OVER, 300, False, False, [300, 300, 300]),  # 4.1 s of 2 s each
        (kept(**TWO), UNDER, 300, False, False, [300, 300]),
        (kept(**TWO), None, 300, False, False, []),
        (kept(**TWO), QUIET, 300, False, False, []),
        (kept(**TWO), OVER, 300, False, True, []),
        (kept(**TWO, has_level=False), OVER, 300, False, False, []),
        (kept(expected_s=lambda *_: 99.0), OVER, 300, False, False, [300] * 8),  # not more
        (kept(**TWO, has_under_share=True, longest=700.4), OVER, 300, False, False, [700, 300, 300, 300]),
        (kept(**TWO, has_under_share=False, longest=700.4), OVER, 300, False, False, [300, 300]),
        (kept(**TWO, has_under_share=True, longest=700.4, tokens=800), OVER, 300, True, False, [800, 300, 300, 300]),
        (kept(**TWO, has_under_share=True, longest=900.0, tokens=800), OVER, 300, True, False, [900, 300, 300, 300]),
        (kept(tokens=800), QUIET, 300, True, False, []),
        (kept(has_under_share=True, longest=700.0), OVER, 300, False, False, [700, 300]),
        (kept(cost_s=0.5, expected_s=lambda _, within_s: within_s), OVER, 300, False, False, [300] * 4),
    ],
)
def test_who_is_to_have_room_beside_it(room, account, prompt, waits, rests, prompts):
    found = room.beside(5.0, one(prompt), POLICY, account, waits=waits, rests=rests)
    assert [generation.prompt_tokens for generation in found] == prompts
    assert all((generation.most_tokens, generation.due) == (20, 7.0) for generation in found)


def test_a_generation_costs_the_mean_of_what_was_decided_on():
    room = KeptRoom()
    for cost_s in (2.0, 4.0):
        room.decided(0.0, one(), None, cost_s, lambda: True, admitted=True)
    assert room._cost_s == pytest.approx(2.1)


@pytest.mark.parametrize(("admitted", "used_s"), [(True, 3.0), (False, 0.0)])
def test_a_tenant_s_account_has_what_it_asked_for_and_got(admitted, used_s):
    account = Account(1.0)
    kept().decided(0.0, one(), account, 3.0, lambda: True, admitted=admitted)
    assert (account.offered_s, account.used_s) == (3.0, used_s)


@pytest.mark.parametrize(
    ("prompt", "account", "admitted", "helped", "heard", "longest"),
    [
        (300, None, False, False, True, 400.0),
        (1000, None, False, False, False, 400.0),  # nothing would help it
        (1000, None, False, True, True, 400.0),
        (1000, None, True, False, True, 400.0),
        (500, Account(1.0), True, False, True, 500.0),
        (300, Account(1.0), True, False, True, 380.0),  # the longest one under its share is forgotten little by little
        (500, Account(1.0), False, False, False, 400.0),
        (500, Account(1.0), False, True, True, 500.0),
        (500, Account(1.0, is_over_share=True), False, False, True, 400.0),
    ],
)
def test_room_is_kept_only_for_those_whom_it_helps(prompt, account, admitted, helped, heard, longest):
    room = kept(longest=400.0)
    room.decided(5.0, one(prompt), account, 1.0, lambda: helped, admitted=admitted)
    assert room._long.heard == [(5.0, prompt, admitted)] * heard
    assert room._longest_under_share == longest


def test_nobody_is_quiet_where_nobody_was_refused():
    room = kept(longest=400.0, has_level=False)
    room.decided(5.0, one(500), Account(1.0), 1.0, lambda: False, admitted=False)
    assert room._longest_under_share == 400.0
    assert room._long.heard
