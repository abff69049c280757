"""docs/papers.md: each mechanism has a known word for how much of it is there. What the page names is there; what is
left out has a figure.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
COLUMNS = ["mechanism", "in the paper", "here", "how much", "what differs, and why", "shown by"]
WORDS = {"whole", "simplified", "replaced", "left out"}
PAPERS = ("WindVE", "NEO", "APEX", "eLLM")
NAMED = re.compile(r"`([\w./]+/[\w.]+)` `([\w.]+)`")


def cells(line):
    return [cell.strip() for cell in line[1:-1].split("|")]


def mechanisms():
    """The rows of the papers' tables, each with its paper."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        lines = [line.rstrip() for line in text.splitlines() if line.startswith("|")]
        start = next(at for at, line in enumerate(lines) if cells(line)[0] == COLUMNS[0])
        yield from ((title, line) for line in lines[start:] if not line.startswith("|---"))


ROWS = [(paper, cells(line)) for paper, line in mechanisms()]
MECHANISMS = [(paper, row) for paper, row in ROWS if row[0] != COLUMNS[0]]


def names(path):
    """Functions, classes and methods that a file defines; of C its functions, some behind the macro `NAME`."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".c":
        return set(re.findall(r"^[\w ]*?[ *](?:NAME\()?(\w+)\)?\(", text, re.MULTILINE))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_each_paper_has_its_table():
    assert [(paper, row) for paper, row in ROWS if row[0] == COLUMNS[0]] == [(paper, COLUMNS) for paper in PAPERS]


@pytest.mark.parametrize(("paper", "row"), MECHANISMS, ids=[f"{paper}: {row[0]}" for paper, row in MECHANISMS])
def test_a_mechanism(paper, row):
    """`test_docs` follows the links, with their anchors."""
    _, _, here, how_much, differs, shown_by = row
    assert how_much in WORDS
    if how_much == "left out":
        assert (here, shown_by) == ("-", "")
        assert re.search(r"\d", differs), "it gives no figure"
        return
    assert NAMED.sub("", here).strip(", ") == "", "each path is followed by a name"
    assert NAMED.findall(here), "it names no code"
    for path, name in NAMED.findall(here):
        assert name in names(ROOT / path), f"{path} has no {name}"
    assert re.search(r"\]\([^)]+\)", shown_by), "nothing shows it"
    assert how_much == "whole" or differs, "it does not say what differs"
