"""The Python API: what the command line does, as functions. `import ucpl` gives these names.

Rooms are imported where they are needed: a plan from specs alone waits for no store, `apply` for no compiler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ucpl.errors import Label, UcplError, fail

if TYPE_CHECKING:
    from ucpl.extents import Key
    from ucpl.frontends.infer import Inferred
    from ucpl.frontends.sizes import Found
    from ucpl.graph import Graph
    from ucpl.layout import Layout, Library
    from ucpl.layout.scope import Value
    from ucpl.proofs.compare import Likeness
    from ucpl.proofs.verify import Verdict
    from ucpl.regions import Placement
    from ucpl.runtime.counters import Report
    from ucpl.schedule.plan import Plan
    from ucpl.stores.checkpoint import Checkpoint
    from ucpl.syntax import nodes

__all__ = [
    "Converted",
    "Side",
    "apply",
    "closed_call",
    "compare",
    "convert",
    "infer",
    "load",
    "load_plan",
    "make_plan",
    "open_checkpoint",
    "parse_target",
    "plan",
    "save_plan",
    "side",
    "source_side",
    "target_side",
    "verify",
]

MEMORY = 512 << 20  # bytes of all buffers together
WORKERS = 2
_OWN_NAMES = frozenset({"file"})  # what a target is called is no matter of the source's
Progress = Callable[[int, int], None]  # (bytes done, all of them)
Here = str | Path


# ---- sides: a layout, located ----------------------------------------------------------------------------------------


@frozen(eq=False)
class Side:
    """One side of a plan: a located layout, and what it was made of."""

    library: Library
    call: nodes.Call
    model: nodes.Model | None  # what a layout of any model is over
    placement: Placement
    inherited: dict[str, tuple[Value, str]]
    config: dict[str, Any] | None = None  # what `config.x` is
    checkpoint: Checkpoint | None = None  # of a source: what its layers and experts are
    sizes: dict[str, Value] | None = None  # given with -D
    found: Found | None = None  # sizes that the spec leaves open, from a checkpoint's shapes

    @property
    def layout(self) -> Layout:
        return self.placement.layout


def load(path: Here) -> Library:
    """The models, layouts and plans of a .ucpl file and of what it imports, over the shipped specs. Raises: UcplError."""
    from ucpl.frontends.texts import text_at
    from ucpl.layout import load as library_of
    from ucpl.resources import spec_files, spec_text

    name = str(path).removeprefix("specs/")
    if not Path(path).exists() and name in dict(spec_files()):  # a shipped one, wherever we are
        return library_of((f"specs/{name}", spec_text(name)))
    return library_of((str(path), read_text(Path(path))), read=text_at)


def read_text(path: Path) -> str:
    """A text file of the user's. Raises: UcplError E170 where it cannot be read."""
    from ucpl.frontends.texts import read_text as read

    return read(path)


def parse_target(text: str) -> tuple[Library, nodes.Call]:
    """`zero1(dp=8)` or `path/to/file.ucpl:megatron(tp=2)`: a library that knows the layout, and the call."""
    from ucpl.layout import load as library_of
    from ucpl.syntax import parse_call

    head, colon, rest = text.partition(".ucpl:")
    if colon:
        return load(head + ".ucpl"), parse_call(rest)
    return library_of(), parse_call(text)


def closed_call(
    file: nodes.File, call: nodes.Call, config: dict[str, Any] | None = None, sizes: dict[str, Value] | None = None
) -> nodes.Call:
    """The call of a `plan` statement, its arguments evaluated where they stand: the file's own `let` are known there."""
    from attrs import evolve

    from ucpl.layout.scope import Scope, literal
    from ucpl.syntax import nodes

    lets = {b.name: b.value for s in file.statements if isinstance(s, nodes.Let) for b in s.bindings}
    scope = Scope(given={k: v for k, v in (sizes or {}).items() if k in lets}, bindings=lets, config=config or {})
    return evolve(call, arguments=tuple(evolve(a, value=literal(scope.evaluate(a.value))) for a in call.arguments))


def is_checkpoint(text: str) -> bool:
    """Whether a LAYOUT is given as the checkpoint that has it: a path that exists."""
    return ".ucpl:" not in text and not text.endswith(")") and Path(text).exists()


def _model_name(library: Library, call: nodes.Call) -> str:
    """The model that the layout called is of; "any" for one of any model."""
    known = library.layout(call.name).node
    return str(getattr(known, "of", "any"))


def of_any(library: Library, call: nodes.Call) -> bool:
    """Whether the layout that is called needs a model from elsewhere."""
    from ucpl.syntax import nodes

    known = library.layout(call.name).node
    assert isinstance(known, nodes.Layout)
    return known.of == "any"


def model_named(text: str) -> nodes.Model:
    """`FILE:NAME`, a model of a .ucpl file. Raises: UcplError E178, E110."""
    from ucpl.syntax import nodes

    file, _, name = text.rpartition(":")
    if not file or not name:
        fail(
            "E178",
            f"`{text}` names no model",
            Label("<command line>", where=text),
            remedy="write --model FILE.ucpl:NAME",
        )
    found = load(file).model(name).node
    assert isinstance(found, nodes.Model)
    return found


def side(
    target: str | tuple[Library, nodes.Call],
    *,
    model: nodes.Model | None = None,
    inherited: dict[str, tuple[Value, str]] | None = None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    rank: int | None = None,
    notes: tuple[tuple[str, Any, str], ...] = (),
) -> Side:
    """Resolve and locate a layout by its call."""
    from ucpl.layout import resolve
    from ucpl.regions import locate

    library, call = parse_target(target) if isinstance(target, str) else target
    model = model if of_any(library, call) else None
    layout = resolve(library, call, model=model, config=config, define_sizes=sizes, inherited=inherited, notes=notes)
    return Side(library, call, model, locate(layout, rank=rank), inherited or {}, config, sizes=sizes)


def config_of(checkpoint: Checkpoint, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Sizes as a config.json gives them: the one given, else the checkpoint's own."""
    from ucpl.stores.huggingface import config_of as own

    return config if config is not None else own(checkpoint)


def source_side(
    checkpoint: Checkpoint,
    source: str | tuple[Library, nodes.Call] | None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
) -> tuple[Side, nodes.Model]:
    """The source of a conversion: inferred, or as a spec says; it must describe the checkpoint. Raises: UcplError E320-E323."""
    from ucpl.frontends import parallel
    from ucpl.frontends.infer import infer as infer_layout
    from ucpl.frontends.infer import inherited_settings, model_of, stated_of
    from ucpl.frontends.sizes import sizes_from, with_sizes
    from ucpl.layout import resolve
    from ucpl.proofs import fit
    from ucpl.regions import locate

    config = config_of(checkpoint, config)
    source = source or own_layout(checkpoint.top, checkpoint.framework)
    if source is None:
        found = infer_layout(checkpoint)
        made = Side(found.library, found.call, found.model, found.placement, found.inherited, config, checkpoint)
        model = found.model
    else:
        library, call = parse_target(source) if isinstance(source, str) else source
        inherited = inherited_settings(checkpoint)
        found_sizes = sizes_from(checkpoint, library, call, config, sizes)
        library = with_sizes(library, _model_name(library, call), found_sizes)
        shaped = parallel.with_shapes(checkpoint, library, call)
        given = model_of(shaped, {}) if of_any(library, call) else None
        notes = tuple((name, size, origin) for name, (size, origin) in found_sizes.items())
        layout = resolve(
            library, call, model=given, config=config, define_sizes=sizes, inherited=inherited, notes=notes
        )
        placement = locate(layout, stated=stated_of(checkpoint))
        made = Side(library, call, given, placement, inherited, config, checkpoint, found=found_sizes)
        model = given or _model_of(library, call)
    fit.demand(made.placement, checkpoint)
    return made, model


def target_side(
    target: str | tuple[Library, nodes.Call],
    source: Side,
    model: nodes.Model | None,
    *,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    drop: Sequence[str] = (),
) -> Side:
    """The target of a conversion: what its call leaves open comes from the source, with its origin.

    A shipped layout that is called at another tensor-parallel degree, `zero1(dp=2, tp=4)`, gets the cuts that DeepSpeed would
    make at that degree, from the source's; `kv_heads` beside tp says what these may rest on (frontends/parallel). Where the
    source is not tensor parallel, a layout of the user's own that extends zero1 says how tensors are cut. From a pipeline,
    `pp`, `stages` and `partition` deal its layers; from a model with experts, `ep` deals those (frontends/stages).
    """
    from ucpl.frontends import parallel, stages
    from ucpl.regions.sharding import shardings_of

    model = _lessened(model, set(drop)) if model is not None and drop else model
    known = config if config is not None else source.config
    inherited = {name: value for name, value in source.inherited.items() if name not in _OWN_NAMES}
    library, call = parse_target(target) if isinstance(target, str) else target
    notes: tuple[parallel.Note, ...] = ()
    if source.found:
        from ucpl.frontends.sizes import with_sizes

        library = with_sizes(library, _model_name(library, call), source.found)
        notes = tuple((name, size, origin) for name, (size, origin) in source.found.items())
    if model is not None and parallel.is_open(library, call):
        made = stages.target(library, call, model, source.checkpoint, inherited) or parallel.target(
            library, call, model, shardings_of(source.layout), inherited, known
        )
        library, call, notes = made.library, made.call, made.notes
    return side((library, call), model=model, inherited=inherited, config=known, sizes=sizes, notes=notes)


def _lessened(model: nodes.Model, drop: set[str]) -> nodes.Model:
    """The model without these tensors and states: what a target of any model then has no place for."""
    from attrs import evolve

    from ucpl.syntax import nodes

    items: list[nodes.ModelItem] = []
    for item in model.items:
        match item:
            case nodes.Tensor(path=path) | nodes.Alias(path=path) if path in drop:
                pass
            case nodes.Alias(owner=owner) if owner in drop:
                pass
            case nodes.Group(members=tuple(members)):
                kept = tuple(m for m in members if m not in drop)
                items += [evolve(item, members=kept)] if kept else []
            case nodes.State(names=names):
                left = tuple(n for n in names if n not in drop)
                items += [evolve(item, names=left)] if left else []
            case _:
                items.append(item)
    return evolve(model, items=tuple(items))


# ---- plans -----------------------------------------------------------------------------------------------------------


def make_plan(
    source: Side,
    target: Side,
    *,
    checkpoint: Checkpoint | None = None,
    drop: tuple[str, ...] = (),
    name: str = "convert",
    twice: bool = False,
) -> tuple[Graph, Plan]:
    """Build, prove and order. Deterministic: the same specs give the same plan. `drop` may name keys of client_state, too.

    `twice`: prove the finished moves once more, by code that made none of them (about twice the time of planning).
    """
    from attrs import evolve

    from ucpl.graph import build
    from ucpl.schedule import order

    known = checkpoint.envelope if checkpoint is not None else None
    beside = tuple(d for d in drop if known is not None and (d in known.carried or d in known.scalars))
    inside = tuple(d for d in drop if d not in beside)
    graph = build(source.placement, target.placement, drop=inside, dtype_of=dtype_of(checkpoint))
    if twice:
        from ucpl.proofs.coverage import prove

        prove(graph)
    made = order(graph, name=name, spec_digest=spec_digest(source, target), layout_text=closed_text(target))
    if beside:
        said = tuple(
            f"{'client_state' if known is not None and d in known.carried else 'scalar'} of {d}: dropped by name"
            for d in beside
        )
        made = evolve(made, dropped=made.dropped + said, carry={**made.carry, **dict.fromkeys(beside, "drop")})
    return graph, made


def dtype_of(checkpoint: Checkpoint | None) -> Callable[[str, Key], str | None] | None:
    """The dtype of a stored tensor, as a checkpoint's headers say."""
    if checkpoint is None:
        return None
    known = {(f, tuple(map(str, k))): e.dtype for (f, k), e in checkpoint.extents.items()}
    return lambda file, key: known.get((file, tuple(map(str, key))))


def closed_text(target: Side) -> str:
    """The target's model and layout as one .ucpl text that needs no other file."""
    from ucpl.layout import close, expand
    from ucpl.syntax import nodes, print_file

    if target.model is None or not of_any(target.library, target.call):
        return print_file(
            close(target.library, target.call, config=target.config, sizes=target.sizes, inherited=target.inherited)
        )
    layout = expand(target.library, target.call, target.model, inherited=target.inherited, config=target.config)
    return print_file(nodes.File("layout.ucpl", 1, (target.model, layout)))


def spec_digest(source: Side, target: Side) -> str:
    """SHA-256 over the closure of files and parameters of both sides."""
    from ucpl.syntax import nodes, print_file

    digest = hashlib.sha256()
    for one in (source, target):
        digest.update(one.layout.call.encode())
        for name, file in sorted(one.library.files.items()):
            digest.update(f"\0{Path(name).name}\0".encode())
            digest.update(file.text.encode())
        if one.model is not None:
            digest.update(print_file(nodes.File("", 1, (one.model,))).encode())
    return digest.hexdigest()


def sides(
    source: str | tuple[Library, nodes.Call],
    target: str | tuple[Library, nodes.Call],
    *,
    model: nodes.Model | None = None,
    checkpoint: Checkpoint | None = None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    drop: Sequence[str] = (),
) -> tuple[Side, Side]:
    """Both sides of a plan. A source that is a path is that checkpoint; its headers, or `model`, close layouts of any model."""
    if checkpoint is not None:
        described = None if isinstance(source, str) and is_checkpoint(source) else source
        here, known = source_side(checkpoint, described, config, sizes)
        return here, target_side(target, here, model or known, config=config, sizes=sizes, drop=drop)
    ours, theirs = (parse_target(one) if isinstance(one, str) else one for one in (source, target))
    if model is None:  # a side of a named model says what the other is over
        model = next((_model_of(*one) for one in (ours, theirs) if not of_any(*one)), None)
    here = side(ours, model=model, config=config, sizes=sizes)
    return here, target_side(theirs, here, model, config=config, sizes=sizes, drop=drop)


def _model_of(library: Library, call: nodes.Call) -> nodes.Model:
    from attrs import evolve

    from ucpl.syntax import nodes

    known = library.layout(call.name).node
    assert isinstance(known, nodes.Layout)
    found = library.model(known.of)
    assert isinstance(found.node, nodes.Model)
    lets = tuple(s for s in found.file.statements if isinstance(s, nodes.Let))  # its file's numbers go along
    return evolve(found.node, items=(*lets, *found.node.items))


def plan(
    source: str,
    target: str,
    *,
    model: str | None = None,
    checkpoint: Here | None = None,
    drop: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    name: str = "convert",
) -> Plan:
    """The plan from one layout to another, proved. `source` may be a checkpoint; layouts of any model need it or `model`."""
    if checkpoint is None and is_checkpoint(source):
        checkpoint = source
    described = None if is_checkpoint(source) else source
    opened = None
    if checkpoint is not None:
        opened = open_checkpoint(checkpoint, described, config=config, sizes=sizes)
    known = model_named(model) if model is not None else None
    here, there = sides(source, target, model=known, checkpoint=opened, config=config, sizes=sizes, drop=drop)
    return make_plan(here, there, checkpoint=opened, drop=tuple(drop), name=name)[1]


def load_plan(path: Here) -> Plan:
    """A plan from its file. Raises: UcplError E350, E351."""
    from ucpl.schedule.files import load_plan as read

    return read(Path(path))


def save_plan(plan: Plan, path: Here) -> None:
    """A plan into a file; the same plan gives the same bytes."""
    from ucpl.schedule.files import save_plan as write

    write(plan, Path(path))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Converted:
    """What `convert` did: the plan it made and the run's report. It prints as the report."""

    plan: Plan
    report: Report

    def __str__(self) -> str:
        return str(self.report)


def open_checkpoint(
    path: Here,
    layout: str | tuple[Library, nodes.Call] | None = None,
    *,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    plan: Plan | None = None,
) -> Checkpoint:
    """A checkpoint's headers. What no framework describes, a layout (or a plan) of framework torch() does.

    Raises: UcplError, exit 3.
    """
    from ucpl.stores.generic import NAME, open_files
    from ucpl.stores.registry import open_checkpoint as read

    here = Path(path)
    layout = layout if layout is not None or plan is not None else own_layout(here)
    if plan is not None and plan.source.framework == NAME:
        return open_files(here, (t.file for t in plan.sources))
    if layout is not None and here.exists():
        library, call = parse_target(layout) if isinstance(layout, str) else layout
        if not of_any(library, call):
            known = config if config is not None else _config_beside(here)
            try:
                placement = side((library, call), config=known, sizes=sizes).placement
            except UcplError as error:  # a size that only the checkpoint's shapes say: it must tell itself what it is
                if error.diagnostics[0].code != "E101":
                    raise
                try:
                    return read(here)
                except UcplError:
                    raise error from None
            if placement.layout.framework == NAME:
                aside = [tuple(b.key.text.split("/")) for b in placement.layout.blobs if b.key is not None]
                return open_files(here, (home.file for part in placement.parts for home in part.homes), aside)
    return read(here)


def own_layout(path: Path, framework: str | None = None) -> str | None:
    """The layout that a folder of framework torch() carries: nothing else would tell what its files are."""
    from ucpl.stores.generic import NAME

    text = path / "ucpl" / "layout.ucpl"
    if framework not in (None, NAME) or not text.is_file():
        return None
    library, call = parse_target(f"{text}:stored()")
    known = library.known.get(call.name)
    items = getattr(known.node, "items", ()) if known is not None else ()
    said = [item.call.name for item in items if type(item).__name__ == "Framework"]
    return f"{text}:stored()" if said == [NAME] else None


def _config_beside(path: Path) -> dict[str, Any] | None:
    """config.json of a folder, if it has one."""
    import json

    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return None
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def infer(checkpoint: Here) -> Inferred:
    """The model and layout of a checkpoint found in the wild; `.text()` is the .ucpl."""
    from ucpl.frontends.infer import infer as infer_layout

    return infer_layout(open_checkpoint(checkpoint))


def apply(
    plan: Plan | Here,
    source: Here | Checkpoint,
    target: Here,
    *,
    memory: int = MEMORY,
    workers: int = WORKERS,
    resume: bool = False,
    force: bool = False,
    verify_source: bool = False,
    allow_globals: Sequence[str] = (),
    tag: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run exactly that plan. Raises: UcplError E600-E605 where the source is not what the plan was made for."""
    from ucpl.runtime.execute import execute
    from ucpl.schedule.plan import Plan as Made
    from ucpl.stores.registry import framework

    made = plan if isinstance(plan, Made) else load_plan(plan)
    opened = open_checkpoint(source, plan=made) if isinstance(source, str | Path) else source
    kept = _without(opened, {name for name, fate in made.carry.items() if fate == "drop"})
    try:
        return execute(
            made,
            kept,
            framework(made.target.framework),
            Path(target),
            memory=memory,
            workers=workers,
            resume=resume,
            force=force,
            verify_source=verify_source,
            allow_globals=tuple(allow_globals),
            tag=tag,
            progress=progress,
        )
    except UcplError as error:
        if error.diagnostics[0].code != "E504":
            raise
        raise _with_holders(error, kept) from None


def _with_holders(error: UcplError, checkpoint: Checkpoint) -> UcplError:
    """Which keys of client_state hold what is refused: they can be left out by name."""
    from attrs import evolve

    from ucpl.stores.pickles import unsafe_globals

    holders = {key: unsafe_globals(value) for key, value in checkpoint.envelope.carried.items()}
    found = []
    for d in error.diagnostics:
        name = d.message.rpartition(" ")[2]
        keys = [str(key) for key, names in holders.items() if name in names]
        remedy = f"--allow-global {name} carries it over, where you trust it"
        remedy += "".join(f"; --drop {key} leaves out what holds it" for key in keys[:3])
        labels = tuple(Label(str(checkpoint.top), f"holds {name}", where=f"client_state {key}") for key in keys[:3])
        found.append(evolve(d, labels=labels or d.labels, remedy=remedy))
    return UcplError(*found)


def _without(checkpoint: Checkpoint, names: set[str]) -> Checkpoint:
    """The checkpoint as if client_state had none of these keys, and no parameter these numbers."""
    from attrs import evolve

    if names.isdisjoint(checkpoint.envelope.carried) and names.isdisjoint(checkpoint.envelope.scalars):
        return checkpoint

    def rest(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in names}

    callers = evolve(checkpoint.caller_states, of=tuple(rest(values) for values in checkpoint.caller_states.of))
    known = checkpoint.envelope
    less = evolve(known, carried=rest(known.carried), scalars=rest(known.scalars))
    return evolve(checkpoint, envelope=less, caller_states=callers)


def convert(
    source: Here,
    target: Here,
    to: str,
    *,
    layout: str | None = None,
    drop: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    **how: Any,
) -> Converted:
    """Infer the source (or take it as `layout` says), plan, prove, and write the target. `how`: as for `apply`."""
    opened = open_checkpoint(source, layout, config=config, sizes=sizes)
    here, model = source_side(opened, layout, config, sizes)
    there = target_side(to, here, model, config=config, sizes=sizes, drop=drop)
    _, made = make_plan(here, there, checkpoint=opened, drop=tuple(drop), twice=True)
    return Converted(made, apply(made, opened, target, **how))


def compare(
    a: Here,
    b: Here,
    *,
    a_layout: str | None = None,
    b_layout: str | None = None,
    memory: int = MEMORY,
    workers: int = WORKERS,
) -> Likeness:
    """Whether two checkpoints hold the same logical state, whatever their layouts. True where they do."""
    from ucpl.proofs.compare import likeness

    ours, theirs = open_checkpoint(a, a_layout), open_checkpoint(b, b_layout)
    here, there = source_side(ours, a_layout)[0], source_side(theirs, b_layout)[0]
    return likeness(ours, here.placement, theirs, there.placement, memory=memory, workers=workers)


def verify(checkpoint: Here, *, layout: str | None = None, memory: int = MEMORY, workers: int = WORKERS) -> Verdict:
    """Read a checkpoint back: digests, CRCs, copies, weights against masters. True where nothing is wrong."""
    from ucpl.proofs.verify import verdict

    opened = open_checkpoint(checkpoint, layout)
    return verdict(opened, source_side(opened, layout)[0].placement, memory=memory, workers=workers)
