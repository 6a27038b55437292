"""The account of a source: one fate for each of its items.

Items are tensors, numbers, values and files. Each is moved, derived, dropped by name, or not read. The items are counted in the
source. The fates are counted from the plan and the target's format. Both sums must be equal.
A run whose optimizer cannot be read is refused here, if its target is more than a folder of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail, plural
from ucpl.extents.account import CLIENT_STATE, Account, AccountEntry, Fate, NotRead, entries_of
from ucpl.files.carrying import unlike_callers
from ucpl.files.groups import has_groups_alone
from ucpl.files.scalars import is_counted
from ucpl.files.skipping import ALL, SKIP
from ucpl.formats.info_keys import INFO, is_in, unknown_info
from ucpl.formats.leaving import (
    DESCRIBING,
    EMPTY,
    EXTRA,
    LAYERS,
    OPTIMIZER_VALUES,
    OPTIMIZERS,
    SCALE,
    SCALED,
    TEXTS,
    keeps_all,
    left_values,
)
from ucpl.formats.overlooked import not_read_of
from ucpl.registry import degree_of, format_named

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.graph import Graph
    from ucpl.layout import Layout
    from ucpl.planning.plan import Plan, Recipe
    from ucpl.registry import Format

__all__ = ["account_of", "demand_account", "demand_an_optimizer", "tensors_of", "with_account"]

Item = tuple[Fate, str, str, str]  # fate, kind, name, reason
_TENSORS = (
    "tensor"  # the kinds of the first part of an account begin so: it is made of the graph, the rest of the checkpoint
)
# Values whose keys are values of their own, and the words for their owner.
_BY_KEY = {
    EXTRA: "the module",
    OPTIMIZER_VALUES: "the optimizer",
    SCALE: "the loss scaling",
    INFO: "universal_checkpoint_info",
    "megatron_extra_state": "the module",
    "megatron_optimizer": "the optimizer",
    "sharded_objects": "the ranks' objects",
}
_PLANNED = "--weights-alone converts the weights; --to 'safetensors()' exports them"
_APPLIED = "ucpl plan --from SRC --weights-alone makes a plan for the weights; --to 'safetensors()' exports them"
_CUTS = "no known release of DeepSpeed writes it, and the target describes its own cuts"
_REMADE = ", and makes it of "


# ---- tensors and states -----------------------------------------------------------------------------------------------


def tensors_of(graph: Graph, dropped: tuple[str, ...]) -> Account:
    """The account of every state of every tensor of the source.

    Raises: AssertionError if a state is neither used nor left out by name.
    """
    here = graph.source
    stored = {(here.tensors[t], p.state) for p in here.parts for t in p.tensors}
    used = stored.intersection(graph.used)
    items: list[Item] = []
    counts, moved = (_counts(here.layout, some) for some in (stored, used))
    owners = {name: path for path, family in here.layout.families.items() for name in family.names} if dropped else {}
    for text in dropped:
        what, _, why = text.partition(": ")
        state, _, path = what.partition(" of ")
        place = owners.get(path, path), state
        if place in stored and place not in used:
            items.append(("derived" if _REMADE in why else "dropped", f"{_TENSORS} {state}", path, why))
    kept = tuple(AccountEntry("moved", f"{_TENSORS} {state}", n) for state, n in sorted(moved.items()))
    return Account(counts.total(), (*kept, *entries_of(items))).check_sum()


def _counts(layout: Layout, places: Iterable[tuple[str, str]]) -> Counter[str]:
    """The number of tensors with each state, a family by its members."""
    found: Counter[str] = Counter()
    for path, state in places:
        found[state] += len(layout.members(path))
    return found


# ---- all of it --------------------------------------------------------------------------------------------------------


def with_account(plan: Plan, source: Checkpoint) -> Plan:
    """The plan with the account of this source.

    The entries of tensors come from the plan, all others from the source.
    """
    return evolve(plan, account=account_of(plan, plan.account, source))


def demand_account(plan: Plan, source: Checkpoint) -> Plan:
    """Add the account of the source that the plan is applied to.

    A plan that was made with its source was checked then. A plan of specs alone is checked here.

    Raises: UcplError E467.
    """
    if plan.account is None and ALL not in plan.carry:
        skipped = {name for name, fate in plan.carry.items() if fate in (SKIP, "drop")}
        demand_an_optimizer(source, plan.target.framework, skipped, _APPLIED)
    return with_account(plan, source)


def account_of(plan: Recipe, planned: Account | None, source: Checkpoint) -> Account:
    """The account of a source.

    planned: the account of its tensors; None: the plan is of specs alone.

    Raises: AssertionError if an item has no fate, or two; UcplError E400 if the folder cannot be listed.
    """
    tensors = tuple(e for e in planned.entries if e.kind.startswith(_TENSORS)) if planned is not None else ()
    if planned is None:
        read = {(t.file, t.key) for t in plan.sources}
        tensors = entries_of(
            ("moved" if place in read else "not read", f"{_TENSORS} stored", "/".join(map(str, place)), "" if place in read
             else "the plan's layouts have no such tensor")
            for place, extent in source.extents.items() if extent.numel
        )  # fmt: skip
    not_read = not_read_of(source)
    others = (*_numbers(plan, source), *_values(plan, source), *_callers(plan, source), *_groups(plan, source))
    files = tuple(_files(plan, source, not_read))
    items = sum(e.count for e in tensors) + _items_of(source, not_read)
    return Account(items, (*tensors, *entries_of(others), *entries_of(files))).check_sum()


def _items_of(source: Checkpoint, not_read: tuple[NotRead, ...]) -> int:
    """Items other than tensors, counted in the source alone."""
    known, container = source.state, source.container
    count = sum(map(len, known.scalars.values())) + len(known.groups) + len(known.carried)
    count += sum(len(mine) for mine in unlike_callers(source).values())
    count += sum(1 for _ in _blobs(source))
    files = {*source.files, *_texts(source)}
    if container is not None:
        files |= {file.name for file in container.files} | {*container.skipped}
    values = [one for one in not_read if one.kind != "file"]
    return count + len(files) + len(values) + len({one.name for one in not_read if one.kind == "file"} - files)


def _is_dropped(plan: Recipe, name: object) -> bool:
    return isinstance(name, str) and plan.carry.get(name) == "drop"


def _numbers(plan: Recipe, source: Checkpoint) -> Iterator[Item]:
    """Numbers that the optimizer keeps for each parameter, as `step`."""
    said = {text.partition(": ")[0]: text.partition(": ")[2] for text in plan.dropped}
    gone = frozenset(plan.gone.get("numbers", ()))
    for state, values in source.state.scalars.items():
        for name in values:
            if _is_dropped(plan, state):
                yield "dropped", state, name, "dropped by name"
            elif (why := said.get(f"{state} of {name}")) is not None:
                yield "dropped", state, name, why
            elif name in gone:
                yield "dropped", state, name, "its tensor is dropped or frozen by name"
            else:
                yield "moved", state, name, ""


def _values(plan: Recipe, source: Checkpoint) -> Iterator[Item]:
    """Values that resume a run, and values that describe its files."""
    left = left_values(source, plan.target)
    gone, untrained = frozenset(plan.gone.get("names", ())), plan.gone.get("numbers", ())
    target = format_named(plan.target.framework)
    keeps_layers = keeps_all(plan.target.framework) or target.has_layer_files(plan.target_shelves.files)
    has_scaler = target.has_scaler(plan.target.settings)
    described = target.cuts_described(source, plan.target)
    cuts = {"/".join(map(str, path)): path for path in _unknown_cuts(source)}
    for blob, key in _blobs(source):
        name = blob if key is None else key if blob == EMPTY else f"{key} of {_BY_KEY.get(blob, 'the module')}"
        if blob in DESCRIBING and key is None:
            yield "derived", "value", name, ""
        elif blob == INFO and key in cuts:
            is_kept = is_in(cuts[key], described)
            yield "moved" if is_kept else "dropped", "value", name, "" if is_kept else _CUTS
        elif key in gone:
            yield "dropped", "value", name, "dropped by name"
        elif blob == OPTIMIZER_VALUES and key in untrained:
            yield "dropped", "value", name, "its parameter is frozen by name"
        elif blob in left:
            yield "dropped", "value", name, left[blob]
        elif blob == SCALE and has_scaler and key in SCALED:
            yield "derived", "value", name, ""
        elif blob == SCALE and has_scaler:
            yield "dropped", "value", name, "ZeRO's object of loss scaling has no place for it"
        elif blob == LAYERS and not keeps_layers:
            yield "dropped", "value", name, "the target has no files of layers"
        else:
            yield "moved", "value", name, ""


def _blobs(source: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """Names of values.

    Each key of a module's state dict is a value of its own.
    """
    yield from ((INFO, "/".join(map(str, path))) for path in _unknown_cuts(source))
    for name, held in source.state.blobs.items():
        if name == INFO:
            yield name, None
        elif name in _BY_KEY and isinstance(held, dict) and held:
            yield from ((name, str(key)) for key in held)
        elif name == LAYERS and isinstance(held, dict):
            yield name, None
            apart = ((stem, facts[kind]) for stem, facts in held.items() for kind in ("extra", "empty"))
            yield from ((name, f"{stem}/{key}") for stem, some in apart for key in some)
        elif name == EMPTY and isinstance(held, dict):
            yield from ((name, str(key)) for key in held)
        elif name != TEXTS:
            yield name, None


def _unknown_cuts(source: Checkpoint) -> Iterator[tuple[object, ...]]:
    """Keys of universal_checkpoint_info that no known release of DeepSpeed writes."""
    held = source.state.blobs.get(INFO)
    return unknown_info(held, {*(t.name for t in source.state.tensors), *source.state.aliases})


def _callers(plan: Recipe, source: Checkpoint) -> Iterator[Item]:
    """The caller's own values.

    They are those of rank 0, and those of other ranks that differ from them.
    """
    target = format_named(plan.target.framework)
    has_tensors_alone = target.has_tensors_alone(plan.target.settings)
    has_callers = target.has_client_state and not has_tensors_alone
    alone = f"{target.title} stores " + ("tensors alone" if has_tensors_alone else "nothing of a caller")
    for key in source.state.carried:
        if _is_dropped(plan, key):
            yield "dropped", CLIENT_STATE, str(key), "dropped by name"
        elif not has_callers:
            yield "dropped", CLIENT_STATE, str(key), alone
        else:
            yield "moved", CLIENT_STATE, str(key), ""
    taken = _ranks_taken(plan, source)
    for rank, keys in unlike_callers(source).items():
        for key in keys:
            name = f"{key} of rank {rank}"
            if _is_dropped(plan, key):
                yield "dropped", CLIENT_STATE, name, "dropped by name"
            elif rank in taken:
                yield "moved", CLIENT_STATE, name, ""
            else:
                why = "the target's ranks take the value of rank 0" if has_callers else alone
                yield "dropped", CLIENT_STATE, name, why


def _ranks_taken(plan: Recipe, source: Checkpoint) -> frozenset[int]:
    """Ranks of the source whose client_state goes into a target's files."""
    settings = plan.target.settings
    files = format_named(plan.target.framework).files_of_callers(settings)
    if not files:
        return frozenset((0,))
    return source.state.parallel.carried_by_rank.taken(degree_of(settings, "pp"), degree_of(settings, "tp"), files)


def _groups(plan: Recipe, source: Checkpoint) -> Iterator[Item]:
    target = format_named(plan.target.framework)
    is_trained = target.has_groups_of_weights or any(t.states for t in plan.target.tensors)
    is_trained |= target.has_groups_alone and has_groups_alone(source)
    said = {text.partition(": ")[0]: text.partition(": ")[2] for text in plan.dropped}
    for group in source.state.groups:
        if target.has_tensors_alone(plan.target.settings):
            yield "dropped", "group", group.name, f"{target.title} stores no hyper-parameters"
        elif group.name in plan.gone.get("groups", ()):
            yield "dropped", "group", group.name, "no parameter is left in it"
        elif not is_trained:
            yield "dropped", "group", group.name, "the target has weights alone"
        elif (why := said.get(f"group of {group.name}")) is not None:
            yield "dropped", "group", group.name, why
        elif not group.members and plan.target.framework.startswith("megatron"):
            yield (
                "dropped",
                "group",
                group.name,
                "it trains no parameter, and Megatron deals parameters to groups itself",
            )
        else:
            yield "moved", "group", group.name, ""


# ---- files ------------------------------------------------------------------------------------------------------------


def _texts(source: Checkpoint) -> tuple[str, ...]:
    """Files of a model's texts, by their paths in the folder."""
    held = source.state.blobs.get(TEXTS)
    within = {name.rpartition("/")[2]: name for name in source.files}
    return tuple(within.get(str(name), str(name)) for name in held) if isinstance(held, dict) else ()


def _files(plan: Recipe, source: Checkpoint, not_read: tuple[NotRead, ...]) -> Iterator[Item]:
    """Files of the folder: read, copied, left out, or not read."""
    seen: set[str] = set()

    def item(fate: Fate, name: str, why: str = "") -> Iterator[Item]:
        if name not in seen:
            seen.add(name)
            yield fate, "file", name, why

    left = left_values(source, plan.target).get(TEXTS)
    some = format_named(plan.target.framework).texts_written(source, plan.target_shelves).left
    for name in _texts(source):
        why = left or some.get(name.rpartition("/")[2], "")
        yield from item("dropped" if why else "moved", name, why)
    if source.container is not None:
        from ucpl.formats.folders.fates import sorted_into  # most sources have no such folder

        dropped = {name for name, fate in plan.carry.items() if fate == "drop"}
        made = sorted_into(source.container.without(dropped), plan.target, source)
        for name in (file.name for file in source.container.files):
            if name in dropped:
                yield from item("dropped", name, "dropped by name")
            elif name in made.left:
                yield from item("dropped", name, made.left[name])
            else:
                yield from item("moved", name)
        for name, why in source.container.skipped.items():
            yield from item("not read", name, why)
    for name in source.files:
        yield from item("moved", name)
    for one in not_read:
        if one.kind == "file":
            yield from item("not read", one.name, one.why)
        else:
            yield "not read", one.kind, one.name, one.why


# ---- an optimizer that nobody reads ---------------------------------------------------------------------------------


def demand_an_optimizer(source: Checkpoint, framework: str, dropped: Collection[str], remedy: str = _PLANNED) -> None:
    """Check that a run loses its optimizer only on request.

    framework: the target's. A target of tensors alone is an export of weights; its account names all omissions.
    dropped: states that are not read, because the caller drops them by name.

    Raises: UcplError E448, E467.
    """
    if format_named(framework).has_model_files:
        return
    _check_other_states(source, framework)
    _check_one_optimizer(source, framework)
    if source.missing_files:
        first, *others = source.missing_files
        more = f" (and {len(others)} more)" if others else ""
        fail(
            "E467",
            f"{first} is missing{more}: no shard of the run's ZeRO optimizer is there",
            Label(str(source.root / first), f"not there, to {others[-1]}" if others else "not there"),
            Label(str(source.root / source.files[0]), "states the optimizer's parameters", where="param_shapes"),
        )
    if source.state.scalars or any(t.states for t in source.state.tensors):
        return
    found = [one for one in not_read_of(source) if one.is_optimizer and one.name not in dropped]
    if found:
        first_one, more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        fail(
            "E467",
            f"the folder has an optimizer, {first_one.name}{more}, and nothing of it is read: {first_one.why}",
            Label(str(source.top / first_one.name if first_one.kind == "file" else source.top), where=first_one.name),
            remedy=remedy,
        )


def _check_one_optimizer(source: Checkpoint, framework: str) -> None:
    """Check that a target of an engine gets optimizers of one kind.

    Raises: UcplError E448.
    """
    words = source.state.blobs.get(OPTIMIZERS)
    target, groups = format_named(framework), source.state.groups
    if not isinstance(words, list) or not target.has_engine or len(words) != len(groups):
        return
    states = {t.name: t.states for t in source.state.tensors}
    kinds: dict[frozenset[str], str] = {}
    for word, group in zip(words, groups, strict=True):
        if group.members:
            kinds.setdefault(frozenset(state for name in group.members for state in states.get(name, ())), str(word))
    if len(kinds) > 1:
        shown = " and ".join(f"`{word}` ({', '.join(sorted(kept)) or 'no states'})" for kept, word in kinds.items())
        fail(
            "E448",
            f"the run has optimizers of {len(kinds)} kinds, {shown}: {target.title} {_have(target)} one optimizer",
            Label(str(source.top), where="param_groups"),
            remedy="plain(), dcp() and torch_file() keep all; --weights-alone converts the weights",
        )


def _have(target: Format) -> str:
    return "has" if target.title.startswith("a ") else "have"


def _check_other_states(source: Checkpoint, framework: str) -> None:
    """Raises: UcplError E448 for states that a target cannot hold."""
    held = source.state.blobs.get(OPTIMIZER_VALUES)
    target = format_named(framework)
    if not isinstance(held, dict) or target.kept_values is None or OPTIMIZER_VALUES in target.kept_values:
        return
    states = dict.fromkeys(state for mine in held.values() for state in mine)
    name, mine = next(iter(held.items()))
    odd = next((state for state, value in mine.items() if not is_counted(value)), next(iter(mine)))
    fail(
        "E448",
        f"the optimizer keeps `{odd}` of `{name}`, which is neither one value per element nor a number:"
        f" {target.title} {_have(target)} no place for it",
        Label(str(source.top), f"of {plural(len(held), 'parameter')}: {', '.join(states)}", where=name),
        remedy=f"{' '.join(f'--drop {state}' for state in states)} leaves these states out; --weights-alone converts the"
        " weights; plain(), dcp() and torch_file() keep all states",
    )
