"""Statements without effect, found without evaluating numbers. They are remarks, no errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from math import prod

from ucpl.errors import UcplError
from ucpl.language import nodes, print_expr
from ucpl.language.walk import walk
from ucpl.language.words import HOLE
from ucpl.layout import Layout
from ucpl.layout.arithmetic import Operand, evaluated
from ucpl.layout.name_remedies import nearest

__all__ = ["constant_condition", "dead_statements", "dead_plan_names", "dead_training"]

_OF_VALUES = (nodes.Name, nodes.Function)  # nodes that a condition can depend on
# States that an optimizer makes of gradients. Masters have other names, and are copies of the weight.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "step")


def dead_statements(file: nodes.File) -> Iterator[str]:
    """Conditions without names, repeated names and lines, empty ranges, idle padding."""
    for statement in file.statements:
        if isinstance(statement, nodes.Assert):
            yield from _condition("", statement.condition, "assert", statement.span.line)
        elif isinstance(statement, nodes.Model | nodes.Layout):
            axes = {axis for item in statement.items if isinstance(item, nodes.Mesh) for axis in item.axes}
            for item in statement.items:
                yield from (f"{statement.name}: {text}" for text in (*_of_an_item(item), *_truths(item, axes)))
            yield from (f"{statement.name}: {text}" for text in _spaced(statement.items))
            if not getattr(statement, "extends", None):  # where a base is taken back, both lines act
                yield from (f"{statement.name}: {text}" for text in _stored_and_not(statement.items))
            yield from (f"{statement.name}: {text}" for text in _lines_twice(statement.items))
            yield from (f"{statement.name}: {text}" for text in _of_nothing(statement.items))


def _of_an_item(item: nodes.ModelItem | nodes.LayoutItem) -> Iterator[str]:
    line = item.span.line
    yield from _conditions(item, line)
    yield from _names_twice(item, line)
    match item:
        case nodes.Entry(shape=shape, clauses=clauses):
            yield from _places(clauses, line)
            yield from _axes((*item.indices, *(shape or ())), line)
        case nodes.States(shape=tuple() as shape):
            yield from _axes(shape, line)
        case nodes.Fill(indices=indices) | nodes.Group(indices=indices):
            yield from _axes(indices, line)
        case nodes.Tensor(dims=dims):
            for dim in dims:
                yield from _range(dim.name or "_", dim.range, line)
        case nodes.Index(name=name, axis=nodes.Dim(name=other, range=None)) if name == other:
            yield f"`index {name} = {name}` (line {line}) does nothing. Write `index {name} = {name}@pp`, or take it out"
        case nodes.Index(name=name, axis=nodes.Stack(terms=(nodes.Term(axes=(nodes.Dim(),)),))):
            yield f"`index {name}` (line {line}) has one digit, which is all of `{name}`. Write two, `(two k)`, or take it out"
        case nodes.Index(name=name, axis=nodes.Cut(axis=inner, splits=splits)):
            yield from _dealt(name, inner, "".join(f"@{split.mesh_axis}" for split in splits), line)
        case nodes.State(names=names) if "weight" in names:
            yield f"`state weight` (line {line}): `weight` is the tensor itself. Take it out, or write `state fp32 : f32`"
        case nodes.Derive(state=state, source=source) if source in _MOMENTS and state not in _MOMENTS:
            yield (
                f"`derive {state} from {source}` (line {line}): `{source}` is made of gradients, and `{state}` is no copy of"
                f" it. Write `derive {state} from {'fp32' if state == 'weight' else 'weight'}`"
            )
        case nodes.Derive(state=state, source=source) if state in _MOMENTS and source not in _MOMENTS:
            yield (
                f"`derive {state} from {source}` (line {line}): `{state}` is made of gradients, and is no copy of `{source}`."
                f" Elements that the source lacks begin at 0 with `fill state {state} = 0`"
            )


def _conditions(item: nodes.Record, line: int) -> Iterator[str]:
    if isinstance(item, nodes.Assert):
        yield from _condition("", item.condition, "assert", line)
    when = getattr(item, "when", None)
    if when is not None:
        yield from _condition(_called(item), when, "when", line)
    for clause in getattr(item, "clauses", ()):
        if clause.word == "when":
            yield from _condition(_called(item), clause.args[0], "when", line)


def _truths(item: nodes.ModelItem | nodes.LayoutItem, axes: set[str]) -> Iterator[str]:
    """Conditions with names in them that always or never hold."""
    asked = [getattr(item, "when", None), *(c.args[0] for c in getattr(item, "clauses", ()) if c.word == "when")]
    for one in (expr for expr in asked if expr is not None):
        is_by_rank = any(_is_coordinate(node, axes) for node in walk(one)) and isinstance(item, nodes.Entry)
        if not is_by_rank and (said := _of_one_truth(one, axes)):
            yield f"`when {print_expr(one)}`{_called(item)} (line {item.span.line}) {said}"


def _is_coordinate(node: nodes.Record, axes: set[str]) -> bool:
    """Match `tp == 0`. Another remark says more about it."""
    match node:
        case nodes.Binary("==", nodes.Name(path=name), nodes.Number(value=0)):
            return name in axes
    return False


def _called(item: nodes.Record) -> str:
    name = getattr(item, "path", None) or getattr(item, "name", "")
    return f" of `{name}`" if name else ""


def _condition(of: str, asked: nodes.Expr, word: str, line: int) -> Iterator[str]:
    """A condition without a name.

    It is the same at all degrees and for all configs.
    """
    if not isinstance(asked, nodes.List) and any(isinstance(node, _OF_VALUES) for node in walk(asked)):
        return
    what = "has a constant value"
    if isinstance(asked, nodes.Text | nodes.List):
        what = f"is a {'text' if isinstance(asked, nodes.Text) else 'list'}, and no condition"
    meant = "`when tp > 1`" if word == "when" else "`assert tp <= 8`"
    yield f"`{word} {print_expr(asked)}`{of} (line {line}) {what}. Write its condition, as in {meant}, or take it out"


def _names_twice(item: nodes.Record, line: int) -> Iterator[str]:
    match item:
        case nodes.States(names=names, groups=groups):
            lists: tuple[Sequence[str], ...] = (names or (), groups or ())
        case nodes.FillStates(names=names, groups=groups):
            lists = (names or (), groups or ())
        case nodes.Group(members=members):
            lists = (members or (),)
        case _:
            return
    for name in (name for one in lists for name in _twice(one)):
        yield f"`{name}` is given twice in one list (line {line}), and is meant once. Take one out"


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _places(clauses: Iterable[nodes.Clause], line: int) -> Iterator[str]:
    """The same place twice."""
    places = [(c.args[0], print_expr(c.args[1])) for c in clauses if c.word == "at"]
    for (axis, where), count in Counter(places).items():
        if count > 1:
            yield f"`at {axis}[{where}]` is given twice (line {line}). Take one out; another home of the tensor is another line"


def _axes(axes: Iterable[nodes.Record], line: int) -> Iterator[str]:
    for node in walk(*axes):
        match node:
            case nodes.Pad(multiple=nodes.Number(value=1)):
                yield f"`pad` to a multiple of 1 (line {line}) adds nothing. Write the multiple, `pad(n, 128)`, or take it out"
            case nodes.Pad(axis=nodes.Pad(multiple=inner, kind=kind), multiple=outer, kind=other) if kind == other:
                yield from _padded(inner, outer, line)
            case nodes.Stack(terms=terms):
                whole = [t.label for t in terms if t.label and not any(map(_is_part, walk(*t.axes)))]
                for label in _twice(whole):
                    yield (
                        f"`{label}:` is given twice in one sum (line {line}), and is one tensor. Write the other's label; or,"
                        f" if copies are meant, a factor, `{label}: copies(2) ...`"
                    )
            case nodes.Cut(axis=nodes.Rest(), splits=splits):
                cut = "".join(f"@{split.mesh_axis}" for split in splits)
                yield (
                    f"`...{cut}` (line {line}) is one axis, the product of all dims that are left. If the first of them is"
                    f" meant, write `_{cut} ...`; if their product is, `(...){cut}`"
                )
            case nodes.Split(mesh_axis=axis, kind="sizes", sizes=(nodes.Number(value=size),)):
                sizes = f"{size - size // 2}, {size // 2}"  # for two ranks
                yield (
                    f"`@{axis}[{size}]` (line {line}) is one piece for one rank: the brackets hold a size for each."
                    f" Write `@{axis}` for equal ones, or all sizes, `@{axis}[{sizes}]`"
                )
            case nodes.Trim(axis=nodes.Trim()):
                yield f"`trim` of a `trim` (line {line}) has nothing left to take. Write it once"
            case nodes.Dim(name=name, range=among) if among is not None:
                yield from _range(name, among, line)


def _is_part(node: nodes.Record) -> bool:
    """True for a part of a dim, and for copies."""
    return isinstance(node, nodes.Copies) or (isinstance(node, nodes.Dim | nodes.Any_) and node.range is not None)


def _dealt(name: str, inner: nodes.Axis, cut: str, line: int) -> Iterator[str]:
    """Check that a rule deals the index itself, without padding."""
    match inner:
        case nodes.Dim(name=other) if other != name:
            yield (
                f"`index {name} = {other}{cut}` (line {line}) deals nothing of `{name}`: in front of the `@` is another"
                f" dim. Write `index {name} = {name}{cut}`, or `index {other} = {other}{cut}`"
            )
        case nodes.Pad():
            chunk = cut[1:].partition("@")[0]
            yield (
                f"`pad` of `index {name}` (line {line}) pads a dim that is dealt by index, so that the first ranks have more of"
                f" it and the last ones less. Write `index {name} = {name}{cut}`, or `{name}@chunk({chunk})` for a last part"
                " that is short"
            )


def _padded(inner: nodes.Expr, outer: nodes.Expr, line: int) -> Iterator[str]:
    """Padding of a padded dim, or two paddings in place of one."""
    match inner, outer:
        case (nodes.Number(value=one), nodes.Number(value=two)) if one and two and not (one % two and two % one):
            said = str(max(one, two))
        case _ if inner == outer:
            said = print_expr(outer)
        case _:
            return
    yield f"`pad` of a `pad` (line {line}) is one: to a multiple of {said}. Write it once, `pad(..., {said})`"


def _range(name: str, among: nodes.Among | None, line: int) -> Iterator[str]:
    """`[..]`, which is all, and one number twice."""
    if among is None or among.others:
        return
    for part in among.items:
        match part:
            case nodes.Range(start=None | nodes.Number() as low, stop=nodes.Number(value=stop)):
                start = 0 if low is None else low.value
                if stop <= start:
                    meant = f"{name}[{stop}..{start}]" if stop < start else f"{name}[{start}..{start + 1}]"
                    text = f"{name}[{'' if low is None else start}..{stop}]"
                    yield f"`{text}` (line {line}) holds nothing: a range ends before its second number. Write `{meant}`"
                    return
    match among.items:
        case (nodes.Range(start=None | nodes.Number(value=0) as low, stop=None, step=None | nodes.Number(value=1)),):
            text = f"{name}[{'' if low is None else 0}..]"
            yield f"`{text}` (line {line}) is all of `{name}`. Write `{name}`, or a bound, `{name}[1..]`"
            return
    for one in _twice(str(part.value) for part in among.items if isinstance(part, nodes.Number)):
        yield f"`{one}` is given twice in the brackets of `{name}` (line {line}), and is meant once. Write the other number"


def _spaced(items: Iterable[nodes.Record]) -> Iterator[str]:
    """`{tp:2}`, which fills with spaces, and characters that nobody sees."""
    for item in items:
        match item:
            case nodes.Files(template=text, key=key):
                said = [text, key or ""]
            case nodes.Entry(clauses=clauses) | nodes.States(clauses=clauses) | nodes.Blob(clauses=clauses):
                said = [c.args[0] for c in clauses if c.word == "as"]
            case _:
                continue
        for sign in dict.fromkeys(c for text in said for c in text if not c.isprintable()):
            yield (
                f"a text (line {item.span.line}) has U+{ord(sign):04X}, which no one sees. Take it out; a backslash begins an"
                " escape, and folders are divided by `/`"
            )
        for text in said if isinstance(item, nodes.Entry | nodes.States) else said[1:]:
            steps = HOLE.sub("x", text).split("/")
            if text and not all(steps):
                good = "/".join(step for step in text.split("/") if step)
                yield (
                    f'the key "{text}" (line {item.span.line}) has a step without a name: `/` divides dicts inside of the file.'
                    f' Write "{good}"'
                )
        for hole in (found for text in said for found in HOLE.finditer(text)):
            width = (hole[2] or "").removesuffix("d")
            if (width or "0")[0] != "0" and width.isascii() and width.isdigit():
                yield f"`{hole[0]}` (line {item.span.line}) fills up with spaces. Write `{{{hole[1]}:0{width}}}`"


def _lines_twice(items: Sequence[nodes.Record]) -> Iterator[str]:
    """The same entry or fill word for word.

    A second home has its own place, a second number its own reason.
    """
    first: dict[nodes.Record, int] = {}
    for item in items:
        if isinstance(item, nodes.Entry | nodes.Fill | nodes.States | nodes.FillStates):
            line = first.setdefault(item, item.span.line)
            if line != item.span.line:
                yield f"line {item.span.line} repeats line {line}, word for word. Take one out"


def _stored_and_not(items: Sequence[nodes.Record]) -> Iterator[str]:
    """`b = none` and another line of `b`. The one that stores it holds."""
    entries = [i for i in items if isinstance(i, nodes.Entry) and all(c.word != "when" for c in i.clauses)]
    stored = {e.path: e.span.line for e in entries if e.shape is not None}
    for entry in entries:
        if entry.shape is None and entry.path in stored and not entry.glob and entry.path != "*":
            yield (
                f"`{entry.path} = none` (line {entry.span.line}) does nothing: line {stored[entry.path]} stores `{entry.path}`."
                " Take one of the two out"
            )


def _of_nothing(items: Sequence[nodes.Record]) -> Iterator[str]:
    """Fills of tensors that are not stored, and untrained members of groups."""
    entries = [item for item in items if isinstance(item, nodes.Entry) and not item.glob]
    gone = {e.path for e in entries if e.shape is None} - {e.path for e in entries if e.shape is not None}
    kinds = {item.path: item.kind for item in items if isinstance(item, nodes.Tensor) and item.kind != "parameter"}
    for item in items:
        match item:
            case nodes.Fill(path=path) if path in gone:
                yield f"`fill {path}` (line {item.span.line}), and `{path} = none`: nothing of it is stored. Take one out"
            case nodes.Group(members=members):
                for name in (n for n in members or () if n in kinds):
                    yield (
                        f"`{name}` of `group {item.name}` (line {item.span.line}) is {kinds[name]}, which no optimizer trains."
                        f" Take it out of the group, or `is {kinds[name]}` off the tensor"
                    )


def dead_plan_names(plan: nodes.Plan) -> Iterator[str]:
    """A plan's contradictory or repeated names, or equal sides."""
    said = {"drop": list(plan.drop), "freeze": list(plan.freeze), "train": [name for name, _ in plan.train]}
    for word, names in said.items():
        for name in _twice(names):
            yield f"plan {plan.name}: `{word} {name}` is given twice (line {plan.span.line}). Take one out"
    for word, other in (("drop", "freeze"), ("drop", "train"), ("freeze", "train")):
        for name in dict.fromkeys(n for n in said[word] if n in said[other]):
            yield (
                f"plan {plan.name}: `{word} {name}` and `{other} {name}` (line {plan.span.line}) do not go together."
                f" Keep one: a dropped tensor is not in the target, a frozen one is not trained"
            )
    if plan.source == plan.target and not any(said.values()):
        yield (
            f"plan {plan.name}: both sides are one call (line {plan.span.line}), so that nothing changes."
            f" Write the degrees that the target has, as in `-> {plan.target.name}(tp = 4)`"
        )


def dead_training(plan: nodes.Plan, source: Layout, target: Layout) -> Iterator[str]:
    """Names that a plan freezes or trains without effect, and unknown groups."""
    known = list(dict.fromkeys(name for side in (source, target) for name, _ in side.model_groups))
    trained = {name for name, tensor in source.tensors.items() if tensor.kind == "parameter"}
    for word, name in (*(("freeze", n) for n in plan.freeze), *(("train", n) for n, g in plan.train if g is None)):
        if name in source.tensors and (name in trained) == (word == "train"):
            is_so = "trained in the source already" if word == "train" else "not trained in the source"
            yield f"plan {plan.name}: `{word} {name}` (line {plan.span.line}) changes nothing: it is {is_so}. Take it out"
    for name, group in plan.train:
        if group is not None and group not in known and ":" not in group:
            close = nearest(group, known)
            groups = ", ".join(known)
            yield (
                f"plan {plan.name}: `train {name} in {group}` (line {plan.span.line}), and no group is called `{group}`."
                + (
                    f" Did you mean `{close}`?"
                    if close
                    else f" Write `train {name} in {known[0]}`; the groups are {groups}"
                    if known
                    else f" The model has none: write `train {name}`, or `group {group} = ...` in the model"
                )
            )


# --- Conditions that always or never hold ---------------------------------------------------------------------------
# A comparison with a number changes where that number is, so only values at and next to it matter.

_TRIES_MAX = 4_096
_TRUTHS = frozenset({"and", "or", "not", "==", "!=", "<", "<=", ">", ">=", "-"})
_BESIDE = (-2, -1, 0, 1, 2, 3)  # where names are compared with each other, and for truth


def _of_one_truth(asked: nodes.Expr, axes: Collection[str]) -> str:
    """The fault and remedy of a constant condition; else \"\".

    `axes`: names of mesh axes with one rank or more.
    """
    truth = constant_condition(asked, axes)
    if truth is None:
        return ""
    text = "always holds" if truth else "never holds"
    match asked:
        case nodes.Binary(operator=("and" | "or") as word, left=left):
            other = "or" if word == "and" else "and"
            return f"{text}. Keep one side of it, as in `when {print_expr(left)}`, or write `{other}` for `{word}`"
    name = next((n.path for n in walk(asked) if isinstance(n, nodes.Name)), "tp")
    if name in axes:
        return (
            f"{text}: `{name}` is how many ranks there are, 1 or more. Write `when {name} > 1`, or for the first of them"
            f" `at {name}[0]`"
        )
    return f"{text}. Write the other number, or take it out"


def constant_condition(asked: nodes.Expr, axes: Collection[str]) -> bool | None:
    """The constant value of a condition, or None.

    None: it depends on names, or is not known.
    """
    parts = list(walk(asked))
    paths = [n.path for n in parts if isinstance(n, nodes.Name)]
    names = list(dict.fromkeys(paths))
    if not names or (len(names) == len(paths) and not {*names} & {*axes}):
        return None  # each name is free to be otherwise
    if any(
        isinstance(n, nodes.Function | nodes.List)
        or (isinstance(n, nodes.Binary | nodes.Unary) and n.operator not in _TRUTHS)
        or (isinstance(n, nodes.Binary) and n.operator == "-")
        for n in parts
    ):
        return None
    values = [_values(name, parts, name in axes) for name in names]
    if prod(map(len, values)) > _TRIES_MAX:
        return None
    found: set[bool] = set()
    for tried in product(*values):
        known = dict(zip(names, tried, strict=True))
        try:
            found.add(bool(evaluated(asked, lambda name, known=known: known[name.path])))  # type: ignore[misc]
        except UcplError:  # a text, or nothing, is neither more nor less than a number
            continue
        if len(found) > 1:
            return None
    return found.pop() if found else None


def _values(name: str, parts: list[nodes.Record], is_axis: bool) -> list[Operand]:
    numbers = {n.value for n in parts if isinstance(n, nodes.Number)}
    near = {*_BESIDE, *(sign * (n + by) for n in numbers for by in (-1, 0, 1) for sign in (1, -1))}
    if is_axis:
        return [n for n in sorted(near) if n > 0]
    texts = dict.fromkeys(n.value for n in parts if isinstance(n, nodes.Text))
    out: list[Operand] = [*sorted(near), *texts, *(["\0"] if texts else [])]
    return [*out, None] if name.startswith("config.") else out
