"""The tensors of a rank as files of a layout.

If several ranks have the same file, each of them saves a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import torch

from ucpl.conversion.planning import Asked, closed_text
from ucpl.conversion.requests import Given
from ucpl.conversion.share import shares_of
from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Key, StoredTensor, key_text
from ucpl.files.safetensors_files import layout_safetensors_file
from ucpl.live.tensors import plain, unreadable
from ucpl.placement import locate
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.vault.files import ToSave, cut, text_file, torch_file
from ucpl.vault.value_trees import dtype_name, nested

if TYPE_CHECKING:
    from collections.abc import Collection

    from ucpl.layout import Layout

__all__ = ["LayoutWriter", "get_holders"]

LAYOUT = "ucpl/layout.ucpl"


@frozen(eq=False)
class LayoutWriter:
    """One rank's tensors by keys, and its part of each file."""

    call: str
    rank: int
    wanted: Mapping[str, StoredTensor]  # by the key as people write it
    holders: Mapping[str, tuple[int, ...]]  # of each file of this rank: all ranks that have it
    text: str  # the closed layout, which the first rank saves

    @classmethod
    def of(cls, call: str, rank: int) -> LayoutWriter:
        """The keys of one rank.

        Raises: UcplError E640, E693, and all errors of planning.
        """
        shares = shares_of(Asked(call, call), Given(), checked=True)
        here = shares.source
        if not format_named(here.layout.framework).is_of_a_spec:
            what = f"{call} is a layout of {here.layout.framework}(), whose files contain more than tensors by keys"
            remedy = "give a layout of framework torch(), or the engine or module itself"
            fail("E693", what, Label(call), remedy=remedy)
        wanted: dict[str, StoredTensor] = {}
        for tensor in shares.of(rank).plan.targets:
            text = key_text(tensor.key)
            if text in wanted:
                what = f"two tensors of a rank have the key {text}, in {wanted[text].file} and {tensor.file}"
                fail("E640", what, Label(tensor.file, where=text))
            wanted[text] = tensor
        mine = {tensor.file for tensor in wanted.values()}
        return cls(call, rank, wanted, get_holders(here.layout, mine), closed_text(here))

    def files(self, what: object) -> list[ToSave]:
        """Raises: UcplError E640, E693."""
        if not isinstance(what, Mapping):
            fail("E693", f"{self.call} is a layout: give a dict of tensors by its keys", Label(self.call))
        strange = next((key for key in what if not isinstance(key, str)), None)
        if strange is not None:
            fail("E693", f"{strange!a} is not a key: keys are strings", Label(self.call))
        for text in sorted(self.wanted.keys() ^ what.keys()):
            expected = "it is missing" if text in self.wanted else "the layout has no such tensor on this rank"
            fail("E640", f"{text} of {self.call}: {expected}", Label(self.call, where=text))
        by_file: dict[str, dict[Key, torch.Tensor]] = {}
        for text, stored in self.wanted.items():
            given = what[text]
            if why := unreadable(given):
                fail("E693", f"{text} is {why}", Label(stored.file, where=text))
            local = plain(given)
            found = f"{list(local.shape)} of {dtype_name(local, text)}"
            if found != (expected := f"{list(stored.shape)} of {stored.dtype}"):
                fail("E640", f"{text} is {found}, the layout says {expected}", Label(stored.file, where=text))
            by_file.setdefault(stored.file, {})[stored.key] = local
        return self._laid(by_file)

    def foreseen(self) -> list[tuple[ToSave, dict[str, StoredTensor]]]:
        """The files of `files`, with tensors that have no bytes.

        And for each file its tensors by storage.
        """
        by_file: dict[str, dict[Key, torch.Tensor]] = {}
        known: dict[str, dict[str, StoredTensor]] = {}
        for stored in self.wanted.values():
            bare = torch.empty(stored.shape, dtype=getattr(torch, DTYPES[stored.dtype].torch), device="meta")
            mine = by_file.setdefault(stored.file, {})
            known.setdefault(stored.file, {})[_storage_name(stored, len(mine))] = stored
            mine[stored.key] = bare
        return [(file, known.get(file.name, {})) for file in self._laid(by_file)]

    def _laid(self, by_file: Mapping[str, Mapping[Key, torch.Tensor]]) -> list[ToSave]:
        files = []
        for name, tensors in by_file.items():
            among = self.holders[name]
            whole = _safetensors(name, tensors) if _is_safetensors(name) else None
            files.append(cut(whole or torch_file(name, nested(tensors, name)), among.index(self.rank), len(among)))
        if self.rank == 0 and self.text:
            files.append(text_file(LAYOUT, self.text.encode()))
        return files


def get_holders(layout: Layout, files: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """The ranks that have each file (or each of `files`), ascending."""
    found: dict[str, list[int]] = {}
    for rank in range(max(1, layout.ranks)):
        for name in sorted({home.file for part in locate(layout, rank=rank).parts for home in part.homes}):
            if files is None or name in files:
                found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def _is_safetensors(name: str) -> bool:
    return PurePosixPath(name).suffix == ".safetensors"


def _storage_name(tensor: StoredTensor, number: int) -> str:
    """The storage name of a tensor in `ToSave.tensors`.

    In safetensors it is the key, else the number.
    """
    return key_text(tensor.key) if _is_safetensors(tensor.file) else str(number)


def _safetensors(name: str, tensors: Mapping[Key, torch.Tensor]) -> ToSave:
    named = {key_text(key): tensor for key, tensor in tensors.items()}
    tensors_of = [(key, dtype_name(tensor, key), tuple(tensor.shape)) for key, tensor in named.items()]
    plan = layout_safetensors_file(tensors_of, {"format": "pt"})
    places = tuple((at, key, named[key]) for key, (at, size) in plan.storages.items() if size)
    return ToSave(name, plan.size, tuple(plan.fixed), places)
