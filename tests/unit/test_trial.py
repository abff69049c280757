import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission.trial import Trial, Trials, hash_secret
from deployments.errors import Forbidden, InvalidInput
from deployments.settings import TrialGrant

SECRET = "3q2-a_Secret"
POOLS = ("accelerator", "cpu")
NOW = 1_700_000_000.0
ALLOWED = TrialGrant(secret_sha256=hash_secret(SECRET), expires_at=NOW + 60)


@pytest.mark.parametrize(
    ("header", "depths"),
    [
        (f"{SECRET} accelerator=40 cpu=0", {"accelerator": 40, "cpu": 0}),
        (f"{SECRET} cpu=7", {"cpu": 7}),
        (f"  {SECRET}\taccelerator=007  ", {"accelerator": 7}),
        (f"{SECRET} cpu=100000", {"cpu": 100_000}),
        (SECRET, {}),
    ],
)
def test_good_headers(header, depths):
    assert Trial.parse(header) == Trial(SECRET, depths)


@pytest.mark.parametrize(
    "word",
    [
        *("cpu", "cpu=", "cpu=-1", "cpu=+1", "cpu=1.5", "cpu=1e3", "cpu=1_0", "cpu=100001", "cpu==1"),
        *("cpu=٣", "cpu=²", "=", "cpu:1", "accelerator=2"),  # a second accelerator
    ],
)
def test_a_bad_word_is_named(word):
    with pytest.raises(InvalidInput) as refused:
        Trial.parse(f"{SECRET} accelerator=40 {word}")
    assert f"'{word}' does not" in str(refused.value)
    assert "x-windve-trial should look like 'SECRET accelerator=40 cpu=7'" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_trial_may_be_aimed_at_one_pool():
    trial = Trial.parse(f"{SECRET} accelerator=40 cpu=7 only=cpu")
    assert trial == Trial(SECRET, {"accelerator": 40, "cpu": 7}, "cpu")
    assert trial.header() == f"{SECRET} accelerator=40 cpu=7 only=cpu"
    with pytest.raises(InvalidInput, match="no pool named npu"):
        Trial.parse(f"{SECRET} cpu=7 only=npu").check(ALLOWED, POOLS, NOW)


@pytest.mark.parametrize(
    ("words", "seconds", "only"),
    [
        ("finish=1.5", 1.5, None),
        ("finish=3600", 3600.0, None),
        ("finish=1e-3", 0.001, None),
        ("finish=2 only=cpu", 2.0, "cpu"),
    ],
)
def test_a_trial_may_ask_for_an_slo(words, seconds, only):
    trial = Trial.parse(f"{SECRET} {words}")
    assert trial == Trial(SECRET, {}, only, seconds)
    assert Trial.parse(trial.header()) == trial
    trial.check(ALLOWED, POOLS, NOW)


@pytest.mark.parametrize(
    "words",
    [
        *("finish=", "finish=0", "finish=-1", "finish=nan", "finish=inf", "finish=3601", "finish=1s"),
        *("finish=1.5 cpu=7", "cpu=7 finish=1.5", "finish=1.5 finish=2.5"),
    ],
)
def test_an_slo_is_seconds_and_stands_in_place_of_depths(words):
    with pytest.raises(InvalidInput, match=r"or 'SECRET finish=1\.5'; 'finish="):
        Trial.parse(f"{SECRET} {words}")


@pytest.mark.parametrize("header", ["", "  ", f"{SECRET} cpu={'9' * 5000}"], ids=["empty", "blank", "5,000 digits"])
def test_headers_that_end_in_an_error_of_python(header):
    with pytest.raises(InvalidInput):
        Trial.parse(header)


@settings(deadline=None)
@given(
    secret=st.text(st.characters(categories=["L", "N", "P"]), min_size=1),
    depths=st.dictionaries(st.sampled_from(POOLS), st.integers(0, 100_000)),
)
def test_a_header_says_what_it_is_made_of(secret, depths):
    assert Trial.parse(Trial(secret, depths).header()) == Trial(secret, depths)


def test_the_pass_lets_its_holder_in():
    for depths in ({"accelerator": 40, "cpu": 0}, {"cpu": 1}, {}):
        Trial(SECRET, depths).check(ALLOWED, POOLS, NOW)


WRONG = "the secret is not that of the running calibration"


@pytest.mark.parametrize(
    ("trial", "allowed", "now", "error", "problem"),
    [
        (Trial(SECRET, {"cpu": 1}), None, NOW, Forbidden, "no calibration is running"),
        (Trial(SECRET, {"cpu": 1}), ALLOWED, NOW + 60, Forbidden, "no calibration is running"),
        (Trial(SECRET + "x", {"cpu": 1}), ALLOWED, NOW, Forbidden, WRONG),
        (Trial(SECRET[:-1], {"cpu": 1}), ALLOWED, NOW, Forbidden, WRONG),
        (Trial("", {"cpu": 1}), ALLOWED, NOW, Forbidden, WRONG),
        (Trial("é", {"cpu": 1}), ALLOWED, NOW, Forbidden, WRONG),
        (Trial(ALLOWED.secret_sha256, {}), ALLOWED, NOW, Forbidden, WRONG),
        (Trial(SECRET, {"gpu": 1}), ALLOWED, NOW, InvalidInput, "no pool named gpu; use accelerator or cpu"),
        (Trial("wrong", {"gpu": 1}), ALLOWED, NOW, Forbidden, WRONG),
    ],
    ids=["no pass", "expired", "longer", "shorter", "empty", "not ASCII", "its hash", "unknown pool", "nothing told"],
)
def test_others_are_turned_away(trial, allowed, now, error, problem):
    with pytest.raises(error, match=problem) as refused:
        trial.check(allowed, POOLS, now)
    for secret in (SECRET, ALLOWED.secret_sha256):
        assert secret not in str(refused.value)


def test_a_pool_that_is_not_there_is_unknown():
    with pytest.raises(InvalidInput, match="no pool named accelerator; use cpu"):
        Trial(SECRET, {"accelerator": 1}).check(ALLOWED, ("cpu",), NOW)


@pytest.mark.parametrize(
    ("words", "uses"),  # by pool: its depth there, and whether it may be offered there
    [
        ("accelerator=40 cpu=7", {"accelerator": (40, True), "cpu": (7, True)}),
        ("accelerator=40", {"accelerator": (40, True), "cpu": (0, False)}),
        ("accelerator=40 cpu=0", {"accelerator": (40, True), "cpu": (0, False)}),
        ("accelerator=40 cpu=7 only=cpu", {"accelerator": (40, False), "cpu": (7, True)}),
        ("finish=1.5", {"accelerator": (None, True), "cpu": (None, True)}),
        ("finish=1.5 only=cpu", {"accelerator": (None, False), "cpu": (None, True)}),
    ],
)
def test_which_pools_a_trial_may_use_and_by_what_it_is_admitted(words, uses):
    trial = Trial.parse(f"{SECRET} {words}")
    assert {pool: (trial.depth(pool), trial.may_use(pool)) for pool in POOLS} == uses


def test_a_calibration_runs_from_its_first_trial_until_its_grant_is_withdrawn():
    trials, trial = Trials(), Trial(SECRET, {"cpu": 1})
    trials.configure(ALLOWED)
    with pytest.raises(Forbidden):
        trials.enter(Trial("guessed", {}), POOLS, 10.0, NOW)
    assert trials.seconds_ago(12.0) is None
    trials.enter(trial, POOLS, 10.0, NOW)
    trials.configure(ALLOWED)
    assert trials.seconds_ago(12.0) == 2
    trials.configure(None)
    assert trials.seconds_ago(12.0) is None
    with pytest.raises(Forbidden):
        trials.enter(trial, POOLS, 12.0, NOW)
