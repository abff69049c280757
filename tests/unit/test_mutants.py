"""Which faults are planted, and how they are called."""

import ast

import pytest

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


def test_survivors_are_read_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "SURVIVORS", tmp_path / "survivors.txt")
    file = "deployments/queueing/pacing.py"
    source = (mutants.ROOT / file).read_text()
    one, other, *_ = faults(file, source)[1]
    mutants.write_survivors({(file, one.name): "it changes nothing"}, {file: [one, other]}, [file])
    assert mutants.known_survivors() == {(file, one.name): "it changes nothing", (file, other.name): mutants.UNNOTICED}
