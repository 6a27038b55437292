"""Unused declarations: files, indices, groups, meshes, numbers, imports.

They are remarks, no errors. The text alone counts, not its value under some degrees: a line under `when` uses the names
in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ucpl.errors import UcplError
from ucpl.language import nodes, print_expr, worded
from ucpl.language.walk import walk
from ucpl.layout import Library
from ucpl.layout.expand import holes_of, items_of, lines_in_file, names_of
from ucpl.layout.templates import PLACE_WORDS
from ucpl.registry import format_named

__all__ = ["CONFIG_UNREAD", "reads_config", "unused"]

CONFIG_UNREAD = (
    "nothing here reads the config: no text names a key of it. Write it where a size is meant, as in"
    " `dim h = config.hidden_size`, or leave the config out"
)

_MANY = PLACE_WORDS - {"rank"}  # words that distinguish stored tensors in a template, besides indices


def unused(library: Library, file: nodes.File) -> Iterator[tuple[str, str]]:
    """Rules and remarks: the statement, its line, and the remedy.

    A file without layouts is not checked: its importers use the declarations.
    """
    layouts = [s for s in file.statements if isinstance(s, nodes.Layout)]
    brackets: dict[str, set[str]] = {}
    for layout in layouts:
        beside = _with_bases(library, layout)
        for one in beside:
            if one.name not in brackets:
                brackets[one.name] = {*_bracketed(one.items), *_implied(library, one)}
        yield from _of_layout(layout, beside, {name for one in beside for name in brackets[one.name]})
    if layouts:
        yield from (("unused-number", text) for text in _numbers(library, file))
        yield from _of_models(library, file)
    yield from (("unused-number", text) for text in _hidden(file))
    if len(file.statements) > sum(isinstance(s, nodes.Import) for s in file.statements):
        yield from (("unused-import", text) for text in _imports(file))


def reads_config(texts: Iterable[nodes.Record]) -> bool:
    """Return True if one of the texts names a config."""
    return any(name.partition(".")[0] == "config" for name in names_of(texts))


def _implied(library: Library, layout: nodes.Layout) -> set[str]:
    """Indices of a layout, with those that its keys imply."""
    try:
        return {*_bracketed(items_of(library, nodes.Call(layout.name)))}
    except UcplError:
        return set()


def _of_layout(layout: nodes.Layout, beside: list[nodes.Layout], brackets: set[str]) -> Iterator[tuple[str, str]]:
    """`beside`: the layout and all layouts that are related to it.

    `brackets`: their indices.
    """
    items = [item for one in beside for item in one.items]
    dims = {*_dims(items)}
    for item in layout.items:
        match item:
            case nodes.Files(name=name, form=str()):
                yield from _of_file(layout, item, brackets, lines_in_file(name, items))
            case nodes.Use(name=name, key=str() as key) if _is_one_key(key):
                yield (
                    "unused-key",
                    f'{layout.name}: `key "{key}"` of `use ... as {name}` (line {item.span.line}) is one key for all'
                    f" tensors in it: the keys of its lines behind `as` are not used. {_with_key(key)}",
                )
            case nodes.Index(name=name, axis=axis):
                if name not in brackets and not dims & {d for d in _dims([axis]) if d != name}:
                    yield "unused-index", _of_index(layout, item)
            case nodes.Group(name=name) if name != "*" and name not in {*_groups(items)}:
                yield (
                    "unused-group",
                    f"{layout.name}: `group {name}` (line {item.span.line}) does nothing: no state line is of it. Write"
                    f" `state * {worded(item.span, 'of', 'for')} {name} = flat(each) ...`, or take it out",
                )
            case nodes.Mesh(name=name, axes=axes) if name and not _is_seen(name, axes, items):
                yield (
                    "unused-mesh",
                    f"{layout.name}: `mesh {name}` (line {item.span.line}) does nothing: no line is `on {name}`. Write"
                    f" `on {name}` behind the lines that are cut by its axes, or take it out",
                )


# ---- files -----------------------------------------------------------------------------------------------------------


def _of_file(
    layout: nodes.Layout, item: nodes.Files, brackets: set[str], there: list[nodes.LayoutItem]
) -> Iterator[tuple[str, str]]:
    if not there:
        yield (
            "unused-file",
            f"{layout.name}: no line is in `file {item.name}` (line {item.span.line}). Write `in {item.name}` behind its"
            " lines, or take it out",
        )
    elif item.key is not None and _is_one_key(item.key, item.template, brackets) and any(map(_key, there)):
        yield (
            "unused-key",
            f'{layout.name}: `key "{item.key}"` of `file {item.name}` (line {item.span.line}) is one key for all tensors in'
            f" it: the keys of lines behind `as` are not used. {_with_key(item.key)}",
        )


def _key(item: nodes.LayoutItem) -> str:
    """The text of a line behind `as`."""
    said = item.clauses if isinstance(item, nodes.Entry | nodes.States | nodes.Blob) else ()
    return next((str(c.args[0]) for c in said if c.word == "as"), "")


def _is_one_key(key: str, template: str = "", indices: Iterable[str] = ()) -> bool:
    """Return True if key and file name are constant."""
    return not {name.removesuffix(".local") for name in holes_of(key + template)} & {*_MANY, *indices}


def _with_key(key: str) -> str:
    return f'Write `key "{key.rstrip("/.")}{"." if key.endswith(".") else "/"}{{key}}"`' if key else "Take it out"


# ---- indices, groups, meshes -----------------------------------------------------------------------------------------


def _of_index(layout: nodes.Layout, item: nodes.Index) -> str:
    name, where = item.name, f"(line {item.span.line})"
    if isinstance(item.axis, nodes.Stack):
        digits = " or ".join(f"`{d}`" for d in _dims([item.axis]))
        return (
            f"{layout.name}: `index {name}` {where} does nothing: no line has {digits}, and none `{name}` in brackets"
        )
    return (
        f"{layout.name}: `index {name}` {where} deals dims in brackets, and no line has `{name}` there. Write"
        f" `w[{name}] = ...`, cut the axis of {name} in its pattern, or take it out"
    )


def _dims(items: Iterable[nodes.Record]) -> Iterator[str]:
    """Dims in patterns, other than in index rules.

    There they are statements of their own.
    """
    for item in items:
        if not isinstance(item, nodes.Index):
            yield from (node.name for node in walk(item) if isinstance(node, nodes.Dim))


def _bracketed(items: Iterable[nodes.LayoutItem]) -> Iterator[str]:
    for item in items:
        if isinstance(item, nodes.Entry | nodes.Group):
            yield from _dims(item.indices)


def _groups(items: Iterable[nodes.LayoutItem]) -> Iterator[str]:
    """Groups that state lines, fills and other groups name."""
    for item in items:
        match item:
            case nodes.States(groups=tuple(names)) | nodes.FillStates(groups=tuple(names)):
                yield from names
            case nodes.Group(without=tuple(names)):
                yield from names


def _is_seen(name: str, axes: tuple[str, ...], items: list[nodes.LayoutItem]) -> bool:
    """Return True if a line uses the mesh.

    A line is on it, or an axis that no other mesh has names a file or a blob.
    """
    others = {a for i in items if isinstance(i, nodes.Mesh) and i.name != name for a in i.axes}
    mine = {*axes} - others
    for item in items:
        match item:
            case nodes.Entry(clauses=clauses) | nodes.States(clauses=clauses):
                if any(c.word == "on" and c.args[0] == name for c in clauses):
                    return True
            case nodes.Files(template=template, key=key) if mine & {*holes_of(template + (key or ""))}:
                return True
            case nodes.Blob(mesh_axes=along) if mine & {*along}:
                return True
    return False


# ---- statements of a model for its layouts ---------------------------------------------------------------------------


def _of_models(library: Library, file: nodes.File) -> Iterator[tuple[str, str]]:
    """Groups and digits of a model that no loaded text uses.

    Only of models whose layouts are in the file.
    """
    texts = library.files.values()
    layouts = [s for text in texts for s in text.statements if isinstance(s, nodes.Layout)]
    items = [item for layout in layouts for item in layout.items]
    plans = [s for text in texts for s in text.statements if isinstance(s, nodes.Plan)]
    models = [s for text in texts for s in text.statements if isinstance(s, nodes.Model)]
    dims = {node.name for node in walk(*items) if isinstance(node, nodes.Dim)}
    dims |= {d.name for m in models for i in m.items if isinstance(i, nodes.Tensor) for d in i.dims if d.name}
    named = {*_groups(items), *(g for m in models for g in _groups_of(m)), *(g for p in plans for _, g in p.train if g)}
    for model in (s for s in file.statements if isinstance(s, nodes.Model)):
        if not any(layout.of == model.name for layout in layouts):
            continue
        for item in model.items:
            where = f"{model.name}: `{type(item).__name__.lower()} {getattr(item, 'name', '')}` (line {item.span.line})"
            match item:
                case nodes.Index(axis=axis) if not dims & (digits := {*_dims([axis])}):
                    one = " and ".join(f"`{d}`" for d in sorted(digits))
                    text = f"{where} does nothing: no line has {one}. Write them where they are stored, or take it out"
                    yield "unused-index", text
                case nodes.Group(name=name) if name not in named and not any(map(_has_groups, layouts)):
                    yield (
                        "unused-group",
                        f"{where} does nothing: no layout here has the groups of the model. Write"
                        f" `state * {worded(item.span, 'of', 'for')} {name} = ...` or `group * = model` in one, or take it out",
                    )


def _groups_of(model: nodes.Model) -> Iterator[str]:
    for item in model.items:
        match item:
            case nodes.State(groups=tuple(names)) | nodes.Group(without=tuple(names)):
                yield from names


def _has_groups(layout: nodes.Layout) -> bool:
    """Return True if a layout uses groups, or has undescribed files.

    Any groups count.
    """
    frameworks = [i.call.name for i in layout.items if isinstance(i, nodes.Framework)]
    return (
        layout.of == "any"
        or any(format_named(name).has_model_files or format_named(name).has_optimizer for name in frameworks)
        or any(isinstance(i, nodes.Group) and i.of_model for i in layout.items)
        or any(isinstance(i, nodes.States | nodes.FillStates) and i.groups == ("*",) for i in layout.items)
        or any("{group}" in t or "{number}" in t or "{member}" in t for t in _texts(layout))
    )


def _texts(layout: nodes.Layout) -> Iterator[str]:
    for node in walk(layout):
        match node:
            case nodes.Clause(word="as", args=(str() as text,)) | nodes.Files(template=text):
                yield text


# ---- numbers and imports ---------------------------------------------------------------------------------------------


def _numbers(library: Library, file: nodes.File) -> Iterator[str]:
    """`let`, `dim` and parameters of models that no loaded text uses.

    Importing texts count.
    """
    known = {*names_of(library.files.values())}
    for statement in file.statements:
        where = ""
        inside: Iterable[nodes.Record] = (statement,)
        if isinstance(statement, nodes.Model | nodes.Layout):
            where, inside = f"{statement.name}: ", statement.items
        if isinstance(statement, nodes.Model):
            for p in statement.parameters:
                if p.name not in known:
                    yield f"{where}nothing of the model is made of `{p.name}`. Write a dim of it, or take it out"
        for item in inside:
            if isinstance(item, nodes.Let | nodes.Dims):
                word = "let" if isinstance(item, nodes.Let) else "dim"
                for binding in item.bindings:
                    if binding.name not in known and not _is_section(binding, known):
                        yield (
                            f"{where}nothing uses `{word} {binding.name} = {print_expr(binding.value)}`"
                            f" (line {item.span.line}). Name it where it is meant, or take it out"
                        )


def _is_section(binding: nodes.Binding, known: Iterable[str]) -> bool:
    """Return True for a section of the config whose keys are used.

    Loaded texts have `t.x` as `config.text_config.x`.
    """
    section = f"{binding.value.path}." if isinstance(binding.value, nodes.Name) else ""
    return section.startswith("config.") and any(name.startswith(section) for name in known)


def _hidden(file: nodes.File) -> Iterator[str]:
    """Numbers of the file that every model and layout overrides."""
    inner = [s for s in file.statements if isinstance(s, nodes.Model | nodes.Layout)]
    others = {*names_of(s for s in file.statements if not isinstance(s, nodes.Model | nodes.Layout))}
    for item in (s for s in file.statements if isinstance(s, nodes.Let)):
        for name in (b.name for b in item.bindings if b.name not in others):
            over = [s for s in inner if name in {*_bound(s)}]
            users = [
                s for s in inner if name in {*names_of([s])} and getattr(s, "of", "") not in {o.name for o in over}
            ]
            users += [s for s in over if s not in users]
            if over and len(over) == len(users):
                yield (
                    f"`let {name}` (line {item.span.line}) is read by nothing: {over[0].name} has a `{name}` of its own."
                    " Take one of the two out"
                )


def _bound(node: nodes.Model | nodes.Layout) -> Iterator[str]:
    """Numbers that a model or layout defines."""
    yield from (p.name for p in node.parameters)
    for item in node.items:
        if isinstance(item, nodes.Let | nodes.Dims):
            yield from (b.name for b in item.bindings)


def _imports(file: nodes.File) -> Iterator[str]:
    used = {*_called(file)}
    for item in file.statements:
        if isinstance(item, nodes.Import):
            for name in item.names:
                if name not in used:
                    yield f'{name} of "{item.file}" is imported (line {item.span.line}), and nothing here names it. Take it out'


def _called(file: nodes.File) -> Iterator[str]:
    """Models and layouts that a file names."""
    for node in walk(file):
        if isinstance(node, nodes.Call):
            yield node.name
        elif isinstance(node, nodes.Layout):
            yield node.of


# ---- layouts that belong together ------------------------------------------------------------------------------------


def _with_bases(library: Library, layout: nodes.Layout) -> list[nodes.Layout]:
    """The layout and all layouts that it uses or extends.

    Also those that use or extend it, with theirs.
    """
    known = [k.node for k in library.known.values() if isinstance(k.node, nodes.Layout)]
    out = _under(library, layout)
    for other in known:
        under = _under(library, other)
        if layout in under:
            out += [one for one in under if one not in out]
    return out


def _under(library: Library, layout: nodes.Layout) -> list[nodes.Layout]:
    out: list[nodes.Layout] = []
    open_ones = [layout]
    while open_ones:
        one = open_ones.pop()
        if one in out:
            continue
        out.append(one)
        calls = [i.call for i in one.items if isinstance(i, nodes.Use)] + ([one.extends] if one.extends else [])
        for call in calls:
            try:
                found = library.layout(call.name, call.span).node
            except UcplError:  # a name that there is not is found elsewhere
                continue
            if isinstance(found, nodes.Layout):
                open_ones.append(found)
    return out
