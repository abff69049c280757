"""What the documentation names is there: links, anchors, files, commands, settings and metrics."""

import contextlib
import functools
import importlib.util
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from pydantic import BaseModel

from benchmarks.paper import PAIRS
from benchmarks.simulation.device import Device
from calibration.generation import promise_proof
from calibration.prove import proof
from deployments.embedding import pool
from deployments.embedding.config import BulkConfig, CostConfig, RouterConfig
from deployments.embedding.metrics import EmbedderMetrics, RouterMetrics
from deployments.embedding.pool import Speed, added_share, is_left_out
from deployments.generation.metrics import GenerationRouterMetrics, GeneratorMetrics
from deployments.serving import recent
from deployments.serving.metrics import router_gauges
from deployments.settings import Autoscaled, CpuSettings, EmulatedDevice, RequestLimits, Settings
from serve_app.cli.main import main
from serve_app.config.models import SeveralSettings
from serve_app.config.router_autoscaling import TARGET, router_autoscaling
from serve_app.web.json_values import MOST_VALUES

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "k8s" / name for name in ("README.md", "RUNBOOK.md")),
]
OURS = ("serve_app", "deployments", "calibration", "benchmarks", "k8s", "docs", "tests", ".ci", ".github")
MOST_LINES = 110  # of README


on_each_page = pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])


def without_code(text):
    return re.sub(r"^( *)```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def code(text):
    """What stands in blocks and between backticks."""
    return [
        *re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL),
        *re.findall(r"`([^`\n]+)`", without_code(text)),
    ]


def anchors(path):
    """Of its headings, as GitHub makes them."""
    found = []
    for title in re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def problem_of(link, path):
    """What is wrong with a link of that page, or None."""
    target, _, anchor = link.partition("#")
    there = (path.parent / target).resolve() if target else path
    if not there.exists() or not there.is_relative_to(ROOT):
        return f"{link}: there is no such file"
    return f"{link}: there is no such heading" if anchor and anchor not in anchors(there) else None


@on_each_page
def test_links_and_anchors(path):
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(path.read_text())))
    here = [link for link in links if not re.match(r"\w+:", link)]
    assert [problem for link in here if (problem := problem_of(link, path))] == []


@on_each_page
def test_code_that_is_shown_of_a_file_is_in_it(path):
    for file, shown in re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        assert shown in (ROOT / file).read_text(), f"{path} shows of {file} what it does not hold"


@on_each_page
def test_files_that_are_named(path):
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", without_code(path.read_text()))
    ours = [name for name in named if name.split("/")[0] in OURS and "NAME" not in name]
    assert [name for name in ours if not (ROOT / name).exists()] == []


def commands(path, start):
    """What follows `start` in the page's code, up to the end of the line or a comment."""
    lines = [line for some in code(path.read_text()) for line in some.splitlines()]
    found = [command for line in lines for command in re.findall(rf"(?:^|[\s`]){start} +([^#&|`]*)", line)]
    return [command.strip() for command in found if command.strip()]


@on_each_page
def test_make_targets(path):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = {command.split()[0] for command in commands(path, "make")}
    assert asked <= targets


@on_each_page
def test_comparisons(path):
    registry = (ROOT / "benchmarks" / "kit" / "registry.py").read_text()
    known = set(re.findall(r'^    "(\w+)": "', registry, re.MULTILINE))
    benches = [command for command in commands(path, "make") if command.startswith("bench ARGS=")]
    asked = [word for command in benches for word in command.partition("=")[2].strip("'").split()]
    asked += [word for command in commands(path, "windve bench") for word in command.split()]
    assert {word for word in asked if not word.startswith("-")} <= known


@on_each_page
def test_modules_and_their_options(path):
    for command in commands(path, "python -m"):
        module, *words = command.split()
        assert importlib.util.find_spec(module) is not None, command
        folder = ROOT / module.replace(".", "/")
        told = "".join(file.read_text() for file in folder.rglob("*.py"))
        options = {word for word in words if word.startswith("--")} - {"--help"}
        assert {option for option in options if f'"{option}"' not in told} == set(), command


@functools.cache
def help_of(command):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([command, "--help"])
    return said.getvalue()


@on_each_page
def test_subcommands_and_their_options(path):
    for line in "\n".join(code(path.read_text())).splitlines():
        if line.startswith("windve "):
            _, command, *words = line.partition("#")[0].split()
            if command != "COMMAND":
                options = {word for word in words if word.startswith("--")}
                assert {option for option in options if option not in help_of(command)} == set(), line


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_readme_shows_lines_that_are_run():
    """`tests/e2e/test_clients.py` runs those of docs/use.md."""
    shared, openai, *_ = blocks(ROOT / "docs" / "use.md", "python")
    assert blocks(ROOT / "README.md", "python") == [f"{shared}\n{openai}"]


def fields(model):
    """The keys of a settings class, and of those within it."""
    for key, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner)
        yield key


def test_each_setting_is_explained():
    text = (ROOT / "docs" / "operations.md").read_text()
    told = set(re.findall(r"\w+", " ".join(code(text))))
    models = (Settings, SeveralSettings, RouterConfig, CpuSettings, EmulatedDevice, Autoscaled, CostConfig)
    assert {key for model in models for key in fields(model)} - told == set()


def test_each_metric_is_explained():
    names = set()

    def instrument(name, *_):
        names.add(re.sub("_(bucket|sum|count)$", "", name))  # of a histogram

    told = SimpleNamespace(Counter=instrument, Gauge=instrument)
    RouterMetrics(told)
    EmbedderMetrics(told, "cpu", {})
    GenerationRouterMetrics(told)
    GeneratorMetrics(told, "cpu", {})
    router_gauges(told)
    table = (ROOT / "docs" / "operations.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(windve_\w+)`", table)) == names


class Loader(yaml.SafeLoader):
    """Takes mkdocs' names of Python functions for what they are to us: words."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _, suffix, node: suffix)


def pages_of(nav):
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_the_site_has_every_page():
    shown = list(pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))  # a SafeLoader
    assert [name for name in shown if not (ROOT / name).exists()] == []
    assert {str(path.relative_to(ROOT)) for path in PAGES} <= set(shown)


def rows(page, heading):
    """The cells of the first table that begins with that heading."""
    table = (ROOT / page).read_text().partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_hardware_is_sized_by_the_figures_that_its_table_names():
    papers = {device.name.replace("2 x", "2"): device for *pair, _ in PAIRS for device in pair}
    for name, _, alpha_ms, beta_s, *shown in rows("docs/sizing.md", "device"):
        device = Device(float(alpha_ms) / 1e3, float(beta_s), micro_batch_queries=8)
        if name in papers:
            assert (device.alpha_s, device.beta_s) == pytest.approx((papers[name].alpha_s, papers[name].beta_s))
        each_s = [device.queries_s(1.0), device.queries_s(2.0)]
        counted = math.ceil(200 / (0.9 * each_s[0]))
        assert [float(cell.replace(",", "")) for cell in shown] == pytest.approx([*each_s, counted], rel=0.02), name


def test_what_the_cpu_adds_is_what_is_compared():
    for name, figures, *shown in rows("docs/does-the-cpu-pay.md", "accelerator + CPU"):
        pair = [Speed(*map(float, one.split(",")), 1) for one in figures.split(";")]
        for slo_s, cell in zip((1.0, 2.0), shown, strict=True):
            share = added_share(*pair, slo_s)
            assert 100 * share == pytest.approx(float(cell.split(" %")[0]), abs=0.06), (name, slo_s)
            assert is_left_out(share, before=False) == cell.endswith("left out"), (name, slo_s)


@on_each_page
def test_metrics_that_are_named(path):
    known = set(re.findall(r"`(windve_\w+)`", (ROOT / "docs" / "operations.md").read_text()))
    named = set(re.findall(r"\b(?:ray_)?(windve_[a-z_]+)", " ".join(code(path.read_text()))))
    assert {name for name in named if name.removesuffix("_total") not in known} == set()


LIMITS, BULK, FOLLOWING = RequestLimits(), BulkConfig(), router_autoscaling(4)
CLAIMS = [
    ("use.md", f"at most {LIMITS.max_inputs_per_request:,} inputs and {LIMITS.max_body_bytes >> 20} MiB"),
    ("use.md", f"{MOST_VALUES:,} JSON values"),
    ("use.md", f"the newest {recent._MOST_FINISHES} of each"),
    ("index-many-texts.md", f"At most {LIMITS.max_inputs_per_request:,} texts and {LIMITS.max_body_bytes >> 20} MiB"),
    ("index-many-texts.md", f"`bulk.timeout_s` ({BULK.timeout_s:g} s)"),
    ("index-many-texts.md", f"`bulk.max_waiting` texts ({BULK.max_waiting:,})"),
    ("from-tei-or-infinity.md", f"`args.limits.max_inputs_per_request` ({LIMITS.max_inputs_per_request:,})"),
    ("does-the-cpu-pay.md", f"less than {100 * pool.LEAST_SHARE / pool._DIFFERENT:g} % to the accelerator"),
    ("does-the-cpu-pay.md", f"from {100 * pool.LEAST_SHARE * pool._DIFFERENT:g} % on"),
    ("operations.md", f"above {TARGET:g} for {FOLLOWING['upscale_delay_s']:g} s"),
    ("glossary.md", f"at least {100 * proof.REQUIRED:g} % of the admitted queries"),
    ("glossary.md", f"{100 * promise_proof.REQUIRED:g} % of first tokens"),
]


@pytest.mark.parametrize(("page", "claim"), CLAIMS)
def test_a_number_that_a_page_gives_is_the_codes(page, claim):
    assert claim in " ".join((ROOT / "docs" / page).read_text().split())


def test_the_readmes_comparison_is_the_last_one_that_was_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "overload.json").read_text())["samples"]

    def in_time(server, load, lengths):
        about = {"contestant": server, "load": load, "lengths": lengths, "arrivals": "Poisson"}
        (one,) = [sample for sample in found if about.items() <= sample.items()]
        return f"{one['goodput_s']:.0f}", f"{100 * one['late_share']:.1f} % late"

    equal, mixed = in_time("windve", 2.0, "equal"), in_time("windve", 2.0, "mixed")
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"windve {equal[0]} and mosec {in_time('mosec', 2.0, 'equal')[0]} (equal lengths)" in text
    assert f"windve {mixed[0]}, with {mixed[1]}, and vLLM {in_time('vLLM pooling', 2.0, 'mixed')[0]} (mixed)" in text
    thrice = [in_time(name, 3.0, "equal")[0] for name in ("mosec", "windve")]
    assert f"At three times mosec answers more: {' to '.join(thrice)}." in text
