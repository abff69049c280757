"""The Grafana dashboard: the committed manifest, and that it asks for what there is."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from deployments.embedding.metrics import EmbedderMetrics, RouterMetrics
from deployments.generation.metrics import GenerationRouterMetrics, GeneratorMetrics
from deployments.serving.metrics import router_gauges
from k8s.dashboard import GRID, MANIFEST, manifest, queries

RAYS_LABELS = ("application", "deployment", "replica", "model", "SessionName", "ip")  # and `OfModel`'s


def kept():
    return yaml.safe_load(MANIFEST.read_text())


def panels():
    return json.loads(kept()["data"]["windve.json"])["panels"]


def test_the_committed_manifest_is_what_make_manifests_makes():
    assert MANIFEST.read_text() == manifest(), "k8s/base/dashboard.yaml is not what its code makes: make manifests"


def test_grafana_s_sidecar_finds_it():
    assert kept()["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_all_queries_are_in_it():
    assert [t["expr"] for panel in panels() for t in panel.get("targets", [])] == [q.expr for _, q in queries()]


def test_prometheus_takes_each_query(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus): the queries are not parsed")
    exprs = [query.expr.replace("$__rate_interval", "1m") for _, query in queries()]
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
    alerts = yaml.safe_load(MANIFEST.with_name("alerts.yaml").read_text())["spec"]["groups"]
    exprs = [query.expr for _, query in queries()] + [rule["expr"] for group in alerts for rule in group["rules"]]
    assert {name for expr in exprs for name in re.findall(r"ray_windve_\w+", expr)} <= labels.keys()
    grouped = re.compile(r"by \(([^)]*)\) \([a-z(]*(ray_windve_\w+)")
    for by, name in [found for expr in exprs for found in grouped.findall(expr)]:
        assert {*by.split(", ")} <= labels[name], name
