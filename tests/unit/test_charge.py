"""What a generation costs its client, in tokens and in device seconds."""

import pytest

from deployments.admission.quota import Quota
from deployments.errors import Busy, OverQuota
from deployments.generation.charge import GenerationCharge
from deployments.generation.scheduler.state import StepState

# A step takes 1 s, a quarter for each row but the first, 1/128 for each token that is read, 1/64 for each of a prompt.
MODEL = (1.0, 0.25, 1 / 128, 1 / 64, 1 / 1024, 1)
STATE = StepState(0.0, 0.0, 0.0, 7, 12, 3, 2, 99, MODEL, 2.0, 0.02, (4, 1))
PROMPT_S = 2.0 * (63 / 64 + 64 * 32 / 1024)  # twice as slow as the model says

CACHED_S = 2.0 * (31 / 64 + 32 * 16 / 1024)


def token_s(rows, read):
    return 2.0 * ((1.0 + 0.25 * (rows - 1)) / rows + read / 128)


@pytest.mark.parametrize(
    ("unit", "prompt", "tokens"),
    [("tokens", 64, [1, 1, 1]), ("device_seconds", PROMPT_S, [token_s(3, 64), token_s(3, 64), token_s(3, 65)])],
)
def test_a_prompt_and_each_token_are_paid(unit, prompt, tokens):
    quota = Quota(1000.0, unit)
    charged = GenerationCharge(quota, prompt_tokens=64)
    full = quota._left
    charged.prompt(STATE)
    spent = [full - quota._left]
    for answer in (0, 1, 0):
        charged.came(STATE, answer)
        spent.append(full - quota._left - sum(spent))
    assert spent == pytest.approx([prompt, *tokens])
    assert charged.spent == pytest.approx(prompt + sum(tokens))
    assert charged.device_s == pytest.approx(PROMPT_S + 2 * token_s(3, 64) + token_s(3, 65))
    charged.prompt(STATE)  # another replica computes it: in place of what was charged
    assert (charged.spent, charged.device_s) == pytest.approx((prompt, PROMPT_S))
    charged.failed(Busy("full", retry_after_s=1.0))
    assert (quota._left, charged.spent, charged.device_s) == pytest.approx((full, 0.0, 0.0))


@pytest.mark.parametrize(
    ("unit", "paid"), [("tokens", 64), ("device_seconds", PROMPT_S - CACHED_S), (None, PROMPT_S - CACHED_S)]
)
def test_what_the_cache_holds_of_a_prompt_costs_tokens_but_no_device_seconds(unit, paid):
    charged = GenerationCharge(unit and Quota(1000.0, unit), prompt_tokens=64)
    charged.prompt(STATE)
    charged.refund_cached(STATE, 32)
    assert (charged.spent, charged.device_s) == pytest.approx((paid, PROMPT_S - CACHED_S))


def test_where_nobody_pays_device_seconds_are_counted():
    charged = GenerationCharge(None, prompt_tokens=64)
    charged.check(0.0, 1)
    charged.came(STATE._replace(rows=0), 0)  # the state was sent before it ran
    assert charged.device_s == pytest.approx(token_s(1, 64))
    assert charged.spent == charged.device_s


@pytest.mark.parametrize(("spent", "waits"), [(4.0, False), (6.0, True)])
def test_who_has_spent_more_than_its_quota_waits(spent, waits):
    quota = Quota(1.0, "device_seconds")
    charged = GenerationCharge(quota, prompt_tokens=64)
    charged.check(0.0, 1)
    quota.spend(spent)
    if not waits:
        charged.check(0.0, 1)
        return
    wait_s = quota.wait_s(0.0, 1)
    with pytest.raises(OverQuota, match=rf"\(device seconds\) is used up; retry in {wait_s:.2f} s") as caught:
        charged.check(0.0, 1)
    assert caught.value.retry_after_s == wait_s > 0
