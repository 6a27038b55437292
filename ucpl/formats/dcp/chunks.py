"""Chunks of tensors.

Their headers, compared with `.metadata`, and a check of completeness. A chunk is an archive of torch.save inside a file
of a rank. torch 2.13 can save a tensor that it can never load: FSDP2 over TP assigns the last rows to a rank that does
not have them, and records the chunk of the rank that has them as empty. If exactly one box lacks its elements, and one
archive has elements of that shape that no box names, the two are joined.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from attrs import evolve, field

from ucpl.errors import Diagnostic, Label, fail
from ucpl.extents import Extent, TensorRef
from ucpl.files.header_watch import ahead
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.zips import ends_of, open_file
from ucpl.formats.dcp.metadata import METADATA, ByteRange, ChunkedTensor, Metadata, StoredChunk
from ucpl.records import define
from ucpl.storage.reading import hint

__all__ = ["NO_TENSOR", "Chunks", "address", "demand_whole"]

NO_TENSOR = "E455"  # of an archive that should be one

CELLS_MAX = 1 << 22  # of the grid that the edges of a tensor's boxes make

Shape = tuple[int, ...]
Key = tuple[str | int, ...]


def address(name: str, offset: Shape) -> Key:
    """The key of a chunk in layouts.

    The tensor's name, then its begin per dim.
    """
    return (name, *offset)


@define
class Chunks:
    """Archives of one folder.

    described: names whose chunks another file than `.metadata` describes.
    """

    root: Path
    described: Mapping[str, str] = field(factory=dict)
    issues: list[Diagnostic] = field(factory=list)  # issues that were corrected, for `verify`

    def metadata(self, name: str) -> Path:
        """The file that describes a tensor."""
        return self.root / self.described.get(name, METADATA)

    def archive(self, place: ByteRange) -> TorchFile:
        return read_torch_file(self.root, place.file, place.start, place.size)

    def ahead(self, metadata: Metadata) -> None:
        """Read the headers of all archives ahead, in an object store.

        Raises: UcplError E685.
        """
        chunks = (chunk for stored in metadata.tensors.values() for chunk in (*stored.chunks, *stored.empty))
        places = list(dict.fromkeys((*(chunk.place for chunk in chunks), *metadata.objects.values())))
        files: dict[str, list[ByteRange]] = {}
        for place in places:
            files.setdefault(place.file, []).append(place)
        if places:
            path = self.root / places[0].file
            ahead(path, [partial(self._ends, file, some) for file, some in files.items()])
            ahead(path, [partial(self.archive, place) for place in places])

    def _ends(self, file: str, places: list[ByteRange]) -> None:
        """Fetch the ends of archives: two neighbours meet in one range."""
        known = [(place.start, place.size) for place in places if place.size is not None and place.start >= 0]
        ends = [end for start, size in known for end in ends_of(start, size)]
        fd = open_file(self.root / file, file)
        try:
            hint(fd, ends)
        finally:
            os.close(fd)

    def tensor(self, place: ByteRange, name: str) -> tuple[TorchFile, TensorRef]:
        """The tensor that an archive is. Raises: UcplError E455."""
        part = self.archive(place)
        if not isinstance(part.value, TensorRef):
            fail(
                NO_TENSOR,
                f"{place.file}: the archive at byte {place.start} is no tensor, and `{name}` should be in it",
                Label(str(self.root / place.file), where=f"byte {place.start}"),
            )
        return part, part.value

    def extents(self, name: str, stored: ChunkedTensor) -> dict[Key, Extent]:
        """Chunks of a tensor by key.

        Raises: UcplError E521, E522, and errors of reading the archives.
        """
        found: list[tuple[StoredChunk, Extent]] = []
        lacking: list[tuple[StoredChunk, TensorRef]] = []
        for chunk in stored.chunks:
            part, tensor = self.tensor(chunk.place, name)
            if tensor.shape == chunk.shape:
                found.append((chunk, self.extent(name, chunk, part, tensor)))
            else:
                lacking.append((chunk, tensor))
        if lacking:
            found.append(self.mended(name, stored, lacking))
        for chunk, extent in found:
            if extent.dtype != stored.dtype:
                fail(
                    "E522",
                    f"`{name}` is {stored.dtype} in {METADATA}, and {extent.dtype} in {extent.file}",
                    Label(str(self.metadata(name)), stored.dtype, where=name),
                    Label(str(self.root / extent.file), extent.dtype, where=f"byte {chunk.place.start}"),
                )
        demand_whole(name, stored, self.metadata(name))
        return {extent.key: extent for _, extent in found}

    def extent(self, name: str, chunk: StoredChunk, part: TorchFile, tensor: TensorRef) -> Extent:
        """The chunk of an archive, with the archive's begin in its storage.

        All archives of a file call their storage "0".
        """
        made = part.extent(address(name, chunk.offset), tensor)
        return evolve(made, storage=f"{chunk.place.start}:{made.storage}")

    def mended(
        self, name: str, stored: ChunkedTensor, lacking: list[tuple[StoredChunk, TensorRef]]
    ) -> tuple[StoredChunk, Extent]:
        """Join the box without elements and the archive without a box.

        Raises: UcplError E522.
        """
        chunk, held = lacking[0]
        spare = [(one, *self.tensor(one.place, name)) for one in stored.empty]
        fitting = [(one, part, tensor) for one, part, tensor in spare if tensor.shape == chunk.shape]
        if len(lacking) > 1 or len(fitting) != 1 or 0 not in held.shape:
            fail(
                "E522",
                f"{METADATA} places {list(chunk.shape)} of `{name}` at {list(chunk.offset)} in {chunk.place.file},"
                f" which holds {list(held.shape)} there",
                Label(str(self.metadata(name)), f"{list(chunk.shape)} at {list(chunk.offset)}", where=name),
                Label(str(self.root / chunk.place.file), f"{list(held.shape)}", where=f"byte {chunk.place.start}"),
            )
        one, part, tensor = fitting[0]
        self.issues.append(
            Diagnostic(
                "E522",
                f"{METADATA} places {list(chunk.shape)} of `{name}` at {list(chunk.offset)} in {chunk.place.file},"
                f" which has nothing of it; the only such elements that no box names are in {one.place.file}",
                (
                    Label(str(self.root / chunk.place.file), f"{list(held.shape)}", where=f"byte {chunk.place.start}"),
                    Label(str(self.root / one.place.file), f"{list(tensor.shape)}", where=f"byte {one.place.start}"),
                ),
                remedy="convert it: the copy has all elements in their place; torch cannot load the source itself",
            )
        )
        placed = evolve(one, offset=chunk.offset, shape=chunk.shape)
        return placed, self.extent(name, placed, part, tensor)


def demand_whole(name: str, stored: ChunkedTensor, path: Path) -> None:
    """Check that the boxes cover each element once.

    path: the file that describes them. Raises: UcplError E521, E523.
    """
    shape = stored.shape
    if 0 in shape:
        return
    edges = [
        np.unique([0, n, *(e for c in stored.chunks for e in (c.offset[d], c.offset[d] + c.shape[d]))])
        for d, n in enumerate(shape)
    ]
    cells = 1
    for edge in edges:
        cells *= len(edge) - 1
    if cells > CELLS_MAX:
        fail("E523", f"`{name}` falls into more than {CELLS_MAX} cells", Label(str(path), where=name))
    count = np.zeros(tuple(len(edge) - 1 for edge in edges), dtype=np.int8)
    for c in stored.chunks:
        box = tuple(
            slice(int(np.searchsorted(edges[d], o)), int(np.searchsorted(edges[d], o + n)))
            for d, (o, n) in enumerate(zip(c.offset, c.shape, strict=True))
        )
        count[box] += 1
        if (count[box] > 1).any():  # each cell is looked at once: boxes may be many, and all as large as the tensor
            break
    if (count == 1).all():
        return
    at = tuple(int(i) for i in np.argwhere(count == count.max() if count.max() > 1 else count == 0)[0])
    element = [int(edges[d][i]) for d, i in enumerate(at)]
    holders = [
        c for c in stored.chunks if all(o <= e < o + n for o, e, n in zip(c.offset, element, c.shape, strict=True))
    ]
    what = "is in no chunk" if not holders else f"is in {len(holders)} chunks"
    places = [
        Label(
            str(_chunk_file(path, c.place.file)), f"{list(c.shape)} at {list(c.offset)}", where=f"byte {c.place.start}"
        )
        for c in holders[:2]
    ]
    fail("E521", f"element {element} of `{name}` {what}", Label(str(path), where=name), *places)


def _chunk_file(path: Path, file: str) -> Path:
    """A file of chunks, in the folder of their description."""
    return path.parent / Path(file).name if path.name == METADATA else path.parent / file
