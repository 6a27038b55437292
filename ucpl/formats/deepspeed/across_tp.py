"""Tensor-parallel ranks with the same tensors, and the part of each rank."""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.errors import Label, fail
from ucpl.extents import Sharding
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.affine import INFO
from ucpl.formats.deepspeed.attributes import carries_cuts, cut_by_attributes
from ucpl.formats.deepspeed.cuts import is_by_lists, shardings_of, vocabulary_of
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import RankModule
from ucpl.formats.deepspeed.order import Shape

Shapes = dict[str, tuple[Shape, ...]]  # of each tensor, on each tensor-parallel rank


def local_shapes(modules: Sequence[RankModule]) -> Shapes:
    """The shapes of each tensor on all ranks.

    modules: of every tensor-parallel rank, in order, with the same tensors.
    """
    return {name: tuple(module.shapes[name] for module in modules) for name in modules[0].shapes}


def cuts_over_tp(gathered: Gathered, first: TorchFile, module: RankModule, local: Shapes) -> dict[str, Sharding]:
    """The cut of each tensor, if a file states it.

    The statement is next to the tensors, or in the tensors' own attributes. A buffer of one shape is a copy. With one
    rank nothing is cut, and lists of patterns state the cuts for more ranks.
    """
    info = Value.of(first).find(INFO)
    gathered.vocabulary |= vocabulary_of(first, info, local)
    if is_by_lists(info):
        gathered.set("tp_rule", "chunk", f"{INFO} of {first.file}")
    elif info is None and carries_cuts(module.tensors):  # such a model's code cuts in equal parts
        gathered.set("tp_rule", "chunk", f"tensor_model_parallel of tensors of {module.file.file}")
    elif all(len(shapes) == 1 for shapes in local.values()):
        return {}
    of_parameters = {name: local[name] for name in module.parameters()}
    shardings = shardings_of(first, info, of_parameters)
    origin = f"buffer_names of {first.file}: buffers of one shape are copies"
    for name, shapes in local.items():
        if name in module.buffers and len(set(shapes)) == 1:
            shardings[name] = Sharding(shapes[0], origin=origin)
    shardings = {**cut_by_attributes(module.tensors, local, module.file.file), **shardings}
    unknown = [name for name in local if name not in shardings]
    if unknown:
        more = f" and of {len(unknown) - 1} more" if len(unknown) > 1 else ""
        gathered.remark(f"the cut of {unknown[0]}{more} over tp is not stated: a layout has to state it")
    return shardings


def same_tensors(one: RankModule, other: RankModule) -> None:
    """Check that all ranks have the same tensors, kinds and order."""
    for what, mine, theirs in (
        ("tensors", list(one.tensors), list(other.tensors)),
        ("trained parameters", list(one.trained), list(other.trained)),
        ("frozen parameters", list(one.frozen), list(other.frozen)),
        ("buffers", sorted(one.buffers), sorted(other.buffers)),
        ("aliases", sorted(one.aliases), sorted(other.aliases)),
        ("parameters that are left out", [*one.left_out.names], [*other.left_out.names]),
        ("tensors without elements", sorted(one.empty), sorted(other.empty)),
    ):
        if mine != theirs:
            differ = sorted(set(mine) ^ set(theirs)) or [a for a, b in zip(mine, theirs, strict=False) if a != b]
            fail(
                "E463",
                f"tensor-parallel ranks do not have the same {what}: {differ[0]}",
                Label(str(one.file.path), where="module"),
                Label(str(other.file.path), where="module"),
            )
    for name in one.shapes:
        if len(one.shapes[name]) != len(other.shapes[name]):
            fail(
                "E463",
                f"{name} is {list(one.shapes[name])} on one tensor-parallel rank and {list(other.shapes[name])} on another",
                Label(str(one.file.path), where=f"module/{name}"),
                Label(str(other.file.path), where=f"module/{name}"),
            )
