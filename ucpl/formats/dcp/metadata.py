"""Read `.metadata` of a DCP folder.

The tensors, their chunks, and the place of each. The file is a pickle of a few classes of
torch.distributed.checkpoint.metadata (tested with releases 2.13 and 2.15). It is read inert, without imports. `chunks`
reads the headers in the chunks' own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import DTYPES, Global, PickledCall, Size, TorchDType
from ucpl.files.inert import PICKLE_BYTES_MAX
from ucpl.files.pickle_runs import Form, Irregular, PickleRuns, Run, ValuesOf, find_runs
from ucpl.files.pickles import load_pickle
from ucpl.files.skipping import skips_optimizer
from ucpl.files.texts import check_inside, read_small
from ucpl.files.values import Value
from ucpl.formats.dcp.places import ByteRange, Numbers, Places, Shape, StoredChunk
from ucpl.records import define, frozen
from ucpl.texts import is_text

__all__ = ["ENVELOPE", "METADATA", "StoredChunk", "Metadata", "ByteRange", "Step", "ChunkedTensor", "read_metadata"]

METADATA = ".metadata"
ENVELOPE = ("ucpl", "envelope")  # key of a run's values that have no place in a state dict
Step = str | int
_MODULE = "torch.distributed.checkpoint"
# Records of the same fields under other modules: Megatron-Core 0.15's own, with fields more, torch's own before DCP had one,
# and OLMo-core's.
_ALIKE = frozenset(
    {
        ("Metadata", Global("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")),
        ("TensorProperties", Global("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties")),
        ("_StorageInfo", Global("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo")),
    }
)
STEPS_MAX = 100  # of dicts and lists in each other


@frozen
class ChunkedTensor:
    """A tensor: its complete shape, and its non-empty chunks by begin."""

    dtype: str
    shape: Shape
    chunks: Sequence[StoredChunk]
    empty: tuple[
        StoredChunk, ...
    ] = ()  # boxes without elements, of ranks that have nothing, which have a place all the same


@define
class Metadata:
    """Contents of a folder's `.metadata`, under its own names.

    paths: the keys of nested dicts and lists from which each name was made.
    """

    tensors: dict[str, ChunkedTensor] = field(factory=dict)
    objects: dict[str, ByteRange] = field(factory=dict)  # values that are no tensors
    paths: dict[str, tuple[Step, ...]] = field(factory=dict)  # in the order of the first rank's state dict
    files: tuple[str, ...] = ()
    # Shapes of tensors that Megatron-Core up to 0.13 saved as runs of each rank's flattened part.
    runs_of: dict[str, Shape] = field(factory=dict)
    archives: dict[str, Sequence[tuple[int, int]]] = field(
        factory=dict
    )  # file -> where its archives begin, and their bytes
    described: dict[str, str] = field(factory=dict)  # name -> the file that describes it, where that is another one

    def without(self, gone: Callable[[str], bool]) -> Metadata:
        """The same without names that are not read."""
        return evolve(
            self,
            tensors={name: one for name, one in self.tensors.items() if not gone(name)},
            objects={name: one for name, one in self.objects.items() if not gone(name)},
            paths={name: one for name, one in self.paths.items() if not gone(name)},
        )

    def renamed(self, paths: dict[str, tuple[Step, ...]]) -> Metadata:
        """The same with other paths, and the names that follow from them."""
        names = {name: ".".join(map(str, steps)) for name, steps in paths.items()}
        return evolve(
            self,
            tensors={names[name]: one for name, one in self.tensors.items()},
            objects={names[name]: one for name, one in self.objects.items()},
            paths={names[name]: steps for name, steps in paths.items()},
            runs_of={names[name]: shape for name, shape in self.runs_of.items()},
            described={names.get(name, name): file for name, file in self.described.items()},
        )

    def describes(self, name: str) -> str:
        """The file that describes a value, relative to the folder."""
        return self.described.get(name, METADATA)


def read_metadata(root: Path) -> Metadata:
    """Read and check `.metadata`.

    Raises: UcplError E400, E420-E427, E455, E520 if it contradicts itself, E452 for a missing file.
    """
    path = root / METADATA
    raw = read_small(path, PICKLE_BYTES_MAX)
    if raw is None:
        fail("E425", f"{METADATA} has more than {PICKLE_BYTES_MAX} bytes", Label(str(path)))
    runs = find_runs(raw, (_CHUNK, _PLACE))
    if runs.at:
        try:
            return _read(root, raw, runs)
        except (UcplError, Irregular, UnicodeDecodeError):
            pass  # the reading of single values says the error
    return _read(root, raw, None)


def _read(root: Path, raw: bytes, runs: PickleRuns | None) -> Metadata:
    """Read all of it.

    runs: of records that are read at once. Raises: Irregular, UnicodeDecodeError, if they cannot be.
    """
    path = root / METADATA
    top = _fields(Value(path, METADATA, (), load_pickle(raw, METADATA, runs=runs).value), "Metadata")
    places = _places(top.at("storage_data"), runs)
    out = Metadata(paths=dict(_paths(top.find("planner_data"))))
    for name, value in top.at("state_dict_metadata").named():
        if _is(value, "BytesStorageMetadata"):
            out.objects[name] = _only_place(name, places.get(name, {}), path)
        else:
            out.tensors[name] = _stored(name, value, places, path, runs)
        out.paths.setdefault(name, (name,))
    if runs is not None:
        runs.demand_all_met()
    unknown = next((name for name in places if name not in out.tensors and name not in out.objects), None)
    if unknown is not None:
        fail(
            "E520",
            f"{METADATA} has a place of `{unknown}`, but no description",
            Label(str(path), "stored", where=f"storage_data/{unknown}"),
            Label(str(path), "is not described", where=f"state_dict_metadata/{unknown}"),
        )
    out.paths = {name: steps for name, steps in out.paths.items() if name in out.tensors or name in out.objects}
    _check_tree(out.paths, path)
    _check_files(root, places, out)
    out.runs_of = dict(_runs_of(top.find("mcore_data"), out.tensors))
    out.archives = _archives(places, path)
    return out


# ---- records of the pickle -------------------------------------------------------------------------------------------


def _is(value: Value, name: str) -> bool:
    held = value.held
    return isinstance(held, PickledCall) and isinstance(held.function, Global) and _is_class(name, held.function)


def _is_class(name: str, held: Global) -> bool:
    return (held.name == name and held.module.startswith(_MODULE)) or (name, held) in _ALIKE


_CHUNK = Form(partial(_is_class, "ChunkStorageMetadata"), (("offsets", "shape"), ("sizes", "shape")))
_CHUNK_CLASS = Global(f"{_MODULE}.metadata", "ChunkStorageMetadata")
_PLACE = Form(
    partial(_is_class, "MetadataIndex"),
    (("fqn", "text"), ("index", "number"), ("offset", "shape")),
    Form(partial(_is_class, "_StorageInfo"), (("relative_path", "text"), ("offset", "count"), ("length", "count"))),
)


def _fields(value: Value, name: str) -> Value:
    """The attributes of an object of a class of DCP's."""
    if not _is(value, name) or not isinstance(value.held, PickledCall):
        value.wrong(f"an object of {name}")
    state = value.held.state
    return Value(value.path, value.file, value.key, {} if state is None else state, value.code)


def _paths(value: Value | None) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """The path of each name, from the default planner's data.

    If it is absent, only the names are known.
    """
    if value is None or type(value.held) is not dict:
        return
    for name, steps in value.named():
        found = [item.held for item in steps.items()]
        if len(found) > STEPS_MAX:
            steps.wrong(f"a path of at most {STEPS_MAX} steps")
        if not found or not all(type(step) is int or (isinstance(step, str) and is_text(step)) for step in found):
            steps.wrong("a path of texts and numbers")
        yield name, tuple(step for step in found if isinstance(step, str | int))


def _runs_of(value: Value | None, tensors: dict[str, ChunkedTensor]) -> Iterator[tuple[str, Shape]]:
    """Tensor -> its shape, if `.metadata` has runs of it."""
    if value is None:
        return
    for name, said in value.named():
        shape = said.find("nd_reformulated_orig_global_shape")
        if shape is None or shape.held is None or name not in tensors:
            continue
        whole, stored = shape.shape(), tensors[name].shape
        grid = stored[:-1]
        fits = len(grid) == len(whole) and all(n and size % n == 0 for size, n in zip(whole, grid, strict=True))
        if not fits or _product(whole) != _product(stored):
            shape.wrong(
                f"a shape of as many elements as {list(stored)}, whose dims the first {len(grid)} of these divide"
            )
        yield name, whole


def _product(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _places(value: Value, runs: PickleRuns | None) -> Mapping[str, dict[Shape | None, ByteRange]]:
    """Places by name and begin (None: a value that is no tensor)."""
    out: dict[str, dict[Shape | None, ByteRange]] = {}
    pairs: list[Run] = []
    for index, held in value.mapping().items():
        if runs is not None and isinstance(index, Run):
            if not isinstance(held, ValuesOf) or held.run is not index or index.form is not _PLACE:
                raise Irregular
            runs.met(index)
            pairs.append(index)
            continue
        said = _fields(Value(value.path, value.file, value.key, index, value.code), "MetadataIndex")
        name, begins = said.at("fqn").text(), said.find("offset")
        stored = Value(value.path, value.file, (*value.key, name), held, value.code)
        info = _fields(stored, "_StorageInfo")
        if (changed := info.find("transform_descriptors")) is not None and changed.held:
            fail(
                "E457",
                f"`{name}` is stored through {changed.held!r:.60}, which is not read",
                Label(str(value.path), where=f"storage_data/{name}"),
                remedy="save it without stream extensions",
            )
        place = ByteRange(info.at("relative_path").text(), info.at("offset").whole(), info.at("length").whole())
        offset = None if begins is None else begins.shape()
        if out.setdefault(name, {}).setdefault(offset, place) != place:
            stored.wrong("one place for a chunk")
    if runs is None or not pairs:
        return out
    made = Places.of(runs, pairs, out)
    if not all(map(is_text, made.names)):
        raise Irregular
    return made


def _only_place(name: str, places: dict[Shape | None, ByteRange], path: Path) -> ByteRange:
    if len(places) != 1:
        _lacks(name, "a value that is no tensor", f"{len(places)} places", path)
    return next(iter(places.values()))


def _stored(
    name: str, value: Value, by_name: Mapping[str, dict[Shape | None, ByteRange]], path: Path, runs: PickleRuns | None
) -> ChunkedTensor:
    said = _fields(value, "TensorStorageMetadata")
    properties = said.at("properties")
    held = _fields(properties, "TensorProperties")
    if not held.held and isinstance(properties.held, PickledCall):  # made by a call, as ucpl writes it
        held = Value(held.path, held.file, held.key, properties.held.args, held.code)
    dtype = held.items()[0] if held.held else held
    if not isinstance(dtype.held, TorchDType) or dtype.held.name not in DTYPES:
        dtype.wrong("a dtype")
    shape = said.at("size").shape()
    listed = said.at("chunks")
    if runs is not None and isinstance(listed.held, list) and any(isinstance(item, Run) for item in listed.held):
        columns = _columns(listed, runs, len(shape))
        made = by_name.boxes(name, shape, *columns) if isinstance(by_name, Places) and columns is not None else None
        if made is not None:
            return ChunkedTensor(dtype.held.name, shape, made)
        listed = evolve(listed, held=list(_singly(listed.held)))
    places = by_name.get(name, {})
    chunks: dict[Shape, StoredChunk] = {}
    empty: dict[Shape, StoredChunk] = {}
    for chunk in listed.items():
        box = _fields(chunk, "ChunkStorageMetadata")
        offset, size = box.at("offsets").shape(), box.at("sizes").shape()
        if len(offset) != len(shape) or len(size) != len(shape):
            chunk.wrong(f"a box of {len(shape)} dims")
        if any(o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
            chunk.wrong(f"a box within {list(shape)}")
        place = places.get(offset) or (places.get(None) if not shape else None)
        if place is None and 0 not in size:
            _lacks(name, f"a chunk at {list(offset)}", "no place for it", path)
        if 0 not in size and offset in chunks:
            chunk.wrong("a box that begins where no other does")
        if place is not None:
            (empty if 0 in size else chunks)[offset] = StoredChunk(offset, size, place)
    extra = next((o for o in places if o is not None and o not in chunks and o not in empty), None)
    if extra is not None:
        _lacks(name, "no chunk there", f"a place of one at {list(extra)}", path)
    alone = tuple(chunk for offset, chunk in empty.items() if offset not in chunks)
    return ChunkedTensor(dtype.held.name, shape, tuple(chunks[o] for o in sorted(chunks)), alone)


def _columns(listed: Value, runs: PickleRuns, dims: int) -> tuple[Numbers, Numbers] | None:
    """Begins and shapes of chunks, in runs and between them."""
    found: list[tuple[Numbers, Numbers]] = []
    for item in listed.items():
        if isinstance(run := item.held, Run):
            if run.form is not _CHUNK:
                raise Irregular
            runs.met(run)
            found.append((run.shapes("offsets"), run.shapes("sizes")))
        else:
            box = _fields(item, "ChunkStorageMetadata")
            offset, size = box.at("offsets").shape(), box.at("sizes").shape()
            found.append((np.array([offset], np.int64), np.array([size], np.int64)))
    if any(column.shape[1] != dims for both in found for column in both):
        return None
    return np.concatenate([offset for offset, _ in found]), np.concatenate([size for _, size in found])


def _singly(listed: list[object]) -> Iterator[object]:
    """Chunks of a list as the pickle has them, each an object."""
    for item in listed:
        if isinstance(item, Run):
            for offset, size in zip(item.shapes("offsets").tolist(), item.shapes("sizes").tolist(), strict=True):
                yield PickledCall(_CHUNK_CLASS, new=True, state={"offsets": Size(offset), "sizes": Size(size)})
        else:
            yield item


def _lacks(name: str, described: str, stored: str, path: Path) -> NoReturn:
    fail(
        "E520",
        f"{METADATA} contradicts itself about `{name}`: {described}, and {stored}",
        Label(str(path), described, where=f"state_dict_metadata/{name}"),
        Label(str(path), stored, where=f"storage_data/{name}"),
    )


def _check_tree(paths: dict[str, tuple[Step, ...]], path: Path) -> None:
    """Check that names equal their paths, and values are leaves.

    A value at the path of a dict would be lost. Raises: UcplError E520.
    """
    dicts: dict[tuple[Step, ...], str] = {}
    for name, steps in paths.items():
        text = ".".join(map(str, steps))
        if text != name:
            fail(
                "E520",
                f"{METADATA} gives `{name}` the path `{text}` in the state dict, but a value's name is its path",
                Label(str(path), text, where=f"planner_data/{name}"),
            )
        for n in range(1, len(steps)):
            dicts.setdefault(steps[:n], name)
    for name, steps in paths.items():
        if steps in dicts:
            _clash(name, dicts[steps], ".".join(map(str, steps)), path)


def _clash(one: str, other: str, text: str, path: Path) -> NoReturn:
    fail(
        "E520",
        f"{METADATA} has two values at `{text}` of the state dict: `{one}` and `{other}`",
        Label(str(path), where=f"planner_data/{one}"),
        Label(str(path), where=f"planner_data/{other}"),
    )


def _archives(places: Mapping[str, dict[Shape | None, ByteRange]], path: Path) -> dict[str, Sequence[tuple[int, int]]]:
    """Byte ranges of values in each file.

    Raises: UcplError E520 if two ranges overlap.
    """
    if isinstance(places, Places):
        return places.archives()
    found: dict[str, list[tuple[int, int, str]]] = {}
    for name, held in places.items():
        for place in held.values():
            assert place.size is not None  # as `.metadata` says of each
            found.setdefault(place.file, []).append((place.start, place.size, name))
    for file, runs in found.items():
        runs.sort()
        for (start, size, one), (begin, _, other) in pairwise(runs):
            if begin < start + size:
                fail(
                    "E520",
                    f"{METADATA} has `{one}` at bytes {start} to {start + size} of {file}, and `{other}` from {begin} on",
                    Label(str(path), f"{size} bytes", where=f"storage_data/{one}"),
                    Label(str(path), f"from byte {begin}", where=f"storage_data/{other}"),
                )
    return {file: tuple((start, size) for start, size, _ in runs) for file, runs in found.items()}


def _check_files(root: Path, places: Mapping[str, dict[Shape | None, ByteRange]], out: Metadata) -> None:
    """Every file is below the folder and there. Raises: UcplError E393, E452."""
    needed: dict[str, str] = {}
    if isinstance(places, Places):
        needed = places.needed()
    else:
        for name, found in places.items():
            for place in found.values():
                needed.setdefault(place.file, name)
    check_inside(root, needed)
    for file, name in list(needed.items()):
        if not (root / file).is_file():
            if skips_optimizer():  # it may have nothing else; where it has weights, who reads them misses it
                del needed[file]
                continue
            count = sum(any(p.file == file for p in found.values()) for found in places.values())
            fail(
                "E452",
                f"{file} is missing: {METADATA} has {count} {'entries' if count > 1 else 'entry'} in it",
                Label(str(root / file), "not there"),
                Label(str(root / METADATA), "is named here", where=f"storage_data/{name}"),
            )
    out.files = (METADATA, *sorted(needed))
