"""The Grafana dashboard: it asks for what there is."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.kit.prometheus import DASHBOARD, panels
from deployments.embedding.metrics import EmbedderMetrics, RouterMetrics
from deployments.generation.metrics import GenerationRouterMetrics, GeneratorMetrics
from deployments.serving.metrics import router_gauges

GRID = 24  # columns of a Grafana dashboard
RAYS_LABELS = ("application", "deployment", "replica", "model", "SessionName", "ip")  # and `OfModel`'s
EXPRS = [target["expr"] for panel in panels() for target in panel["targets"]]
ALERTS = yaml.safe_load(DASHBOARD.with_name("alerts.yaml").read_text())["spec"]["groups"]
RULES = [rule for group in ALERTS for rule in group["rules"]]


def test_it_works_where_prometheus_lacks_the_alerts_rules():
    (drift,) = [rule["expr"].strip() for rule in RULES if rule.get("record") == "windve:drift:ratio_rate15m"]
    assert any(drift in expr for expr in EXPRS)
    assert not any("windve:" in expr for expr in EXPRS)


def test_prometheus_takes_each_query(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus): the queries are not parsed")
    exprs = [expr.replace("$__rate_interval", "1m") for expr in EXPRS]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"{len(rules)} rules found" in done.stdout, done.stderr


def test_no_panel_lies_on_another():
    seen = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not seen & cells, panel["title"]
        assert at["x"] + at["w"] <= GRID
        seen |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_it_and_the_alerts_ask_only_for_metrics_and_labels_that_windve_has():
    labels = {}

    def instrument(suffix):
        return lambda name, _, tags=(): labels.update({f"ray_{name}{suffix}": {*tags, *RAYS_LABELS}})

    told = SimpleNamespace(Counter=instrument("_total"), Gauge=instrument(""))
    about = dict.fromkeys(("engine", "dtype", "version"), "")
    RouterMetrics(told)
    EmbedderMetrics(told, "cpu", about)
    GenerationRouterMetrics(told)
    GeneratorMetrics(told, "cpu", about)
    router_gauges(told)
    exprs = EXPRS + [rule["expr"] for rule in RULES]
    assert {name for expr in exprs for name in re.findall(r"ray_windve_\w+", expr)} <= labels.keys()
    grouped = re.compile(r"by \(([^)]*)\) \([a-z(]*(ray_windve_\w+)")
    for by, name in [found for expr in exprs for found in grouped.findall(expr)]:
        assert {*by.split(", ")} <= labels[name], name
