"""The `module` of a rank's model states: which of its tensors are trained, frozen, buffers, second names, or empty.

Authoritative: `param_shapes` for order and shapes (never `param_slice_mappings`, which are wrong under round robin).
Read in deepspeed 0.19.8: engine.py (`_common_checkpoint_state`, `_get_zero_param_shapes`, `_get_shared_params`).
"""

from __future__ import annotations

from math import prod
from typing import NoReturn

from attrs import field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import NamedTensor, TensorRef, key_text
from ucpl.stores.deepspeed.gathered import Gathered
from ucpl.stores.deepspeed.order import Shape, slice_numel
from ucpl.stores.deepspeed.topology import Shard
from ucpl.stores.torch_files import TorchFile
from ucpl.stores.values import Value

Groups = tuple[dict[str, Shape], ...]  # trained parameters by group, in the order of the flat buffers


@frozen(eq=False)
class Module:
    """A rank's tensors by kinds of names. Shapes are those on this rank, whole at stage 3 too."""

    file: TorchFile  # that states them
    groups: Groups = ()
    tensors: dict[str, TensorRef] = field(factory=dict)  # in the module's order, aliases too
    buffers: frozenset[str] = frozenset()
    shapes: dict[str, Shape] = field(factory=dict)  # of trained and frozen parameters and buffers
    frozen: tuple[str, ...] = ()
    aliases: dict[str, str] = field(factory=dict)
    empty: dict[str, tuple[str, Shape]] = field(factory=dict)  # tensors without elements: dtype and shape

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


def module_of(part: TorchFile, groups: Groups, stage: int, shared: Value | None) -> Module:
    """The module of a file. `shared`: shared_params, which stand in the first rank's file alone."""
    meta = Value.of(part)
    tensors = {name: value.held for name, value in meta.at("module").named() if isinstance(value.held, TensorRef)}
    stated = meta.find("buffer_names")
    buffers = frozenset(stated.texts()) if stated is not None else frozenset()
    trained = {name: shape for group in groups for name, shape in group.items()}
    if len(trained) < sum(len(group) for group in groups):
        fail("E456", "param_shapes names a parameter twice", Label(str(part.path), where="param_shapes"))
    lacking = next((name for name in trained if name not in tensors), None)
    if lacking is not None:
        fail(
            "E459",
            f"{lacking} is in param_shapes but not in the module",
            Label(str(part.path), where="param_shapes"),
            Label(str(part.path), where="module"),
        )
    known = _frozen_shapes(meta) | trained
    aliases = _aliases(part, shared, tensors, buffers, stage)
    shapes: dict[str, Shape] = {}
    empty: dict[str, tuple[str, Shape]] = {}
    for name, tensor in tensors.items():
        if name in aliases:
            continue
        shape = known.get(name, tensor.shape)
        if prod(shape) == 0 and (stage < 3 or name in buffers or name in known):
            empty[name] = (tensor.storage.dtype, shape)
            continue
        if stage == 3 and name not in known and name not in buffers:
            _no_values(part, name)
        if name in known and stage < 3 and tensor.shape != shape:
            fail(
                "E458",
                f"{name} has the shape {list(tensor.shape)} in the module and {list(shape)} in param_shapes",
                Label(str(part.path), where=f"module/{name}"),
                Label(str(part.path), where="param_shapes"),
            )
        shapes[name] = shape
    rest = tuple(n for n in shapes if stage and n not in buffers and n not in trained)
    if stage == 2 and len(known) > len(trained):
        _all_frozen(part, rest, known)
    return Module(part, groups, tensors, buffers, shapes, rest, aliases, empty)


def _frozen_shapes(meta: Value) -> dict[str, Shape]:
    stated = meta.find("frozen_param_shapes")
    return {} if stated is None else {name: shape.shape() for name, shape in stated.named()}


def _no_values(part: TorchFile, name: str) -> NoReturn:
    fail(
        "E459",
        f"{name} is in the module, but no file holds its values: it is in neither param_shapes nor frozen_param_shapes",
        Label(str(part.path), where=f"module/{name}"),
        remedy="Stage 3 saves no parameter that is neither in the optimizer nor frozen: freeze it and save again.",
    )


def _all_frozen(part: TorchFile, rest: tuple[str, ...], known: dict[str, Shape]) -> None:
    """At stage 2 what no group trains is frozen, and is stated to be, where anything is."""
    for name in rest:
        if name not in known:
            fail(
                "E459",
                f"{name} is trained by no group of the optimizer, and not frozen either",
                Label(str(part.path), where=f"module/{name}"),
                remedy="Freeze it (requires_grad False) or give it to the optimizer, and save again.",
            )


def _aliases(
    part: TorchFile, shared: Value | None, tensors: dict[str, TensorRef], buffers: frozenset[str], stage: int
) -> dict[str, str]:
    """Second names. Where `shared_params` is not stated (ZeRO-0, old releases): names of one place in one storage."""
    if shared is not None and stage:
        stated = {alias: owner.text() for alias, owner in shared.named()}
        for alias, owner in stated.items():
            if alias not in tensors or owner not in tensors:
                fail("E459", f"shared_params ties {alias} to {owner}, and the module lacks one", Label(str(part.path)))
            if owner in stated:
                shared.at(alias).wrong("a parameter that is no second name itself")
        return stated
    if stage == 3:
        return {}
    owners: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name in buffers or prod(tensor.shape) == 0:
            continue
        place = (tensor.storage.name, tensor.offset, tensor.shape, tensor.stride, tensor.storage.dtype)
        if place in owners:
            aliases[name] = owners[place]
        else:
            owners[place] = name
    return aliases


# ---- its tensors' places ---------------------------------------------------------------------------------------------


def keep_module(gathered: Gathered, module: Module, shard: Shard, stage: int) -> None:
    """Weights, buffers and fragments of frozen parameters, of all dp ranks that have a file."""
    first = Value.of(shard.first)
    names = [*first.at("module").mapping()]
    for part in shard.metas:
        value = Value.of(part)
        if [*value.at("module").mapping()] != names:
            differ(shard.first, part, "module", "names")
        if part is not shard.first and groups_of(part) != groups_of(shard.first):
            differ(shard.first, part, "param_shapes", "parameters")
        for name, held in value.at("module").named():
            owner = module.aliases.get(name, name)
            if not isinstance(held.held, TensorRef):
                continue
            if name in module.empty or (stage == 3 and owner not in module.buffers):
                gathered.consumed.add((part.file, held.key))
            else:
                gathered.keep_where_full(part, held.key, held.held)
        _keep_fragments(gathered, module, part, len(shard.metas) if stage == 3 else 0)
    fragments = first.find("frozen_param_fragments")
    held_here = fragments.mapping() if fragments is not None else {}
    lacking = next((name for name in module.frozen if stage == 3 and name not in held_here), None)
    if lacking is not None:
        fail(
            "E459",
            f"the frozen {lacking} has no fragment",
            Label(str(module.file.path), where="frozen_param_fragments"),
        )
    gathered.set("frozen_fragments", int(bool(held_here)), f"frozen_param_fragments of {module.file.file}")


def _keep_fragments(gathered: Gathered, module: Module, part: TorchFile, dp: int) -> None:
    """Frozen parameters: whole, or one slice of `dp` each."""
    fragments = Value.of(part).find("frozen_param_fragments")
    for name, value in fragments.named() if fragments is not None else ():
        tensor = value.tensor()
        if name in module.empty or name not in module.shapes:
            gathered.consumed.add((part.file, value.key))
            continue
        expected: Shape = (slice_numel(module.shapes[name], dp),) if dp else module.shapes[name]
        if tensor.shape != expected:
            fail(
                "E458",
                f"the frozen {name} has the shape {list(tensor.shape)} here, expected {list(expected)}",
                Label(str(part.path), where=key_text(value.key)),
            )
        gathered.keep(part, value.key, tensor)


def differ(one: TorchFile, other: TorchFile, key: str, what: str) -> NoReturn:
    fail(
        "E456",
        f"{one.file} and {other.file} do not state the same {what}",
        Label(str(one.path), where=key),
        Label(str(other.path), where=key),
        remedy="They are of different runs or steps: copy all files of one step again.",
    )


def named_tensors(gathered: Gathered, module: Module, whole: dict[str, Shape]) -> tuple[NamedTensor, ...]:
    """The model's tensors in the module's order. `whole`: their shapes, over all ranks."""
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
