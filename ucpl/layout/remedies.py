"""What to write instead of a dim or a tensor that there is not, with the line where it can be known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import evolve

from ucpl.layout.layout import LogicalTensor
from ucpl.layout.near import for_name, nearest
from ucpl.syntax import nodes, print_item
from ucpl.syntax.walk import rewritten
from ucpl.syntax.words import CLAUSE_WORDS, ELEMENT_TYPES

__all__ = ["for_cut", "for_dim", "for_extent", "for_tensor", "for_unread_dim"]

_GROUPS = 'the parameter groups of the model are `group * = model`; a line for all tensors is `* = ... as "{name}"`'
_ORDERS = ("T", "mT", "t", "transpose")  # of torch: the other order of two dims
_NUMBER_IN_A_NAME = re.compile(r"\\?\*|\(?(?:\\d|\[0-9\])[+*]?\)?|%d|\$\{?\w*\}?|\{\w*\}")


def for_dim(item: nodes.Entry, name: str, of: Sequence[LogicalTensor], close: str | None) -> str:
    """Of a name in an entry's pattern that is no dim; with the line to write, where it can be known."""
    from ucpl.syntax.habits import foreign, words

    if item.path == "*" and name == "model":
        return _GROUPS
    if name.lower() != name and name.lower() in CLAUSE_WORDS:
        return f"words of the language are small: write `{name.lower()}`"
    said = words().tools.get(item.path.rpartition(".")[2]) or foreign(name)
    last = name.rpartition(".")[2]
    if last in ("None", "null", "nil", "NULL"):
        return _with_line(said, evolve(item, shape=None))
    if last in _ORDERS and len(of) == 1 and not item.indices:
        return _with_line(said, evolve(item, shape=tuple(nodes.Dim(d) for d in reversed(of[0].dims))))
    bracketed = [axis.name for axis in item.indices if isinstance(axis, nodes.Dim)]
    if name in bracketed and not close and not said:
        rest = ", ".join(one for one in bracketed if one != name)
        line = f": `{item.path}[{rest}] = ...`" if rest else ""
        return f"take `{name}` out: an index in brackets is a dim of the tensor, and stands for all of its values{line}"
    if (close and len(name) < 3) or not said:
        word = nearest(name, CLAUSE_WORDS) if not close and len(name) > 1 else None
        if close:
            return _with_line(f"did you mean `{close}`?", rewritten(item, lambda node: _renamed(node, name, close)))
        if word:
            return f"did you mean the clause `{word}`?"
    return said or "a dim without a name is written `_`, all that are left `...`"


def for_unread_dim(item: nodes.Record, name: str, names: Iterable[str]) -> str:
    """The same of a line that speaks of no tensor."""
    if isinstance(item, nodes.Entry) and item.path == "*" and name == "model":
        return _GROUPS
    return for_name(name, names, f"define it: `dim {name} = ...`")


def _renamed(node: nodes.Record, name: str, close: str) -> nodes.Record | None:
    return evolve(node, name=close) if isinstance(node, nodes.Dim) and node.name == name else None


def for_extent(item: nodes.Tensor, position: int, names: Iterable[str], left: Sequence[str] = ()) -> str:
    """Of a name among the dims of a model's tensor that has no size. `left`: all of the model that have none."""
    from ucpl.syntax.habits import foreign, words

    name = item.dims[position].name or ""
    bare = evolve(item, dims=item.dims[:position] + item.dims[position + 1 :])
    kind = name if name in ELEMENT_TYPES else words().dtypes.get(name, "") if len(name) > 3 else ""
    if kind:
        return _with_line(
            foreign(name) or f"the element type stands behind the dims: `dtype {kind}`", evolve(bare, dtype=kind)
        )
    if " " in name:
        dims = tuple(nodes.Dimension(one) for one in name.split())
        whole = evolve(item, dims=item.dims[:position] + dims + item.dims[position + 1 :])
        return _with_line("dims stand side by side, without quotes", whole)
    if name == "frozen":
        return _with_line("write `is frozen`", evolve(bare, kind="frozen"))
    if name == "buffer":
        return _with_line("write `is buffer`", evolve(bare, kind="buffer"))
    if name in ("x", "by", "times") and bare.dims:
        return _with_line("dims stand side by side, with a space between them", bare)
    given = " ".join(f"-D {one}=..." for one in left or (name,))
    others = [f"`{one}`" for one in left if one != name]
    too = f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} none either" if others else ""
    return for_name(
        name,
        names,
        f"give it a size: `dim {name} = ...` in the model, or {given} on the command line{too}. Without them nothing is"
        " checked; when a checkpoint is converted, its shapes give them",
    )


def _with_line(why: str, item: nodes.Record) -> str:
    assert isinstance(item, nodes.Entry | nodes.Tensor)
    return f"{why}\nwrite: {print_item(item)}"


def for_tensor(name: str, tensors: Iterable[str]) -> str:
    """Of a tensor that the model does not have."""
    known = list(tensors)
    head, _, tail = name.rpartition(".")
    if head in known and tail.isidentifier() and len(tail) <= 2:
        return f"an index stands in brackets: `{head}[{tail}]`"
    if _NUMBER_IN_A_NAME.search(name):
        key = _NUMBER_IN_A_NAME.sub("{l}", name)
        return (
            "a tensor's name is no pattern; one line stands for all layers by an index in brackets, as in "
            f'`w[l] = h  as "{key}"`'
        )
    return for_name(name, known, "add it to the model, or take this line out")


def for_cut(reason: str) -> str:
    """What to write instead of a cut that does not come out even."""
    if "units" in reason:
        return "pad it to whole units, pad(n, 64)@spread(tp, 64), or let the last piece be short: @chunk(tp, 64)"
    if "sizes" in reason:
        return "give one size for each coordinate, which together are the whole: @tp[19, 18]"
    return "pad it, cut by @chunk or @spread, or give the sizes: @tp[19, 18]"
