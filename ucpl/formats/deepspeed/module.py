"""The `module` of a rank's model states, with each tensor's kind.

A tensor is trained, frozen, a buffer, a second name, or empty. `param_shapes` has the correct order and shapes
(`param_slice_mappings` are wrong under round robin).
Source: deepspeed 0.19.8: engine.py (`_common_checkpoint_state`, `_get_zero_param_shapes`, `_get_shared_params`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Key, NamedTensor, TensorRef, key_text
from ucpl.extents.parallel_facts import slice_numel
from ucpl.files.carrying import lifted
from ucpl.files.pickles import attributes_of
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.topology import ModelRankFiles
from ucpl.records import frozen

BLOB = "left_out"
_SHOWN = 3


@frozen
class LeftOut:
    """A name in the module without a parameter of the model."""

    dtype: str
    owner: str | None = None  # it is a second name of this one, which is not there; None: it has no other
    value: TensorRef | None = None  # the value below stage 3, which is stored

    def noted(self, file: str) -> dict[str, object]:
        """The form in which readers keep it in the train state."""
        return {"dtype": self.dtype, "of": self.owner, "value": lifted(self.value, file)}

    @classmethod
    def of(cls, value: Value) -> LeftOut:
        """The value that a reader kept.

        Raises: UcplError E455 for any other form.
        """
        dtype, owner, held = value.at("dtype"), value.find("of"), value.find("value")
        if not isinstance(dtype.held, str) or dtype.held not in DTYPES:
            dtype.wrong("a dtype")
        tensor = held.tensor() if held is not None and held.held is not None else None
        return cls(dtype.held, owner.text() if owner is not None and owner.held is not None else None, tensor)


@frozen(eq=False)
class NotStored:
    """Names without data in a step's files.

    by_choice: frozen parameters were excluded.
    """

    names: dict[str, LeftOut] = field(factory=dict)
    by_choice: bool = False  # the fields for frozen parameters are there, and empty

    def and_of(self, other: NotStored) -> NotStored:
        return NotStored({**other.names, **self.names}, self.by_choice or other.by_choice)

    def lines(self, part: TorchFile) -> tuple[str, ...]:
        """Lines for `inspect` and plans."""
        out = []
        for name, one in self.names.items():
            if one.owner is None:
                out.append(f"{name}: in no group of the optimizer and not frozen, and stage 3 saves no such parameter")
            elif one.value is None:
                out.append(
                    f"{one.owner}, and {name}, which is the same: frozen and left out (exclude_frozen_parameters)"
                )
            else:
                out.append(
                    f"{one.owner}: frozen and left out; its second name {name} was not, and goes along, but to stage 3"
                )
        if self.by_choice or any(one.owner for one in self.names.values()):
            modules = _without_tensors(part)
            more = f", and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
            of = f": nothing is there of {', '.join(modules[:_SHOWN])}{more}" if modules else ""
            out.append(f"frozen parameters (exclude_frozen_parameters){of}")
        return tuple(out)


def is_by_choice(part: TorchFile, stage: int) -> bool:
    """Test whether frozen parameters were excluded: their field is None.

    Only stages 2 and 3 have the field.
    """
    held = Value.of(part).mapping()
    return stage >= 2 and "frozen_param_shapes" in held and held["frozen_param_shapes"] is None


def _without_tensors(part: TorchFile) -> list[str]:
    """Modules without submodules and tensors, from the versions in state_dict."""
    module = Value.of(part).at("module").held
    attributes = attributes_of(module) if isinstance(module, OrderedDict) else None
    versions = attributes.get("_metadata") if isinstance(attributes, dict) else None
    if not isinstance(versions, dict) or not isinstance(module, dict):
        return []
    names = [name for name in versions if isinstance(name, str) and name]
    inside = {name.rpartition(".")[0] for name in (*names, *(n for n in module if isinstance(n, str)))}
    return [name for name in names if name not in inside]


Groups = tuple[dict[str, Shape], ...]  # trained parameters by group, in the order of the flat buffers


@frozen(eq=False)
class ModuleFacts:
    """Facts of the module's names from other fields."""

    shapes: dict[str, Shape]  # of trained and frozen parameters
    buffers: frozenset[str]


@frozen(eq=False)
class RankModule:
    """A rank's tensors by kinds of names.

    Shapes are those on this rank, complete ones at stage 3, too.
    """

    file: TorchFile  # that states them
    groups: Groups = ()
    tensors: dict[str, TensorRef] = field(factory=dict)  # in the module's order, aliases too
    buffers: frozenset[str] = frozenset()
    shapes: dict[str, Shape] = field(factory=dict)  # of trained and frozen parameters and buffers
    frozen: tuple[str, ...] = ()
    aliases: dict[str, str] = field(factory=dict)
    empty: dict[str, tuple[str, Shape]] = field(factory=dict)  # tensors without elements: dtype and shape
    left_out: NotStored = field(factory=NotStored)
    stated_groups: Groups = ()  # as in the file, if members of `groups` are parts of its tensors

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    def parameters(self) -> list[str]:
        return [name for name in self.shapes if name not in self.buffers]


def groups_of(part: TorchFile) -> Groups:
    """param_shapes of a file of model states: none at stage 0."""
    stated = Value.of(part).find("param_shapes")
    if stated is None:
        return ()
    return tuple({name: shape.shape() for name, shape in group.named()} for group in stated.items())


def module_of(part: TorchFile, groups: Groups, stage: int, shared: Value | None) -> RankModule:
    """The module of a file.

    shared: shared_params, which only the first rank's file has.
    """
    meta = Value.of(part)
    tensors = {name: value.held for name, value in meta.at("module").named() if isinstance(value.held, TensorRef)}
    stated = meta.find("buffer_names")
    named = frozenset(stated.texts()) if stated is not None else frozenset()
    trained = {name: shape for group in groups for name, shape in group.items()}
    if len(trained) < sum(len(group) for group in groups):
        fail("E456", "param_shapes names a parameter twice", Label(str(part.path), where="param_shapes"))
    frozen_ = _frozen_shapes(meta)
    for field_, names in (("param_shapes", trained), ("frozen_param_shapes", frozen_)):
        _check_in_module(part, field_, names, tensors)
    known = frozen_ | trained
    buffers = _with_second_names(named, {name: tensor for name, tensor in tensors.items() if name not in known})
    aliases = _aliases(part, shared, tensors, ModuleFacts(known, buffers), stage)
    left_out = {a: _left_out(tensors[a], o) for a, o in aliases.items() if o not in tensors and a in tensors}
    aliases = {alias: owner for alias, owner in aliases.items() if owner in tensors}
    shapes: dict[str, Shape] = {}
    empty: dict[str, tuple[str, Shape]] = {}
    for name, tensor in tensors.items():
        if name in aliases or name in left_out:
            continue
        shape = known.get(name, tensor.shape)
        if prod(shape) == 0 and (stage < 3 or name in buffers or name in known):
            empty[name] = (tensor.storage.dtype, shape)
            continue
        if stage == 3 and name not in known and name not in buffers:
            left_out[name] = _left_out(tensor)
            continue
        if name in known and stage < 3 and tensor.shape != shape:
            fail(
                "E458",
                f"{name} has the shape {list(tensor.shape)} in the module and {list(shape)} in param_shapes",
                Label(str(part.path), where=f"module/{name}"),
                Label(str(part.path), where="param_shapes"),
            )
        shapes[name] = shape
    rest = tuple(n for n in shapes if (stage or trained) and n not in buffers and n not in trained)
    unstored = NotStored(left_out, is_by_choice(part, stage))
    return RankModule(part, groups, tensors, buffers, shapes, rest, aliases, empty, unstored)


def _check_in_module(
    part: TorchFile, field_: str, names: Mapping[str, Shape], tensors: Mapping[str, TensorRef]
) -> None:
    """Check that a field's names have tensors.

    Names left out are left out of both: frozen_param_shapes is empty if frozen parameters were excluded.
    """
    lacking = next((name for name in names if name not in tensors), None)
    if lacking is not None:
        fail(
            "E459",
            f"{lacking} is in {field_} but not in the module",
            Label(str(part.path), where=field_),
            Label(str(part.path), where="module"),
        )


def _with_second_names(named: frozenset[str], tensors: dict[str, TensorRef]) -> frozenset[str]:
    """All names of buffers; `buffer_names` has only one name of each."""
    places = {_place(tensors[name]) for name in named if name in tensors and 0 not in tensors[name].shape}
    return named | {name for name, tensor in tensors.items() if _place(tensor) in places}


def _place(tensor: TensorRef) -> tuple[object, ...]:
    return (tensor.storage.name, tensor.offset, tensor.shape, tensor.stride, tensor.storage.dtype)


def _left_out(tensor: TensorRef, owner: str | None = None) -> LeftOut:
    return LeftOut(tensor.storage.dtype, owner, None if 0 in tensor.shape else tensor)


def _frozen_shapes(meta: Value) -> dict[str, Shape]:
    stated = meta.find("frozen_param_shapes")
    return {} if stated is None else {name: shape.shape() for name, shape in stated.named()}


def _aliases(
    part: TorchFile, shared: Value | None, tensors: dict[str, TensorRef], known: ModuleFacts, stage: int
) -> dict[str, str]:
    """Second names: those of `shared_params`, and names of one storage place.

    shared_params is missing without ZeRO and in old releases, and lacks a module that its parent has twice.
    """
    placed = known.shapes if stage == 3 else {name: tensor.shape for name, tensor in tensors.items()}
    stated = _stated_aliases(part, shared, tensors, placed) if shared is not None else {}
    if stage == 3:
        found = stated | _of_placeholders(tensors, known, stated)
        return auto_ep.second_names(part, {name: t.shape for name, t in tensors.items()}, known.shapes) | found
    owners: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name in known.buffers or name in stated or prod(tensor.shape) == 0:
            continue
        place = _place(tensor)
        if place in owners and not (stage and name in known.shapes):
            aliases[name] = owners[place]
        else:
            owners.setdefault(place, name)
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in known.buffers}
    return stated | aliases | auto_ep.second_names(part, shapes, known.shapes)


def _stated_aliases(
    part: TorchFile, shared: Value, tensors: dict[str, TensorRef], shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """The names of `shared_params`, except those of tensors without elements.

    DeepSpeed takes any two of these for one tensor.
    """
    stated = {alias: owner.text() for alias, owner in shared.named()}
    empty = {name for name, shape in shapes.items() if prod(shape) == 0}
    stated = {alias: owner for alias, owner in stated.items() if not empty & {alias, owner}}
    for alias, owner in stated.items():
        if alias not in tensors and owner in tensors:
            fail("E459", f"shared_params ties {alias} to {owner}, and the module lacks one", Label(str(part.path)))
        if owner in stated:
            shared.at(alias).wrong("a parameter that is no second name itself")
    return stated


def _of_placeholders(tensors: dict[str, TensorRef], known: ModuleFacts, stated: dict[str, str]) -> dict[str, str]:
    """Second names at stage 3, where placeholders share a storage."""
    owners: dict[str, list[str]] = {}
    for name in known.shapes:
        if name in tensors:
            owners.setdefault(tensors[name].storage.name, []).append(name)
    rest = (name for name in tensors if not (name in known.shapes or name in known.buffers or name in stated))
    found = {name: owners.get(tensors[name].storage.name, []) for name in rest}
    return {name: mine[0] for name, mine in found.items() if len(mine) == 1 < len(known.shapes)}


# ---- its tensors' places ---------------------------------------------------------------------------------------------


def keep_module(gathered: Gathered, module: RankModule, shard: ModelRankFiles, stage: int) -> None:
    """Keep weights, buffers and fragments of frozen parameters, of all dp ranks."""
    first = Value.of(shard.first)
    names = [*first.at("module").mapping()]
    ways: dict[int, tuple[set[Key], dict[Key, TensorRef]]] = {}  # by value: pickles of equal bytes are one
    for part in shard.metas:
        if id(part.value) not in ways:
            value = Value.of(part)
            if [*value.at("module").mapping()] != names:
                odd = {*names} ^ {*value.at("module").mapping()}
                differ(shard.first, part, "module", f"names ({', '.join(sorted(map(str, odd)))})" if odd else "names")
            if part is not shard.first and groups_of(part) != groups_of(shard.first):
                differ(shard.first, part, "param_shapes", "parameters")
            ways[id(part.value)] = _ways(module, value, stage)
        consumed, kept = ways[id(part.value)]
        gathered.consumed.update((part.file, key) for key in consumed)
        for key, tensor in kept.items():
            gathered.keep_where_full(part, key, tensor)
        _keep_fragments(gathered, module, part, stage, len(shard.metas))
        if stage == 2:
            _point_to_weights(gathered, module, part)
    fragments = first.find("frozen_param_fragments")
    held_here = fragments.mapping() if fragments is not None else {}
    lacking = next((name for name in module.frozen if stage == 3 and name not in held_here), None)
    if lacking is not None:
        fail(
            "E459",
            f"the frozen {lacking} has no fragment",
            Label(str(module.file.path), where="frozen_param_fragments"),
        )
    if stage >= 2 and "frozen_param_fragments" in first.mapping():  # below, DeepSpeed never states them
        gathered.set("frozen_fragments", int(fragments is not None), f"frozen_param_fragments of {module.file.file}")


def _ways(module: RankModule, value: Value, stage: int) -> tuple[set[Key], dict[Key, TensorRef]]:
    """Keys of a module without payload, and its other tensors."""
    consumed: set[Key] = set()
    kept: dict[Key, TensorRef] = {}
    for name, held in value.at("module").named():
        owner = module.aliases.get(name, name)
        if not isinstance(held.held, TensorRef):
            continue
        if name in module.left_out.names and 0 not in held.held.shape:
            continue  # it goes along as it is
        if name in module.empty or (stage == 3 and (owner not in module.buffers or name in module.aliases)):
            consumed.add(held.key)
        else:
            kept[held.key] = held.held
    return consumed, kept


def _keep_fragments(gathered: Gathered, module: RankModule, part: TorchFile, stage: int, dp: int) -> None:
    """Keep fragments of frozen parameters: copies of them, slices at stage 3.

    Without the shards, a run of stage 2 is read as one of stage 0: there the module's tensors are enough.
    """
    fragments = Value.of(part).find("frozen_param_fragments")
    for name, value in fragments.named() if fragments is not None else ():
        tensor = value.tensor()
        if name not in module.tensors:
            continue  # no tensor of the model: the account names it
        if stage < 2 or name in module.empty or name not in module.frozen:  # it was frozen later: the optimizer has it
            gathered.consumed.add((part.file, value.key))
            continue
        expected: Shape = (slice_numel(module.shapes[name], dp),) if stage == 3 else module.shapes[name]
        if tensor.shape != expected:
            fail(
                "E458",
                f"the frozen {name} has the shape {list(tensor.shape)} here, expected {list(expected)}",
                Label(str(part.path), where=key_text(value.key)),
            )
        gathered.keep(part, value.key, tensor)


def _point_to_weights(gathered: Gathered, module: RankModule, part: TorchFile) -> None:
    """Use the module's tensor for parameters outside groups that are not frozen.

    They have no fragment.
    """
    fragments = Value.of(part).find("frozen_param_fragments")
    held = fragments.mapping() if fragments is not None else {}
    for name in module.frozen:
        if name not in held:
            weight = part.extent(("module", name), module.tensors[name])
            gathered.payload[part.file, ("frozen_param_fragments", name)] = weight


def differ(one: TorchFile, other: TorchFile, key: str, what: str) -> NoReturn:
    fail(
        "E456",
        f"{one.file} and {other.file} do not state the same {what}",
        Label(str(one.path), where=key),
        Label(str(other.path), where=key),
        remedy="They are of different runs or steps: copy all files of one step again.",
    )


def named_tensors(gathered: Gathered, module: RankModule, whole: dict[str, Shape]) -> tuple[NamedTensor, ...]:
    """The model's tensors in the module's order.

    `whole`: their shapes, over all ranks.
    """
    kinds = dict.fromkeys(module.frozen, "frozen")
    if gathered.groups:
        trained = {name for group in gathered.groups for name in group.members}
        kinds |= {name: "frozen" for name in module.shapes if name not in trained}
    kinds |= dict.fromkeys(module.buffers, "buffer")
    return tuple(
        NamedTensor(
            name,
            shape,
            module.tensors[name].storage.dtype,
            kinds.get(name, "parameter"),
            tuple(gathered.states.get(name, ())),
        )
        for name, shape in whole.items()
    )
