"""Which faults are planted, and how they are called."""

import ast
import io
from collections import Counter

import pytest
from rich.console import Console

from tests.mutants import __main__ as mutants
from tests.mutants.faults import faults


@pytest.mark.parametrize(
    ("source", "planted"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a == b", ["a != b"]),
        ("a in b", ["a not in b"]),
        ("a < b <= c", ["a <= b <= c", "a < b < c"]),
        ("a + b", ["a - b"]),
        ("a / b", ["a * b"]),
        ("'a' + b", []),
        ("a and b", ["a or b"]),
        ("not a", ["a"]),
        ("x = 2", ["x = 3"]),
        ("x = 2.0", ["x = 3.0"]),
        ("x = 0.0", ["x = 0.5"]),
        ("x = True", ["x = False"]),
        ("min(a, b)", ["pass", "max(a, b)"]),
        ("x = math.ceil(a)", ["x = math.floor(a)"]),
        ("x = a if b else c", ["x = c if b else a"]),
        ("if a:\n    x = y", ["if not a:\n    x = y"]),
        ("x += y", ["pass"]),
        ("x.a = y", ["pass"]),
        ("x = y", []),
        ("assert a < b", []),
        ("'''What it is, in 2 words.'''", []),
        ("@dataclass(frozen=True)\nclass A:\n    x: Literal[1]", []),
    ],
)
def test_what_is_planted(source, planted):
    count = len(faults("m.py", source)[1])
    made = []
    for index in range(count):
        tree, found = faults("m.py", source)
        found[index].plant()
        made.append(ast.unparse(tree))
    assert made == planted


def test_a_fault_keeps_its_name_when_lines_move_and_two_have_two_names():
    source = "class A:\n    def f(self):\n        return 1, 1\n"
    names = [fault.name for fault in faults("m.py", source)[1]]
    assert names == ["A.f | return 1, 1 | 1 -> 2", "A.f | return 1, 1 | 1 -> 2 #2"]
    assert names == [fault.name for fault in faults("m.py", "\n\n" + source)[1]]


def test_what_changes_nothing_is_read_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "equivalent.txt")
    mutants.EQUIVALENT.write_text(
        "# A comment.\na.py\n    A.f | x = 1 | 1 -> 2\n        x is not read\nb.py\n    f | y | 1 -> 2\n        so\n"
    )
    assert mutants.equivalent() == {("a.py", "A.f | x = 1 | 1 -> 2"): "x is not read", ("b.py", "f | y | 1 -> 2"): "so"}


@pytest.mark.parametrize(
    ("planted", "found", "is_sample", "status"),
    [
        (100, 85, False, 0),
        (100, 84, False, 1),
        (100, 75, True, 0),  # 0.85 less three times sqrt(0.85 * 0.15 / 100)
        (100, 74, True, 1),
        (10_000, 8300, True, 1),
    ],
)
def test_a_sample_fails_where_it_cannot_be_chance(planted, found, is_sample, status):
    console = Console(file=io.StringIO())
    counts = Counter({"a/b.py": planted}), Counter({"a/b.py": found}), Counter[str]()
    assert mutants.verdict(console, *counts, is_sample=is_sample) == status


def test_every_fault_that_changes_nothing_can_be_planted():
    files = {file for file, _ in mutants.equivalent()}
    planted = {f.key for file in files for f in faults(file, (mutants.ROOT / file).read_text(encoding="utf-8"))[1]}
    assert not mutants.equivalent().keys() - planted
