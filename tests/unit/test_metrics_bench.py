"""What `make bench ARGS=metrics` makes of its samples."""

from benchmarks.comparisons import metrics

PARTS = {"counting_us": 3.0, "publishing_us": 0.2, "embedder_us": 1.8, "agent_us": 5.0}
FOUND = {
    "samples": [
        {"what": "path", "path_us": 500.0, "requests_s": 3000.0},
        {"what": "metrics", **PARTS, "share": 2.0, "observed": 53_000, "seconds": 200.0, "per_observation_us": 20.0},
    ]
}


def test_each_part_and_the_whole_against_a_request():
    cost, agent = metrics.sheets(FOUND)
    assert [row[1:] for row in cost.rows] == [
        ["500.00", "100 %"],
        ["3.00", "0.60 %"],
        ["0.20", "0.04 %"],
        ["1.80", "0.36 %"],
        ["5.00", "1.00 %"],
        ["", "2.00 %"],
    ]
    assert agent.rows == [["3,000", "265", "20", "0.53 %"]]
    assert [goal.met for goal in metrics.goals(FOUND)] == [True]


def test_a_cost_above_the_goal_is_seen():
    (goal,) = metrics.goals({"samples": [{**FOUND["samples"][1], "share": 2.1}]})
    assert goal.met is False


def test_nothing_measured_is_not_met():
    (goal,) = metrics.goals({"samples": []})
    assert goal.met is None
    assert metrics.sheets({"samples": []})[0].rows[0][1] == "-"
