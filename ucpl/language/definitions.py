"""Names that one file defines twice.

Two lines disagree, so the message shows both. The check uses a single text: the meaning of a name, and unknown names,
are the layout room's.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.language.nodes import Span
from ucpl.language.source import Source
from ucpl.records import frozen

__all__ = ["check_definitions"]


_SECOND_MESH = (
    "one `mesh` has all axes; the same ranks seen otherwise have a name, `mesh expert: pp edp ep`,"
    " and lines say `on expert`"
)


@frozen
class _Definition:
    kind: str  # "layout", "file", …: the same word for names that would collide
    name: str
    span: Span
    remedy: str = ""  # where it is this one that may be meant otherwise
    is_parameter: bool = False  # of a model or layout


def check_definitions(file: nodes.File, source: Source) -> None:
    """Refuse a name that is defined twice in one scope.

    Tensors and files under a condition may share a name, since at most one of them need hold. Entries and blobs may repeat:
    they can have several homes. Raises: UcplError E008.
    """
    _check((d for s in file.statements for d in _of_file(s)), source)
    for statement in file.statements:
        match statement:
            case nodes.Model():
                if statement.name == "any":
                    fail(
                        "E008",
                        "a model is called `any`, and `of any` means a layout of every model",
                        source.label(statement.span, "defined here"),
                        remedy="give the model another name",
                    )
                parameters = [_Definition("number", p.name, p.span, is_parameter=True) for p in statement.parameters]
                _check([*parameters, *(d for item in statement.items for d in _of_model(item))], source)
            case nodes.Layout():
                parameters = [_Definition("number", p.name, p.span, is_parameter=True) for p in statement.parameters]
                items = [d for item in statement.items for d in _of_layout(item)]
                _check([*parameters, *items], source)
            case _:
                pass


def _check(definitions: Iterable[_Definition], source: Source) -> None:
    seen: dict[tuple[str, str], _Definition] = {}
    for new in definitions:
        kind = "number" if new.kind == "dim" else new.kind  # one name, one value
        old = seen.setdefault((kind, new.name), new)
        if old is not new:
            what = f"the {new.kind} `{new.name}`" if new.name else f"the {new.kind}"
            fail(
                "E008",
                f"{what} is defined twice",
                source.label(new.span, "defined again here"),
                source.label(old.span, "first defined here"),
                remedy=_SECOND_MESH
                if (new.kind, new.name) == ("mesh", "")
                else _is_a_size(new.name)
                if old.is_parameter and new.kind == "dim"
                else new.remedy or old.remedy,
            )


def _is_a_size(name: str) -> str:
    return f"a parameter is a size, too: take `{name} = ...` out of the `dim` line, and write `{name}` among the dims"


def _further(state: nodes.State) -> str:
    """Remedy for a second line of a state with other dims."""
    text = "  ".join(" ".join(("without", *c.dims, *(("for", ", ".join(c.of)) if c.of else ()))) for c in state.without)
    return (
        f"a state has one line, and a clause for each kind of tensor: write `{text}` behind the first" if text else ""
    )


def _numbers(bindings: Iterable[nodes.Binding], kind: str) -> list[_Definition]:
    return [_Definition(kind, b.name, b.span) for b in bindings]


def _of_file(statement: nodes.Statement) -> list[_Definition]:
    match statement:
        case nodes.Let():
            return _numbers(statement.bindings, "number")
        case nodes.Model():
            return [_Definition("model or layout", statement.name, statement.span)]
        case nodes.Layout():
            return [_Definition("model or layout", statement.name, statement.span)]
        case nodes.Import():
            return [_Definition("model or layout", name, statement.span) for name in statement.names]
        case nodes.Plan():
            return [_Definition("plan", statement.name, statement.span)]
        case nodes.Assert():
            return []


def _of_model(item: nodes.ModelItem) -> list[_Definition]:
    match item:
        case nodes.Let():
            return _numbers(item.bindings, "number")
        case nodes.Dims():
            return _numbers(item.bindings, "dim")
        case nodes.Tensor():
            return [] if item.when is not None else [_Definition("tensor", item.path, item.span)]
        case nodes.Alias(path=path, owner=owner):
            remedy = f"remove one of the two; an alias has the new name first: alias {owner} = {path}"
            return [] if item.when is not None else [_Definition("tensor", path, item.span, remedy)]
        case nodes.Index():
            return [] if item.when is not None else [_Definition("index", item.name, item.span)]
        case nodes.Group():
            return [_Definition("group", item.name, item.span)]
        case nodes.Use():
            return [_Definition("prefix", item.name, item.span)]
        case nodes.DefaultDtype():
            return [_Definition("default dtype", "", item.span)]
        case nodes.Gone(kind="tensor" | "alias"):
            return [_Definition("tensor", name, item.span) for name in item.names]
        case nodes.State():
            return [_Definition("state", name, item.span, _further(item)) for name in item.names]
        case nodes.Assert() | nodes.Gone():
            return []


def _of_layout(item: nodes.LayoutItem) -> list[_Definition]:
    match item:
        case nodes.Let():
            return _numbers(item.bindings, "number")
        case nodes.Dims():
            return _numbers(item.bindings, "dim")
        case nodes.Mesh():
            return [_Definition("mesh", item.name, item.span)]
        case nodes.Domain():
            return [_Definition("domain", item.kind, item.span)]
        case nodes.Index():
            return [] if item.when is not None else [_Definition("index", item.name, item.span)]
        case nodes.Files():
            return [] if item.when is not None else [_Definition("file", item.name, item.span)]
        case nodes.Group():
            return [_Definition("group", item.name, item.span)]
        case nodes.Use():
            return [_Definition("prefix", item.name, item.span)]
        case nodes.Derive():
            return [] if item.when is not None else [_Definition("derived state", item.state, item.span)]
        case nodes.Framework():
            return [_Definition("framework", "", item.span)]
        case nodes.Entry() | nodes.States() | nodes.Fill() | nodes.FillStates():
            return []
        case nodes.Blob() | nodes.Assert() | nodes.Gone():
            return []
