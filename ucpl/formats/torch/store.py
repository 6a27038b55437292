"""Files that only a spec describes: tensors at keys, without metadata.

A target's file is a nested dict made of the keys; it is a safetensors file if its name ends so, otherwise one of
torch.save. A source is the files that the spec names, each in its own form. `framework torch(tracker = "latest.txt",
step = "release")` also writes a small text. config.json and similar files are copied, so that sizes are found on the
way back.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, StoredTensor, Structure, TensorRef, key_text
from ucpl.files.carrying import Place, Storages
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.model_texts import carried_texts
from ucpl.files.pickles import unsafe_globals
from ucpl.formats.named_files import NAME, Values
from ucpl.records import define, frozen

__all__ = ["Generic"]


class Generic:
    name = NAME
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Return False: only a spec describes such a folder, for `open_files`."""
        return False

    def open(self, path: Path) -> Checkpoint:
        """Raise UcplError E435: a path alone does not describe its files."""
        fail("E435", f"{path} says nothing of itself: a spec of framework torch() does", Label(str(path)))

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """Files as the keys say. Raises: UcplError E392."""
        by_file: dict[str, list[int]] = {}
        for t, target in enumerate(targets):
            by_file.setdefault(target.file, []).append(t)
        beside: dict[str, list[tuple[Key, object]]] = {}
        values = Values(source.root)
        for way in (w for blob in structure.blobs for w in blob.ways):
            value = values.at(way.source_file, way.source_key)
            beside.setdefault(way.file, []).append((way.key, value))
        names = dict.fromkeys([*by_file, *beside])
        files = tuple(
            _written(path, (by_file.get(path, []), targets), (beside.get(path, []), values.extents)) for path in names
        )
        texts = carried_texts(source)
        tracker = structure.settings.get("tracker")
        if tracker:
            if str(tracker) in {*names, *texts}:
                fail(
                    "E507",
                    f"the tracker `{tracker}` is another file of the target, too",
                    Label("<target>", where=f'tracker = "{tracker}"'),
                    remedy='tracker = "latest.txt", or another name that no file of the target has',
                )
            texts[str(tracker)] = f"{structure.settings.get('step', '')}\n"
        held = [value for found in beside.values() for _, value in found]
        unsafe = tuple(sorted({name for value in held for name in unsafe_globals(value)}))
        return Skeleton(folder="", files=files, texts=texts, unsafe_globals=unsafe)


# ---- writing ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Held:
    """A value that is copied as it is.

    Its dicts are no steps of keys.
    """

    value: object


@define
class _Tree:
    """Nested dicts under construction.

    A dict whose keys count from 0 becomes a list; a value without a key is the file.
    """

    file: str
    top: dict[str | int, object] = field(factory=dict)
    bare: TensorRef | _Held | None = None

    def put(self, key: Key, value: TensorRef | _Held) -> None:
        if self.bare is not None or (not key and self.top):
            self.clash(key)
        if not key:
            self.bare = value
            return
        node = self.top
        for step in key[:-1]:
            inner = node.setdefault(step, {})
            if not isinstance(inner, dict):
                self.clash(key)
            node = inner
        if key[-1] in node:
            self.clash(key)
        node[key[-1]] = value

    def clash(self, key: Key) -> NoReturn:
        fail(
            "E392",
            f"{key_text(key) or 'all'} of {self.file} is a tensor or a blob, and something else, too",
            Label(self.file, where=key_text(key)),
        )


def _settled(value: object) -> object:
    if isinstance(value, _Held):
        return value.value
    if not isinstance(value, dict):
        return value
    if value and set(value) == set(range(len(value))):
        return [_settled(value[i]) for i in range(len(value))]
    return {key: _settled(item) for key, item in value.items()}


def _written(
    path: str,
    tensors: tuple[list[int], tuple[StoredTensor, ...]],
    beside: tuple[list[tuple[Key, object]], dict[Place, Extent]],
) -> SkeletonFile:
    """One file of a target.

    `tensors`: its members, and all targets; `beside`: values at keys, and the tensors in them.
    """
    members, targets = tensors
    is_safetensors = PurePosixPath(path).suffix == ".safetensors"
    storages = Storages(beside[1])
    storage_of: dict[int, str] = {}
    made: dict[int, TensorRef] = {}
    tree = _Tree(path)
    flat: dict[str, TensorRef] = {}
    for t in sorted(members, key=lambda t: (targets[t].shares is not None, t)):
        target = targets[t]
        shares = target.shares if target.shares in made and not is_safetensors else None
        ref = made[shares] if shares is not None else storages.tensor(target.dtype, target.shape)
        made[t] = ref
        storage_of[t] = ref.storage.name
        if not is_safetensors:
            tree.put(target.key, ref)
        elif (name := "/".join(map(str, target.key))) in flat:
            tree.clash(target.key)
        else:
            flat[name] = ref
    if is_safetensors:
        return SkeletonFile(path, flat, "safetensors", {"format": "pt"}, storage_of)
    for key, value in beside[0]:
        tree.put(key, _Held(storages.value(value)))
    value = _settled(tree.top if tree.bare is None else tree.bare)
    return SkeletonFile(path, value, storage_of=storage_of, carried=tuple(storages.carried))
