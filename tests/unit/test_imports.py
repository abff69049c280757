"""The shape of the code: a folder imports only those below it, nobody reaches into another module's private names, and
functions are short.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("serve_app", "deployments", "calibration")
MOST_LINES, MOST_PARAMETERS = 40, 6  # a dataclass names more
ORDER = (  # from the top
    "benchmarks",
    "calibration",
    "calibration.generation",
    "calibration.planning",
    "calibration.report",
    "calibration.prove",
    "calibration.measure",
    "calibration.service",
    "calibration.fit",
    "calibration.devices",
    "calibration.progress",
    "calibration.load",
    "serve_app",
    "serve_app.cli",
    "serve_app.local",
    "serve_app.generation",
    "serve_app.ingress",
    "serve_app.embedding",
    "serve_app.rpc",
    "serve_app.web",
    "serve_app.observe",
    "serve_app.config",
    "serve_app.api_keys",
    "serve_app.grpc_services",
    "serve_app.proto",
    "serve_app.stop_signal",
    "serve_app.version",
    "deployments.generation",
    "deployments.generation.engine",
    "deployments.generation.kernels",
    "deployments.generation.text",
    "deployments.generation.settings",
    "deployments.generation.emulated_devices",
    "deployments.generation.scheduler",
    "deployments.embedding",
    "deployments.engines",
    "deployments.serving",
    "deployments.models",
    "deployments.hardware",
    "deployments.embedding.scheduler",
    "deployments.admission",
    "deployments.serve_adapter",
    "deployments.settings",
    "deployments.errors",
)
CIRCLES = {  # left to cut: the engines' package has the protocol beside the choice of an engine
    ("deployments.embedding.link", "deployments.embedding.pool"),
    ("deployments.embedding.retries", "deployments.embedding.placer"),
}
FILES = [
    path.relative_to(ROOT)
    for folder in (*PRODUCT, "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "__init__.py" or path.parent.parent != ROOT
]


def place(module):
    """The entry of ORDER that a module belongs to, if it is ours."""
    parts = module.split(".")
    if parts[0] not in {*PRODUCT, "benchmarks"}:
        return None
    return next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in ORDER or end == 1)


def imports(path):
    """(module, name) of each import; the name is None for whole modules."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield (f"deployments.{alias.name}", None) if node.module == "deployments" else (node.module, alias.name)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    here = place(".".join(path.with_suffix("").parts))
    for module, name in imports(path):
        if (there := place(module)) is not None:
            assert ORDER.index(there) >= ORDER.index(here), f"{path} imports {module}"
            assert not (name or "").startswith("_"), f"{path} imports {module}.{name}"


def test_no_modules_import_each_other():
    """Directly or through others, be it for types only."""
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {
        module: {whole if (whole := f"{of}.{name}") in modules else of for of, name in imports(path)} - {module}
        for module, path in modules.items()
    }
    known = {module: {other for other in others if (module, other) not in CIRCLES} for module, others in graph.items()}
    TopologicalSorter({module: others - {"deployments.engines"} for module, others in known.items()}).prepare()


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
