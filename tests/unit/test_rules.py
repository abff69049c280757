"""The ablation: each rule can be switched off and is on again afterwards, and its table says what the rule is for."""

import pytest

from benchmarks.ablation.scenes import GROUPS, Asked, play
from benchmarks.ablation.switches import RULES, Rule
from benchmarks.comparisons import rules
from benchmarks.kit.bench import quiet_ray
from benchmarks.simulation.application import Shape
from benchmarks.simulation.device import Device
from deployments.admission import predictor

RULE = "a rule"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_off_and_then_on_again(rule):
    with rule.off():
        changed = [(what, name, vars(what)[name]) for what, name, _ in rule.changes()]
    assert all(vars(what)[name] is not value for what, name, value in changed)
    assert changed or rule.elsewhere
    assert rule.lines > 0
    assert set(rule.groups) <= GROUPS.keys()


def test_names_tell_rules_apart():
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_lines_are_those_of_the_code_and_of_the_words():
    alone = Rule(RULE, "", code=(predictor._LargeRun,))
    assert alone.lines == 1 + 1 + 6  # without blank lines
    assert Rule(RULE, "", words="class _LargeRun").lines == 1
    assert Rule(RULE, "", code=(predictor._LargeRun,), words="class _LargeRun").lines == alone.lines


def test_figures_of_a_scene():
    quiet_ray()
    asked = [Asked(6.0 + number / 1e3, 300 if number % 2 else 75, group="few") for number in range(60)]
    found = play(Shape(1, 1, {"cpu": Device(0.018, 0.27, 8)}, 1.0), asked, 7.0, fair={"few": 0.5})
    assert found["late"] == found["lost"] == 0
    assert found["worst"] == pytest.approx(2 * found["goodput"] * 2 / (60 * 2.5))
    assert 0 < found["long"] <= 1 < found["requests"]


def found_of(on, off, group="streams"):
    base = {"goodput": 1.0, "late": 0.0, "lost": 0.0, "worst": None, "long": None, "requests": 1.0}
    about = {"what": "scene", "group": group, "scene": "s"}
    rule = {"what": "rule", "rule": RULE, "lines": 3, "without": "less", "elsewhere": ""}
    scenes = [{**about, "rule": name, **base, **more} for name, more in ((rules.ALL_ON, on), (RULE, off))]
    return {"samples": [scenes[0], rule, scenes[1]]}


@pytest.mark.parametrize(
    ("on", "off", "pays", "costs"),
    [
        ({}, {}, [], []),
        ({}, {"goodput": 0.985}, [], []),
        ({}, {"goodput": 0.97}, ["streams: goodput x 1.031"], []),
        ({}, {"goodput": 1.03}, [], ["streams: goodput x 0.971"]),
        ({}, {"late": 0.01}, ["streams: late 0.0% instead of 1.0% in 1 of 1"], []),
        ({"late": 0.0049}, {"late": 0.0051}, [], []),
        ({"late": 0.02}, {"late": 0.01}, [], []),
        ({"lost": 0.02}, {}, [], ["streams: lost 2.0% instead of 0.0% in 1 of 1"]),
        ({"worst": 1.0}, {"worst": 0.5}, ["streams: worst 100.0% instead of 50.0% in 1 of 1"], []),
        ({"long": 0.6}, {"long": 0.4}, ["streams: long 60.0% instead of 40.0% in 1 of 1"], []),
    ],
)
def test_what_a_rule_is_for(on, off, pays, costs):
    found = found_of(on, off)
    assert rules._verdict(found, RULE) == (pays, costs)
    (goal,) = rules.goals(found)
    assert goal.reached == (not pays)
    each, ratios, others, every = rules.sheets(found)
    assert each.rows[0][:2] == [RULE, "3"]
    assert len(ratios.rows) == len(others.rows) == len(every.rows) == 1


def test_requests_count_where_clients_come_back():
    assert rules._verdict(found_of({}, {"requests": 2.0}), RULE) == ([], [])
    more = found_of({"requests": 2.0}, {"requests": 3.0}, "returning")
    assert rules._verdict(more, RULE) == (["returning: 2.0 requests for an answer instead of 3.0"], [])
