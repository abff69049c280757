"""What changes logits before a token is drawn, beside the transformers library's own rules and OpenAI's formula."""

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from deployments.generation.text.logit_rules import rules_of
from deployments.generation.text.sampling import RowSamplers, Sampler, Sampling, pick

WORDS, PROMPT, ENDS = 40, np.array([3, 7, 7, 11], np.int32), (2, 5)
DRAWN = [7, 9, 9, 30]  # one of the prompt, one twice


def logits_of(seed):
    return (np.random.default_rng(seed).standard_normal(WORDS) * 3).astype(np.float32)


def altered(logits, drawn, **asked):
    """By all rules, called for each token as a sampler does."""
    rules = list(rules_of(Sampling(**asked), PROMPT, ENDS))
    for count in range(len(drawn) + 1):
        found = logits.copy()
        for rule in rules:
            rule.alter(found, drawn[:count])
    return found


def by_transformers(logits, drawn, rules):
    scores, ids = torch.from_numpy(logits.copy())[None], torch.tensor([[*PROMPT.tolist(), *drawn]])
    for rule in rules:
        scores = rule(ids, scores)
    return scores[0].numpy()


BIAS = ((4, 2.5), (9, -100.0))
_REPETITION = RepetitionPenaltyLogitsProcessor(1.3)
_BIAS = SequenceBiasLogitsProcessor([[[token], added] for token, added in BIAS])


def _least(tokens):
    return MinNewTokensLengthLogitsProcessor(len(PROMPT), tokens, list(ENDS), device="cpu")


@pytest.mark.parametrize(
    ("asked", "rules"),
    [
        ({"repetition_penalty": 1.3}, [_REPETITION]),
        ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
        ({"logit_bias": BIAS}, [_BIAS]),
        ({"min_tokens": 5}, [_least(5)]),  # one more than were drawn
        ({"min_tokens": 4}, [_least(4)]),
        ({"repetition_penalty": 1.3, "logit_bias": BIAS, "min_tokens": 9}, [_BIAS, _REPETITION, _least(9)]),
    ],
)
@pytest.mark.parametrize("drawn", [[], DRAWN])
def test_logits_are_those_of_transformers(asked, rules, drawn):
    for seed in range(20):
        wanted = by_transformers(logits := logits_of(seed), drawn, rules)
        found = altered(logits, drawn, **asked)
        assert (np.isfinite(found) == np.isfinite(wanted)).all()
        kept = np.isfinite(found)
        np.testing.assert_allclose(found[kept], wanted[kept], rtol=1e-5)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (-0.25, 0.75)])
def test_penalties_of_the_answers_own_tokens(frequency, presence):
    logits = logits_of(1)
    counts = np.bincount(DRAWN, minlength=WORDS)
    wanted = logits - counts * frequency - (counts > 0) * presence
    found = altered(logits, DRAWN, frequency_penalty=frequency, presence_penalty=presence)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_usual_options_have_no_rules():
    for asked in (Sampling(min_p=0.5), Sampling(0.0, 5, 0.5, 1)):
        assert not Sampler(asked, rules=rules_of(asked, PROMPT, ENDS)).alters
    least = Sampling(min_tokens=3)
    assert not list(rules_of(least, PROMPT, ()))  # nothing ends the answer


def test_an_answer_draws_by_its_rules_and_reports_the_models_own_shares():
    logits = np.zeros(WORDS, np.float32)
    logits[[2, 8]] = 9.0, 8.0
    asked = Sampling(0.0, min_tokens=1, frequency_penalty=8.5)
    sampler = Sampler(asked, 0, ENDS, rules_of(asked, PROMPT, ENDS))
    drawn = []
    for _ in range(2):
        (picked,) = pick(logits, RowSamplers([sampler], 1))
        sampler.drew(picked.id)
        drawn.append(picked.id)
        assert picked.alternatives[0][0] == 2  # the likeliest before all rules
    assert (drawn, sampler.ended) == ([8, 2], True)
    assert logits[8] == 8.0  # the row belongs to other answers, too
