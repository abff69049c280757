"""When room is kept for long prompts."""

from deployments.generation.scheduling.long_prompts import LongPrompts


def offered(prompts, long_every, *, admits_long, count=200, now=0.0):
    """Short prompts of 100 tokens, which are admitted, and long ones of 2,000."""
    for number in range(count):
        is_long = number % long_every == 0
        prompts.offered(now + number * 0.05, 2000 if is_long else 100, admitted=admits_long or not is_long)
    return now + count * 0.05


def test_room_is_kept_while_long_prompts_are_refused_too_often():
    prompts = LongPrompts()
    assert prompts.tokens == 0
    now = offered(prompts, 10, admits_long=False)
    assert 1000 <= prompts.tokens <= 2000
    assert prompts.is_long(2000)
    assert not prompts.is_long(100)
    offered(prompts, 10, admits_long=True, now=now)
    assert prompts.tokens == 0


def test_more_room_is_kept_the_longer_they_starve():
    prompts, found = LongPrompts(), []
    now = 0.0
    for _ in range(4):
        now = offered(prompts, 5, admits_long=False, now=now, count=100)
        found.append(prompts.tokens)
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_few_long_prompts_have_no_say_and_refusals_are_forgotten():
    prompts = LongPrompts()
    for _ in range(2):
        offered(prompts, 100, admits_long=False, count=10)
    assert prompts.tokens == 0
    now = offered(prompts, 10, admits_long=False)
    assert prompts.tokens
    for number in range(20):
        prompts.offered(now + 100 + number, 100, admitted=True)
    assert prompts.tokens == 0
