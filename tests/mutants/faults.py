"""The faults that are planted in a module: each is one small change of its syntax tree. Pure."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_ORDER = {ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)}
_OPPOSITE = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
COMPARED = _ORDER | {kind: (other,) for a, b in _OPPOSITE.items() for kind, other in ((a, b), (b, a))}
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
_FACTOR = 1.5  # of a number: far enough for a test that pins it, near enough to pass for a tuned value


@dataclass(frozen=True)
class Fault:
    """`plant()` changes the tree that the fault was found in, for good. `name` stays when the lines around it move."""

    file: str
    line: int
    name: str
    plant: Callable[[], None]

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.name


def faults(file: str, source: str) -> tuple[ast.Module, list[Fault]]:
    """The module's syntax tree, and all that can be planted in it. The name of a fault is made of the function or class
    around it, the line without its comment, and what becomes what: `Learning.passed | self.slow = ... | 0.02 -> 0.03`.
    """
    tree, lines, found, seen = ast.parse(source), source.splitlines(), [], Counter[str]()
    for node, where, before, after, plant in _inside(tree, "module"):
        line = lines[node.lineno - 1].split("  # ")[0].strip()
        name = f"{where} | {line} | {before} -> {after}"
        seen[name] += 1
        found.append(Fault(file, node.lineno, f"{name} #{seen[name]}" if seen[name] > 1 else name, plant))
    return tree, found


def _inside(parent: ast.AST, where: str) -> Iterator[tuple[ast.AST, str, str, str, Callable[[], None]]]:
    for field, value in ast.iter_fields(parent):
        if field in {"decorator_list", "annotation", "returns", "type_params"}:
            continue  # these decide nothing while it runs
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.Raise) or _is_docstring(node):
                continue
            for changed in _changes(node):
                plant = _planter(parent, field, index if isinstance(value, list) else None, changed)
                yield node, where, _text(node), _text(changed), plant
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = node.name if named and where == "module" else f"{where}.{node.name}" if named else where
            yield from _inside(node, inner)


def _planter(parent: ast.AST, field: str, index: int | None, changed: ast.AST) -> Callable[[], None]:
    def plant() -> None:
        if index is None:
            setattr(parent, field, changed)
        else:
            getattr(parent, field)[index] = changed
        ast.fix_missing_locations(parent)

    return plant


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [operator], others):
            for other in COMPARED[type(operator)]:
                yield ast.copy_location(ast.Compare(left, [other()], others), node)
        case ast.Compare(left, operators, others):  # a < b < c
            for index, operator in enumerate(operators):
                for other in COMPARED[type(operator)][:1]:
                    chain = [*operators[:index], other(), *operators[index + 1 :]]
                    yield ast.copy_location(ast.Compare(left, chain, others), node)
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED and not _is_text(node):
            yield ast.copy_location(ast.BinOp(left, COMPUTED[type(operator)](), right), node)
        case ast.BoolOp(operator, values):
            yield ast.copy_location(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values), node)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield ast.copy_location(operand, node)
        case ast.Constant(bool() as value):
            yield ast.copy_location(ast.Constant(not value), node)
        case ast.Constant(int() | float() as value):
            yield ast.copy_location(ast.Constant(value + 1 if isinstance(value, int) else _FACTOR * value or 0.5), node)
        case ast.Call(ast.Name(name), [_, *_] as given, named) if name in CALLED:
            yield ast.copy_location(ast.Call(ast.Name(CALLED[name], ast.Load()), given, named), node)
        case ast.Call(ast.Attribute(ast.Name("math") as module, name), given, named) if name in CALLED:
            yield ast.copy_location(ast.Call(ast.Attribute(module, CALLED[name], ast.Load()), given, named), node)
        case ast.If(test, body, others) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), test), body, others), node)
        case ast.IfExp(test, body, other):
            yield ast.copy_location(ast.IfExp(test, other, body), node)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.Delete():
            yield ast.copy_location(ast.Pass(), node)
        case ast.Continue():
            yield ast.copy_location(ast.Break(), node)
        case ast.Break():
            yield ast.copy_location(ast.Continue(), node)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
        for side in (node.left, node.right)
    )


def _text(node: ast.AST) -> str:
    match node:
        case ast.Pass():
            return "nothing"
        case ast.If(test):
            return f"if {ast.unparse(test)}"
    return ast.unparse(node)
