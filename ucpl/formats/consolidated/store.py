"""Meta's weights: consolidated.NN.pth, a file for each model-parallel rank.

    consolidated.00.pth, consolidated.01.pth, ...      {name: part of a tensor}
    consolidated.safetensors                           Mistral's, one rank
    params.json                                        sizes of the model

Parts are those of fairscale's layers in Meta's code (llama 2 and 3, model.py): ColumnParallelLinear has rows, RowParallelLinear
columns, norms are on every rank. tok_embeddings is cut by rows in Llama 3 (VocabParallelEmbedding), before by columns
(ParallelEmbedding). specs/meta.ucpl has the same rule.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, NamedTensor, Setting, StoredTensor, Structure, TensorRef, TrainState, key_text
from ucpl.extents.account import NotRead
from ucpl.files.carrying import Storages
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands, NamePatterns
from ucpl.files.header_watch import watched
from ucpl.files.model_texts import TEXTS, carried_files, read_texts
from ucpl.files.safetensors_files import read_safetensors_file
from ucpl.files.torch_files import read_torch_file
from ucpl.formats.consolidated.params import PARAMS, config_made, written
from ucpl.formats.leaving import EMPTY, empty_tensors
from ucpl.records import define
from ucpl.texts import Json

__all__ = ["Meta", "config_of", "ranks_in"]

NAME = "consolidated"
SAFETENSORS = "consolidated.safetensors"
_RANK = re.compile(r"consolidated\.(\d{2,})\.pth")
_OF_MODELS = re.compile(r"(?:model|pytorch_model)\b.*\.(?:safetensors|bin)")  # of transformers, next to Mistral's
_ROWS = re.compile(r"(?:.*\.)?(?:wq|wk|wv|w1|w3)\.weight|output\.weight")
_COLUMNS = re.compile(r"(?:.*\.)?(?:wo|w2)\.weight")
_EMBEDDINGS = "tok_embeddings.weight"
_FLOATS = ("f", "bf")
_FREQUENCIES = "rope.freqs"  # of Llama 1 and 2; Meta's code computes it, and loads with strict=False


class Meta:
    name = NAME
    demands = Demands(
        names=NamePatterns(
            patterns=(r"^tok_embeddings\.weight$", r"^layers\.[0-9]+\.(attention|feed_forward)\.w[a-z0-9]+\.weight$"),
            of=(NAME,),
            code="E449",
            says="no module of Meta's model has a tensor of such a name, so that its loader leaves all weights out",
        )
    )

    def recognises(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        names = os.listdir(path)
        is_alone = SAFETENSORS in names and PARAMS in names and not any(map(_OF_MODELS.fullmatch, names))
        return is_alone or any(map(_RANK.fullmatch, names))

    @watched
    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError E439, E458, E464, and errors of reading files.
        """
        return _Opened(path, ranks_in(path)).checkpoint()

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The files of a target. Raises: UcplError E471."""
        return _skeleton(targets, source)


def config_of(folder: Path) -> dict[str, Json] | None:
    """config.json for the weights of such a folder."""

    def shapes() -> Mapping[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in Meta().open(folder).state.tensors}

    return config_made(folder, shapes) if Meta().recognises(folder) else None


def ranks_in(folder: Path) -> tuple[str, ...]:
    """Names of the files with weights, by rank.

    Raises: UcplError E400, E458 if the file of a rank is missing.
    """
    names = sorted((name for name in os.listdir(folder) if _RANK.fullmatch(name)), key=lambda name: (len(name), name))
    numbers = [int(name.split(".")[1]) for name in names]
    lacking = next((n for n, number in enumerate(numbers) if number != n), None)
    if lacking is not None:
        fail(
            "E458",
            f"consolidated.{lacking:02}.pth is missing: {names[-1]} is there",
            Label(str(folder / f"consolidated.{lacking:02}.pth"), "not there"),
        )
    return tuple(names) or (SAFETENSORS,)


# ---- reading ---------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Opened:
    root: Path
    names: tuple[str, ...]
    not_read: list[NotRead] = field(factory=list)

    def checkpoint(self) -> Checkpoint:
        parts = [self.part(name) for name in self.names]
        self.check(parts)
        texts, left = read_texts(self.root)
        first = parts[0]
        rows = _rows_of_embeddings(parts)
        payload: dict[tuple[str, Key], Extent] = {
            (file, (name,)): one
            for file, part in zip(self.names, parts, strict=True)
            for name, one in part.items()
            if one.numel
        }
        shapes = {name: self.complete(name, [part[name] for part in parts], rows) for name in first}
        state = TrainState(
            NAME,
            tensors=tuple(
                NamedTensor(name, shape, first[name].dtype, _kind(name, first[name]), ())
                for name, shape in shapes.items()
                if prod(shape)
            ),
            settings={
                "mp": Setting(len(self.names), f"{len(self.names)} files of weights"),
                "rows": Setting(int(rows), f"the shape of {_EMBEDDINGS}"),
                "safetensors": Setting(int(self.names == (SAFETENSORS,)), "names of files"),
            },
            blobs={TEXTS: texts} | ({EMPTY: empty} if (empty := dict(_empty(shapes, first))) else {}),
        )
        return Checkpoint(
            top=self.root,
            root=self.root,
            tag=None,
            format=NAME,
            version="",
            extents=payload,
            carried_extents={},
            state=state,
            files=(*self.names, *texts),
            not_read=(*self.not_read, *left, *self.others(texts)),
        )

    def part(self, name: str) -> dict[str, Extent]:
        """The tensors of one rank's file."""
        if name == SAFETENSORS:
            return dict(read_safetensors_file(self.root, name).tensors)
        part = read_torch_file(self.root, name)
        held = part.value if isinstance(part.value, dict) else {}
        tensors = {key: one for key, one in held.items() if isinstance(key, str) and isinstance(one, TensorRef)}
        if not tensors:
            fail("E439", f"{name} has no tensors by name", Label(str(part.path)))
        self.not_read += [
            NotRead(f"{name}: {key}", "it is no tensor", kind="value") for key in held if key not in tensors
        ]
        if tensors.pop(_FREQUENCIES, None) is not None:
            why = "the model computes it, and Meta's own code does not load it"
            self.not_read.append(NotRead(f"{name}: {_FREQUENCIES}", why, kind="value"))
        return {key: part.extent((key,), one) for key, one in tensors.items()}

    def check(self, parts: list[dict[str, Extent]]) -> None:
        """Check that all ranks have the same tensors. Raises: UcplError E458."""
        for name, part in zip(self.names[1:], parts[1:], strict=True):
            if apart := sorted(part.keys() ^ parts[0].keys()):
                has, lacks = (self.names[0], name) if apart[0] in parts[0] else (name, self.names[0])
                fail(
                    "E458",
                    f"{lacks} has no `{apart[0]}`, and {has} has it: the files are of two models",
                    Label(str(self.root / lacks), where=apart[0]),
                )

    def complete(self, name: str, ranks: list[Extent], rows: bool) -> tuple[int, ...]:
        """The shape of a tensor of all ranks. Raises: UcplError E464."""
        shapes = [one.shape for one in ranks]
        dim = _dim_of(name, rows)
        if len(ranks) == 1:
            return shapes[0]
        if dim is not None and all(len(s) == 2 and s[1 - dim] == shapes[0][1 - dim] for s in shapes):
            whole = sum(s[dim] for s in shapes)
            return (whole, shapes[0][1]) if dim == 0 else (shapes[0][0], whole)
        known = {one.crc for one in ranks} - {None}
        if dim is None and len({*shapes}) == 1 and len(known) < 2:
            return shapes[0]
        fail(
            "E464",
            f"`{name}` is {', '.join(str(list(s)) for s in shapes[:4])} on model-parallel ranks, and no layer of Llama's is"
            " cut so: its place in the complete tensor is unknown",
            Label(str(self.root / self.names[0]), where=name),
            remedy=f"a layout that extends meta, with framework torch() and a line for it, such as"
            f' "{name}" = _@spread(mp) ...  as "{{name}}"; give it with --from FILE.ucpl:NAME(mp = {len(ranks)})',
        )

    def others(self, texts: Mapping[str, object]) -> Iterator[NotRead]:
        """Other files of the folder."""
        for name in sorted(os.listdir(self.root)):
            if name not in texts and name not in self.names and (self.root / name).is_file():
                why = "checksums of the source's files" if name == "checklist.chk" else "it is no file of the model"
                yield NotRead(name, why)


def _dim_of(name: str, rows: bool) -> int | None:
    """The dim that ranks cut, or None for copies."""
    if name == _EMBEDDINGS:
        return 0 if rows else 1
    return 0 if _ROWS.fullmatch(name) else 1 if _COLUMNS.fullmatch(name) else None


def _rows_of_embeddings(parts: list[dict[str, Extent]]) -> bool:
    """Test for embeddings that are cut by rows.

    A norm has the width of the model.
    """
    one, norm = parts[0].get(_EMBEDDINGS), parts[0].get("norm.weight")
    return one is None or norm is None or len(one.shape) != 2 or one.shape[1:] == norm.shape


def _kind(name: str, one: Extent) -> str:
    return "parameter" if one.dtype.startswith(_FLOATS) else "buffer"


def _empty(shapes: Mapping[str, tuple[int, ...]], of: Mapping[str, Extent]) -> Iterator[tuple[str, object]]:
    """Tensors without elements, as every reader notes them."""
    for name, shape in shapes.items():
        if not prod(shape):
            yield name, {"dtype": of[name].dtype, "shape": list(shape), "buffer": _kind(name, of[name]) == "buffer"}


# ---- writing ---------------------------------------------------------------------------------------------------------


def _demand_equal(targets: tuple[StoredTensor, ...], source: Checkpoint) -> None:
    """Check that ranks have equal parts, as fairscale's layers demand.

    A source with other parts keeps them. Raises: UcplError E471.
    """
    shapes: dict[Key, set[tuple[int, ...]]] = {}
    for target in targets:
        shapes.setdefault(target.key, set()).add(target.shape)
    apart = next((key for key, some in shapes.items() if len(some) > 1), None)
    files = {target.file for target in targets}
    own = source.state.settings.get("mp")
    if apart is not None and not (source.format == NAME and own is not None and own.value == len(files)):
        fail(
            "E471",
            f"`{key_text(apart)}` does not divide into {len(files)} equal parts, and Meta's layers are cut so",
            Label("meta", where=key_text(apart)),
            remedy="mp = 1, or a number that divides the heads, the inner size and the vocabulary",
        )


def _skeleton(targets: tuple[StoredTensor, ...], source: Checkpoint) -> Skeleton:
    files: dict[str, tuple[Storages, dict[str, TensorRef], dict[int, str]]] = {}
    for i, target in enumerate(targets):
        if len(target.key) != 1:
            where = key_text(target.key)
            fail("E471", f"a folder of Meta has no place for {where}", Label(target.file, where=where))
        storages, tree, storage_of = files.setdefault(target.file, (Storages({}), {}, {}))
        tree[str(target.key[0])] = made = storages.tensor(target.dtype, target.shape)
        storage_of[i] = made.storage.name
    for name, one in empty_tensors(source.state, source.root).items():
        for storages, tree, _ in files.values():
            tree.setdefault(name, storages.empty(one.dtype, one.shape))
    _demand_equal(targets, source)
    made_files = [
        SkeletonFile(file, tree, "safetensors", {"format": "pt"}, storage_of)
        if file.endswith(".safetensors")
        else SkeletonFile(file, tree, storage_of=storage_of)
        for file, (_, tree, storage_of) in files.items()
    ]
    texts = written(source, targets)
    raw = [
        SkeletonFile(name, held, "bytes")
        for name, held in carried_files(source).items()
        if isinstance(held, bytes) and name not in texts.left
    ]
    return Skeleton("", (*made_files, *raw), texts=dict(texts.texts))
