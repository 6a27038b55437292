"""A small world for the runtime.

It has files of raw storages, a framework that writes torch files, and a model in plain NumPy.
"""

import zlib
from pathlib import Path

import networkx as nx
import numpy as np
from attrs import evolve, frozen

from ucpl.extents import DTYPES, Extent, Shelves, StorageRef, StoredTensor, Structure, TensorRef, TrainState
from ucpl.files.checkpoint import Carried, Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.torch_files import read_torch_file
from ucpl.planning import Plan, Runs
from ucpl.tables import MoveSide, gaps
from ucpl.tables.operations import Fill, Split, Write


class Torch:
    """A framework that writes one torch file per target file.

    Each torch file is a flat dict of the file's tensors.
    """

    name = "world"
    demands = Demands()

    def __init__(self, carried=(), unsafe=(), texts=None):
        self.carried, self.unsafe, self.texts = carried, unsafe, {"latest": "step1"} if texts is None else texts

    def recognises(self, path):
        return False

    def open(self, path):
        raise NotImplementedError  # a world is made in memory: nothing of it is opened

    def skeleton(self, structure, targets, source, tag):
        files: dict[str, list[int]] = {}
        for t, tensor in enumerate(targets):
            files.setdefault(tensor.file, []).append(t)
        found: list[SkeletonFile] = []
        for path, members in files.items():
            value: dict[str, TensorRef] = {}
            storage_of: dict[int, str] = {}
            for n, t in enumerate(members):
                tensor = targets[t]
                name = str(n) if tensor.shares is None else storage_of[tensor.shares]
                storage_of[t] = name
                value[tensor.key[0]] = reference(name, tensor)
            carried: list[Carried] = []
            if self.carried and not found:
                for extent in self.carried:
                    name = f"c{len(carried)}"
                    carried.append(Carried(extent, name))
                    value["carried " + str(extent.key[0])] = reference(name, extent)
            found.append(SkeletonFile(path, value, storage_of=storage_of, carried=tuple(carried)))
        return Skeleton(tag or "", tuple(found), self.texts, self.unsafe)


def reference(name, tensor):
    stride, step = [], 1
    for n in reversed(tensor.shape):
        stride.append(step)
        step *= n
    ref = StorageRef(name, tensor.dtype, step)
    return TensorRef(ref, 0, tuple(tensor.shape), tuple(reversed(stride)))


@frozen(eq=False)
class Stored:
    """A tensor to store, with its values as unsigned integers (bits).

    Its storage is laid out with `order` of dims.
    """

    file: str
    key: tuple
    dtype: str
    bits: np.ndarray
    order: tuple | None = None
    before: int = 0  # elements of the storage before it
    after: int = 0


def write_source(root: Path, tensors, crc=True, gaps=True) -> Checkpoint:
    """Raw files: storages one after another; gaps: bytes between them."""
    root.mkdir(parents=True, exist_ok=True)
    extents: dict = {}
    content: dict[str, bytearray] = {}
    for i, t in enumerate(tensors):
        data = content.setdefault(t.file, bytearray(b"head"))
        data += b"x" * (5 * i % 7 if gaps else 0)
        order = t.order or tuple(range(t.bits.ndim))
        laid = t.bits.transpose(order).copy(order="C")
        strides = dict(zip(order, (s // laid.itemsize for s in laid.strides), strict=True))
        pad = np.full(1, 7, laid.dtype)
        raw = pad.tobytes() * t.before + laid.tobytes() + pad.tobytes() * t.after
        extents[t.file, t.key] = Extent(
            t.file, t.key, t.dtype, t.bits.shape, tuple(strides[d] for d in range(t.bits.ndim)), t.before, str(i),
            len(data), len(raw), zlib.crc32(raw) if crc else None,
        )  # fmt: skip
        data += raw
    for name, data in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return Checkpoint(root, root, None, "world", "", extents, {}, TrainState("world"), files=tuple(content))


def stored(extent: Extent, label="") -> StoredTensor:
    return StoredTensor(extent.file, extent.key, extent.dtype, extent.shape, "weight", label or str(extent.key[0]))


def moves(kind, rows, **more) -> Runs:
    """Rows of (tensor, source, target, shape, source_offset, source_stride, target_offset, target_stride)."""
    width = max((len(r[3]) for r in rows), default=1)

    def wide(i, fill):
        return np.array([(*r[i], *([fill] * (width - len(r[i])))) for r in rows], np.int64).reshape(len(rows), width)

    def column(i, dtype):
        return np.array([r[i] for r in rows], dtype)

    return Runs(
        kind, "weight", column(0, np.int32), column(1, np.int32), column(2, np.int32), wide(3, 1), column(4, np.int64),
        wide(5, 0), column(6, np.int64), wide(7, 0), **more,
    )  # fmt: skip


def plan_of(sources, targets, *all_moves, tensors=("the tensor",)) -> Plan:
    empty = Plan(
        name="test",
        source_call="from()",
        target_call="to()",
        source=Structure("world"),
        target=Structure("world"),
        source_shelves=Shelves(()),
        target_shelves=Shelves(()),
        tensors=tuple(tensors),
        net=nx.DiGraph(),
        layout_text="layout of the test\n",
    )
    return filled(empty.of(sources=sources, targets=targets, moves=all_moves))


def filled(plan: Plan) -> Plan:
    """With a Fill of whatever nothing is moved to."""
    targets = [(t, tensor.numel) for t, tensor in enumerate(plan.targets) if tensor.shares is None]
    homes, numel = np.array(targets, np.int64).reshape(-1, 2).T
    splits = [n for n in plan.nodes if isinstance(n, Split)]
    boxes = gaps(MoveSide.concat(n.boxes for n in splits), homes, numel, plan.spaces[1])
    if len(boxes):
        (write,) = (n for n in plan.nodes if isinstance(n, Write))
        plan.net.add_edge(Fill("all", "", boxes.elements, boxes), write)
    return evolve(plan, net=plan.net)


def copies(checkpoint: Checkpoint, file_of=None) -> Plan:
    """A plan that copies each tensor unchanged to its own file.

    `file_of` optionally names the files.
    """
    extents = list(checkpoint.extents.values())
    sources = [stored(e) for e in extents]
    targets = [evolve(s, file=file_of(s) if file_of else f"to_{s.file}.pt") for s in sources]
    rows = [(i, i, i, (s.numel,), 0, (1,), 0, (1,)) for i, s in enumerate(sources)]
    return plan_of(sources, targets, moves("copy", rows), tensors=tuple(s.label for s in sources))


def bits_of(dtype: str, shape, seed: int) -> np.ndarray:
    """Different bits everywhere, NaNs and all."""
    size = DTYPES[dtype].itemsize
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, int(np.prod(shape)) * size, dtype=np.uint8)
    cell = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "V16"}[size]
    return raw.view(cell).reshape(shape)


def read_target(folder: Path, file: str) -> dict[str | int, np.ndarray]:
    """All tensors of a written torch file, as bits."""
    read = read_torch_file(folder, file)
    raw = (folder / file).read_bytes()
    found = {}
    for extent in read.extents():
        size = DTYPES[extent.dtype].itemsize
        cell = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "V16"}[size]
        flat = np.frombuffer(raw, cell, extent.numel, extent.storage_start + extent.offset * size)
        assert zlib.crc32(raw[extent.storage_start : extent.storage_start + extent.storage_bytes]) == extent.crc
        found[extent.key[0]] = flat.reshape(extent.shape)
    return found


def open_target(folder: Path, files) -> Checkpoint:
    """A written target as a checkpoint."""
    extents = {}
    for file in files:
        for extent in read_torch_file(folder, file).extents():
            extents[file, extent.key] = extent
    return Checkpoint(folder, folder, None, "world", "", extents, {}, TrainState("world"), files=tuple(files))


def remade(plan: Plan, **change) -> Plan:
    """A plan with other sources, targets or moves.

    Its texts are those of `plan_of`.
    """
    part = {name: change.get(name, getattr(plan, name)) for name in ("sources", "targets", "moves")}
    return plan_of(part["sources"], part["targets"], *part["moves"], tensors=plan.tensors)
