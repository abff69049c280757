"""The alerts, by Prometheus's own promtool: each fires when it should, and not when it should not."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
MANIFEST = yaml.safe_load((K8S / "base" / "alerts.yaml").read_text())
RULES = [rule for group in MANIFEST["spec"]["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]


@pytest.fixture
def promtool(tmp_path):
    """Runs promtool over the rules; returns what it prints. They must pass."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus): the alerts are not tested")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(MANIFEST["spec"]))
    tests = {"rule_files": ["rules.yaml"], **yaml.safe_load((K8S / "alerts_test.yaml").read_text())}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))

    def run(*words):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_they_are_rules(promtool):
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "rules.yaml")


def test_each_fires_when_it_should_and_not_when_it_should_not(promtool):
    assert "SUCCESS" in promtool("test", "rules", "tests.yaml")


def test_each_is_tried_both_ways():
    tried = [
        (one["alertname"], bool(one["exp_alerts"]))
        for test in yaml.safe_load((K8S / "alerts_test.yaml").read_text())["tests"]
        for one in test["alert_rule_test"]
    ]
    assert {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)} == set(tried)


def test_each_has_its_paragraph_in_the_runbook():
    """At an absolute address, which `kubectl apply -k` makes the operator's (test_manifests.py)."""
    titles = re.findall(r"^## (\w+)$", (K8S / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert titles == [rule["alert"] for rule in ALERTS]
    kustomization = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())
    (address,) = kustomization["configMapGenerator"][0]["literals"]
    for rule in ALERTS:
        assert f"url={rule['annotations']['runbook_url']}" == f"{address}#{rule['alert'].lower()}"
