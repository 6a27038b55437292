"""Tensor-parallel ranks with the same tensors, and the part of each rank.

The cut of a tensor is stated next to the tensors (`cuts`) or in attributes of theirs. Megatron sets `tensor_model_parallel`,
`partition_dim` and `partition_stride`. A state_dict keeps them if its tensors are parameters (`keep_vars=True`); torch's own
state_dict detaches its tensors and drops them. If some tensor has them, a tensor without them is a copy, as in DeepSpeed
(`is_model_parallel_parameter` of deepspeed 0.19.8, runtime/utils.py). Parts are in the order of Megatron's
tensor_parallel/layers.py: with a stride of 2, a rank has a part of each half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding, TensorRef
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.cuts import is_by_lists, shardings_of, vocabulary_of
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import RankModule
from ucpl.formats.deepspeed.names import INFO
from ucpl.formats.deepspeed.order import Shape

IS_CUT, DIM, STRIDE = "tensor_model_parallel", "partition_dim", "partition_stride"
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
    elif info is None and _carries_cuts(module.tensors):  # such a model's code cuts in equal parts
        gathered.set("tp_rule", "chunk", f"tensor_model_parallel of tensors of {module.file.file}")
    elif all(len(shapes) == 1 for shapes in local.values()):
        return {}
    of_parameters = {name: local[name] for name in module.parameters()}
    shardings = shardings_of(first, info, of_parameters)
    origin = f"buffer_names of {first.file}: buffers of one shape are copies"
    for name, shapes in local.items():
        if name in module.buffers and len(set(shapes)) == 1:
            shardings[name] = Sharding(shapes[0], origin=origin)
    shardings = {**_cut_by_attributes(module.tensors, local, module.file.file), **shardings}
    unknown = [name for name in local if name not in shardings]
    if unknown:
        more = f" and of {len(unknown) - 1} more" if len(unknown) > 1 else ""
        gathered.remark(f"the cut of {unknown[0]}{more} over tp is not stated: a layout has to state it")
    return shardings


def _attributes(tensor: TensorRef) -> Mapping[str, object]:
    found = tensor.attributes
    return found if isinstance(found, dict) else {}


def _carries_cuts(tensors: Mapping[str, TensorRef]) -> bool:
    """Test whether any tensor has an attribute that it is cut."""
    return any(_attributes(tensor).get(IS_CUT) is True for tensor in tensors.values())


def _cut_by_attributes(
    tensors: Mapping[str, TensorRef], local: Mapping[str, Sequence[Shape]], file: str
) -> dict[str, Sharding]:
    """The cuts of all tensors with attributes; the others are copies.

    tensors: of the first rank. local: shapes on all ranks.
    """
    if not _carries_cuts(tensors):
        return {}
    out: dict[str, Sharding] = {}
    for name, shapes in local.items():
        said = _attributes(tensors[name]) if name in tensors else {}
        if said.get(IS_CUT) is True:
            found = _cut(said, shapes, file)
        else:
            why = f"{IS_CUT} = False" if IS_CUT in said else f"no {IS_CUT}, which others have,"
            found = Sharding(shapes[0], origin=f"{why} of {file}") if len(set(shapes)) == 1 else None
        if found is not None:
            out[name] = found
    return out


def _cut(said: Mapping[str, object], shapes: Sequence[Shape], file: str) -> Sharding | None:
    """The cut of one tensor; None if its attributes contradict its shapes."""
    dim, stride = said.get(DIM), said.get(STRIDE, 1)
    if type(dim) is not int or type(stride) is not int or stride < 1:
        return None
    if not all(0 <= dim < len(shape) and shape[dim] % stride == 0 for shape in shapes):
        return None
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        return None
    widths = tuple(shape[dim] // stride for shape in shapes)
    whole = (*shapes[0][:dim], sum(widths) * stride, *shapes[0][dim + 1 :])
    origin = f"{DIM} = {dim}" + (f" and {STRIDE} = {stride}" if stride > 1 else "") + f" of tensors of {file}"
    return Sharding(whole, dim, (Section(sum(widths), widths),) * stride, origin)


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
