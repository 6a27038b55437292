"""A rank's part of a tensor, as torch 2.13 pickles a DTensor.

Source: torch 2.13, distributed/tensor/_api.py, _dtensor_spec.py, device_mesh.py and _mesh_layout.py.
"""

from __future__ import annotations

import struct
from math import prod

from ucpl.extents import Global, PickledCall, Size, StorageRef, TensorRef, TorchDType
from ucpl.files.carrying import strides
from ucpl.records import frozen

__all__ = ["CLASSES", "Mesh", "Shape", "dtensor", "local_of", "whole_of"]

Shape = tuple[int, ...]
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_LAYOUT = "torch.distributed._mesh_layout"
_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_NAMES = ("ddp", "fsdp")  # of the mesh's dims, as verl calls them
# Classes that these files need, and that torch.load(weights_only=True) rejects.
CLASSES = frozenset(
    f"{one.module}.{one.name}"
    for one in (
        _REBUILD,
        _WRAPPER,
        _DTENSOR,
        _MESH,
        Global("torch.serialization", "_get_layout"),
        Global(_SPEC, "DTensorSpec"),
        Global(_SPEC, "ShardOrderEntry"),
        Global(_SPEC, "TensorMeta"),
        Global(_LAYOUT, "_FlatLayout"),
        Global(_LAYOUT, "_MeshLayout"),
        Global(_PLACEMENTS, "Replicate"),
        Global(_PLACEMENTS, "Shard"),
    )
)


@frozen(eq=False)
class Mesh:
    """The mesh of one rank's file.

    `known` has the bytes of the tensor of its ranks. torch numbers process groups as a job makes them: "0" has all ranks, and
    those of the mesh are next, the groups of its first dim before those of its second.
    """

    rank: int
    at: int  # on the dim that cuts tensors
    object: PickledCall
    placements: tuple[PickledCall, ...]
    order: PickledCall  # of the mesh dims that cut dim 0
    known: dict[str, bytes]

    @classmethod
    def of(cls, rank: int, ddp: int, fsdp: int, device: str, storage: str) -> Mesh:
        """storage: the name of the ranks' storage in the file."""
        shape: Shape = (ddp, fsdp) if ddp > 1 else (fsdp,)
        ranks = prod(shape)
        copy, place = divmod(rank, fsdp)
        axes = tuple(
            PickledCall(Global(_LAYOUT, "_FlatLayout"), new=True, state={"shape": (n,), "stride": (step,)})
            for n, step in zip(shape, strides(shape), strict=True)
        )
        made = PickledCall(
            _MESH,
            new=True,
            state={
                "_device_type": device,
                "_layout": PickledCall(Global(_LAYOUT, "_MeshLayout"), new=True, state={"axes": axes}),
                "_rank_map": TensorRef(StorageRef(storage, "i32", ranks), 0, (ranks,), (1,)),
                "_mesh_dim_names": _NAMES[-len(shape) :],
                "_root_mesh": None,
                "_flatten_rank_map": tuple(range(ranks)),
                "_thread_id": None,
                "_flatten_mapping": {},
                "_dim_group_names": ["0"] if ddp == 1 else [str(1 + place), str(1 + fsdp + copy)],
                "_rank": rank,
                "_coordinate_on_dim": (copy, place) if ddp > 1 else (place,),
                "_hash": None,
            },
        )
        replicate = [PickledCall(Global(_PLACEMENTS, "Replicate"), new=True, state={}) for _ in shape[1:]]
        shard = PickledCall(Global(_PLACEMENTS, "Shard"), new=True, state={"dim": 0})
        order = PickledCall(Global(_SPEC, "ShardOrderEntry"), (0, (len(shape) - 1,)), new=True)
        return cls(rank, place, made, (*replicate, shard), order, {storage: struct.pack(f"<{ranks}i", *range(ranks))})


def local_of(shape: Shape, at: int, ways: int) -> Shape:
    """The shape of a part, as torch.chunk cuts dim 0."""
    each = -(-shape[0] // ways)
    return (min(each, max(0, shape[0] - at * each)), *shape[1:])


def dtensor(local: TensorRef, shape: Shape, mesh: Mesh) -> PickledCall:
    """local: the rank's part. shape: of the complete tensor."""
    dtype = TorchDType(local.storage.dtype)
    layout = PickledCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    device = PickledCall(Global("torch", "device"), ("cpu",))
    meta = PickledCall(Global(_SPEC, "TensorMeta"), (Size(shape), strides(shape), dtype), new=True)
    spec = PickledCall(
        Global(_SPEC, "DTensorSpec"),
        new=True,
        state={
            "mesh": mesh.object,
            "placements": mesh.placements,
            "tensor_meta": meta,
            "shard_order": (mesh.order,),
            "use_strided_shard_as_shard_order": False,
            "_hash": None,
        },
    )
    args = (_DTENSOR, dtype, shape, strides(shape), 0, layout, device, False)
    return PickledCall(_REBUILD, (_WRAPPER, _DTENSOR, args, (None, {"_local_tensor": local, "_spec": spec})))


def whole_of(value: PickledCall) -> tuple[str, Shape] | None:
    """The dtype and complete shape of a DTensor."""
    args = value.args[2] if value.function == _REBUILD and value.args[0] == _WRAPPER else None
    if not isinstance(args, tuple) or not isinstance(args[1], TorchDType):
        return None
    return args[1].name, args[2]
