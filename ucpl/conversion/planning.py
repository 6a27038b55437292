"""From two sides to a plan: build, prove, order.

Deterministic: the same specs give the same plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from attrs import evolve

from ucpl.conversion.changes import Changes
from ucpl.conversion.dialects import Names, split_names
from ucpl.conversion.dropping import schedule_notes
from ucpl.conversion.opening import open_checkpoint
from ucpl.conversion.requests import Called, Folding, Given, called, is_checkpoint, library_of, with_arguments
from ucpl.conversion.side import Side
from ucpl.conversion.sides import sides
from ucpl.conversion.ties import framework_of
from ucpl.conversion.training import placements_in_dtype
from ucpl.conversion.weights import with_weights
from ucpl.errors import Label, UcplError, fail
from ucpl.extents.account import CLIENT_STATE
from ucpl.files.masters import FP32
from ucpl.files.skipping import ALL, SKIP
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.conversion.target_passes import AfterPasses
    from ucpl.extents import Key
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.graph import Graph
    from ucpl.language import nodes
    from ucpl.planning.order import Parts
    from ucpl.planning.plan import Plan, Recipe

__all__ = [
    "Asked",
    "Prepared",
    "closed_call",
    "described",
    "dtype_of",
    "folded",
    "is_unread",
    "make_plan",
    "plan_of",
    "statement",
]


T = TypeVar("T")
_OF_THE_TEXT = "E017"  # it is the same without families: the text has a line for each tensor in any case


@frozen(eq=False)
class Asked:
    """The input of a plan.

    A source that is a path is that checkpoint.
    """

    source: str | Called | None  # None: the layout comes from `checkpoint`
    target: str | Called
    checkpoint: str | Path | None = None  # its headers give model and dtypes
    name: str = "convert"
    twice: bool = False  # prove the finished moves once more, by code that made none of them
    called: str | None = None  # the dialect of the source's tensor names, if `source` does not give it


@frozen(eq=False)
class Prepared:
    """A plan and its inputs."""

    plan: Plan
    source: Side
    target: Side
    after: AfterPasses | None = None  # the metadata of the target; None: the plan has no checkpoint
    loader: tuple[str, ...] = ()  # notes on messages of the target's loader
    config_unread: bool = False  # a config was given, and no text names a key of it
    model_unread: bool = False  # a model was given, and neither layout is of any

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.source.checkpoint

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on oddities of both specs that are not errors."""
        lacking = () if self.checkpoint is None else (f"not stored: {text}" for text in self.checkpoint.missing_tensors)
        return tuple(dict.fromkeys((*lacking, *self.odd)))

    @property
    def odd(self) -> tuple[str, ...]:
        """The same, without the tensors that the source does not store."""
        from ucpl.lint.duplicates import stored_twice

        out = [text for side in (self.source, self.target) for text in stored_twice(side.placement)]
        out += self.checkpoint.notes if self.checkpoint is not None else ()
        if self.checkpoint is not None and self.checkpoint.container is not None:
            out += self.checkpoint.container.odd
        out += _names_of_the_spec(self.source, self.target)
        out += self.loader
        if self.config_unread:
            from ucpl.lint.unused_names import CONFIG_UNREAD

            out.append(CONFIG_UNREAD)
        if self.model_unread:
            out.append("both layouts are of models of their own, and --model is of none. Leave it out")
        return tuple(dict.fromkeys(out))


def _names_of_the_spec(source: Side, target: Side) -> list[str]:
    """A note if a target gets a spec's tensor names.

    The names in the source's files differ from the spec's. The source is a Hugging Face folder that a spec of a model
    describes; the target is of any model.
    """
    checkpoint, layout = source.checkpoint, target.layout
    if checkpoint is None or source.called.is_of_any or not target.called.is_of_any:
        return []
    known = {t.name for t in checkpoint.state.tensors}
    other = next((path for path in layout.tensors if path not in known), None)
    is_of_class = format_named(checkpoint.format).has_model_files
    if not (is_of_class and format_named(layout.framework).has_names_of_modules) or other is None:
        return []
    called, call = source.called, target.called.call.name
    named = f"{Path(called.library.layout(called.call.name).file.name).name}:{called.call.name}()"
    return [
        f"the target's tensors have the names of the model `{source.layout.model_name}` (`{other}`), not those in the source's"
        f" files. To keep the names in the files, omit --from, or write --from 'of {named}' and --to '{call}(...) of {named}'"
    ]


def folded(plan: Callable[[Given], T], asked: Asked, given: Given) -> T:
    """A plan in which many tensors that are stored alike are one.

    It has single ones if an option names one of them. An error names a single tensor: it is raised by a second plan
    without families.
    """
    if given.drop or given.freeze or given.train or given.fill or given.bare or asked.called is not None:
        return plan(given)
    folding = Folding()
    try:
        return plan(evolve(given, folding=folding))
    except UcplError as error:
        if not folding.is_done or error.diagnostics[0].code == _OF_THE_TEXT:
            raise
    return plan(given)


def described(asked: Asked, given: Given) -> tuple[Side, Side, Names | None]:
    """Both sides of a plan, and their dialects if they have any.

    An unreadable optimizer of the source is skipped if the target stores none of it, or if the caller drops it.
    """
    return with_weights(partial(_described, asked), given, asked.target)


def _described(asked: Asked, given: Given) -> tuple[Side, Side, Names | None]:
    source, target, path = asked.source, asked.target, asked.checkpoint
    mine = asked.called
    if isinstance(source, str) and not is_checkpoint(source):
        source, mine = split_names(source)
    if isinstance(source, str) and source and is_checkpoint(source):
        source, path = None, path if path is not None else source
    target, other = split_names(target) if isinstance(target, str) else (target, None)
    if other is not None and not target:
        fail(
            "E335",
            f"no names can be had from `{other}`: no layout is given before `of`, and a target has to name one",
            Label("<call>", where=f"of {other}"),
        )
    own = called(source) if source else None
    opened = open_checkpoint(path, own, given) if path is not None else None
    aimed, given = with_arguments(called(target), given) if isinstance(target, str) else (target, given)
    if opened is not None and not given.weights_alone:
        from ucpl.conversion.accounting import demand_an_optimizer

        demand_an_optimizer(opened, framework_of(aimed), given.skipped)
    if mine is None and other is None:
        return (*sides(own, aimed, given, opened), None)
    from ucpl.conversion.named_sides import named_sides

    return named_sides(opened, own, aimed, (mine, other), evolve(given, folding=None))


def is_unread(sides: tuple[Side, Side], given: Given) -> bool:
    """True if a config is given and nothing reads it.

    With a checkpoint and a layout of any model, the config's class gives ties and cuts.
    """
    if given.config is None:
        return False
    from ucpl.lint.unused_names import reads_config

    if any(one.checkpoint is not None for one in sides) and any(one.called.is_of_any for one in sides):
        return False
    models = [given.model] if given.model is not None else []
    return not reads_config([*models, *(file for one in sides for file in one.library.files.values())])


def make_plan(
    source: Side, target: Side, *, name: str = "convert", twice: bool = False, names: Names | None = None
) -> Plan:
    """Build, prove and order a plan.

    Dropped names may also be keys of client_state. Raises: UcplError E30x, E187.

    twice: prove the finished moves once more, by code that made none of them (about twice the time of planning).
    """
    return plan_of(source, target, name=name, twice=twice, names=names)[0]


def plan_of(
    source: Side, target: Side, *, name: str, twice: bool, names: Names | None
) -> tuple[Plan, AfterPasses | None]:
    """The plan, and the metadata of the target.

    Raises: UcplError as `make_plan`.
    """
    from ucpl.conversion.lost_bytes import losses_of, replays_of
    from ucpl.conversion.target_passes import decide_target_passes
    from ucpl.graph import build
    from ucpl.planning import ClosedText, order
    from ucpl.planning.unread import unread_of
    from ucpl.verification.masters import masters_of

    _check_trained_groups(target)
    said_of_dtype: tuple[str, ...] = ()
    if names is None:
        here, there, said_of_dtype = placements_in_dtype(source, target)
    else:
        from ucpl.conversion.logical import placements

        here, there = placements(names, source, target)
    changes = target.changes or Changes()
    dtypes = dtype_of(source.checkpoint)
    graph = build(here, there, drop=_of_tensors(source, target, changes), freeze=changes.frozen, dtype_of=dtypes)
    if twice:
        from ucpl.verification.proof.coverage import prove

        prove(graph)
    _demand_text(target)
    recipe, opened = _recipe(graph, source, target, names, said_of_dtype), source.checkpoint
    parts: Parts = {
        "name": name,
        "spec_digest": spec_digest(source, target),
        "layout_text": ClosedText(partial(closed_text, target)),
        "masters": None if FP32 in changes.drop else masters_of(source.placement, dtypes, frozenset(changes.frozen)),
    }
    if opened is None:
        return order(graph, recipe, **parts), None
    from ucpl.conversion.accounting import account_of, tensors_of

    after, recipe = decide_target_passes(opened, recipe)
    parts["account"] = account_of(recipe, tensors_of(graph, graph.dropped), opened)
    parts["unread"] = unread_of(opened.extents, graph.sources)
    return order(graph, recipe, losses=losses_of(opened), replays=replays_of(opened), **parts), after


def _check_trained_groups(target: Side) -> None:
    """Check that group lines of an engine's target name trained parameters.

    Raises: UcplError E471.
    """
    layout, of = target.layout, format_named(target.layout.framework)
    if not of.has_engine or not layout.states:
        return
    for name, members in layout.model_groups:
        if found := [member for member in members if layout.tensors[member].kind == "frozen"]:
            fail(
                "E471",
                f'group "{name}" of the model has `{found[0]}`, which is frozen, and groups of {of.title} have trained'
                " parameters alone",
                Label(layout.call, where=f'group "{name}"'),
                remedy=f"take {', '.join(found)} out of that line; plain(), dcp() and torch_file() keep such members",
            )


def _of_tensors(source: Side, target: Side, changes: Changes) -> tuple[str, ...]:
    """Dropped names of tensors and states; other names are dropped elsewhere."""
    named = {b.name for side in (source, target) for b in side.placement.blobs}
    skipped = {one.name for one in source.checkpoint.not_read} if source.checkpoint is not None else set()
    others = {*_besides(source.checkpoint, changes.drop), *named, *changes.values, *skipped}
    return tuple(d for d in changes.drop if d not in others)


def _besides(checkpoint: Checkpoint | None, drop: tuple[str, ...]) -> dict[str, str]:
    """Dropped names of values besides tensors, each with its kind."""
    if checkpoint is None:
        return {}
    from ucpl.formats.leaving import other_states

    kinds = dict.fromkeys(checkpoint.state.scalars, "scalar")
    kinds |= dict.fromkeys(other_states(checkpoint.state), "value")
    kinds |= {key: "client_state" for key in checkpoint.state.carried if isinstance(key, str)}
    kinds |= dict.fromkeys(_companion_files(checkpoint), "file")
    return {name: kinds[name] for name in drop if name in kinds}


def _recipe(graph: Graph, source: Side, target: Side, names: Names | None, said_of_dtype: tuple[str, ...]) -> Recipe:
    """The decisions of both sides, before the target passes complete them."""
    from ucpl.conversion.filling import numbers_of_fills
    from ucpl.graph.blobs import carried_blobs
    from ucpl.planning import recipe_of

    changes = target.changes or Changes()
    blobs, without = carried_blobs(source.placement, target.placement, changes.drop)
    besides = _besides(source.checkpoint, changes.drop)
    known = recipe_of(graph, blobs)
    numbers, filled = numbers_of_fills(source, target) if names is None else ({}, names.said[1])
    return evolve(
        known,
        derived=said_of_dtype + known.derived,
        dropped=(
            *known.dropped,
            *without,
            *_numbers_left_out(source, target, tuple(besides)),
            *(names.said[0] if names is not None else ()),
            *(f"{kind} of {name}: dropped by name" for name, kind in besides.items()),
        ),
        filled=known.filled + filled,
        changed=(*changes.said, *schedule_notes(source.checkpoint, changes.gone)),
        gone=changes.gone,
        renamed=names.made if names is not None else {},
        begun=numbers,
        carry={**known.carry, **dict.fromkeys(besides, "drop"), **dict.fromkeys(_skipped(source), SKIP)},
        passes=source.passes,
    )


def _skipped(source: Side) -> tuple[str, ...]:
    """Skipped states and values; `ALL` for the complete optimizer."""
    if source.checkpoint is None or not any(one.is_optimizer for one in source.checkpoint.not_read):
        return ()
    left = {one.name for one in source.checkpoint.not_read if one.kind == CLIENT_STATE}
    return (ALL, *sorted(left)) if source.given.weights_alone else tuple(sorted(source.given.skipped))


def _numbers_left_out(source: Side, target: Side, said: tuple[str, ...]) -> tuple[str, ...]:
    """Numbers of single parameters that the target has no place for.

    `said`: dropped by name. If a spec's names differ from those in the source's files, the numbers keep the names in the files.
    """
    if source.checkpoint is None:
        return ()
    gone = target.changes.gone.get("numbers", ()) if target.changes is not None else ()
    out: list[str] = []
    for state, values in source.checkpoint.state.scalars.items():
        if state in said:
            continue
        if format_named(target.layout.framework).has_tensors_alone(target.layout.settings):
            out += [f"{state} of {name}: the target stores no {state}" for name in values]
        elif not source.called.is_of_any:
            lost = (name for name in values if name not in target.layout.tensors and name not in gone)
            out += [
                f"{state} of {name}: no tensor of the target has this name, which the files give it" for name in lost
            ]
    return tuple(out)


def _companion_files(checkpoint: Checkpoint | None) -> frozenset[str]:
    """Names of a training framework's files next to the shards."""
    if checkpoint is None or checkpoint.container is None:
        return frozenset()
    return frozenset(file.name for file in checkpoint.container.files)


def statement(file: str, name: str, given: Given) -> tuple[Called, Called, nodes.Plan]:
    """A `plan` statement, with the closed calls of both sides first."""
    from ucpl.language import nodes

    library = library_of(file)
    known = library.plan(name)
    assert isinstance(known.node, nodes.Plan)
    source, target = (closed_call(known.file, call, given) for call in (known.node.source, known.node.target))
    return Called(library, source), Called(library, target), known.node


def closed_call(file: nodes.File, call: nodes.Call, given: Given) -> nodes.Call:
    """The call of a `plan` statement with evaluated arguments.

    The arguments may use `let` names of the file.
    """
    from ucpl.language import nodes
    from ucpl.layout.scope import Scope, literal

    lets = {b.name: b.value for s in file.statements if isinstance(s, nodes.Let) for b in s.bindings}
    sizes = {name: value for name, value in given.sizes.items() if name in lets}
    scope = Scope(given=sizes, bindings=lets, config=given.config or {})
    return evolve(call, arguments=tuple(evolve(a, value=literal(scope.evaluate(a.value))) for a in call.arguments))


def dtype_of(checkpoint: Checkpoint | None) -> Callable[[str, Key], str | None] | None:
    """The dtype of a stored tensor, as a checkpoint's headers say."""
    return None if checkpoint is None else checkpoint.dtype_of


def closed_text(target: Side) -> str:
    """The target's model and layout as one .ucpl text.

    It refers to no other file. Empty if no text can express it, or if the text is too large to be read. The files of every
    framework except torch() are readable without it.
    """
    return _text_of(target)[0]


def _text_of(target: Side) -> tuple[str, str]:
    """The text, or the reason for its absence."""
    from ucpl.language.source import why_too_large, why_too_many, why_unwritten

    names = (*target.layout.tensors, *target.layout.aliases)
    if why := why_unwritten(names, in_keys=target.called.is_of_any):  # `{name}` is expanded there
        return "", why
    if target.called.is_of_any and (why := why_too_many(names)):
        return "", why
    text = _closed_text(target)
    why = why_too_large(text)
    return ("", why) if why else (text, "")


def _demand_text(target: Side) -> None:
    """Reject a target of framework torch() without a closed text.

    If its layout is of any model, only this text describes its files. Raises: UcplError E017.
    """
    needed = target.called.is_of_any and format_named(target.layout.framework).is_of_a_spec
    if needed and (why := _text_of(target)[1]):
        what = f"nothing would describe the files of {target.layout.call}: {why}"
        fail(
            "E017",
            what,
            Label(target.layout.call),
            remedy="name a layout of a model, or another form, as zero1(dp = 1)",
        )


def _closed_text(target: Side) -> str:
    from ucpl.language import nodes, print_file
    from ucpl.language.walk import lowest_version
    from ucpl.layout import close, expand

    (library, call), given = target.called, target.given
    if given.model is None or not target.called.is_of_any:
        return print_file(close(library, call, config=given.config, sizes=given.sizes, inherited=given.inherited))
    layout = expand(library, call, given.model, inherited=given.inherited, config=given.config)
    held = {name for i in given.model.items if isinstance(i, nodes.State) for name in i.names}
    new = (nodes.State((s.name,), s.dtype, s.scalar, s.groups) for s in target.layout.states if s.name not in held)
    model = evolve(given.model, items=(*given.model.items, *new))
    return print_file(nodes.File("layout.ucpl", lowest_version(layout), (model, layout)))


def spec_digest(source: Side, target: Side) -> str:
    """SHA-256 over the closure of files and parameters of both sides."""
    from ucpl.language import nodes, print_file

    digest = hashlib.sha256()
    printed: dict[int, bytes] = {}
    for text in target.given.fill:
        digest.update(f"\0fill {text}\0".encode())
    for word, texts in (("drop", target.given.drop), ("freeze", target.given.freeze), ("train", target.given.train)):
        for text in texts:
            digest.update(f"\0{word} {text}\0".encode())
    for one in (source, target):
        digest.update(one.layout.call.encode())
        for name, file in sorted(one.library.files.items()):
            digest.update(f"\0{Path(name).name}\0".encode())
            digest.update(file.text.encode())
        model = one.given.model
        if one.called.is_of_any and model is not None:
            if id(model) not in printed:  # both sides have one model, most often
                printed[id(model)] = print_file(nodes.File("", 1, (model,))).encode()
            digest.update(printed[id(model)])
    return digest.hexdigest()
