"""infer: the model and the layout of a checkpoint found in the wild, as the language says them."""

from __future__ import annotations

from attrs import evolve, frozen

from ucpl.errors import Label, fail
from ucpl.extents import Key, key_text
from ucpl.frontends import parallel, stages
from ucpl.layout import Layout, Library, expand, load, resolve
from ucpl.layout.scope import Value
from ucpl.regions import Placement, locate
from ucpl.stores.checkpoint import Checkpoint
from ucpl.syntax import nodes, parse, print_file

MODEL_NAME = "checkpoint"
LAYOUT_NAME = "stored"


@frozen(eq=False)
class Inferred:
    """What a checkpoint is: its model, and the layout that it is stored in."""

    checkpoint: Checkpoint
    library: Library
    model: nodes.Model
    call: nodes.Call
    inherited: dict[str, tuple[Value, str]]
    layout: Layout
    placement: Placement

    def text(self) -> str:
        """The closed .ucpl text: needs no other file and converts identically."""
        layout = expand(self.library, self.call, self.model, name=LAYOUT_NAME, inherited=self.inherited)
        return print_file(nodes.File("inferred.ucpl", 1, (self.model, layout)))


def infer(checkpoint: Checkpoint) -> Inferred:
    """The model and layout of an opened checkpoint. Raises UcplError where its framework cannot be told in the language."""
    library = load()
    settings = inherited_settings(checkpoint)
    call = nodes.Call(layout_name(checkpoint))
    model = model_of(checkpoint, {})
    notes: tuple[parallel.Note, ...] = ()
    parallel.demand(checkpoint.shardings, checkpoint)
    if checkpoint.shardings:
        extended = parallel.stored(library, call, model, checkpoint.shardings, settings)
        library, call, notes = extended.library, extended.call, extended.notes
    for extended in facts_of(library, call, model, checkpoint):
        library, call, notes = extended.library, extended.call, (*notes, *extended.notes)
    placement = locate(
        resolve(library, call, model=model, inherited=settings, notes=notes), stated=stated_of(checkpoint)
    )
    dtypes = state_dtypes(checkpoint, placement)
    if dtypes:
        model = model_of(checkpoint, dtypes)
        layout = resolve(library, call, model=model, inherited=settings, notes=notes)
        placement = locate(layout, stated=stated_of(checkpoint))
    return Inferred(checkpoint, library, model, call, settings, placement.layout, placement)


def facts_of(library: Library, call: nodes.Call, model: nodes.Model, checkpoint: Checkpoint) -> list[parallel.Extended]:
    """The layout with a pipeline's layers, or a model's experts."""
    if checkpoint.pipeline is not None:
        return [stages.stored_pipeline(library, call, model, checkpoint.pipeline)]
    if checkpoint.experts is not None:
        return [stages.stored_experts(library, call, model, checkpoint.experts)]
    return []


def layout_name(checkpoint: Checkpoint) -> str:
    settings = checkpoint.envelope.settings
    match checkpoint.framework:
        case "deepspeed":
            return f"zero{settings['stage'].value}"
        case "huggingface":
            return "safetensors"
        case name:
            return name


def inherited_settings(checkpoint: Checkpoint) -> dict[str, tuple[Value, str]]:
    """Values that layouts may take over from a checkpoint, with their origins."""
    out: dict[str, tuple[Value, str]] = {}
    for name, setting in checkpoint.envelope.settings.items():
        value = setting.value
        if value is not None:
            out[name] = (int(value) if isinstance(value, bool) else value, setting.origin)
    return out


def model_of(checkpoint: Checkpoint, dtypes: dict[str, str]) -> nodes.Model:
    """The model statement: tensors in the checkpoint's order, aliases, the optimizer's groups, states."""
    items: list[nodes.ModelItem] = []
    for t in checkpoint.tensors:
        kind = t.kind if t.kind in ("buffer", "frozen") else "parameter"
        dims = tuple(nodes.Dimension(None, n) for n in t.shape)
        items.append(nodes.Tensor(t.name, dims, t.dtype or None, kind))  # type: ignore[arg-type]
    items += [nodes.Alias(alias, owner) for alias, owner in checkpoint.aliases.items()]
    groups = checkpoint.envelope.groups
    items += [nodes.Group(g.name, members=g.members) for g in groups if g.members]
    trained = [t for t in checkpoint.tensors if t.kind == "parameter"]
    holders: dict[str, set[str]] = {}
    for t in trained:
        for s in t.states:
            holders.setdefault(s, set()).add(t.name)
    by_holders: dict[tuple[str, tuple[str, ...] | None], list[str]] = {}
    for state, names in holders.items():
        limited: tuple[str, ...] | None = None
        if len(names) < len(trained):
            limited = tuple(g.name for g in groups if g.members and set(g.members) <= names)
        by_holders.setdefault((dtypes.get(state, "f32"), limited), []).append(state)
    items += [nodes.State(tuple(states), dtype, False, limited) for (dtype, limited), states in by_holders.items()]
    scalars = [s for s in checkpoint.envelope.scalars if s not in holders]
    if scalars:
        items.append(nodes.State(tuple(scalars), "f32", True, None))
    return nodes.Model(MODEL_NAME, tuple(items))


def stated_of(checkpoint: Checkpoint):  # type: ignore[no-untyped-def]
    """Flats as the checkpoint states them, for `group g = from FILE "key"`."""

    def stated(file: str, key: str, here: dict[str, int]) -> list[list[tuple[str, tuple[int, ...]]]]:
        flats = [f for f in checkpoint.stated if all(here.get(a, v) == v for a, v in f.coordinates.items())]
        last = key.rpartition("/")[2]
        if last.isdigit():
            flats = [f for f in flats if f.bucket == int(last)]
        return [list(f.members) for f in sorted(flats, key=lambda f: f.bucket)]

    return stated


def canonical(key: Key) -> tuple[str, ...]:
    """A key by its text: a step is a dict key, by its text too, or a list index."""
    return tuple(map(str, key))


def state_dtypes(checkpoint: Checkpoint, placement: Placement) -> dict[str, str]:
    """dtype of each state's stored tensors, as the files say."""
    stated = {(f, canonical(k)): e.dtype for (f, k), e in checkpoint.extents.items()}
    out: dict[str, str] = {}
    for part in placement.parts:
        if part.state == "weight":
            continue
        for home in part.homes:
            dtype = stated.get((home.file, canonical(home.key)))
            if dtype is None:
                continue
            if out.setdefault(part.state, dtype) != dtype:
                fail(
                    "E330",
                    f"{part.state} is stored as {out[part.state]} and as {dtype}",
                    Label(home.file, dtype, where=key_text(home.key)),
                )
    return {s: d for s, d in out.items() if d != "f32"}


def closed_layout(text: str, name: str) -> tuple[Library, nodes.Call]:
    """A library with a text that `infer` wrote, and the call of its layout."""
    library = load((name, text))
    file = parse(text, name)
    layouts = [s for s in file.statements if isinstance(s, nodes.Layout)]
    return library, nodes.Call(layouts[-1].name)


def with_arguments(call: nodes.Call, values: dict[str, Value]) -> nodes.Call:
    """A call with more arguments by name."""
    from ucpl.layout.scope import literal

    return evolve(call, arguments=(*call.arguments, *(nodes.Argument(k, literal(v)) for k, v in values.items())))
