"""Which promise a device cannot keep, and whether it keeps the one that is named instead."""

import re

import pytest

from deployments.generation.scheduler.promises import shortfall
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.sequences import Generation
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import StepTime

SLOW = StepTime(0.26, 0.001, 1e-6, 0.02, 0.0, 4)  # a model of 7 billion weights on a CPU
NONE, SHORT = "holds for no answer: a step takes 0.26 s here, or longer", "here, or longer ones"
CONTEXT, USUAL, ALL = 65_536, 256, "65,536"


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "is_total", "sentence"),
    [
        (8.0, 0.4, None, None),
        (2.0, 0.1, True, f"tpot_s: 0.1 s {NONE}; set 0.29 s for 256 tokens or 0.36 s for 65,536 tokens"),
        (
            8.0,
            0.3,
            False,
            f"tpot_s: 0.3 s does not hold for a text of 65,536 tokens {SHORT}; set 0.36 s for 65,536 tokens",
        ),
        (2.0, 0.4, False, f"ttft_s: 2 s does not hold for a prompt of 256 tokens {SHORT}; set 7.3 s for 256 tokens"),
        (0.2, 0.4, True, f"ttft_s: 0.2 s {NONE}; set 7.4 s for 256 tokens"),
    ],
)
def test_what_is_promised_too_much_and_what_would_do(ttft_s, tpot_s, is_total, sentence):
    found = shortfall(SLOW, StepPolicy(ttft_s, tpot_s), USUAL, CONTEXT)
    assert (found and (found.is_total, found.sentence)) == (sentence and (is_total, sentence))


@pytest.mark.parametrize(("ttft_s", "tpot_s"), [(2.0, 0.1), (8.0, 0.3), (2.0, 0.4), (0.2, 0.4)])
def test_no_answer_is_admitted_where_it_says_so_and_with_the_named_values_each(ttft_s, tpot_s):
    def may(prompt, most):
        policy = StepPolicy(ttft_s, tpot_s)
        schedule = StepScheduler(SLOW, policy, 2000)
        return not schedule.admission.never(Generation(prompt, most, ttft_s, tpot_s), ttft_s)

    while (found := shortfall(SLOW, StepPolicy(ttft_s, tpot_s), USUAL, CONTEXT)) is not None:
        assert may(1, 2) is not found.is_total
        needed = float(re.findall(r"([\d.]+) s for", found.problem)[-1])
        ttft_s, tpot_s = (needed, tpot_s) if found.key == "ttft_s" else (ttft_s, needed)
    assert may(USUAL, USUAL)
    assert may(1, CONTEXT - 1)
