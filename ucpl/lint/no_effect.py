"""Lines of a layout without effect over one model: remarks, no errors.

They may have an effect over another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ucpl.language import nodes, print_expr, worded
from ucpl.language.walk import walk
from ucpl.layout import Layout
from ucpl.layout.axes import leaves_of
from ucpl.layout.by_index import whole_name
from ucpl.layout.globs import is_called
from ucpl.layout.layout import Filling
from ucpl.layout.name_remedies import for_dropped, for_parameter, nearest

__all__ = [
    "foreign_texts",
    "lines_without_effect",
    "empty_parts",
    "empty_ranges",
    "misspelt_states",
    "odd_tensors",
    "odd_conditions",
    "unequal_fills",
    "unknown_drops",
    "unknown_parameters",
    "unread_dims",
]

_EVERYWHERE = ("weight", "fp32")
_FORMS = ("torch", "safetensors")
_FORMS_ELSEWHERE = {
    "pt": "torch",
    "pth": "torch",
    "bin": "torch",
    "ckpt": "torch",
    "pickle": "torch",
    "pkl": "torch",
    "pytorch": "torch",
}
_SUFFIXES = {"torch": (".pt", ".pth", ".bin", ".ckpt"), "safetensors": (".safetensors",)}
_FOREIGN = re.compile(r"%[ds]|%0?[0-9]+d|\$\{?\w*|<\w+>|\*")  # placeholders of other tools


def lines_without_effect(layout: Layout, items: Iterable[nodes.LayoutItem], *, of_any: bool) -> Iterator[str]:
    """The layout's own statements without effect.

    Layouts of any model are written for families of models: for these, only `*` and unknown names are reported.
    """
    spoken = {entry.span for entry in layout.entries}
    states = {state.name for state in layout.states}
    for item in items:
        match item:
            case nodes.Entry(path="*", of=of, shape=tuple()) if item.span not in spoken:
                if (of is None or not of_any) and all(c.word != "when" for c in item.clauses):
                    yield _line(layout, of, item.span)
            case nodes.Entry(shape=tuple()):
                yield from _idle_conditions(layout, item)
                yield from _idle_casts(layout, item)
            case nodes.Files(form=str() as form) if not layout.framework:
                yield from _odd_form(layout, form, item)
            case nodes.Entry(path=path, shape=None, glob=()) if of_any and path != "*":
                if path not in layout.tensors and path not in layout.aliases:
                    close = nearest(path, [*layout.tensors, *layout.aliases])
                    hint = f": did you mean `{close}`?" if close else ""
                    yield f"{layout.name}: `{path} = none`, and {layout.model_name} has no `{path}`{hint}"
            case nodes.Derive(state=one, source=other) if of_any:
                for name in dict.fromkeys((one, other)):
                    if name not in _EVERYWHERE and name not in states:
                        known = ", ".join([*_EVERYWHERE, *sorted(states - {*_EVERYWHERE})])
                        yield (
                            f"{layout.name}: `derive {one} from {other}`, and {layout.model_name} has no state `{name}`."
                            f" The states are {known}"
                        )


def _odd_form(layout: Layout, form: str, item: nodes.Files) -> Iterator[str]:
    """A form that no framework writes, or the suffix of another form."""
    where = f"(line {item.span.line})"
    close = nearest(form, _FORMS) or _FORMS_ELSEWHERE.get(form)
    if close not in (None, form):
        yield f"{layout.name}: `{form}` {where} is a form that no framework writes: did you mean `{close}`?"
    other = next((one for one, ends in _SUFFIXES.items() if one != form and item.template.endswith(ends)), "")
    if other and form in _FORMS:
        meant = f"file {item.name} = {other}"
        yield f'{layout.name}: "{item.template}" {where} has the suffix of another form. Did you mean `{meant}`?'


def _idle_conditions(layout: Layout, item: nodes.Entry) -> Iterator[str]:
    """A condition on an index.

    Its name is the size of the index there.
    """
    bracketed = {axis.name for axis in item.indices if isinstance(axis, nodes.Dim)}
    yield from _coordinates(layout, item)
    asked = [n for c in item.clauses if c.word == "when" for n in walk(c) if isinstance(n, nodes.Name)]
    for name in sorted({n.path for n in asked} & bracketed):
        count = f", {layout.sizes[name]}" if name in layout.sizes else ""
        yield (
            f"{layout.name}: `when` of `{item.path}` (line {item.span.line}) speaks of `{name}`, which is how many there"
            f" are{count}: some of them are `{item.path}[{name}[..2]] = ...`"
        )


def _coordinates(layout: Layout, item: nodes.Entry) -> Iterator[str]:
    """A condition that no number of ranks meets.

    The name of a mesh axis is its size, not a coordinate.
    """
    axes = {axis for mesh in layout.meshes for axis in mesh.axes}
    asked = [n for c in item.clauses if c.word == "when" for n in walk(c) if isinstance(n, nodes.Binary)]
    for one in asked:
        match one:
            case nodes.Binary("==", nodes.Name(path=name), nodes.Number(value=0)) if name in axes:
                yield (
                    f"{layout.name}: `when {name} == 0` of `{item.path}` (line {item.span.line}) never holds: `{name}` is how"
                    f" many ranks there are. The first of them are `at {name}[0]`"
                )


def _idle_casts(layout: Layout, item: nodes.Entry) -> Iterator[str]:
    """`lossy` or `exact` where nothing asks for a cast."""
    words = {c.word for c in item.clauses}
    if words & {"dtype", "value"} or not words & {"lossy", "exact"}:
        return  # x - 1 of a number may have no equal in its own type
    of = [t for e in layout.entries if e.span == item.span for t in e.targets.values()]
    if of and all(layout.tensors[t].dtype is None for t in of):
        word = "lossy" if "lossy" in words else "exact"
        yield (
            f"{layout.name}: `{word}` of `{item.path}` (line {item.span.line}) does nothing: neither the line nor the model"
            f" says a dtype, so that there is no cast. Write `dtype bf16 {word}`, or take it out"
        )


def _line(layout: Layout, of: str | None, span: nodes.Span) -> str:
    text = f"* {worded(span, 'of', 'is')} {of}" if of else "*"
    what = "second name" if of == "alias" else f"{of} tensor" if of else "tensor"
    return (
        f"{layout.name}: the line `{text} = ...` speaks of no tensor: {layout.model_name} has no {what} without a line of"
        " its own. Take it out, or take the others out"
    )


def unknown_drops(layout: Layout, drop: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names of a plan's `drop` that match nothing in its source.

    Each has its remedy. Globs, too; they match tensors and states.
    """
    states = [*(s.name for s in layout.states), "weight"]
    tensors = list(dict.fromkeys((*layout.tensors, *map(whole_name, layout.tensors), *layout.aliases)))
    for name in drop:
        if not any(is_called(name, one) for one in (*states, *tensors)):
            yield name, for_dropped(name, states, tensors)


def unknown_parameters(plan: nodes.Plan, sides: Iterable[Layout]) -> Iterator[tuple[str, str]]:
    """Names of a plan's `freeze` and `train` without a tensor, with remedies."""
    known = {whole_name(path) for one in sides for path in (*one.tensors, *one.aliases)}
    for word, name in (*(("freeze", n) for n in plan.freeze), *(("train", n) for n, _ in plan.train)):
        if not any(is_called(name, one) for one in known):
            yield f"{word} {name}", for_parameter(name, sorted(known))


def foreign_texts(layout: Layout, items: Iterable[nodes.LayoutItem]) -> Iterator[str]:
    """Placeholders of other tools in names of files and keys.

    They are plain text there.
    """
    for item in items:
        match item:
            case nodes.Files(template=text) if item.form is not None:
                said = [text, item.key or ""]
            case nodes.Entry() | nodes.States():
                said = [c.args[0] for c in item.clauses if c.word == "as"]
            case _:
                continue
        for text in said:
            bare = re.sub(r"\{[^{}]*\}", "", text)
            if (found := _FOREIGN.search(bare)) is not None:
                yield (
                    f'{layout.name}: `{found.group()}` in "{text}" is a text here. A number or a name is written in braces,'
                    " as in {tp}, {l}, {tp:02}"
                )


def empty_ranges(layout: Layout, items: Iterable[nodes.ModelItem]) -> Iterator[str]:
    """Numeric ranges of a model's tensors that are empty or too long."""
    items = tuple(items)
    bindings = [one for item in items if isinstance(item, nodes.Dims) for one in item.bindings]
    stated = {one.name for one in bindings if isinstance(one.value, nodes.Number)}  # others may be larger elsewhere
    for item in items:
        if not isinstance(item, nodes.Tensor):
            continue
        for dim in item.dims:
            if dim.range is None or dim.name is None or dim.range.others:
                continue
            for part in dim.range.items:
                size = layout.sizes.get(dim.name)
                if isinstance(part, nodes.Range) and (said := _of_a_range(part, dim.name, size, dim.name in stated)):
                    yield f"{item.path}: {said}"


def _of_a_range(part: nodes.Range, dim: str, size: int | None, is_stated: bool) -> str:
    """The fault of one range, with the likely intended one; else \"\"."""
    match part:
        case nodes.Range(start=nodes.Number(value=low), stop=None) if (
            is_stated and size is not None and low >= size > 0
        ):
            return f"`{dim}[{low}..]` holds nothing: `{dim}` is {size}. Write `{dim}[{size - 1}..]`, or a lower number"
        case nodes.Range(start=start, stop=nodes.Number(value=high)) if size is not None and high > size:
            low = start.value if isinstance(start, nodes.Number) else 0
            return f"`..{high}` ends behind `{dim}`, which is {size}. Write `{dim}[{low}..]`, or `{dim}[{low}..{size}]`"
    return ""


def empty_parts(layout: Layout, items: Iterable[nodes.LayoutItem]) -> Iterator[str]:
    """Numeric parts of dims that begin behind their dim's end."""
    for item in items:
        match item:
            case nodes.Entry(indices=indices, shape=tuple() as shape):
                axes = (*indices, *shape)
            case nodes.Fill(indices=axes):
                pass
            case _:
                continue
        for node in walk(*axes):
            match node:
                case nodes.Dim(name=name, range=nodes.Among(items=parts, others=False)) if name in layout.sizes:
                    size = layout.sizes[name]
                    starts = [
                        p.start for p in parts if isinstance(p, nodes.Range) and isinstance(p.start, nodes.Number)
                    ]
                    for low in (start.value for start in starts if start.value >= size):
                        yield (
                            f"{layout.name}: `{name}[{low}..]` (line {item.span.line}) holds nothing: {name} is {size}, and"
                            f" its indices are 0 to {size - 1}. Write a lower number, or take it out"
                        )


def unequal_fills(layout: Layout) -> Iterator[str]:
    """Two `fill` lines of one rank with two numbers for an element.

    A plan rejects them if the source lacks that element.
    """
    for n, one in enumerate(layout.fillings):
        for other in layout.fillings[:n]:
            if one.rank != other.rank or one.value == other.value or not _same_states(one, other):
                continue
            shared = [name for name in sorted(one.names & other.names) if _meet(one, other, name)]
            if shared:
                states = sorted((one.states or set()) & (other.states or set()))
                own = (
                    f"states of groups of its own, `fill state m {worded(one.span, 'of', 'for')} decay = 0`"
                    if states
                    else "indices of its own, `fill w[v[8..]] = 0`"
                )
                yield (
                    f"{layout.name}: line {other.span.line} and line {one.span.line} fill"
                    f" `{f'{states[0]} of ' if states else ''}{shared[0]}` with two values, and neither is the more special"
                    f" one. Take one out, or let each fill {own}"
                )


def _same_states(one: Filling, other: Filling) -> bool:
    if one.states is None or other.states is None:
        return one.states is other.states
    return bool(one.states & other.states)


def _meet(one: Filling, other: Filling, name: str) -> bool:
    """Return True if two lines fill one element.

    Without boxes a line fills all.
    """
    if name not in one.boxes or name not in other.boxes:
        return True
    return any(
        all(max(a, c) < min(b, d) for a, b, c, d in zip(*box, *there, strict=True))
        for box in one.boxes[name]
        for there in other.boxes[name]
    )


def misspelt_states(items: Iterable[nodes.LayoutItem]) -> Iterator[str]:
    """Names that are nearly `weight` or `fp32`.

    For layouts of any model that are tried over one of ours.
    """
    for item in items:
        if isinstance(item, nodes.Derive):
            for name in (item.state, item.source):
                close = nearest(name, _EVERYWHERE)
                if close is not None and close != name:
                    yield f"`derive {item.state} from {item.source}`: did you mean `{close}` for `{name}`?"


def unread_dims(layout: Layout, items: Iterable[nodes.LayoutItem]) -> Iterator[str]:
    """Named dims in unused lines that no model here has.

    For layouts of any model.
    """
    read = {entry.span for entry in layout.entries} | {line.span for line in layout.state_lines}
    bound = {b.name for i in items if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings}
    known = {*layout.sizes, *layout.indices, *bound, *(d for t in layout.tensors.values() for d in t.dims)}
    known |= {leaf for dim in layout.indices for leaf in leaves_of(dim, layout.indices)}
    for item in items:
        if not isinstance(item, nodes.Entry | nodes.States) or not isinstance(item.shape, tuple) or item.span in read:
            continue
        axes = (*item.indices, *item.shape) if isinstance(item, nodes.Entry) else item.shape
        names = dict.fromkeys(n.name for n in walk(*axes) if isinstance(n, nodes.Dim) and n.name not in known)
        for name in names:
            close = nearest(name, known)
            yield (
                f"{layout.name}: no dim is called `{name}` (line {item.span.line}), and no tensor here is read by that line."
                + (
                    f" Did you mean `{close}`?"
                    if close
                    else " In a layout of any model `_` is the next dim, whichever it is"
                )
            )


_BRACES = r"\{(\w+)\}"
_WITHOUT_GRADIENT = ("bool", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")


def odd_tensors(file: nodes.File) -> Iterator[str]:
    """Conditions on an entry's own index, and indices in a model's names.

    The index has its size as value.
    """
    for model in (s for s in file.statements if isinstance(s, nodes.Model)):
        is_trained = any(isinstance(i, nodes.State) and i.groups is None and not i.scalar for i in model.items)
        for item in (i for i in model.items if isinstance(i, nodes.Tensor)):
            if is_trained and item.kind == "parameter" and item.scaling is None and item.dtype in _WITHOUT_GRADIENT:
                yield (
                    f"{model.name}: `{item.path}` (line {item.span.line}) is trained, and {item.dtype} has no gradient. Write"
                    f" `is buffer`, or `is frozen` if it is a parameter all the same"
                )
            own = {d.name for d in item.dims}
            asked = [] if item.when is None else [*_compared(item.when)]
            for name in dict.fromkeys(n for n in asked if n in own):
                yield (
                    f"{model.name}: `when` of `{item.path}` (line {item.span.line}) speaks of `{name}`, which is how many there"
                    f" are: some of them are `{item.path} : {name}[2..] ...`"
                )
            for name in dict.fromkeys(re.findall(_BRACES, item.path)):  # those with a number are written out before
                path = re.sub(r"\.?\{\w+\}", "", item.path).strip(".") or "w"
                yield (
                    f'{model.name}: "{item.path}" (line {item.span.line}) is one name, braces and all. An index has a number in'
                    f" this text, as by `dim {name} = 4`; or it is a dim, and is stored with the others: write"
                    f" `{path} : {' '.join([name, *(d.name or str(d.size) for d in item.dims)])}`"
                )


def _compared(asked: nodes.Expr) -> Iterator[str]:
    """Names that a condition compares with more than 1.

    `when e` and `when e > 1` hold if there are any, or several.
    """
    for node in walk(asked):
        if isinstance(node, nodes.Binary) and node.operator not in ("and", "or"):
            sides = node.left, node.right
            if not any(isinstance(one, nodes.Number) and one.value < 2 for one in sides):
                yield from (one.path for one in walk(*sides) if isinstance(one, nodes.Name))


def odd_conditions(file: nodes.File) -> Iterator[str]:
    """`config.head_dim or 128`: 1 or 0 here, unlike in Python."""
    for node in walk(file):
        if (
            not isinstance(node, nodes.Binding)
            or not isinstance(node.value, nodes.Binary)
            or node.value.operator != "or"
        ):
            continue
        match node.value.right:
            case nodes.Number(value=number) if number > 1:
                pass
            case nodes.Binary(operator="+" | "-" | "*" | "/" | "%"):
                pass
            case _:
                continue
        left, right = print_expr(node.value.left), print_expr(node.value.right)
        yield (
            f"`{node.name} = {left} or {right}` (line {node.value.right.span.line or node.span.line}) is 1 or 0: a condition."
            f" The first that has a value is `default({left}, {right})`"
        )
