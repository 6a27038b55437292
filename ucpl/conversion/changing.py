"""The changes of --drop, --freeze and --train to the source's model.

Parameters are left out, frozen, or trained in the target. All changes are by name; the matches of a name are counted and
reported. New parameters have no value in the source: a `fill` line gives it (ucpl/conversion/filling.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from ucpl.conversion.changes import ChangeOrigin, Changes, Dealt
from ucpl.conversion.grouping import dealt
from ucpl.errors import Label, fail
from ucpl.language import nodes
from ucpl.layout.by_index import whole_name
from ucpl.layout.globs import is_called
from ucpl.layout.name_remedies import for_dropped, for_parameter
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.tables import each

if TYPE_CHECKING:
    from ucpl.conversion.requests import Given
    from ucpl.conversion.side import Side
    from ucpl.layout import Layout
    from ucpl.layout.layout import LogicalTensor
    from ucpl.placement import Placement

__all__ = ["changed_model", "changes_of", "counted", "demand_acting", "demand_left_out", "demand_states_left_out"]

NAMES_SHOWN = 3
EXTRA, EMPTY = "module_extra", "empty_tensors"  # values in a module that have no tensor elements


@frozen(eq=False)
class _Known:
    """The possible meanings of names in a source."""

    tensors: Mapping[str, LogicalTensor]
    aliases: Mapping[str, str]
    states: frozenset[str]
    beside: frozenset[str]  # values of the module that are no tensors, and tensors without elements
    others: frozenset[str]  # keys of client_state, numbers, blobs: left out elsewhere
    origin: ChangeOrigin
    guesses: str = ""  # the source's format, if it guesses which tensors are buffers

    def named(self, text: str) -> tuple[list[str], list[str], list[str]]:
        """Tensors, second names and values that a name or glob matches.

        They are in the model's order.
        """
        tensors = [p for p in self.tensors if text == p or is_called(text, whole_name(p))]
        aliases = [p for p in self.aliases if is_called(text, p)]
        return tensors, aliases, sorted(p for p in self.beside if is_called(text, p))

    def owners(self, text: str) -> list[str]:
        """Tensors that a name or glob matches, also by second names."""
        tensors, aliases, _ = self.named(text)
        return list(dict.fromkeys([*tensors, *(self.aliases[alias] for alias in aliases)]))


def changes_of(source: Side, given: Given, own: nodes.Model | None) -> Changes:
    """The requested changes of the source's parameters.

    own: the target's model, if it differs from the source's. It contains the new parameters, and the members of each group.

    Raises: UcplError E300, E327, E328, E329.
    """
    known = _known(source, ChangeOrigin(given.said_by))
    drop, tensors, said = _dropped(known, given.drop)
    _demand_whole_ties(known, tensors, drop)
    frozen_, of_frozen = _frozen(known, given.freeze, tensors)
    asked = _trained(known, given.train, (tensors, frozen_), _fresh(known, own))
    left = {path for path, t in known.tensors.items() if t.kind == "parameter"} - tensors - frozen_
    groups = dealt(source, left, asked, known.origin) if own is None else _groups_in_model(known, own, asked)
    if not left and not asked and any(t.kind == "parameter" for t in known.tensors.values()):
        _demand_some(known, tensors, given)
    trained = frozenset(asked)
    return Changes(
        drop=drop,
        tensors=tensors,
        values=known.beside & set(drop),
        frozen=frozen_,
        trained=trained,
        dealt=groups,
        said=(*said, *of_frozen, *groups.said),
        origin=known.origin,
    )


def _known(source: Side, origin: ChangeOrigin) -> _Known:
    layout, opened = source.layout, source.checkpoint
    beside: set[str] = set()
    others = {blob.name for blob in source.placement.blobs}
    if opened is not None:
        from ucpl.formats.leaving import other_states

        for name in (EXTRA, EMPTY):
            held = opened.state.blobs.get(name)
            beside |= {key for key in held if isinstance(key, str)} if isinstance(held, dict) else set()
        others |= {file.name for file in opened.container.files} if opened.container is not None else set()
        others |= {one.name for one in opened.not_read if one.is_optimizer}
        others |= {key for key in opened.state.carried if isinstance(key, str)} | opened.state.scalars.keys()
        others |= other_states(opened.state).keys()
    states = {p.state for p in source.placement.parts} | {s.name for s in layout.states}
    return _Known(
        layout.tensors,
        layout.aliases,
        frozenset(states),
        frozenset(beside - layout.tensors.keys()),
        frozenset(others),
        origin,
        opened.format if opened is not None and format_named(opened.format).guesses_buffers else "",
    )


# ---- dropped names -----------------------------------------------------------------------------------------------------


def _dropped(known: _Known, texts: Sequence[str]) -> tuple[tuple[str, ...], frozenset[str], list[str]]:
    """(names, the tensors among them, notes).

    Globs are replaced by their matches. Names of no tensor are unchanged.
    """
    names: dict[str, None] = {}
    tensors: dict[str, None] = {}
    said = []
    for text in texts:
        mine, aliases, values = known.named(text)
        if not (mine or aliases or values) and ("*" in text or text not in known.states | known.others):
            others = [*known.tensors, *known.aliases, *sorted(known.beside)]
            _refuse_unknown(known, ("drop", text), for_dropped(text, sorted(known.states), others))
        said += [f"left out by --drop {text}: {what}" for what in _dropped_texts(known, mine, aliases, values)]
        tensors |= dict.fromkeys(mine)
        names |= dict.fromkeys([*mine, *aliases, *values] or [text])
    return tuple(names), frozenset(tensors), said


def _dropped_texts(known: _Known, tensors: list[str], aliases: list[str], values: list[str]) -> list[str]:
    out = []
    if tensors:
        out.append(f"{counted(known.tensors, tensors)} ({_listed(tensors)})")
    left = [alias for alias in aliases if known.aliases[alias] not in tensors]
    gone = [alias for alias in aliases if known.aliases[alias] in tensors]
    out += [f"the second name {alias}; its numbers stay, as {known.aliases[alias]}" for alias in left]
    out += [f"{alias}, a second name of {known.aliases[alias]}" for alias in gone]
    if values:
        out.append(f"{_listed(values)}, without elements of a tensor")
    return out


def counted(tensors: Mapping[str, LogicalTensor], names: Sequence[str]) -> str:
    """`3 tensors, 1,234 elements`."""
    n, elements = len(names), sum(tensors[name].numel for name in names)
    return f"{n:,} tensor{'s' * (n != 1)}, {elements:,} element{'s' * (elements != 1)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _demand_whole_ties(known: _Known, tensors: frozenset[str], drop: Iterable[str]) -> None:
    """Check that dropped tensors lose all names. Raises: UcplError E328."""
    gone = set(drop)
    for alias, owner in known.aliases.items():
        if owner in tensors and alias not in gone:
            fail(
                "E328",
                f"{owner} is dropped, and {alias} is a second name of it that is not",
                known.origin.place("drop", owner),
                Label("<source>", f"one tensor with {owner}", where=alias),
                remedy=f"add {(other := known.origin.other('drop', owner, alias))} to leave out both names; {other} alone"
                f" keeps the tensor as {owner}",
            )


def _demand_some(known: _Known, tensors: frozenset[str], given: Given) -> None:
    """Raises: UcplError E328 if no tensor is left."""
    if len(tensors) == len(known.tensors):
        fail(
            "E328",
            "every tensor is dropped",
            Label("<command line>", where=" ".join(f"--drop {text}" for text in given.drop)),
        )


# ---- frozen and trained parameters -------------------------------------------------------------------------------------


def _frozen(known: _Known, texts: Sequence[str], dropped: frozenset[str]) -> tuple[frozenset[str], list[str]]:
    found: set[str] = set()
    said = []
    for text in texts:
        mine = _of_kind(known, ("freeze", text), "parameter", (text, dropped))
        found |= set(mine)
        if known.tensors[mine[0]].kind == "buffer":
            said.append(f"a frozen parameter by --freeze {text}: {_listed(mine)}, which was taken for a buffer")
            continue
        kept = sorted(s for s in known.states if s != "weight")
        states = f"; {'its' if len(mine) == 1 else 'their'} optimizer states are left out ({', '.join(kept)})"
        said.append(f"frozen by --freeze {text}: {counted(known.tensors, mine)} ({_listed(mine)}){states * bool(kept)}")
    return frozenset(found), said


def _trained(
    known: _Known, texts: Sequence[str], others: tuple[frozenset[str], frozenset[str]], fresh: Sequence[str]
) -> dict[str, tuple[str, str | None]]:
    """Newly trained tensors, each with its option's text and group.

    The group is None if the text names none.
    """
    dropped, frozen_ = others
    out: dict[str, tuple[str, str | None]] = {}
    for text in texts:
        name, equals, group = text.rpartition("=")
        if not equals or (text in known.tensors or text in known.aliases):
            name, group = text, ""
        name = name.strip()
        new = [path for path in fresh if is_called(name, path)]
        mine = [] if new and not known.owners(name) else _of_kind(known, ("train", text), "frozen", (name, dropped))
        for path in (*mine, *new):
            if path in frozen_:
                known.origin.refuse(("train", text), f"{path} is to be frozen and to be trained")
            if path in out and out[path][1] != (group.strip() or None):
                known.origin.refuse(("train", text), f"{path} is to be in two groups")
            out[path] = (text, group.strip() or None)
    return out


def _fresh(known: _Known, own: nodes.Model | None) -> list[str]:
    """Parameters of the target's model that the source lacks."""
    had = set(map(whole_name, known.tensors))
    items = own.items if own is not None else ()
    return [i.path for i in items if isinstance(i, nodes.Tensor) and i.kind == "parameter" and i.path not in had]


def _groups_in_model(known: _Known, own: nodes.Model, asked: Mapping[str, tuple[str, str | None]]) -> Dealt:
    """The groups of the target's model.

    Raises: UcplError E327 if a --train text names a group.
    """
    by_text: dict[str, list[str]] = {}
    new: dict[str, str] = {}
    for path, (text, group) in asked.items():
        if group is not None and (begun := _begun_in(own, path, group)) is not None:
            new[begun[0]] = begun[1]
        elif group is not None:
            behind = f"in {group}" if known.origin.is_of_plan("train", text) else f"={group}"
            known.origin.refuse(
                ("train", text), f"the target has the groups of its model {own.name}", f"leave {behind} out"
            )
        by_text.setdefault(text, []).append(path)
    texts = [f"trained by --train {t}: {_listed(p)}, as {own.name} has it" for t, p in by_text.items()]
    texts += [f"group {name} is new, with the hyper-parameters of {like}" for name, like in new.items()]
    return Dealt(said=tuple(texts), new=new)


def _begun_in(own: nodes.Model, path: str, group: str) -> tuple[str, str] | None:
    """The new group and its source group in a text like `2:0`.

    The new group has the hyper-parameters of the source's group. None: the parameter is not in that group of the model.
    """
    name, colon, like = (part.strip() for part in group.rpartition(":"))
    named = {item.name: item.members or () for item in own.items if isinstance(item, nodes.Group)}
    return (name, like) if colon and path in named.get(name, ()) else None


def _of_kind(known: _Known, said: tuple[str, str], kind: str, of: tuple[str, frozenset[str]]) -> list[str]:
    """Tensors of one kind that a text matches.

    A glob can match tensors of other kinds, but must match one of this kind. The name of a buffer means a parameter if
    the source's format guesses buffers.

    of: the name in the text, and the dropped tensors.

    Raises: UcplError E300, E327.
    """
    text, dropped = of
    named = known.owners(text)
    if not named:
        of_kind = [path for path, tensor in known.tensors.items() if tensor.kind == kind]
        _refuse_unknown(known, said, for_parameter(text, [*known.tensors, *known.aliases], of_kind))
    mine = [path for path in named if known.tensors[path].kind == kind]
    if known.guesses and not mine and "*" not in text:  # the caller knows better
        mine = [path for path in named if known.tensors[path].kind == "buffer"]
    for path in named:
        if path in dropped and ("*" not in text or not set(mine) - dropped):
            known.origin.refuse(said, f"{path} is dropped")
    mine = [path for path in mine if path not in dropped]
    if not mine or ("*" not in text and len(mine) < len(named)):
        other = next(path for path in named if path not in mine)
        known.origin.refuse(said, f"{other} is {_KINDS[known.tensors[other].kind]}")
    return mine


_KINDS = {"parameter": "trained already", "frozen": "frozen already", "buffer": "a buffer, which nothing trains"}


def _refuse_unknown(known: _Known, said: tuple[str, str], remedy: str) -> NoReturn:
    """Raises: UcplError E300."""
    kinds = "tensor or state" if said[0] == "drop" else "parameter"
    what = "it matches no tensor" if "*" in said[1] else f"no {kinds} of that name"
    fail("E300", f"{known.origin.words(*said)}: {what}", known.origin.place(*said), remedy=remedy)


# ---- the model that the target is over ---------------------------------------------------------------------------------


def changed_model(model: nodes.Model, changes: Changes) -> nodes.Model:
    """The model of a target of any model, after the changes.

    Dropped tensors and emptied groups are removed.
    """
    gone = set(changes.drop)
    frozen_, trained = ({whole_name(p) for p in some} for some in (changes.frozen, changes.trained))
    items: list[nodes.ModelItem] = []
    for item in model.items:
        match item:
            case nodes.Tensor(path=path) | nodes.Alias(path=path) if path in gone:
                pass
            case nodes.Alias(owner=owner) if owner in gone:
                pass
            case nodes.Tensor(path=path) if path in frozen_:
                items.append(evolve(item, kind="frozen"))
            case nodes.Tensor(path=path) if path in trained:
                items.append(evolve(item, kind="parameter"))
            case nodes.Group(name=name, members=tuple(members)):
                kept = changes.dealt.members.get(name, tuple(m for m in members if m not in gone))
                items += [evolve(item, members=tuple(dict.fromkeys(map(whole_name, kept))))] if kept else []
            case nodes.State(names=names):
                kept_ = evolve(item, typed=_typed(item, gone | frozen_), without=_without(item, gone | frozen_))
                if item.without and not kept_.without:
                    continue
                items += _state(kept_, tuple(n for n in names if n not in gone), changes.dealt)
            case _:
                items.append(item)
    for name in changes.dealt.new:
        members = tuple(dict.fromkeys(map(whole_name, changes.dealt.members[name])))
        items.append(nodes.Group(name, members=members))
    return evolve(model, items=tuple(items))


def _typed(item: nodes.State, gone: set[str]) -> tuple[nodes.TypedOf, ...]:
    """The types of a state, without those of dropped or frozen tensors."""
    kept = (evolve(t, of=tuple(name for name in t.of if name not in gone)) for t in item.typed)
    return tuple(t for t in kept if t.of)


def _without(item: nodes.State, gone: set[str]) -> tuple[nodes.Without, ...]:
    """Dims that a state lacks, of the tensors that keep it."""
    kept = (evolve(w, of=w.of and tuple(name for name in w.of if name not in gone)) for w in item.without)
    return tuple(w for w in kept if w.of != ())


def _state(item: nodes.State, names: tuple[str, ...], dealt_: Dealt) -> list[nodes.ModelItem]:
    """A state line without dropped names and emptied groups."""
    of = item.groups and tuple(g for g in item.groups if g not in dealt_.emptied)
    of = of and (*of, *(new for new, like in dealt_.new.items() if like in of))
    return [evolve(item, names=names, groups=of)] if names and of != () else []


def demand_acting(changes: Changes, layout: Layout) -> None:
    """Check that a target with its own model has the requested changes.

    Raises: UcplError E327, E328.
    """
    for word, names, kind in (("freeze", changes.frozen, "frozen"), ("train", changes.trained, "parameter")):
        for path in sorted(names):
            tensor = layout.tensors.get(path)
            if tensor is not None and tensor.kind != kind:
                text = f"`{whole_name(path)} : ... is frozen`" if kind == "frozen" else "it without `is frozen`"
                changes.origin.refuse(
                    (word, path),
                    f"it is {_KINDS[tensor.kind]} in {layout.model_name}, the target's model",
                    f"write {text}",
                )
    of, stage = format_named(layout.framework), layout.settings.get("stage")
    is_trained = any(t.kind == "parameter" for t in layout.tensors.values())
    if of.has_engine and not of.is_of_any_ranks and stage and not is_trained and (changes.frozen or changes.tensors):
        fail(
            "E328",
            f"no trained parameter is left, and ZeRO stage {stage} partitions optimizer states",
            Label("<call>", where=layout.call),
            remedy="train one of them, or write the weights: --to 'plain()'",
        )


def demand_left_out(changes: Changes, target: Placement) -> None:
    """Check that a target with its own model stores no dropped tensor.

    Raises: UcplError E327.
    """
    held = {target.tensors[n] for part in target.parts for n in each(part.folded.tensor)} & changes.tensors
    for path in (path for path in target.layout.tensors if path in held):
        changes.origin.refuse(
            ("drop", path),
            f"{target.layout.name}, which is of {target.layout.model_name}, stores it",
            f"write `{whole_name(path)} = none`",
        )


def demand_states_left_out(drop: Iterable[str], origin: ChangeOrigin, target: Placement, source: Placement) -> None:
    """Check that a target stores no dropped state of the source.

    Raises: UcplError E327.
    """
    from ucpl.lint.missing_tensors import stored_states

    held = {part.state for part in source.parts}
    for name in (name for name in stored_states(drop, target) if name in held):
        origin.refuse(
            ("drop", name),
            f"{target.layout.name} stores {name} of each parameter",
            "take it out, since the target needs it; --weights-alone leaves out the optimizer"
            + (f"; `state {name} = none` in a layout of its own stores none" if name != "weight" else ""),
        )
