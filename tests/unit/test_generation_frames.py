"""Frames between a Router and a replica that generates: what goes in comes out."""

import math

import numpy as np
import pytest
from msgspec.structs import astuple, replace

from deployments.admission.fair_share import Tenant
from deployments.generation.frames import (
    GenerationOffer,
    GenerationOffers,
    GenerationReport,
    NewToken,
    RefusedOffer,
    ScoredPrompt,
)
from deployments.generation.scheduler.state import HostState, StepState
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked, Sampling

STATE = StepState(math.inf, 0.25, 0.001, 7, 12, 3, 2, 99, (0.1, 0.0, 0.0, 0.001, 0.0, 8), 1.5, 0.02, (4, 1))
WITH_HOST = STATE._replace(host=HostState(5, 9, 4, 1, (50, 30, 19), 400, (2, 3), 120.5, 300.0, 1.25))


def through(frame, decode):
    return decode(b"".join(frame))


def plain(state):
    """With all that are sequences as tuples."""
    host = None if state.host is None else HostState(*map(tupled, state.host))
    return StepState(*map(tupled, state))._replace(host=host)


def tupled(field):
    return tuple(field) if isinstance(field, list) else field


def offer(number, length, **more):
    ids = np.arange(number, number + length, dtype=np.int32)
    return GenerationOffer(number, 1.5, ids, 20, Sampling(0.7, 5, 0.9, 2**40), **more)


def test_offers_come_out_as_they_went_in():
    first = offer(1, 3, answers=2, logprobs=0, end_tokens=(5, 6), tpot_s=0.1, tenant=Tenant("a", 2.0))
    second = offer(2, 1, bulk=True)
    sent = GenerationOffers([first, second], [8, 9], [(4, 1)], {"router": "r"}, asks=True)
    got = through(sent.encode(), GenerationOffers.decode)
    for here, there in zip(got.offers, sent.offers, strict=True):
        assert here.ids.tolist() == there.ids.tolist()
        assert replace(here, ids=None) == replace(there, ids=None)
    assert (got.called_off, got.stopped, got.settings, got.asks) == ([8, 9], [(4, 1)], {"router": "r"}, True)
    assert got.offers[0].ids.dtype == np.int32


def test_an_offer_s_time_is_told_exactly():
    (got,) = through(GenerationOffers([replace(offer(1, 3), left_s=1 / 3)]).encode(), GenerationOffers.decode).offers
    assert got.left_s == 1 / 3


@pytest.mark.parametrize(
    "what", [{"offers": [1]}, {"called_off": [1]}, {"stopped": [(1, 0)]}, {"settings": {"a": 1}}, {"asks": True}]
)
def test_a_frame_is_sent_if_it_says_anything(what):
    assert GenerationOffers(**what)
    assert not GenerationOffers()
    assert not through(GenerationOffers().encode(), GenerationOffers.decode)


@pytest.mark.parametrize("lengths", [[3], [1, 2], [3, 1]])
@pytest.mark.parametrize("broken", [lambda frame: frame[:-4], lambda frame: frame + bytes(4)])
def test_a_frame_whose_lengths_do_not_add_up_is_refused(lengths, broken):
    frame = b"".join(GenerationOffers([offer(number, length) for number, length in enumerate(lengths)]).encode())
    with pytest.raises(ValueError, match="add up"):
        GenerationOffers.decode(broken(frame))


def test_a_prompt_without_tokens_is_refused():
    frame = b"".join(GenerationOffers([offer(1, 0), offer(2, 3)]).encode())
    with pytest.raises(ValueError, match="add up"):
        GenerationOffers.decode(frame)


def test_what_is_not_said_is_as_it_is_called_by_default():
    one = GenerationOffer(1, 1.0, np.zeros(1, np.int32), 5, Sampling())
    assert astuple(one)[5:] == (1, None, (), None, False, None, None, False, None)
    assert astuple(RefusedOffer(3)) == (3, False, 0, 0.0, "")
    (frame,) = GenerationReport(STATE).encode()
    got = through(frame, GenerationReport.decode)
    assert (got.seen, got.routers, got.tokens, got.refused) == (0, 1, [], [])


@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (5, 3)])
def test_scores_come_out_finite_as_they_went_in(shape):
    numbers = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    logprobs = -numbers
    logprobs[:, -1] = -math.inf
    sent = PromptScores(numbers.astype(np.int32) + 2**30, logprobs, np.arange(shape[0], dtype=np.int32))
    (frame,) = GenerationReport(STATE, scored=[ScoredPrompt.of(7, 30, sent)]).encode()
    (got,) = through(frame, GenerationReport.decode).scored
    assert (got.number, got.start, got.scores.tokens) == (7, 30, shape[0])
    assert got.scores.ids.tolist() == sent.ids.tolist()
    assert got.scores.logprobs.tolist() == np.maximum(logprobs, -9999).tolist()
    assert got.scores.ranks.tolist() == sent.ranks.tolist()


def test_scores_whose_lengths_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="reshape"):
        _ = ScoredPrompt(7, 30, bytes(24), bytes(20), bytes(8)).scores


@pytest.mark.parametrize("state", [STATE, WITH_HOST])
def test_a_report_comes_out_as_it_went_in(state):
    sure = Picked(3, -0.5, ((3, -0.5), (4, -math.inf)))
    tokens = [NewToken(1, 0, Picked(2**30)), NewToken(1, 1, sure, "stop"), NewToken(2, 0, Picked(5), "length")]
    sent = GenerationReport(
        state, 6, [RefusedOffer(3, never=True, longest=900)], [1, 2], [(4, "it broke")], tokens, 3, [4], [5]
    )
    (frame,) = sent.encode()
    got = through(frame, GenerationReport.decode)
    assert got.tokens[0] == tokens[0]
    assert got.tokens[1].picked == Picked(3, -0.5, ((3, -0.5), (4, -9999.0)))
    assert got.tokens[2] == tokens[2]
    assert plain(got.state) == plain(state)
    assert got.state.host is None or got.state.host.gained_share == pytest.approx(0.4017, abs=1e-4)
    assert (got.seen, got.refused, got.admitted, got.failed) == (6, sent.refused, [1, 2], [(4, "it broke")])
    assert (got.routers, got.broken, got.suspect) == (3, [4], [5])
