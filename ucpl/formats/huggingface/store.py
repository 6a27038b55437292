"""Hugging Face folders: config.json, and weights in safetensors files or in pickles.

Weights are in model.safetensors or pytorch_model.bin, or in shards with an index. A layout names one file,
`model.safetensors`; an option of this store cuts it into shards (`shard = "5GB"`), by sizes, at layout time. Tensors of
all shards are found under that one name, and so are those of pytorch_model.bin. If a spec names other files
(`adapter_model.safetensors`, `unet/diffusion_pytorch_model.safetensors`), these are read and written, each with the index
of its own name. Without a spec the weights of a folder, whatever their name, are found as `model.safetensors`.

Not here: the meaning of tensors, the files themselves (weight_files), and the cut into shards (writing).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import NoReturn

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import (
    DTYPES,
    Extent,
    NamedTensor,
    Setting,
    StoredTensor,
    Structure,
    TrainState,
    can_train,
    in_elements,
)
from ucpl.extents.account import NotRead
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.header_watch import ahead, watched
from ucpl.files.model_texts import (
    TEXT_BYTES_MAX,
    TEXTS,
    carried_texts,
    config_of,
    damaged_texts,
    read_texts,
    version_of,
)
from ucpl.files.texts import check_inside, is_inside, names_like, read_small
from ucpl.files.unknown import unknown_keys
from ucpl.formats.huggingface.demands import DEMANDS
from ucpl.formats.huggingface.weight_files import (
    INDEX,
    INDEX_OF_ANY,
    PICKLE,
    SHARD,
    WeightsFile,
    chosen,
    read_weights,
    twin_of,
)
from ucpl.formats.huggingface.writing import EMPTY, Shards
from ucpl.records import define

__all__ = ["FILE", "TEXTS", "HuggingFace", "carried_texts", "config_of", "read_texts"]

FILE = "model.safetensors"  # the file's name in layouts, for any number of shards
_NOT_OURS = ("DCP_SHARDING_INFO", "CUSTOM_METADATA")  # of torch's HuggingFaceStorageWriter: parts of tensors


class HuggingFace:
    name = "huggingface"
    demands = DEMANDS

    def recognises(self, path: Path) -> bool:
        """Test for a .safetensors file, or a folder with files of weights.

        Files of the folder are complete ones or shards.
        """
        if path.is_file():
            return path.suffix == ".safetensors"
        return path.is_dir() and bool(names_like(path, INDEX) or _weights_in(os.listdir(path)))

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E380-E386, and errors of reading files (E400, E430-E434).
        """
        return _Folder.of(path).checkpoint(path)

    @watched
    def open_named(self, path: Path, files: Iterable[str]) -> Checkpoint:
        """The files that a spec names, or their shards.

        A path that is a file is the one that is meant, where one is named. Raises: as `open`, E380 for one that is not
        there, and E393 for a name that leads out of the folder.
        """
        names = list(dict.fromkeys(files))
        check_inside(path, names)
        if path.is_file() and len(names) == 1:
            made = _Folder.of(path)
            made.planned = names[0]
            return made.checkpoint(path)
        root = path if path.is_dir() else path.parent
        return joined([_Folder.named(root, name).below(root, name, path) for name in names])

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """Shards of at most `shard` bytes, an index, and small files.

        Raises: UcplError E387, E392, E397.
        """
        return Shards(structure, targets, source).skeleton()


# ---- reading ---------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Folder:
    root: Path
    names: list[str]  # the weights' files
    weight_map: dict[str, str] | None  # the index: tensor -> file
    index: str = ""
    stated_size: object = None  # in the index, in bytes
    remarks: list[str] = field(factory=list)
    noted: list[str] = field(factory=list)  # which of several files and entries the folder's own loader takes
    not_read: list[NotRead] = field(factory=list)
    planned: str = FILE  # the layout's name of the weights
    found: dict[str, Extent] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)

    @classmethod
    def of(cls, path: Path) -> _Folder:
        if path.is_file():
            return cls(path.parent, [path.name], None)
        everything = sorted(os.listdir(path))
        named = _weights_in(everything)
        here = [name for name in named if (path / name).is_file()]
        choice = chosen(path, everything)
        if choice is not None:
            made = cls._taken(path, choice.file, here)
            made.noted += choice.notes
            noted = {name for name in everything for note in choice.notes if note.startswith(f"{name} is not read")}
            rest = [n for n in named if n != choice.file and n not in noted and not choice.is_index]
            made.not_read += [NotRead(name, f"it is not part of {choice.file}") for name in rest]
            return made
        indexes = [name for name in everything if name.endswith(INDEX)]
        if pickled := [name for name in here if PICKLE.fullmatch(name)]:
            here = [name for name in here if name not in pickled] or pickled
        if len(indexes) > 1:
            fail("E384", f"{path} has {len(indexes)} indexes", Label(str(path), where=", ".join(indexes)))
        if indexes:
            return cls._indexed(path, indexes[0], here)
        if odd := [name for name in named if name not in here]:
            _reject_odd(path / odd[0])
        if not here:
            fail("E380", f"{path} has no weights: no .safetensors file is in it", Label(str(path)))
        if len(here) > 1 or SHARD.fullmatch(here[0]):
            cls._complete(path, here)
        made = cls(path, here, None)
        made.not_read += [NotRead(name, f"{here[0]} is read") for name in pickled if name not in here]
        return made

    @classmethod
    def _taken(cls, path: Path, file: str, here: list[str]) -> _Folder:
        """The folder of one file or index with a known name."""
        if file.endswith(INDEX_OF_ANY):
            return cls._indexed(path, file, here)
        if file not in here:
            _demand_plain(path / file)
            fail("E380", f"{file} is missing: config.json names it", Label(str(path / file), "not there"))
        return cls(path, [file], None)

    @classmethod
    def named(cls, root: Path, file: str) -> _Folder:
        """A folder's form of a file in a spec.

        Index, shards, or the file.
        """
        path = (root / file).parent
        everything = sorted(os.listdir(path)) if path.is_dir() else []
        name = PurePosixPath(file).name
        twin = twin_of(name)
        if twin and not _of_name(name, everything) and _of_name(twin, everything):
            name = twin
        here = [n for n in _weights_in(everything) if (path / n).is_file()]
        mine = [n for n in _of_name(name, everything) if n in here]
        both = [n for n in (name, name + INDEX_OF_ANY) if (path / n).is_file()]
        choice = chosen(path, both) if len(both) == 2 else None
        if choice is not None:
            made = cls._taken(path, choice.file, mine)
            made.noted += choice.notes
        elif both:
            made = cls._taken(path, both[-1], mine)
        elif mine:
            cls._complete(path, mine)
            made = cls(path, mine, None)
        else:
            _demand_plain(path / name)
            there = sorted({SHARD.sub(r"\g<stem>.\g<form>", n) for n in here})
            fail(
                "E380",
                f"{file} is missing: the spec has tensors in it",
                Label(str(path / name), "not there"),
                remedy=f'write file weights = safetensors "{there[0]}"; the folder has {", ".join(there)}'
                if there
                else "give the folder that has the weights",
            )
        made.planned = file
        return made

    def below(self, root: Path, file: str, top: Path) -> Checkpoint:
        """The checkpoint of a folder below the one that was named.

        Paths are relative to the named one.
        """
        made = self.checkpoint(top if self.root == root else self.root)
        under = PurePosixPath(file).parent
        return evolve(
            made,
            top=top,
            root=root,
            extents={place: evolve(e, file=str(under / e.file)) for place, e in made.extents.items()},
            files=tuple(str(under / name) for name in made.files),
        )

    @classmethod
    def _indexed(cls, path: Path, index: str, here: list[str]) -> _Folder:
        where = path / index
        raw = read_small(where, TEXT_BYTES_MAX)
        if raw is None:
            fail("E385", f"{index} has more than {TEXT_BYTES_MAX} bytes", Label(str(where)))
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            fail("E385", f"{index} is no JSON: {str(error)[:200]}", Label(str(where)))
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and isinstance(file, str) for name, file in weight_map.items()
        ):
            fail("E385", f"{index} has no weight_map from tensors to files", Label(str(where), where="weight_map"))
        if not weight_map:
            fail("E385", f"{index} lists no tensor", Label(str(where), where="weight_map"))
        names = sorted(set(weight_map.values()))
        for name in names:
            if not is_inside(name) or not _weights_in([PurePosixPath(name).name]):
                fail(
                    "E385",
                    f"{index} names {name[:200]!a}, which is no file of weights of the folder",
                    Label(str(where)),
                )
            if name not in here and not ("/" in name and (path / name).is_file()):
                _demand_plain(path / name)
                tensor = next(t for t, f in weight_map.items() if f == name)
                fail(
                    "E380",
                    f"{name} is missing: the index has {sum(f == name for f in weight_map.values())} tensors in it",
                    Label(str(path / name), "not there"),
                    Label(str(where), "is named here", where=tensor),
                    remedy=cls._without(path, index, weight_map, here),
                )
        metadata = value.get("metadata")
        made = cls(path, names, weight_map, index, metadata.get("total_size") if isinstance(metadata, dict) else None)
        made.not_read += [NotRead(name, f"{index} does not list it") for name in here if name not in names]
        made.not_read += unknown_keys(index, value, ("metadata", "weight_map"), by="transformers")
        made.not_read += unknown_keys(index, metadata, ("total_parameters", "total_size"), "metadata/", "transformers")
        return made

    @staticmethod
    def _without(path: Path, index: str, weight_map: dict[str, str], here: list[str]) -> str:
        """The remedy if files next to a stale index are complete."""
        sets: dict[tuple[str, str], list[str]] = {}
        here = [name for name in here if name.endswith(index.removesuffix(INDEX_OF_ANY).rpartition(".")[2])]
        for name in here:
            if (match := SHARD.fullmatch(name)) is not None:
                sets.setdefault((match["stem"], match["count"]), []).append(name)
        complete = [names for (_, count), names in sets.items() if len(names) == int(count)]
        complete += [[name] for name in here if SHARD.fullmatch(name) is None]
        for names in complete:
            try:
                known = {tensor for name in names for tensor in read_weights(path, name).tensors}
            except UcplError:
                continue
            if known.issuperset(weight_map):
                files = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
                return (
                    f"{files} {'has' if len(names) == 1 else 'have'} all {len(weight_map)} tensors that the index lists:"
                    f" the index is of another save. Take {index} away, and the files are read by their headers"
                )
        return ""

    @staticmethod
    def _complete(path: Path, here: list[str]) -> None:
        """Shards without an index: all of one set, none missing."""
        shards = [(name, SHARD.fullmatch(name)) for name in here]
        odd = [name for name, match in shards if match is None]
        sets = {(match["stem"], match["count"], match["form"]) for _, match in shards if match is not None}
        if odd or len(sets) != 1:
            fail(
                "E384",
                f"{path} has {len(here)} .safetensors files without an index that joins them",
                Label(str(path), where=", ".join(here[:6]) + (", ..." if len(here) > 6 else "")),
            )
        ((stem, count, form),) = sets
        for number in range(1, int(count) + 1):
            name = f"{stem}-{number:0{len(count)}d}-of-{count}.{form}"
            if name not in here:
                _demand_plain(path / name)
                fail("E380", f"{name} is missing", Label(str(path / name), "not there"))

    def checkpoint(self, top: Path) -> Checkpoint:
        ahead(self.root / self.names[0], [partial(read_weights, self.root, name) for name in self.names])
        parts = [self.read(name) for name in self.names]
        self.gather(parts)
        self.not_read += [one for part in parts for one in part.unread]
        texts, more = read_texts(self.root) if top.is_dir() else ({}, [])
        self.not_read += more
        self.noted += damaged_texts(texts)
        empty = {name: extent for name, extent in self.found.items() if 0 in extent.shape}
        blobs: dict[str, object] = {TEXTS: texts} if texts else {}
        if empty:
            blobs[EMPTY] = {n: {"dtype": e.dtype, "shape": list(e.shape), "buffer": True} for n, e in empty.items()}
        full = {name: extent for name, extent in self.found.items() if name not in empty} if empty else self.found
        shards = Setting(len(parts), f"files of {self.root.name}")
        return Checkpoint(
            top=top,
            root=self.root,
            tag=None,
            format="huggingface",
            version=version_of(texts),
            extents={(self.planned, (name,)): extent for name, extent in full.items()},
            carried_extents={},
            state=TrainState(
                "huggingface",
                version_of(texts),
                tensors=tuple(
                    NamedTensor(
                        name, in_elements(e.dtype, e.shape), e.dtype, "parameter" if can_train(e.dtype) else "buffer"
                    )
                    for name, e in full.items()
                ),
                aliases=self.aliases,
                settings={"shards": shards},
                blobs=blobs,
            ),
            files=(*self.names, *((self.index,) if self.index else ()), *texts),
            remarks=(*self.noted, *self.remarks),
            notes=tuple(self.noted),
            not_read=tuple(self.not_read),
        )

    def gather(self, parts: Sequence[WeightsFile]) -> None:
        """Tensors and second names of all files, compared with the index.

        Raises: UcplError E381, E382.
        """
        forms: Counter[tuple[str, tuple[int, ...]]] = Counter()
        listed = self.weight_map.keys() if self.weight_map is not None else None
        for part in parts:
            forms.update([(extent.dtype, extent.shape) for extent in part.tensors.values()])
            names = part.tensors.keys()
            if names.isdisjoint(self.found) and (listed is None or names <= listed):
                self.found |= part.tensors
                continue
            for name, extent in part.tensors.items():
                self.keep(name, extent)
        total = sum(count * prod(shape) * DTYPES[dtype].itemsize for (dtype, shape), count in forms.items())
        seconds = {alias for part in parts for alias in part.aliases}
        for name, file in (self.weight_map or {}).items():
            if name not in self.found and name in seconds:
                continue
            if name not in self.found:
                fail(
                    "E381",
                    f"{file} has no tensor {name}, where the index has it",
                    Label(str(self.root / file), "not in this file", where=name),
                    Label(str(self.root / self.index), "is listed here", where=name),
                )
            if self.found[name].file != file and all(name not in p.tensors for p in parts if p.file == file):
                self.remarks.append(f"{self.index} has {name} in {file}, it is in {self.found[name].file}")
        if isinstance(self.stated_size, int) and self.stated_size != total:
            self.remarks.append(f"{self.index} states total_size {self.stated_size}, the shards hold {total} bytes")
        for part in parts:
            self.aliases |= {alias: owner for alias, owner in part.aliases.items() if alias not in self.found}
            other = [n for n in part.metadata if n not in self.aliases]
            if other:
                self.noted.append(
                    f"__metadata__ of {part.file} is not read: {', '.join(map(ascii, sorted(other)[:6]))}"
                )

    def read(self, name: str) -> WeightsFile:
        part = read_weights(self.root, name)
        if any(word in part.metadata for word in _NOT_OURS):
            fail(
                "E386",
                f"{name} holds pieces of tensors, as torch.distributed.checkpoint saves them",
                Label(str(part.path), where="__metadata__"),
            )
        return part

    def keep(self, name: str, extent: Extent) -> None:
        stated = self.weight_map.get(name) if self.weight_map is not None else None
        other = self.found.get(name)
        if self.weight_map is not None and stated is None:
            self.remarks.append(f"{name} of {extent.file} is not listed in {self.index}: loaders may leave it out")
        if other is not None and self.weight_map is None:
            fail(
                "E382",
                f"{name} is in two files",
                Label(str(self.root / other.file), "here", where=name),
                Label(str(self.root / extent.file), "and here", where=name),
            )
        if other is not None:
            says = f"; the index has {stated}" if stated is not None else ""
            at = f"{name} is in {other.file} and in {extent.file}{says}"
            self.noted.append(f"{at}: {extent.file} is read, transformers takes the last file by name")
        self.found[name] = extent


def _weights_in(names: Iterable[str]) -> list[str]:
    """Names of files of weights: safetensors, and pickles that a loader takes."""
    return sorted(name for name in names if name.endswith(".safetensors") or PICKLE.fullmatch(name))


def _of_name(name: str, names: Iterable[str]) -> list[str]:
    """A file, its index and its shards, among names."""
    stem, _, form = name.rpartition(".")
    own = (name, name + INDEX_OF_ANY)
    return [
        n
        for n in names
        if n in own or ((m := SHARD.fullmatch(n)) is not None and (m["stem"], m["form"]) == (stem, form))
    ]


def _demand_plain(path: Path) -> None:
    """Check that a name is a file if it exists.

    Raises: UcplError E380, E400.
    """
    if os.path.lexists(path) and not path.is_file():
        _reject_odd(path)


def _reject_odd(path: Path) -> NoReturn:
    """Reject a name of weights that is no file.

    Folder, pipe or broken link.
    An emptied cache leaves broken links.
    """
    if path.is_symlink() and not os.path.exists(path):
        fail(
            "E380",
            f"{path.name} is a link to {os.readlink(path)}, which is not there",
            Label(str(path), "leads nowhere"),
            remedy="download the file again, or copy the folder with the targets of its links (`cp -rL`)",
        )
    fail("E400", f"{path.name} is no regular file", Label(str(path)), remedy="put the file there whose name it has")


def joined(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Several files' worth of one folder."""
    first = parts[0]
    if len(parts) == 1:
        return first
    read = {name for part in parts for name in part.files}
    return evolve(
        first,
        extents={place: extent for part in parts for place, extent in part.extents.items()},
        state=evolve(
            first.state,
            tensors=tuple(tensor for part in parts for tensor in part.state.tensors),
            aliases={alias: owner for part in parts for alias, owner in part.state.aliases.items()},
        ),
        files=tuple(dict.fromkeys(name for part in parts for name in part.files)),
        remarks=tuple(dict.fromkeys(text for part in parts for text in part.remarks)),
        notes=tuple(dict.fromkeys(text for part in parts for text in part.notes)),
        not_read=tuple(dict.fromkeys(one for part in parts for one in part.not_read if one.name not in read)),
    )
