"""Parts of fused tensors, found in the source of a class.

A module that computes several values at once (gate and up, or q, k and v) splits the output of one linear layer: by
`chunk`, `split`, `view` or strided slices. The syntax tree of the module's class shows the split, and nothing is run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Literal

from ucpl.records import frozen

__all__ = ["OutputSplit", "split_of"]

_SAME = {"view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "flatten", "to", "float"}
_PRODUCTS = {"linear", "bmm", "matmul", "einsum", "mm"}
_SUFFIXES = ("_states", "_state", "_output", "_proj", "_layer", "s")


Kind = Literal["joined", "strided", "by_head"]


@frozen
class OutputSplit:
    """A split of a linear layer's output into equal parts.

    `joined`: parts end to end. `strided`: elements in turns. `by_head`: parts end to end within each head.
    """

    kind: Kind
    count: int
    labels: tuple[str, ...] = ()


def split_of(owner: type, attribute: str) -> OutputSplit | None:
    """The split of the output of `self.attribute`, or None.

    The methods of a class are searched.
    """
    if owner.__module__ == "torch.nn.modules.activation" and attribute.startswith("in_proj"):
        return OutputSplit("joined", 3, ("q", "k", "v"))  # torch's own attention, as its documentation says
    for method in _methods(owner):
        found = _Method(attribute).split(method)
        if found is not None:
            return found
    return None


@cache
def _methods(owner: type) -> tuple[ast.FunctionDef, ...]:
    out: list[ast.FunctionDef] = []
    for base in inspect.getmro(owner):
        package = base.__module__.split(".")
        if package[0] in ("torch", "builtins") or (package[0] == "transformers" and package[1] != "models"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # a class without source
            continue
        out += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    return tuple(out)


class _Method:
    """One method: names of the output, and its first split."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._held: set[str] = set()
        self._headed: set[str] = set()  # of these, the outputs that a view splits into heads

    def split(self, method: ast.FunctionDef) -> OutputSplit | None:
        for statement in _statements(method):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, value = statement.targets[0], statement.value
                found = self._found(value, target)
                if found is not None:
                    return found
                if isinstance(target, ast.Name):
                    is_headed = self._is_headed(value)
                    (self._held.add if self._is_output(value) else self._held.discard)(target.id)
                    (self._headed.add if is_headed else self._headed.discard)(target.id)
                elif isinstance(target, ast.Tuple):
                    self._held -= {name.id for name in target.elts if isinstance(name, ast.Name)}
            else:
                found = self._found(statement, None)
                if found is not None:
                    return found
        return None

    def _found(self, tree: ast.AST, target: ast.expr | None) -> OutputSplit | None:
        names = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found = self._of_call(node, names)
            elif isinstance(node, ast.Subscript) and self._is_output(node.value) and _step(node.slice) == 2:
                found = OutputSplit("strided", 2, _labels(2, []))
            else:
                continue
            if found is not None:
                return found
        return None

    def _of_call(self, call: ast.Call, names: list[str]) -> OutputSplit | None:
        name, base, args = _called(call)
        if base is None or not self._is_output(base):
            return None
        kind: Kind = "by_head" if self._is_headed(base) else "joined"
        if name in ("chunk", "tensor_split") and args and isinstance(args[0], ast.Constant):
            count = args[0].value
            return _parted(kind, count, names) if isinstance(count, int) else None
        if name == "split" and args:
            sizes = args[0]
            if isinstance(sizes, ast.List | ast.Tuple):
                return _parted(kind, len(sizes.elts), names) if len({ast.dump(e) for e in sizes.elts}) == 1 else None
            return _parted(kind, len(names), names) if len(names) > 1 else None
        if name in ("view", "reshape"):
            flat = list(args[0].elts) if len(args) == 1 and isinstance(args[0], ast.Tuple | ast.List) else args
            return _viewed(flat)
        return None

    def _is_output(self, node: ast.AST) -> bool:
        """True if the value is the layer's output, perhaps in another shape."""
        if isinstance(node, ast.Name):
            return node.id in self._held
        if isinstance(node, ast.BinOp):
            return self._is_output(node.left) if isinstance(node.op, ast.Add) else self._is_weight(node.right)
        if not isinstance(node, ast.Call):
            return False
        if self._is_weight(node.func):
            return True
        name, base, args = _called(node)
        if "act" in name and node.args:
            return self._is_output(node.args[0])
        if name in _PRODUCTS and any(self._is_weight(a) for a in node.args):
            return True
        return name in _SAME and base is not None and self._is_output(base) and not _viewed_apart(name, args)

    def _is_headed(self, node: ast.AST) -> bool:
        """True if a view of the output has an axis of heads."""
        if isinstance(node, ast.Name):
            return node.id in self._headed
        name, base, args = _called(node) if isinstance(node, ast.Call) else ("", None, [])
        if base is None or name not in _SAME:
            return False
        is_view = name in ("view", "reshape") and any("head" in ast.unparse(a) for a in args)
        return (is_view and self._is_output(base)) or self._is_headed(base)

    def _is_weight(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Subscript) or (
            isinstance(node, ast.Attribute) and node.attr in ("T", "weight", "mT") and isinstance(node.value, ast.AST)
        ):
            node = node.value
        return (
            isinstance(node, ast.Attribute)
            and node.attr == self._attribute
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )


def _statements(method: ast.FunctionDef) -> Iterator[ast.stmt]:
    """The simple statements of a method, in their order."""
    stack: list[ast.AST] = list(reversed(method.body))
    while stack:
        node = stack.pop()
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.withitem)]
        if isinstance(node, ast.stmt) and not inner:
            yield node
        stack += reversed(inner)


def _called(call: ast.Call) -> tuple[str, ast.expr | None, list[ast.expr]]:
    """(name, tensor, other arguments) of a method or torch function."""
    if not isinstance(call.func, ast.Attribute):
        return "", None, []
    name, base = call.func.attr, call.func.value
    if isinstance(base, ast.Name) and base.id in ("torch", "F"):
        return (name, call.args[0], call.args[1:]) if call.args else (name, None, [])
    return name, base, call.args


def _viewed(args: list[ast.expr]) -> OutputSplit | None:
    """The split by a literal 2 or 3 in a view."""
    for i, arg in enumerate(args):
        if isinstance(arg, ast.Constant) and isinstance(arg.value, int) and arg.value in (2, 3) and i:
            after = len(args) - 1 - i
            if after == 1 and "head" in ast.unparse(args[i - 1]):
                return _parted("by_head", arg.value, [])
            return _parted("joined", arg.value, []) if after in (1, 2) else None
    return None


def _viewed_apart(name: str, args: list[ast.expr]) -> bool:
    return name in ("view", "reshape") and _viewed(args) is not None


def _step(index: ast.expr) -> int | None:
    """The step of the last slice of an index: 2 of `[..., ::2]`."""
    last = index.elts[-1] if isinstance(index, ast.Tuple) and index.elts else index
    step = last.step if isinstance(last, ast.Slice) else None
    return step.value if isinstance(step, ast.Constant) and isinstance(step.value, int) else None


def _parted(kind: Kind, count: int, names: list[str]) -> OutputSplit | None:
    return OutputSplit(kind, count, _labels(count, names)) if count in (2, 3) else None


def _labels(count: int, names: list[str]) -> tuple[str, ...]:
    """Labels of the parts.

    They are the names that the class gives to them, or the usual ones.
    """
    short = [_short(name) for name in names]
    if len(short) == count == len(set(short)) and all(short):
        return tuple(short)
    return ("q", "k", "v") if count == 3 else ("gate", "up")


def _short(name: str) -> str:
    name = name.strip("_")
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name if name.isidentifier() else ""
