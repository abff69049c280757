"""Nobody reaches into another module's private names; functions are short. `make check` looks for circles, too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("serve_app", "deployments", "calibration")
MOST_LINES, MOST_PARAMETERS = 40, 6  # a dataclass names more
FILES = [
    path.relative_to(ROOT) for folder in (*PRODUCT, "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_private_names_stay_in_their_module(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (*PRODUCT, "benchmarks"):
            assert not [alias.name for alias in node.names if alias.name.startswith("_")], node.module


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parts[0] in PRODUCT and "_pb2" not in path.name], ids=str
)
def test_functions_fit_on_a_screen_and_take_few_parameters(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            first = node.body[min(len(node.body) - 1, ast.get_docstring(node) is not None)]
            assert node.end_lineno - first.lineno < MOST_LINES, f"{path}: {node.name} is long"
            assert len([name for name in taken if name not in {"self", "cls"}]) <= MOST_PARAMETERS, (
                f"{path}: {node.name}"
            )
