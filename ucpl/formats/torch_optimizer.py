"""State dicts of torch optimizers: names for their numbers, and their states.

torch numbers the parameters of an optimizer without names. The evidence, in this order: the caller's order, names in the
dict, `param_names` of its groups (torch 2.6 and later), then shapes of states in the order of the model's state dict. If
more than one assignment remains, the optimizer is refused (E446).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from itertools import permutations
from math import prod
from pathlib import Path
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, UcplError, fail, plural
from ucpl.extents import Counted, Extent, Key, ParameterGroup, PickledCall, Scalar, Step, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.carrying import Storages, lifted
from ucpl.files.checkpoint import Checkpoint, Order
from ucpl.files.scalars import is_counted, number_of
from ucpl.files.skipping import skips
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import unknown_keys
from ucpl.files.values import Value
from ucpl.formats.leaving import EMPTY, OPTIMIZER_VALUES, OPTIMIZERS, empty_tensors
from ucpl.formats.matching import Shape, Slots, Unclear, check_order, match, match_consecutive
from ucpl.formats.torch_dicts import NamedTensors, joined, named_tensors
from ucpl.records import frozen

__all__ = [
    "EXTRA",
    "PARAM_NAMES",
    "REMEDY",
    "STATED",
    "STATISTICS",
    "are_determined",
    "NamedOptimizer",
    "OptimizerFacts",
    "candidates_of",
    "fits",
    "is_conventional",
    "named_optimizers",
    "noted_empty",
    "optimizers_of",
    "put_numbers",
    "read_facts",
    "state_dict_of",
]

EXTRA = OPTIMIZER_VALUES
_STEP = "step"
PARAM_NAMES = "param_names"  # of torch 2.6 and later
REMEDY = (
    "--order names.txt gives the names in the optimizer's order. The training script writes it: names = {p: n for n, p in"
    " model.named_parameters()}; print(*(names[p] for g in optimizer.param_groups for p in g['params']), sep='\\n',"
    " file=open('names.txt', 'w')). --order model: the groups follow each other in the model's order. --weights-alone leaves"
    " the optimizer out"
)
STATED = "ucpl_names"  # a key of a state dict that a conversion wrote: names by group, if shapes do not determine them
_PARAMS = "params"
_CONVENTIONAL = ("weight", "bias")  # last steps of names of parameters in modules of torch
STATISTICS = ("running_mean", "running_var")  # buffers of torch's norms, next to this counter
_COUNTER = "num_batches_tracked"


@frozen(eq=False)
class NamedOptimizer:
    """An optimizer whose numbers have names.

    `groups`: the names of each group, in its order. `states`: those of each name that has any. `evidence`: for notes.
    """

    value: Value
    groups: tuple[tuple[str, ...], ...]
    states: dict[str, Value]
    evidence: str


@frozen(eq=False)
class _Group:
    """A group of an optimizer before its numbers have names."""

    optimizer: int
    number: int
    value: Value
    params: tuple[Step, ...]
    shapes: tuple[frozenset[Shape] | None, ...]  # that its states allow; None: any

    stated: Value | None = None  # the names that a conversion wrote
    elements: int = 0  # of a state over all parameters; 0: each parameter has its own

    @property
    def where(self) -> str:
        return f"param_groups/{self.number}"


def is_conventional(name: str, shape: Shape) -> bool:
    """Test for a name and shape of parameters in torch's own modules."""
    last = name.rpartition(".")[2]
    return last in _CONVENTIONAL and (last != "bias" or len(shape) < 2)


def named_optimizers(
    optimizers: Sequence[Value], model: NamedTensors, order: Order | None = None
) -> tuple[NamedOptimizer, ...]:
    """Names for the numbers of all optimizers of one model.

    Raises: UcplError E446 if there is no assignment, or more than one;
    E466 if the caller's order does not fit.
    """
    candidates = candidates_of(model)
    groups = [group for n, one in enumerate(optimizers) for group in _groups(n, one, candidates)]
    names, how = _names(groups, model, candidates, order)
    out = []
    for n, one in enumerate(optimizers):
        mine = [(group, said) for group, said in zip(groups, names, strict=True) if group.optimizer == n]
        states = {}
        for group, said in mine:
            for step, name in zip(group.params, said, strict=True):
                held = one.at("state").find(step)
                if held is not None and held.mapping():
                    states[name] = held
        out.append(NamedOptimizer(one, tuple(tuple(said) for _, said in mine), states, how))
    return tuple(out)


def fits(optimizers: Sequence[Value], model: NamedTensors) -> bool:
    """Test whether some assignment of numbers to parameters fits."""
    candidates = candidates_of(model)
    groups = [group for n, one in enumerate(optimizers) for group in _groups(n, one, candidates)]
    names = [name for group in groups if (stated := _names_in(group)) is not None for name in stated]
    if names:
        return None not in model.find_all(names)
    made = match([*candidates.items()], [_slots(group) for group in groups])
    return not isinstance(made, Unclear) or made.is_several


def trains_all(optimizer: Value, models: Mapping[Key, NamedTensors]) -> bool:
    """Test whether an optimizer has parameters of each model.

    There must be one assignment of its numbers, to the tensors of all models.
    """
    try:
        [made] = named_optimizers([optimizer], joined(models))
    except UcplError:
        return False
    names = [name for group in made.groups for name in group]
    return all(any(name in joined({place: one}).tensors for name in names) for place, one in models.items())


def candidates_of(model: NamedTensors) -> dict[str, Shape]:
    """Tensors that an optimizer may have.

    Second names, integers and statistics of norms are excluded.
    """
    out = {}
    for name, one in model.tensors.items():
        lead, _, last = name.rpartition(".")
        is_statistic = last in STATISTICS and f"{lead}.{_COUNTER}".lstrip(".") in model.tensors
        if name not in model.aliases and one.storage.dtype.startswith(("f", "bf", "c")) and not is_statistic:
            out[name] = one.shape
    return out


def _groups(number: int, optimizer: Value, candidates: Mapping[str, Shape]) -> Iterator[_Group]:
    known = set(candidates.values())
    states, stated = optimizer.at("state"), optimizer.find(STATED)
    for g, group in enumerate(optimizer.at("param_groups").items()):
        params: list[Step] = []
        shapes: list[frozenset[Shape] | None] = []
        for one in group.at(_PARAMS).items():
            if not isinstance(one.held, int | str) or isinstance(one.held, bool):
                one.wrong("a number or a name of a parameter")
            params.append(one.held)
            held = states.find(one.held)
            shapes.append(
                _factored(held.held, known) or _allowed(_shapes_of(held.held), known) if held is not None else None
            )
        said = stated.find(g) if stated is not None else None
        elements = _elements(states, params, candidates)
        yield _Group(number, g, group, tuple(params), tuple(shapes), said, elements)


def _elements(states: Value, params: Sequence[Step], candidates: Mapping[str, Shape]) -> int:
    """The elements of one state over all parameters, or 0.

    torch keeps it with the first number.
    """
    held = [one for step in params if (one := states.find(step)) is not None and one.mapping()]
    if len(held) != 1 or len(params) < 2:
        return 0
    shapes = {shape for shape in _shapes_in(held[0].held) if shape}
    (size,) = next(iter(shapes)) if len(shapes) == 1 and len(min(shapes)) == 1 else (0,)
    return size if size > max((prod(shape) for shape in candidates.values()), default=0) else 0


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _shapes_of(held: object) -> list[Shape]:
    """Shapes of one parameter's states.

    Those in lists, as SOAP's matrices, count if no others have dims.
    """
    beside = [one.shape for one in held.values() if isinstance(one, TensorRef)] if isinstance(held, dict) else []
    return beside if any(beside) else [*_shapes_in(held)]


def _shapes_in(held: object, depth: int = 4) -> Iterator[Shape]:
    """Shapes of the tensors of one parameter's states."""
    if isinstance(held, TensorRef):
        yield held.shape
    elif isinstance(held, dict) and depth:
        for one in held.values():
            yield from _shapes_in(one, depth - 1)
    elif isinstance(held, list | tuple) and depth:
        for one in held:
            yield from _shapes_in(one, depth - 1)
    elif isinstance(held, PickledCall):
        yield from _stated(held)


def _stated(held: PickledCall) -> Iterator[Shape]:
    """The shape in the arguments of a tensor class's object."""
    todo: list[object] = [*held.args]
    for one in todo:
        if isinstance(one, tuple) and one and all(type(n) is int for n in one):
            yield tuple(one)
            return
        if isinstance(one, tuple | list) and len(todo) < 64:
            todo.extend(one)


def _factored(held: object, known: set[Shape]) -> frozenset[Shape]:
    """The shapes of a parameter with means over rows and columns.

    Adafactor of transformers, fairseq and timm keeps no state of a matrix's own shape: `exp_avg_sq_row` and `exp_avg_sq_col`
    lack a dim each, and are alike for a square matrix.
    """
    if not isinstance(held, dict):
        return frozenset()
    tensors = {str(name): one.shape for name, one in held.items() if isinstance(one, TensorRef)}
    pairs = [
        (one, tensors[name[:-3] + "col"])
        for name, one in tensors.items()
        if name.endswith("row") and name[:-3] + "col" in tensors
    ]
    return frozenset(
        shape
        for shape in known
        for rows, columns in pairs
        for d, e in permutations(range(len(shape)), 2)
        if rows == (*shape[:d], *shape[d + 1 :]) and columns == (*shape[:e], *shape[e + 1 :])
    )


def _allowed(found: list[Shape], known: set[Shape]) -> frozenset[Shape] | None:
    """The shapes that a parameter with these states can have; None: any."""
    shapes = {shape for shape in found if shape}
    if not shapes:
        return frozenset({()}) if () in known and found else None
    for test in (_all_follow, _is_one, _is_flat):
        if fitting := frozenset(shape for shape in known if test(shape, shapes)):
            return fitting
    return None


def _all_follow(shape: Shape, shapes: set[Shape]) -> bool:
    """Test for states of this shape, some of them without a dim."""
    reduced = {d for d in shapes if d != shape and _is_reduced(d, shape)}
    return shapes - reduced <= {shape} and (shape in shapes or len(reduced) > 1)


def _is_reduced(one: Shape, shape: Shape) -> bool:
    summed = len(one) == len(shape) and all(a in (1, b) for a, b in zip(one, shape, strict=True))
    return summed or any(one == (*shape[:d], *shape[d + 1 :]) for d in range(len(shape)))


def _is_one(shape: Shape, shapes: set[Shape]) -> bool:
    return shape in shapes


def _is_flat(shape: Shape, shapes: set[Shape]) -> bool:
    return (prod(shape),) in shapes


# ---- names -----------------------------------------------------------------------------------------------------------

Names = list[list[str]]  # of each group


def _names(
    groups: list[_Group], model: NamedTensors, candidates: Mapping[str, Shape], order: Order | None
) -> tuple[Names, str]:
    if order is not None:
        return _in_order(groups, model, candidates, order.take()), order.origin
    if (stated := _stated_names(groups, model)) is not None:
        return stated
    listed = [*candidates.items()]
    if len(groups) == 1 and (elements := groups[0].elements):
        made = _of_elements(listed, groups[0], elements)
        if not isinstance(made, Unclear):
            return made, "the elements of the optimizer's state, in the order of the model's state dict"
        _reject(made, groups, candidates)
    first = match(listed, [_slots(group) for group in groups])
    made = match(listed, [_slots(group, is_conventional) for group in groups]) if isinstance(first, Unclear) else first
    if not isinstance(made, Unclear):
        return made, "shapes of the optimizer's states, in the order of the model's state dict"
    assert isinstance(first, Unclear)
    _reject(first, groups, candidates)


def _of_elements(listed: list[tuple[str, Shape]], group: _Group, elements: int) -> Names | Unclear:
    """Names by the elements of one state over all parameters (LBFGS)."""
    many = len(listed) + 1
    found: Names | Unclear = Unclear(False)
    tests: tuple[Callable[[str, Shape], bool], ...] = (lambda _, shape: True, is_conventional)
    for test in tests:
        slots = Slots(elements * many + len(group.params), lambda name, shape, at, test=test: test(name, shape))  # type: ignore[misc]
        found = match(listed, [slots], lambda shape: prod(shape) * many + 1)
        if not isinstance(found, Unclear):
            return found
    return found


def _slots(group: _Group, unknown: Callable[[str, Shape], bool] = lambda _, shape: True) -> Slots:
    def fits(name: str, shape: Shape, at: int) -> bool:
        known = group.shapes[at]
        return unknown(name, shape) if known is None else shape in known

    return Slots(len(group.params), fits)


def _stated_names(groups: list[_Group], model: NamedTensors) -> tuple[Names, str] | None:
    """Names in the dict itself, or torch's `param_names`."""
    out: Names = []
    how = "names in the optimizer's groups"
    for group in groups:
        names = _names_in(group)
        if names is None:
            return None
        if names != group.params:
            how = f"{PARAM_NAMES} of the optimizer's groups"
        found = model.find_all(names)
        if None in found:
            lacking = names[found.index(None)]
            fail(
                "E446",
                f"{group.value.file}: the optimizer has the parameter `{lacking}`, and the model has no such tensor",
                Label(str(group.value.path), where=f"{group.where}/{PARAM_NAMES}"),
                remedy="--weights-alone converts the model without its optimizer",
            )
        out.append([name for name in found if name is not None])
    return out, how


def _names_in(group: _Group) -> tuple[str, ...] | None:
    """The names that a group has: its parameters', or torch's `param_names`."""
    if all(isinstance(name, str) for name in group.params):
        return tuple(map(str, group.params))
    for stated in (group.stated, group.value.find(PARAM_NAMES)):
        if stated is not None and isinstance(stated.held, list) and len(stated.held) == len(group.params):
            return stated.texts()
    return None


def _in_order(groups: list[_Group], model: NamedTensors, candidates: Mapping[str, Shape], order: Order) -> Names:
    """Names by the caller's order, group after group."""
    rooms = [len(group.params) for group in groups]
    if not order.names:
        made = match_consecutive([*candidates.items()], [_slots(group) for group in groups])
        if isinstance(made, Unclear):
            _reject(made, groups, candidates)
        return made
    whose = Label(str(groups[0].value.path), where="param_groups") if groups else Label("<optimizer>")
    names = order.at(0) or ()
    owners = check_order(order, names, model.find_all(names), "tensor of the model", whose)
    if len(owners) != sum(rooms):
        fail("E466", f"{order.origin} has {plural(len(owners), 'name')}, and the optimizer {sum(rooms)} numbers", whose)
    rest = iter(owners)
    out = [[next(rest) for _ in range(room)] for room in rooms]
    for group, mine in zip(groups, out, strict=True):
        for at, (name, shape) in enumerate(zip(mine, group.shapes, strict=True)):
            if shape is not None and model.tensors[name].shape not in shape:
                fail(
                    "E466",
                    f"{order.origin} has {name} of shape {list(model.tensors[name].shape)} as number {at} of group"
                    f" {group.number}, whose states have the shape {list(min(shape))}",
                    Label(str(group.value.path), where=group.where),
                )
    return out


def _reject(unclear: Unclear, groups: list[_Group], candidates: Mapping[str, Shape]) -> NoReturn:
    first = groups[0].value
    rooms = [len(group.params) for group in groups]
    label = Label(str(first.path), f"groups of {rooms} parameters", where="param_groups")
    if not unclear.is_several:
        count = sum(rooms)
        what = f"{first.file}: the optimizer numbers {plural(count, 'parameter')}, and the model has"
        if count > len(candidates):
            fail(
                "E446",
                f"{what} {plural(len(candidates), 'tensor')} that can be trained",
                label,
                remedy="the optimizer is of another model, or the state dict lacks some of its parameters: --weights-alone"
                " leaves the optimizer out",
            )
        fail(
            "E446",
            f"{what} no {plural(count, 'tensor')} with the shapes of their states in this order",
            label,
            Label(str(first.path), f"{len(candidates)} that can be trained", where="the model"),
            remedy=REMEDY,
        )
    if not unclear.places:
        fail(
            "E446",
            f"{first.file}: the optimizer's numbers fit the model's parameters in several ways",
            label,
            remedy=REMEDY,
            about=unclear,
        )
    may = [f"number {at} of group {g}" if g >= 0 else "no number" for g, at in unclear.places]
    alike = [name for name, shape in candidates.items() if shape == candidates[unclear.name]]
    fail(
        "E446",
        f"{first.file}: the optimizer numbers its parameters, and several assignments fit: `{unclear.name}` may have"
        f" {', or '.join(may)}",
        label,
        Label(str(first.path), f"of the same shape: {', '.join(alike[:6])}{', ...' if len(alike) > 6 else ''}"),
        remedy=REMEDY,
        about=unclear,
    )


# ---- states ----------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class OptimizerFacts:
    """The states of optimizers, sorted.

    `payload`: one value per element, by `(*lead, name, state)`. `scalars`: numbers. `extra`: all other states by
    parameter, with tensors as they are carried. `read`: places in the file of the tensors of payload and numbers.
    """

    payload: dict[Key, Extent] = field(factory=dict)
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    states: dict[str, tuple[str, ...]] = field(factory=dict)
    groups: tuple[ParameterGroup, ...] = ()
    extra: dict[str, dict[str, object]] = field(factory=dict)
    read: set[Key] = field(factory=set)
    not_read: list[NotRead] = field(factory=list)  # keys that are neither states of a parameter nor groups
    empty: dict[str, dict[str, str]] = field(factory=dict)  # dtypes of states without elements, by parameter


def read_facts(
    part: TorchFile, optimizers: Mapping[str, NamedOptimizer], shapes: Mapping[str, Shape], lead: Key
) -> OptimizerFacts:
    """The states and groups of optimizers of one file.

    optimizers: by a name that their groups' names begin with, empty for a single one. shapes: of the model's tensors.
    """
    held = {
        name: {state: value for state, value in states.named() if not skips(state)}
        for one in optimizers.values()
        for name, states in one.states.items()
    }
    groups = [
        (f"{word}/{g}" if word else str(g), one, g) for word, one in optimizers.items() for g in range(len(one.groups))
    ]
    of_all = {name for name, states in held.items() if _is_of_all(states, shapes[name])}
    trained = {n for n, states in held.items() if states} or {n for _, one, g in groups for n in one.groups[g]}
    trained |= {n for _, one, g in groups if not of_all.isdisjoint(one.groups[g]) for n in one.groups[g]}
    made = []
    for said, one, g in groups:
        names = one.groups[g]
        members = tuple(name for name in names if name in trained and 0 not in shapes[name])
        row = one.value.at("param_groups").items()[g]
        hyper = {key: lifted(inner.held, part.file) for key, inner in row.named() if key != _PARAMS}
        made.append(ParameterGroup(said, members, hyper, names if names != members else ()))
    found = OptimizerFacts(groups=tuple(made))
    for one in optimizers.values():
        found.not_read.extend(_unread(one.value))
    kinds = _kinds(held, shapes, [group.members for group in made])
    for name, states in held.items():
        mine = dict.fromkeys(states, "other") if name in of_all else kinds
        _sort(found, part, (name, states), mine, shapes[name], lead)
    return found


def _unread(optimizer: Value) -> Iterator[NotRead]:
    """Keys of an optimizer that no target keeps."""
    lead = "".join(f"{step}/" for step in optimizer.key)
    yield from unknown_keys(optimizer.file, optimizer.held, ("state", "param_groups", STATED), lead, "torch")
    params = {one.held for group in optimizer.at("param_groups").items() for one in group.at(_PARAMS).items()}
    yield from unknown_keys(optimizer.file, optimizer.at("state").held, params, f"{lead}state/", "torch")


def _kinds(
    held: Mapping[str, Mapping[str, Value]], shapes: Mapping[str, Shape], groups: Sequence[tuple[str, ...]]
) -> dict[str, str]:
    """The kind of each state: "element", "number" or "other"."""
    out = {}
    for state in dict.fromkeys(state for states in held.values() for state in states):
        holders = {name: states[state].held for name, states in held.items() if state in states}
        several = {name: one for name, one in holders.items() if prod(shapes[name]) != 1} or holders
        is_each = all(isinstance(one, TensorRef) and one.shape == shapes[name] for name, one in several.items())
        if is_each and (state != _STEP or several is not holders):
            whole = all(holders.keys() >= {*group} for group in groups if not holders.keys().isdisjoint(group))
            out[state] = "element" if whole else "other"
        elif all(_is_number(one) for one in several.values()):
            out[state] = "number"
        else:
            out[state] = "other"
    return out


def _is_of_all(states: Mapping[str, Value], shape: Shape) -> bool:
    """Test for states over all parameters, as LBFGS has them."""
    held = [one.held for one in states.values() if isinstance(one.held, TensorRef) and one.held.shape]
    return bool(held) and all(len(one.shape) == 1 and prod(one.shape) > prod(shape) for one in held)


def _is_number(held: object) -> bool:
    return prod(held.shape) == 1 if isinstance(held, TensorRef) else is_counted(held)


def _sort(
    found: OptimizerFacts,
    part: TorchFile,
    states: tuple[str, Mapping[str, Value]],
    kinds: Mapping[str, str],
    shape: Shape,
    lead: Key,
) -> None:
    name, held = states
    mine = []
    for state, value in held.items():
        kind = kinds[state]
        one = value.held
        if kind == "element" and isinstance(one, TensorRef):
            if prod(shape):
                found.payload[*lead, name, state] = part.extent((*lead, name, state), one)
            else:
                found.empty.setdefault(name, {})[state] = one.storage.dtype
            found.read.add(value.key)
            mine.append(state)
        elif kind == "number" and isinstance(one, TensorRef):
            found.read.add(value.key)
            found.scalars.setdefault(state, {})[name] = part.read_scalar(value.key, one)
            found.scalar_extents.setdefault(state, {})[name] = part.extent(value.key, one)
        elif kind == "number" and is_counted(one):
            found.scalars.setdefault(state, {})[name] = one
        else:
            found.extra.setdefault(name, {})[state] = lifted(one, part.file)
    found.states[name] = tuple(mine)


# ---- writing ---------------------------------------------------------------------------------------------------------


def state_dict_of(
    groups: Sequence[tuple[tuple[str, ...], Mapping[str, object]]],
    states: Mapping[str, Mapping[str, object]],
    *,
    is_named: bool = False,
    by_name: bool = False,
) -> dict[str, object]:
    """The state dict of a torch optimizer.

    groups: the names of each, and its hyper-parameters. states: values by parameter and state. is_named: with the names
    under a key that torch ignores. by_name: names in place of numbers, as in FSDP's full state dict.
    """
    if by_name:
        return {
            "state": {name: dict(states[name]) for names, _ in groups for name in names if states.get(name)},
            "param_groups": [{**hyper, _PARAMS: list(names)} for names, hyper in groups],
        }
    number = {name: n for n, name in enumerate(name for names, _ in groups for name in names)}
    made: dict[str, object] = {
        "state": {n: dict(states[name]) for name, n in number.items() if states.get(name)},
        "param_groups": [{**hyper, _PARAMS: [number[name] for name in names]} for names, hyper in groups],
    }
    return {**made, STATED: [list(names) for names, _ in groups]} if is_named else made


def optimizers_of(source: Checkpoint) -> list[str]:
    """The optimizer of each group; of a run with one, empty texts."""
    groups, kept = source.state.groups, source.state.blobs.get(OPTIMIZERS)
    words = [group.name.rpartition("/")[0] for group in groups]
    if not any(words) and isinstance(kept, list) and len(kept) == len(groups):
        return [str(word) for word in kept]
    return words


def put_numbers(
    source: Checkpoint,
    storages: Storages,
    states: MutableMapping[str, dict[str, object]],
    names: Container[str] | None = None,
) -> None:
    """Put a source's numbers and states of other forms into states.

    names: the parameters of one of several optimizers; None: all.

    A number is a tensor if the source has a tensor. Those of tensors without elements have the form of the others: torch
    adds 1 to the steps of all parameters at once, and these are tensors.
    """
    scalars, extents = source.state.scalars, source.scalar_extents

    def in_form(value: object, extent: Extent | None) -> object:
        is_tensor = isinstance(value, Scalar) and extent is not None
        return storages.extent(extent) if is_tensor and extent is not None else number_of(value)

    def is_mine(name: object) -> bool:
        return names is None or name in names

    for name, one in empty_tensors(source.state, source.root).items():
        for state, number in one.numbers.items() if is_mine(name) else ():
            held, of = scalars.get(state, {}), extents.get(state, {})
            alike = next((other for other, value in held.items() if number_of(value) == number and other in of), None)
            made = number if alike is None else in_form(held[alike], of[alike])
            states.setdefault(name, {})[state] = made
    for state, values in scalars.items():
        for name, value in values.items():
            if is_mine(name):
                states.setdefault(name, {})[state] = in_form(value, extents.get(state, {}).get(name))
    extra = source.state.blobs.get(OPTIMIZER_VALUES)
    for name, more in extra.items() if isinstance(extra, dict) else ():
        if is_mine(name):
            states.setdefault(str(name), {}).update(storages.value(more))


def noted_empty(named: NamedTensors, facts: OptimizerFacts) -> dict[str, object]:
    """The blob of tensors without elements.

    Their states and numbers are taken out of the facts.
    """
    listed = {name for group in facts.groups for name in group.every}
    noted = {}
    for name, one in named.tensors.items():
        if prod(one.shape):
            continue
        numbers = {state: number_of(per.pop(name)) for state, per in facts.scalars.items() if name in per}
        for extents in facts.scalar_extents.values():
            extents.pop(name, None)
        facts.states.pop(name, None)
        is_buffer = bool(facts.groups) and name not in listed
        noted[name] = {"dtype": one.storage.dtype, "shape": list(one.shape), "buffer": is_buffer}
        noted[name] |= {"states": facts.empty[name]} if name in facts.empty else {}
        noted[name] |= {"numbers": numbers} if numbers else {}
    return {EMPTY: noted} if noted else {}


def are_determined(model: object, optimizers: Mapping[str, object], groups: Sequence[tuple[str, ...]]) -> bool:
    """Test whether a reader finds these names for a target's numbers."""
    where = Path("target")
    try:
        named = named_tensors(Value(where, "", (), model))
        made = named_optimizers([Value(where, "", (), one) for one in optimizers.values()], named)
    except UcplError:
        return False
    return [names for one in made for names in one.groups] == [*groups]
