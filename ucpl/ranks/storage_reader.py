"""Any readable checkpoint for torch.distributed.checkpoint.

`dcp.load` into the tensors of a running job. Each tensor of the model is a list of boxes in files; DCP's own planner
selects those that a rank needs, and only those bytes are read.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from attrs import field
from numpy.typing import NDArray
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader as Base
from torch.futures import Future

from ucpl.conversion.opening import open_checkpoint
from ucpl.conversion.requests import Given, called
from ucpl.conversion.sides import source_side
from ucpl.errors import Label, UcplError, fail
from ucpl.extents import DTYPES
from ucpl.files.groups import agreed
from ucpl.live.agreement import JobRanks
from ucpl.live.tensors import (
    is_direct,
    is_inference,
    memory_of,
    overflows,
    parts_of,
    plain,
    survives,
    tensor_of,
    unwritable,
)
from ucpl.ranks.box_index import GROUPS, MODEL, STATES, CheckpointIndex, index_checkpoint, with_tensors
from ucpl.ranks.engines import KnownStates, TrainingEngine, as_kept, fill, is_engine
from ucpl.ranks.exchange import dtype_of
from ucpl.ranks.load_checks import BY_TORCH_FILE, LoadRequest, check_fit, check_tied, is_empty, tied
from ucpl.ranks.optimizer_states import make_states
from ucpl.ranks.scattered_files import Ends, check_copies, copies_differ, ends_of
from ucpl.records import define, frozen
from ucpl.runtime.reading import Reader, packed
from ucpl.runtime.sources import SourceFiles
from ucpl.storage.urls import is_url
from ucpl.storage.vaults.snapshot_folder import SCHEME, get_skipped, pin_generation

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["StorageReader", "load_into"]

BLOCK = 16 << 20  # bytes that are read at once
FETCHED = 64 << 20  # bytes of a store that are fetched at once


class _Room:
    """Bytes that are reused: the kernel clears new ones."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, size: int) -> NDArray[np.uint8]:
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size]


@frozen
class _Read:
    """Data in a plan: the vault's generation, a rank's files."""

    generation: int | None
    files: Ends = field(factory=dict)


class StorageReader(Base):
    """`dcp.load(state_dict, storage_reader=ucpl.StorageReader(PATH))` from any checkpoint.

    path: a checkpoint that `ucpl inspect` knows; `layout`, the call of a layout, if the checkpoint does not define
    it.

    model, states, groups: the job's names of its requests, with the parameter's {name}, the {state}, and the
    {group}'s number and {key}: by default {"model": ..., "optim": ...} of torch.distributed.checkpoint.state_dict.

    Raises: UcplError, exit 3, if the checkpoint is damaged; CRCs are not compared, since a rank reads its own part
    alone.
    """

    def __init__(
        self, path: str | os.PathLike[str], layout: str | None = None, *, model: str = MODEL, states: str = STATES,
        groups: str = GROUPS,
    ) -> None:  # fmt: skip
        self._names = model, states, groups
        self._layout = layout
        self._values, self._staging = _Room(), _Room()
        self._is_agreed = False  # true after all ranks compared their files
        self.bytes_read = 0
        self.generation: int | None = None  # of a vault
        self._generation: int | None = None  # of a vault without a named generation: the newest one of this rank
        self.error: Exception | None = None  # the error of opening it, for other ranks
        self._index = CheckpointIndex()
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Open a checkpoint.

        With other ranks it fails as torch's own reader does: within dcp.load, where all ranks get the error.
        """
        if checkpoint_id is None:
            return
        self.error = None
        try:
            self._open(checkpoint_id)
        except Exception as error:
            if JobRanks.of().size == 1:
                raise
            self.error = error

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> None:
        given = os.fspath(checkpoint_id)
        is_vault = given.startswith(f"{SCHEME}:")
        source = pin_generation(given) if is_vault else given
        if source != given:
            _warn(given)
        asked = called(self._layout) if self._layout is not None else None
        opened = open_checkpoint(source, asked)
        placement = source_side(opened, asked, Given()).placement
        opened = with_tensors(opened)
        self._index = index_checkpoint(opened, placement, self._names)
        # The former checkpoint ends here, and stays if this one could not be opened.
        self._checkpoint: Checkpoint = opened
        self._placement = placement
        self.generation = int(source.rpartition("@")[2]) if is_vault else None  # of a vault
        self._generation = None
        if source != given:
            self._newest, self._generation = given, self.generation

    def take_masters(self, wanted: Mapping[str, object]) -> None:
        """Use masters for weights that a job holds in a wider type.

        If the checkpoint has masters.

        wanted: the job's tensors, by the names that it asks for.
        """
        wide = set()
        for name, value in wanted.items():
            known = self._index.metadata.get(name)
            if isinstance(value, torch.Tensor) and isinstance(known, TensorStorageMetadata):
                stored = known.properties.dtype
                if value.dtype.is_floating_point and value.dtype.itemsize > stored.itemsize:
                    wide.add(name)
        if wide:
            self._index = index_checkpoint(self._checkpoint, self._placement, self._names, frozenset(wide))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(os.fspath(checkpoint_id)) or os.path.exists(checkpoint_id)

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return Metadata(dict(self._index.metadata))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: object, **__: object) -> None:
        """Files are opened when they are read.

        Raises: the error of a checkpoint that could not be opened.
        """
        if self.error is not None:
            raise self.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        is_asked = not self._is_agreed and self.generation is None and JobRanks.of().size > 1
        return replace(plan, storage_data=_Read(self._generation, ends_of(self.files()) if is_asked else {}))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Agree on one generation of a vault for all ranks.

        The oldest of the ranks' newest ones.

        Raises: UcplError E625 if ranks have different files under one name.
        """
        every = [cast("_Read", plan.storage_data) for plan in plans]
        copies_differ([one.files for one in every], str(self._checkpoint.root))
        seen = [one.generation for one in every if one.generation is not None]
        return [replace(plan, storage_data=_Read(min(seen, default=None))) for plan in plans]

    def files(self) -> dict[str, Path]:
        """Files whose headers were read, by names in their folder."""
        root = self._checkpoint.root
        return {os.path.relpath(path, root): Path(path) for path in self._checkpoint.opened}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the planner, a block at a time.

        Raises: UcplError E610, E611, E691, E692.
        """
        made = plan.storage_data  # none, of a plan that was not made by this reader
        generation = made.generation if isinstance(made, _Read) else self._generation
        if generation != self._generation and self._generation is not None:
            self._open(f"{self._newest}@{generation}")
            self._demand_all(plan, generation)
        items = [item for item in plan.items if item.storage_index in self._index.chunks]
        files = {self._index.chunks[item.storage_index].extent.file for item in items}
        sources = SourceFiles(self._checkpoint.root, sorted(files), self._checkpoint.opened)
        reader = Reader(sources, keeps=False)
        try:
            for some in self._fetched(sorted(items, key=self._place), sources):
                for item in some:
                    self._tensor(item, planner, reader, sources)
            for item in plan.items:
                if item.storage_index not in self._index.chunks:
                    self._value(item, planner)
        finally:
            sources.close()
        self.bytes_read += reader.bytes_read
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _demand_all(self, plan: LoadPlan, generation: int | None) -> None:
        """Check a generation that was not read when the plan was made.

        Raises: UcplError E692.
        """
        for item in plan.items:
            if item.storage_index not in self._index.chunks and item.storage_index.fqn not in self._index.values:
                where = item.storage_index.fqn
                what = f"{self._newest}@{generation}, which all ranks see, has no `{where}` as the newest one has it"
                fail(
                    "E692",
                    what,
                    Label(self._newest, where=where),
                    remedy="load again: ranks began while a save came to count",
                )

    def _place(self, item: ReadItem) -> tuple[str, int]:
        chunk = self._index.chunks[item.storage_index]
        return chunk.extent.file, chunk.extent.storage_start + chunk.offset

    def _fetched(self, items: list[ReadItem], sources: SourceFiles) -> Iterator[list[ReadItem]]:
        """Items in order; those of remote files in groups per fetch."""
        if not sources.is_remote:
            yield items
            return
        spans = [self._span(item) for item in items]
        sources.want(_by_file(spans))
        batch: list[int] = []
        size = 0
        for i, span in enumerate(spans):
            batch.append(i)
            size += span[2] - span[1]
            if size >= FETCHED or i + 1 == len(items):
                sources.fetch(_by_file([spans[k] for k in batch]))
                yield [items[k] for k in batch]
                batch, size = [], 0

    def _span(self, item: ReadItem) -> tuple[str, int, int]:
        """(file, first byte, byte after the last) of an item.

        No bytes, if it is no run of the file.
        """
        chunk = self._index.chunks[item.storage_index]
        size = DTYPES[chunk.extent.dtype].itemsize
        shape = tuple(item.lengths)
        steps = tuple(s * size for s in chunk.stride)
        first = sum(b * s for b, s in zip(item.storage_offsets, steps, strict=True))
        low = chunk.extent.storage_start + (chunk.extent.offset + chunk.offset) * size + first
        is_run = all(a == b or n == 1 for a, b, n in zip(steps, packed(shape, size), shape, strict=True))
        return chunk.extent.file, low, low + prod(shape) * size if is_run else low

    def _tensor(self, item: ReadItem, planner: LoadPlanner, reader: Reader, sources: SourceFiles) -> None:
        chunk, goal = self._index.chunks[item.storage_index], self._goal(item, planner)
        size = DTYPES[chunk.extent.dtype].itemsize
        shape, begins = tuple(item.lengths), tuple(item.storage_offsets)
        steps = tuple(s * size for s in chunk.stride)
        first = sum(b * s for b, s in zip(begins, steps, strict=True)) + chunk.offset * size
        position = chunk.extent.storage_start + chunk.extent.offset * size + first
        rows = max(1, BLOCK // max(1, prod(shape[1:]) * size))
        file = sources.index[chunk.extent.file]
        for low in range(0, shape[0] if shape else 1, rows):
            part = (min(rows, shape[0] - low), *shape[1:]) if shape else ()
            into, dtype = goal[low : low + part[0]] if shape else goal, dtype_of(chunk.extent.dtype)
            is_as_stored = into.dtype == dtype and is_direct(into)
            there = (
                np.asarray(memory_of(into))  # read directly into its destination
                if is_as_stored
                else self._values.of(prod(part) * size)
            )
            spread = min(BLOCK, sum((n - 1) * s for n, s in zip(part, steps, strict=True)) + size)
            at = position + (low * steps[0] if shape else 0)
            reader.gather(file, at, part, steps, there, 0, packed(part, size), size, self._staging.of(max(1, spread)))
            if not is_as_stored:
                _put(tensor_of(there, dtype, part), into, item.dest_index.fqn)
        planner.commit_tensor(item, goal)

    def _value(self, item: ReadItem, planner: LoadPlanner) -> None:
        value = self._index.values[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            raw = io.BytesIO()
            torch.save(value, raw)
            raw.seek(0)
            planner.load_bytes(item, raw)
            return
        goal = self._goal(item, planner)
        assert isinstance(value, torch.Tensor)
        _put(value, goal, item.dest_index.fqn)
        planner.commit_tensor(item, goal)

    def _goal(self, item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
        """The tensor to fill.

        Raises: UcplError E646 of one that cannot be filled.
        """
        goal, name = planner.resolve_tensor(item), item.dest_index.fqn
        if why := unwritable(goal):
            fail("E646", f"{name} of the job is {why}", Label(str(self._checkpoint.root), where=name))
        return plain(goal)


def _put(values: torch.Tensor, into: torch.Tensor, name: str) -> None:
    """Put numbers into a tensor of a job.

    Those of a floating type are rounded, all others stay. Raises: UcplError E646.
    """
    if values.dtype == into.dtype:
        into.copy_(values)
        return
    made = values.to(into.dtype)
    is_rounded = values.is_floating_point() and (made.is_floating_point() or made.is_complex())
    if overflows(values, made) or not (is_rounded or survives(values, made)):
        what = f"{name} is {into.dtype} in the job, which cannot hold the {values.dtype} of the checkpoint"
        fail("E646", what, Label("the job", where=name), remedy=f"make it {values.dtype} in the job")
    into.copy_(made)


def _by_file(spans: Iterable[tuple[str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for file, low, high in spans:
        if low < high:
            found.setdefault(file, []).append((low, high))
    return found


def load_into(
    model: torch.nn.Module | TrainingEngine,
    optimizer: object | None,
    src: str | os.PathLike[str],
    *,
    layout: str | None = None,
    rename: Callable[[str], str] | None = None,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
) -> StorageReader:
    """Fill a model and its optimizer from any checkpoint.

    Each rank fills its own part: plain, FSDP2, TP, any DTensors.

    model: or an engine of DeepSpeed, ZeRO 1 to 3, and as `optimizer` engine.optimizer; None fills weights and masters
    alone.

    src: the checkpoint; `layout`, the call of its layout, if the checkpoint does not define it. Of a vault all ranks
    read the generation that is newest to the first of them.

    rename: the checkpoint's name of a parameter of the model; by default the same.

    strict: the job has exactly the tensors of the checkpoint; False leaves the rest of both as it is. Of the
    optimizer of an engine everything is filled, in any case.

    Returns the reader, whose `bytes_read` are this rank's; of a vault, `generation` is the one that was read. Raises:
    UcplError, E646 if that does not fit.
    """
    ranks = JobRanks.of(group)
    with ranks.agreeing():
        src = os.fspath(src)
        if not (isinstance(model, torch.nn.Module) or is_engine(model)):
            raise TypeError(f"load_into() fills a module or an engine of DeepSpeed, and no {type(model).__name__}")
    asked_for = {"kind of model": "an engine" if is_engine(model) else "a module", "layout": layout, "strict": strict}
    ranks.demand_same({**asked_for, "optimizer": "none" if optimizer is None else "one"}, "load_into")
    src = _one_of_all(src, ranks)
    with ranks.agreeing():
        reader = StorageReader(src, layout)
        if reader.error is not None:
            raise reader.error
        files = reader.files() if reader.generation is None else {}
    check_copies(ranks, files, src)
    reader._is_agreed = True
    if not isinstance(model, torch.nn.Module) or is_engine(model):  # an engine is a module, too
        known = KnownStates(reader._index.metadata, reader._index.values, reader._checkpoint.state)
        fill(model, reader, known, rename or str, ranks, states=optimizer is not None, strict=strict, src=src)
        return reader
    with ranks.agreeing():
        weights = get_model_state_dict(model)
        names = {name: rename(name) if rename is not None else name for name in weights}
        asked: dict[str, object] = {f"model.{names[name]}": value for name, value in weights.items()}
        empty = frozenset(name for name, value in weights.items() if is_empty(value))
        twice = _apart(tied(weights), names, asked, frozenset(reader._index.metadata))
        # Read apart, to be compared.
        asked |= {name: torch.empty_like(cast("torch.Tensor", asked[name])) for name in twice}
        reader.take_masters(asked)
    index = reader._index.metadata
    there = check_fit(LoadRequest(asked, src=src), index, strict, ranks)
    own: _Optimizer | None = None
    with _as_before(optimizer):
        with ranks.agreeing():
            if optimizer is not None:
                _demand_own(model, cast("torch.optim.Optimizer", optimizer), src)
                own = _Optimizer.of(model, cast("torch.optim.Optimizer", optimizer), names, empty, reader, src)
        states = check_fit(own.asked(src), index, strict, ranks) if own is not None else {}
        with ranks.agreeing(in_words=True):
            found = _filled({**there, **states}, reader)
        with ranks.agreeing():
            for name, owner in twice.items():
                if name in there and owner in there:
                    pair = cast("torch.Tensor", found[name]), cast("torch.Tensor", found[owner])
                    check_tied(name.removeprefix("model."), owner.removeprefix("model."), pair, src)
            _put_weights(model, {name: found.get(f"model.{names[name]}", value) for name, value in weights.items()})
            if own is not None:
                own.put(found, reader)
    return reader


def _filled(asked: Mapping[str, object], reader: StorageReader) -> dict[str, object]:
    """Fill this rank's part in one pass over the files.

    By DCP's planner, which needs no other rank here.
    """
    found = dict(asked)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(found, reader.read_metadata())
    plan = planner.create_local_plan()
    _demand_complete(plan, found, reader)
    reader.read_data(plan, planner)
    return found


def _demand_complete(plan: LoadPlan, asked: Mapping[str, object], reader: StorageReader) -> None:
    """Check that boxes have all elements of this rank.

    Raises: UcplError E646.
    """
    read: dict[str, int] = {}
    for item in plan.items:
        read[item.dest_index.fqn] = read.get(item.dest_index.fqn, 0) + prod(item.lengths)
    for name, value in asked.items():
        if isinstance(value, torch.Tensor) and read.get(name, 0) < (mine := sum(p.numel() for p in parts_of(value))):
            what = f"the checkpoint has {read.get(name, 0)} of the {mine} elements of {name} that this rank holds"
            fail("E646", what, Label(str(reader._checkpoint.root), where=name))


@contextmanager
def _as_before(optimizer: object | None) -> Iterator[None]:
    """After an error, an optimizer that had no states has none."""
    is_new = isinstance(optimizer, torch.optim.Optimizer) and not optimizer.state
    try:
        yield
    except BaseException:
        if is_new:
            cast("torch.optim.Optimizer", optimizer).state.clear()
        raise


def _put_weights(model: torch.nn.Module, weights: dict[str, object]) -> None:
    """Weights that were made in inference mode are written in it alone."""
    is_inferred = any(isinstance(one, torch.Tensor) and is_inference(one) for one in weights.values())
    with torch.inference_mode() if is_inferred else nullcontext():
        set_model_state_dict(model, weights)  # type: ignore[arg-type]


def _demand_own(model: torch.nn.Module, optimizer: torch.optim.Optimizer, src: str) -> None:
    """Parameters of the optimizer are the model's. Raises: UcplError E646."""
    mine = set(map(id, model.parameters()))
    others = sum(id(p) not in mine for group in optimizer.param_groups for p in group["params"])
    if others:
        what = f"the optimizer holds {others} parameters that are none of the model's"
        fail("E646", what, Label(src), remedy="give the optimizer that was made with the parameters of this model")


def _apart(
    tied_names: Mapping[str, str], names: Mapping[str, str], asked: dict[str, object], index: frozenset[str]
) -> dict[str, str]:
    """Second names of one tensor of the job in the checkpoint.

    Each further one, and the first. If the checkpoint lacks a name and has the tensor by another one, the name is no
    longer requested.
    """
    groups: dict[str, list[str]] = {}
    for name, owner in tied_names.items():
        groups.setdefault(owner, [f"model.{names[owner]}"]).append(f"model.{names[name]}")
    out: dict[str, str] = {}
    for some in map(list, map(dict.fromkeys, groups.values())):
        stored = [name for name in some if name in index]
        for name in some if stored else ():
            if name not in stored:
                del asked[name]
        first, *more = stored or some
        out |= dict.fromkeys(more, first)
    return out


def _one_of_all(src: str, ranks: JobRanks) -> str:
    """The first rank's result, for all: a server may commit meanwhile."""
    if ranks.size == 1 or not any(str(one).startswith(f"{SCHEME}:") for one in ranks.all(src)):
        return src
    ranks.demand_same({"source": src}, "load_into")
    pinned = src
    if ranks.rank == 0:
        with suppress(UcplError):  # which each rank then says for itself
            pinned = pin_generation(src)
            _warn(src)
    return str(ranks.all(pinned)[0])


def _warn(src: str) -> None:
    for text in get_skipped(src):
        warnings.warn(text, stacklevel=3)


@define(eq=False)
class _Optimizer:
    """An optimizer's state in the form of torch's own state dict.

    Made here, if the optimizer has done no step.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    names: Mapping[str, str]  # the checkpoint's, of the model's parameters
    empty: frozenset[str]  # parameters without elements
    state_dict: dict[str, object]
    flat: dict[str, object]  # by the checkpoint's names

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        names: Mapping[str, str],
        empty: frozenset[str],
        reader: StorageReader,
        src: str,
    ) -> _Optimizer:
        own: dict[torch.Tensor, str] = {p: names[name] for name, p in model.named_parameters() if name in names}

        def is_stored(param: torch.Tensor, state: str) -> bool:
            return f"optim.state.{own.get(param)}.{state}" in reader._index.metadata or is_empty(param)

        make_states(model, optimizer, is_stored)
        state_dict = _state_dict_of(model, optimizer, src)
        states = cast("dict[str, dict[str, object]]", state_dict["state"])
        flat = {f"optim.state.{names[p]}.{s}": v for p, each in states.items() for s, v in each.items()}
        return cls(model, optimizer, names, empty, cast("dict[str, object]", state_dict), flat)

    @property
    def groups(self) -> list[dict[str, object]]:
        return cast("list[dict[str, object]]", self.state_dict["param_groups"])

    def asked(self, src: str) -> LoadRequest:
        trained = tuple(self.names[p] for one in self.groups for p in cast("list[str]", one["params"]))
        empty = frozenset(self.names[p] for p in self.empty)
        return LoadRequest(self.flat, trained, type(self.optimizer).__name__, src, empty)

    def put(self, found: Mapping[str, object], reader: StorageReader) -> None:
        for p, each in cast("dict[str, dict[str, object]]", self.state_dict["state"]).items():
            for s in each:
                each[s] = found.get(f"optim.state.{self.names[p]}.{s}", each[s])
        _take_groups(self.groups, self.names, self.empty, reader)
        set_optimizer_state_dict(self.model, self.optimizer, self.state_dict)  # type: ignore[arg-type]


def _state_dict_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, src: str) -> Mapping[str, object]:
    """An optimizer's state dict.

    torch makes its states by a step without gradients. Raises: UcplError E646 for LBFGS, whose step needs a closure.
    """
    is_begun = bool(optimizer.state)
    try:
        return get_optimizer_state_dict(model, optimizer)
    except TypeError:
        if is_begun:
            raise
        optimizer.state.clear()
        name = type(optimizer).__name__
        fail("E646", f"torch makes no states of {name} before its first step", Label(src), remedy=BY_TORCH_FILE)


def _take_groups(
    groups: Sequence[dict[str, object]], names: Mapping[str, str], empty: frozenset[str], reader: StorageReader
) -> None:
    """Hyper-parameters of each group's parameters in the source.

    Parameters without elements are in none.

    Raises: UcplError E482 where parameters of a group disagree.
    """
    held = [[names.get(p, p) for p in cast("list[str]", group["params"]) if p not in empty] for group in groups]
    found = agreed(reader._checkpoint.state.groups, [(str(g), tuple(members)) for g, members in enumerate(held)])
    for group, hyper in zip(groups, found, strict=True):
        for key in group:
            if hyper is not None and key != "params" and key in hyper:
                group[key] = as_kept(hyper[key], group[key])
