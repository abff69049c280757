"""Runs a Prometheus that scrapes a service every second."""

import json
import math
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kit.serving import ROOT, answers, free_port, running

DASHBOARD = ROOT / "k8s" / "base" / "dashboard.json"


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, in Grafana's JSON model."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """A running Prometheus at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **words: str | float) -> Any:
        """The answer's data. Raises RuntimeError with Prometheus's error text."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(words)}", timeout=30) as answer:  # noqa: S310
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{words}: {error.read().decode()}") from None

    def values(self, expr: str) -> list[float]:
        """The current values of `expr`, without NaN."""
        found = [float(series["value"][1]) for series in self.ask("/api/v1/query", query=expr)["result"]]
        return [value for value in found if not math.isnan(value)]

    def history(self, expr: str, start: float, end: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """`expr` every second from `start` to `end` (Unix time): per series its labels and (time, value) pairs."""
        found = self.ask("/api/v1/query_range", query=expr, start=start, end=end, step=1)["result"]
        return [(series["metric"], [(at, float(value)) for at, value in series["values"]]) for series in found]

    def metrics(self) -> set[str]:
        return set(self.ask("/api/v1/label/__name__/values"))


@contextmanager
def reading(target: str, groups: Sequence[dict[str, Any]] = ()) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target` every second and evaluates `groups` of rules, until the block ends. Raises
    RuntimeError if it does not start.
    """
    address = urllib.parse.urlsplit(target)
    listen = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="windve-prometheus-") as scratch:
        folder = Path(scratch)
        rules = {"groups": [{**group, "interval": "1s"} for group in groups]}
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
        scrape = {"job_name": "ray", "metrics_path": address.path, "static_configs": [{"targets": [address.netloc]}]}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = ["prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data",
                   f"--web.listen-address={listen}"]  # fmt: skip
        with running(command, lambda _: answers(f"http://{listen}/-/ready"), {}, folder):
            yield Prometheus(f"http://{listen}")
