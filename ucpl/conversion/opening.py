"""Opens checkpoints: headers by their metadata, a stored or a given layout."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.ordering import arguments_in, arguments_of, demand_used, order_of, without_order
from ucpl.conversion.requests import Called, Config, Given, called
from ucpl.conversion.side import located
from ucpl.errors import Label, UcplError, fail
from ucpl.extents.account import CLIENT_STATE, NotRead
from ucpl.files.skipping import ALL, SKIP, Skipped, skipping
from ucpl.registry import format_named, format_of_models, formats
from ucpl.storage.cache_dirs import owned_scope
from ucpl.storage.resolve_url import resolve_source
from ucpl.texts import is_endless, json_object, read_text

if TYPE_CHECKING:
    from ucpl.extents import Key
    from ucpl.files.checkpoint import Checkpoint, Order
    from ucpl.formats.named_files import Aside
    from ucpl.inference.infer import Inferred
    from ucpl.language import nodes
    from ucpl.layout.entries import Kin
    from ucpl.placement import Placement
    from ucpl.planning.plan import Plan

_OF_TORCH = re.compile(r'\bframework\s+"?torch\b')  # a comment that has it costs a look at the text
_PREFIX = "prefix"  # of names in the files, which the model lacks

__all__ = ["infer", "load_plan", "open_alike", "open_checkpoint", "open_for", "own_layout", "read_named"]


def open_checkpoint(path: str | Path, layout: Called | None = None, given: Given | None = None) -> Checkpoint:
    """Read a checkpoint's headers.

    A layout of framework torch() describes files of no other framework. Raises: UcplError, exit 3.
    """
    asked = given or Given()
    with owned_scope() as mine, skipping(optimizer=asked.weights_alone, states=asked.skipped) as skipped:
        here = _demand_stored(path)
        opened = _opened(here, layout, asked)
        if skipped.met:
            if not opened.state.tensors and not opened.extents:
                what = f"{path} holds an optimizer alone: without it, no tensor is left"
                fail("E439", what, Label(str(path)))
            opened = evolve(opened, not_read=(*opened.not_read, *_not_read(skipped, asked)))
        opened = _without_objects(opened) if asked.weights_alone else opened
    return opened if mine is None or here == Path(path) else evolve(opened, standing=mine)


def _not_read(skipped: Skipped, given: Given) -> Iterator[NotRead]:
    """Skipped tensors and values, with the reasons."""
    for name, kind in skipped.met.items():
        why = given.why_skipped or ("left out by --weights-alone" if given.weights_alone else "dropped by name")
        yield NotRead(name, why, is_optimizer=True, kind=kind)


def _without_objects(opened: Checkpoint) -> Checkpoint:
    """The checkpoint without a caller's objects of foreign classes.

    An optimizer may be pickled as an object: its weights come out all the same.
    """
    from ucpl.files.pickles import unsafe_globals

    known = format_named(opened.format).known_globals()
    held = {key: set(unsafe_globals(value)) - known for key, value in opened.state.carried.items()}
    why = "left out by --weights-alone: {} is not loaded"
    return _without_values(opened, {str(key): why.format(min(names)) for key, names in held.items() if names})


def _without_values(opened: Checkpoint, gone: Mapping[str, str]) -> Checkpoint:
    """The checkpoint without some values of the caller, each with the reason."""
    if not gone:
        return opened
    carried = {key: value for key, value in opened.state.carried.items() if str(key) not in gone}
    more = tuple(NotRead(key, why, is_optimizer=True, kind=CLIENT_STATE) for key, why in gone.items())
    return evolve(opened, state=evolve(opened.state, carried=carried), not_read=(*opened.not_read, *more))


def _opened(here: Path, layout: Called | None, given: Given) -> Checkpoint:
    if layout is None:  # a checkpoint's own metadata leaves no size open
        layout, given = own_layout(here), evolve(given, sizes={})
    order = order_of(layout, given.order)
    opened = _ordered(here, layout, given, order)
    demand_used(order, here)
    return opened


def _ordered(here: Path, layout: Called | None, given: Given, order: Order | None) -> Checkpoint:
    from ucpl.formats.opening import open_checkpoint as read

    layout = without_order(layout) if layout is not None else None
    arguments = arguments_of(layout)
    if layout is None or not os.path.exists(here):
        return read(here, order)
    from ucpl.formats.named_files import below, open_files

    names, models = _safetensors_of(layout, here), format_of_models()
    if names and not (layout.is_of_any and set(names) <= {models.weights_file}):
        return models.open_named(here, names)
    if layout.is_of_any:
        try:
            opened = read(here, order, arguments, layout.format.name)
        except UcplError:
            if (named := _of_named_files(here, layout, given)) is None:
                raise
            return named
        # A reader of files with any keys leaves those that a layout of framework torch() describes to the layout.
        if format_named(opened.format).reads and (named := _of_named_files(here, layout, given)) is not None:
            return named
        return _with_prefix(_with_master(opened, layout), layout)
    known = evolve(given, config=given.config if given.config is not None else _config_in(here))
    try:
        placement = located(layout, known).placement
    except UcplError as error:  # only the checkpoint's shapes give a size: its own metadata has to describe it
        if error.diagnostics[0].code not in ("E101", "E169"):
            raise
        if (found := _files_like(layout, here)) is not None:
            return open_files(here, *found)
        try:
            return read(here)
        except UcplError:
            raise error from None
    if not format_named(placement.layout.framework).is_of_a_spec:
        return _read_grouped(here, order, placement)
    files = (file for part in placement.parts for block in part.homes.blocks for file in block.files)
    return open_files(here, [*files, *_value_files(placement, here)], below(_values_of(placement)))


def _with_master(checkpoint: Checkpoint, layout: Called) -> Checkpoint:
    """With the named state as its master: `dcp(master_state = "master")`."""
    from ucpl.files.masters import SETTING, renamed

    said = _text_of(layout, SETTING)
    if said is None:
        return checkpoint  # the layout refuses it, or has a key that the files lack
    return evolve(renamed(checkpoint, said, f'{SETTING} = "{said}"'), notes=())


def _with_prefix(checkpoint: Checkpoint, layout: Called) -> Checkpoint:
    """Names without the prefix of a call: `dcp(prefix = "model_state.")`."""
    said, known = _text_of(layout, _PREFIX), checkpoint.state.settings.get(_PREFIX)
    if said is None or known is None or said == known.value or not checkpoint.state.tensors:
        return checkpoint
    return _prefixed(checkpoint, said)


def _prefixed(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """Weights under names without a prefix.

    Raises: UcplError E321 if a tensor's name in the files does not begin with it, or if an optimizer has other names.
    """
    state = checkpoint.state
    before = str(state.settings[_PREFIX].value)
    stored = [before + name for name in (*(t.name for t in state.tensors), *state.aliases)]
    other = next((name for name in stored if not name.startswith(prefix) or name == prefix), None)
    if other is None and not state.groups and not any(t.states for t in checkpoint.state.tensors):
        return _named(checkpoint, before, prefix)
    known = before if other is None else _common(stored)
    label = Label(str(checkpoint.root), where=other or stored[0])
    if other is None:
        message = f"the optimizer has the names of parameters that follow `{before}`"
    else:
        message = f"`{other}` does not begin with it"
    remedy = f'dcp({_PREFIX} = "{known}"), with which all names begin, or leave {_PREFIX} out'
    fail("E321", f'{_PREFIX} = "{prefix}", and {message}', label, remedy=remedy if known else f"leave {_PREFIX} out")


def _common(names: list[str]) -> str:
    """The first steps of all names."""
    steps = sorted(name.split(".")[:-1] for name in names)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(steps[0], steps[-1], strict=False))
    return "".join(f"{step}." for step, _ in alike)


def _named(checkpoint: Checkpoint, before: str, prefix: str) -> Checkpoint:
    from ucpl.extents import Setting

    state = checkpoint.state

    def plain(name: str) -> str:
        return (before + name).removeprefix(prefix)

    made = evolve(
        state,
        tensors=tuple(evolve(t, name=plain(t.name)) for t in state.tensors),
        aliases={plain(name): plain(owner) for name, owner in state.aliases.items()},
        settings={**state.settings, _PREFIX: Setting(prefix, f'{_PREFIX} = "{prefix}"')},
    )
    return evolve(checkpoint, state=made)


def _text_of(layout: Called, name: str) -> str | None:
    """The text of an argument of a call."""
    from ucpl.layout.scope import Scope

    argument = next((a for a in layout.call.arguments if a.name == name), None)
    if argument is None or all(p.name != name for p in layout.layout.parameters):
        return None
    said = Scope().evaluate(argument.value)
    return said if isinstance(said, str) else None


def _read_grouped(here: Path, order: Order | None, placement: Placement) -> Checkpoint:
    """A checkpoint of a framework.

    If its files do not give the order of an optimizer's numbers, the `group` lines of a spec do.
    """
    from ucpl.files.checkpoint import Order
    from ucpl.formats.opening import open_checkpoint as read

    try:
        return read(here, order, first=placement.layout.framework)
    except UcplError as error:
        groups = placement.layout.model_groups
        if error.diagnostics[0].code != "E461" or not groups or order is not None:
            raise
        names = tuple(name for _, members in groups for name in members)
        said = Order((names,), f"group lines of {placement.layout.model_name}")
        return read(here, said, first=placement.layout.framework)


def _values_of(placement: Placement) -> list[tuple[str, Key]]:
    """Places of values that are not tensors of the model."""
    return [(place.file, place.key) for blob in placement.blobs for place in blob.places]


def _value_files(placement: Placement, here: Path) -> list[str]:
    """Files of those values.

    The file of a dropped value may be missing.
    """
    root = here if here.is_dir() else here.parent
    return [p.file for b in placement.blobs for p in b.places if b.rule.fate != "drop" or (root / p.file).is_file()]


def open_for(plan: Plan, path: str | Path) -> Checkpoint:
    """Open the source of a plan, without states that the plan skips.

    Raises: UcplError E606 if the source has tensors that the plan does not know; E608 for a plan that no run can finish.
    """
    names = {name for name, fate in plan.carry.items() if fate == SKIP}
    given = Given(weights_alone=ALL in names, skipped=frozenset(names - {ALL}))
    with skipping(optimizer=given.weights_alone, states=given.skipped) as skipped:
        opened = _opened_for(plan, path)
    opened = evolve(opened, not_read=(*opened.not_read, *_not_read(skipped, given)))
    objects = {str(key) for key in opened.state.carried} & names if given.weights_alone else set()
    return _without_values(opened, dict.fromkeys(sorted(objects), "left out by --weights-alone"))


def _opened_for(plan: Plan, path: str | Path) -> Checkpoint:
    """Open the source of a plan.

    If nothing else names its files, the plan does. Raises: as `open_for`.
    """
    if plan.rank is not None:
        what = f"the plan is the share of rank {plan.rank} alone, of {plan.target_call}"
        fail("E608", what, Label(plan.name, where=f"rank {plan.rank}"))
    from ucpl.formats.opening import framework
    from ucpl.planning.unread import check_known, check_known_files

    here = _demand_stored(path)
    if format_named(plan.source.framework).is_of_a_spec:
        opened = _files_of(plan, here)
    else:
        opened = read_named(here, plan.source.framework, dict.fromkeys(t.file for t in plan.sources)) or _read_as(
            plan, here
        )
    if plan.source.framework == format_named(opened.format).file_format:  # with the names in its files
        opened = framework(plan.source.framework).open(opened.root)
    is_whole = all((t.file, t.key) in opened.extents for t in plan.sources)  # else the run reports the missing tensors
    of_modules = format_named(plan.target.framework).needs_modules(plan.target.settings)
    if not is_whole and format_named(opened.format).has_layers_stacked and of_modules:
        opened = format_named(opened.format).in_modules(opened)
        is_whole = all((t.file, t.key) in opened.extents for t in plan.sources)
    if plan.unread is not None and is_whole:
        if format_named(plan.source.framework).is_of_a_spec:
            check_known_files(opened.root, plan.sources, plan.unread)
        check_known(opened.extents, plan.sources, plan.unread)
    return opened


def _read_as(plan: Plan, here: Path) -> Checkpoint:
    """A checkpoint, read with the choices of a plan's source."""
    from ucpl.files.checkpoint import Order
    from ucpl.formats.opening import open_checkpoint as read

    known = format_named(plan.source.framework).reads
    arguments = arguments_in(plan.source.framework, plan.source.settings)
    try:
        return read(here, None, arguments, plan.source.framework)
    except UcplError as error:
        if not known or error.diagnostics[0].code not in ("E446", "E461"):
            raise
        names = tuple(name for _, members in plan.source.groups for name in members)
        return read(here, Order((names,), f"groups of {plan.name}"), arguments, plan.source.framework)


def _files_of(plan: Plan, here: Path) -> Checkpoint:
    """The files that a plan names; no other text describes them."""
    from ucpl.formats.named_files import below, open_files

    values = [(w.source_file, w.source_key) for b in plan.target.blobs for w in (*b.ways, *b.alike)]
    return open_files(here, [*(t.file for t in plan.sources), *(f for f, _ in values)], below(values))


def open_alike(path: str | Path, placement: Placement) -> Checkpoint:
    """Open another checkpoint of a placed layout; missing files are skipped.

    Raises: UcplError, exit 3.
    """
    from ucpl.formats.named_files import below, open_files
    from ucpl.formats.opening import open_checkpoint as read

    here = _demand_stored(path)
    names = dict.fromkeys(file for part in placement.parts for block in part.homes.blocks for file in block.files)
    if not format_named(placement.layout.framework).is_of_a_spec or not here.exists():
        of = placement.layout.framework
        return read_named(here, of, names) or read(here, first=of)
    root = here if here.is_dir() else here.parent
    values = _values_of(placement)
    names |= dict.fromkeys(file for file, _ in values)
    return open_files(here, [name for name in names if (root / name).is_file()], below(values))


def _safetensors_of(layout: Called, here: Path) -> tuple[str, ...]:
    """The files that a layout of framework huggingface() names.

    Empty if the folder is of another kind, or if a name has a placeholder or a condition.
    """
    from ucpl.language import nodes
    from ucpl.layout.statements import items_of

    items = items_of(layout.library, layout.call)
    frameworks = [i.call.name for i in items if isinstance(i, nodes.Framework)]
    files = [i for i in items if isinstance(i, nodes.Files) and i.form is not None]
    names = tuple(dict.fromkeys(i.template for i in files))
    is_plain = all(i.when is None and "{" not in i.template and i.template.endswith(".safetensors") for i in files)
    below = any("/" in name and any((here / name).parent.glob("*.safetensors")) for name in names)
    return (
        names
        if is_plain
        and format_named("".join(frameworks[-1:])).has_model_files
        and (below or format_of_models().store().recognises(here))
        else ()
    )


def _of_named_files(here: Path, layout: Called, given: Given) -> Checkpoint | None:
    """A folder that only a layout of any model describes, or None.

    Its files' keys name the tensors.
    """
    from ucpl.formats.named_files import open_files
    from ucpl.inference.key_names import files_of_keys, tensors_of_keys
    from ucpl.language import nodes
    from ucpl.layout.statements import CallInputs, open_layout

    folder = here if here.is_dir() else here.parent
    if (like := _files_like(layout, folder)) is None:
        return None
    inputs = CallInputs(given.config or {}, given.sizes, given.inherited)
    of_any = open_layout(layout.library, layout.call, inputs, nodes.Model("checkpoint", ()))
    names = [name for name in files_of_keys(of_any) if here.is_dir() or name == here.name]
    if not any((folder / name).is_file() for name in names):
        return None
    opened = open_files(here, names, like[1])
    tensors = tensors_of_keys(of_any, opened.extents.values())
    return evolve(opened, state=evolve(opened.state, tensors=tensors)) if tensors else None


def _files_like(layout: Called, here: Path) -> tuple[list[str], Aside] | None:
    """Files of a folder that match the names of a layout's files.

    Used for framework torch() while a size of the layout is unknown. Also returns a test for keys that are not part of the
    model.
    """
    from ucpl.language import nodes
    from ucpl.language.words import HOLE
    from ucpl.layout.statements import items_of

    items = items_of(layout.library, layout.call)
    if not _of_a_spec(items) or not here.is_dir():
        return None
    texts = [HOLE.split(i.template)[:: HOLE.groups + 1] for i in items if isinstance(i, nodes.Files) and i.form]
    named = re.compile("|".join("[^/]+".join(map(re.escape, parts)) for parts in texts))
    files = [p.relative_to(here).as_posix() for p in sorted(here.rglob("*")) if p.is_file()]
    wraps = {i.name: i.key or "{key}" for i in items if isinstance(i, nodes.Files)}
    keys = []
    for blob in (i for i in items if isinstance(i, nodes.Blob)):
        said = {c.word: c.args[0] for c in blob.clauses if c.word in ("in", "as")}
        wrap = wraps.get(said.get("in", "meta" if "meta" in wraps else "weights"), "{key}")
        text = wrap.replace("{key}", said.get("as", blob.name))
        keys.append("[^/]+".join(map(re.escape, HOLE.split(text)[:: HOLE.groups + 1])))
    aside = re.compile("|".join(f"{key}(?:/.*)?" for key in keys) or "(?!)")
    return [f for f in files if named.fullmatch(f)], lambda file, key: aside.fullmatch("/".join(key)) is not None


def read_named(here: Path, framework: str, files: Iterable[str]) -> Checkpoint | None:
    """Open a Hugging Face folder with weights in files of other names.

    None: the folder is opened without names.
    """
    names = tuple(files)
    models = format_of_models()
    if framework != models.name or set(names) <= {models.weights_file} or not here.exists():
        return None
    return models.open_named(here, names)


def load_plan(path: str | Path) -> Plan:
    """A plan from its file. Raises: UcplError E350, E351."""
    from ucpl.planning.files import load_plan as read

    if is_endless(path):
        fail("E350", f"{path} is no regular file", Label(str(path)))
    return read(Path(path))


def _demand_stored(given: str | Path) -> Path:
    """Reject a source that is neither a folder nor a regular file.

    Raises: UcplError E435.
    """
    path = resolve_source(given)
    if is_endless(path):
        fail("E435", f"{path} is no file and no folder", Label(str(path)))
    return path


def _of_a_spec(items: Iterable[nodes.LayoutItem]) -> bool:
    """True if only the layout with these lines describes its files."""
    from ucpl.language import nodes

    names = [item.call.name for item in items if isinstance(item, nodes.Framework)]
    return bool(names) and format_named(names[-1]).is_of_a_spec


def own_layout(path: Path, framework: str | None = None) -> Called | None:
    """The layout in a folder of framework torch(), which describes its files."""
    if framework is not None and not format_named(framework).is_of_a_spec:
        return None
    text = path / "ucpl" / "layout.ucpl"
    if not os.path.isfile(text) or not _OF_TORCH.search(read_text(text)):
        return None  # parsing takes long if there are many tensors
    from ucpl.language import nodes

    found = called(f"{text}:stored()")
    known = found.library.known.get(found.call.name)
    items = known.node.items if known is not None and isinstance(known.node, nodes.Layout) else ()
    return found if _of_a_spec(items) else None


def infer(checkpoint: Checkpoint, *, fold: bool = False, kin: Kin | None = None, with_scales: bool = True) -> Inferred:
    """Infer the model and layout of a checkpoint.

    fold: tensors that are stored alike are one in its placement. kin: see `resolve`. They are checked against it.
    with_scales: see `inference.infer`.
    Raises: UcplError E320-E323.
    """
    from ucpl.inference.infer import infer as made
    from ucpl.verification import spec_matches

    found = made(checkpoint, fold=fold, kin=kin, with_scales=with_scales)
    spec_matches.demand(found.placement, checkpoint)
    return found


def _config_in(path: Path) -> Config | None:
    """config.json of a folder, or made by a format from other files."""
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    if not os.path.isfile(file):
        try:
            return next((made for one in formats().values() if (made := one.config_made(folder)) is not None), None)
        except PermissionError:  # a closed folder: the reader of its format names it
            return None
    value = json_object(read_text(file))
    return value if isinstance(value, dict) else None
