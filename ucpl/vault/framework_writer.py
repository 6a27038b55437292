"""The state of a running job as files of its framework.

The framework itself assigns values to files: an engine of DeepSpeed through its checkpoint engine, everything else
through DCP's planner, which distributes values that several ranks have. Tensors are used in place; this module writes
nothing.

DCP's distribution is kept. If all ranks have the same tensors as at the previous save, with other values, they skip the
exchange.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Protocol, cast

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ucpl.errors import Label, UcplError, fail
from ucpl.live.agreement import JobRanks
from ucpl.live.tensors import is_placed, unreadable
from ucpl.records import define, frozen
from ucpl.storage.vaults.records import SavedValue
from ucpl.vault.files import ToSave, archives, text_file, torch_file
from ucpl.vault.value_trees import ValueTree, one_tensor, to_value_tree

__all__ = ["SaveInput", "Distributions", "files_of", "compare_input", "of_state", "ranks", "collect_input", "sizes_of"]

TOP = "/vault"  # the path that DeepSpeed gets


@frozen(eq=False)
class SaveInput:
    """The values that a rank is about to save.

    The rank collected them alone, without the other ranks.

    engine: of DeepSpeed, which all ranks query together. For everything else: the state dict, DCP's planner items for
    it, and the facts that its plans depend on; None if a value in it may describe itself in more detail.
    """

    engine: _Engine | None
    state: dict[str, object]
    planner: DefaultSavePlanner
    held: _Held | None


def collect_input(what: object) -> SaveInput:
    """The values to save.

    Raises: UcplError E693, and all errors of the framework.
    """
    planner = DefaultSavePlanner()
    if any(cls.__name__ == "DeepSpeedEngine" for cls in type(what).__mro__):
        return SaveInput(cast(_Engine, what), {}, planner, None)
    state = {
        key: value.state_dict() if not isinstance(value, torch.Tensor) and isinstance(value, Stateful) else value
        for key, value in _state_of(what).items()
    }
    planner.set_up_planner(state, None, _is_alone() or dist.get_rank() == 0)
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor) and (why := unreadable(value)):
            fail("E693", f"{name} is {why}", Label("the saved state", where=name))
    return SaveInput(None, state, planner, _held(planner))


def files_of(one: SaveInput, step: int, shares: Distributions) -> list[ToSave]:
    """The files that this rank would write. Collective. Raises: UcplError E693.

    shares: DCP's distribution of the previous save for one rank; it is updated.
    """
    return _of_engine(one.engine, step) if one.engine is not None else of_state(one, shares)


def _state_of(what: object) -> dict[str, object]:
    """The state dict, as dcp.save takes it. Raises: UcplError E693."""
    if isinstance(what, torch.nn.Module):
        what = (what, None)
    if isinstance(what, tuple) and len(what) == 2 and isinstance(what[0], torch.nn.Module):
        module, optimizer = what
        state: dict[str, object] = {"model": get_model_state_dict(module)}
        return state if optimizer is None else {**state, "optim": get_optimizer_state_dict(module, optimizer)}
    if isinstance(what, Mapping) and all(isinstance(key, str) for key in what):
        return dict(what)
    remedy = "give an engine of DeepSpeed, (module, optimizer), a state dict as for dcp.save, or the writer a layout"
    fail("E693", f"a {type(what).__name__} cannot be saved", Label("the saved state"), remedy=remedy)


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------------


class _CapturingEngine:
    """A stand-in for an engine's checkpoint engine.

    It keeps references to all values that it receives.
    """

    def __init__(self, before: object) -> None:
        self._before = before
        self.found: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._before, name)

    def save(self, state_dict: object, path: str) -> None:
        self.found[PurePosixPath(path).relative_to(TOP).as_posix()] = state_dict

    def create(self, *_: object, **__: object) -> None:
        """Nothing is written."""

    makedirs = commit = set_commit_info = create

    def is_decoupled(self) -> bool:
        """It writes `latest` itself."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """True: each tensor is saved without the rest of its storage.

        So DeepSpeed makes no clone.
        """
        return False


class _Engine(Protocol):
    """The interface of DeepSpeed's engine that is used here."""

    checkpoint_engine: object
    global_rank: int
    _copy_recovery_script: Callable[..., None]

    def save_checkpoint(self, save_dir: str, tag: str) -> object: ...


@contextmanager
def _capturing(engine: _Engine) -> Iterator[_CapturingEngine]:
    before = engine.checkpoint_engine
    engine.checkpoint_engine = captured = _CapturingEngine(before)
    engine._copy_recovery_script = _nothing  # DeepSpeed would copy a script next to its files
    try:
        yield captured
    finally:
        engine.checkpoint_engine = before
        del engine._copy_recovery_script


def _nothing(*_: object) -> None:
    """Nothing is written."""


def _of_engine(engine: _Engine, step: int) -> list[ToSave]:
    tag = f"global_step{step}"
    with _capturing(engine) as captured:
        engine.save_checkpoint(TOP, tag=tag)
    files = [torch_file(name, to_value_tree(value, name)) for name, value in captured.found.items()]
    if engine.global_rank == 0:
        files.append(text_file("latest", tag.encode()))
    return files


# ---- everything else, by DCP -------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Distribution:
    """The values that one rank writes, as DCP distributed them."""

    held: _Held | None  # the values of the rank
    plan: SavePlan
    results: list[WriteResult]  # positions of its values in its file
    laid: ToSave | None  # its file, without the tensors, which need not live as long
    places: tuple[tuple[int, str, int], ...]  # of each tensor there: byte, storage, number in the plan
    metadata: Metadata | None  # on the first rank: of all
    text: bytes  # the same, serialized


@define(eq=False)
class Distributions:
    """The distributions that are kept between saves.

    is_known: the last save used the distribution of an earlier one.
    are_named: the files list their values with positions.
    """

    known: _Distribution | None = None
    is_known: bool = False
    are_named: bool = False


class _PlanCollector(StorageWriter):
    """A storage writer that only collects the plan of one rank.

    The first rank also collects the metadata of all.
    """

    def __init__(self) -> None:
        self.file: ToSave | None = None
        self.plan = SavePlan([])
        self.results: list[WriteResult] = []
        self.metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is written."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing is written."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.plan = plan
        self.file, self.results = _file_of(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {one.index: one.storage_data for some in results for one in some}
        self.metadata = metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _file_of(plan: SavePlan, planner: SavePlanner) -> tuple[ToSave | None, list[WriteResult]]:
    """The file of a rank, and each value's position in it.

    Raises: UcplError E440, E441, E693.
    """
    name = f"__{0 if _is_alone() else dist.get_rank()}_0.distcp"
    parts: list[ValueTree | bytes] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            parts.append(data.getvalue())
        else:
            assert isinstance(data, torch.Tensor)
            parts.append(one_tensor(data, item.index.fqn))
    if not parts:
        return None, []
    file, spans = archives(name, parts)
    results = [
        WriteResult(item.index, size, _StorageInfo(name, at, size))
        for item, (at, size) in zip(plan.items, spans, strict=True)
    ]
    return file, results


def _named(file: ToSave, plan: SavePlan, results: list[WriteResult]) -> ToSave:
    """The same file with a list of its values.

    They are the non-tensors, and the tensors that have elements.
    """
    named = [
        SavedValue(one.index.fqn, "", one.storage_data.offset, one.size_in_bytes, "", ())
        for item, one in zip(plan.items, results, strict=True)
        if item.type == WriteItemType.BYTE_IO
    ]
    for at, storage, tensor in file.tensors:
        index = plan.items[int(storage.partition(":")[0])].index  # as `archives` numbers them
        name = f"{index.fqn}@{','.join(map(str, index.offset or ()))}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        named.append(SavedValue(name, storage, at, tensor.numel() * tensor.element_size(), dtype, tuple(tensor.shape)))
    return evolve(file, named=tuple(named))


_Held = tuple[object, ...]  # all properties of a rank's values that DCP uses, without the data


def compare_input(one: SaveInput, shares: Distributions) -> tuple[dict[str, object], bool]:
    """Values by DCP's names.

    And True if only their data changed since the last save.
    """
    is_as_before = one.held is not None and shares.known is not None and shares.known.held == one.held
    return dict(one.planner.state_dict), is_as_before


def sizes_of(values: Mapping[str, object]) -> dict[str, int]:
    """Bytes that DCP would write for each non-tensor."""
    found = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            file = io.BytesIO()
            torch.save(value, file)
            found[name] = len(file.getvalue())
    return found


def of_state(one: SaveInput, shares: Distributions) -> list[ToSave]:
    """The files that this rank would write for a state dict.

    Collective. Raises: UcplError E693.
    """
    again = _as_before(one.held, one.planner, shares.known)
    shares.is_known = ranks().all_agree(again is not None)
    if shares.is_known and again is not None:
        file, shares.known = again
    else:
        shares.known = None  # an error below leaves nothing that others do not have
        collecting = _dealt(one.state)
        file, metadata = collecting.file, collecting.metadata
        text = pickle.dumps(metadata) if metadata is not None else b""
        if file is not None and shares.are_named:
            file = _named(file, collecting.plan, collecting.results)
        shares.known = _Distribution(one.held, collecting.plan, collecting.results, *_apart(file), metadata, text)
    files = [file] if file is not None else []
    if shares.known.text:
        files.append(text_file(".metadata", shares.known.text))
    return files


def _held(planner: DefaultSavePlanner) -> _Held | None:
    """The facts that DCP's plans depend on.

    None if a value may describe itself in more detail.
    """
    found: list[object] = []
    for name, value in planner.state_dict.items():
        if is_placed(value):
            found.append((name, value.shape, value.dtype, value.requires_grad, value.placements, value.device_mesh))
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            found.append((name, value.shape, value.dtype, value.requires_grad, value.layout))
        elif isinstance(value, torch.Tensor):
            return None
        else:
            found.append(name)
    return planner.is_coordinator, planner.mappings, found


def _apart(file: ToSave | None) -> tuple[ToSave | None, tuple[tuple[int, str, int], ...]]:
    """A file without its tensors, and their positions in it."""
    if file is None:
        return None, ()
    # As `archives` numbers them.
    places = tuple((at, storage, int(storage.partition(":")[0])) for at, storage, _ in file.tensors)
    return evolve(file, tensors=()), places


def _as_before(
    held: _Held | None, planner: DefaultSavePlanner, known: _Distribution | None
) -> tuple[ToSave | None, _Distribution] | None:
    """The values of a rank whose properties are unchanged.

    None: all ranks distribute or reject them together.

    Positions of non-tensors may change: only the rank that has the metadata records them.
    """
    if known is None or held is None or known.held != held:
        return None
    try:
        file = _refilled(known, planner)
        if file is not None or known.laid is None:
            return file, known
        file, results = _file_of(known.plan, planner)
    except Exception:  # all ranks raise it in the next distribution
        return None
    if known.metadata is None:
        return None
    if file is not None and known.laid is not None and known.laid.named:
        file = _named(file, known.plan, results)
    known.metadata.storage_data |= {one.index: one.storage_data for one in results}
    laid, places = _apart(file)
    return file, evolve(known, results=results, laid=laid, places=places, text=pickle.dumps(known.metadata))


def _refilled(known: _Distribution, planner: SavePlanner) -> ToSave | None:
    """The file with the same positions and new values.

    None: a non-tensor has another length, or there is no file.
    """
    if known.laid is None:
        return None
    tensors: dict[int, torch.Tensor] = {}
    values: dict[int, bytes] = {}
    for number, (item, result) in enumerate(zip(known.plan.items, known.results, strict=True)):
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            tensors[number] = data.detach()
            continue
        assert isinstance(data, io.BytesIO)
        if len(data.getvalue()) != result.size_in_bytes:
            return None
        values[result.storage_data.offset] = data.getvalue()
    fixed = tuple((at, values.get(at, told)) for at, told in known.laid.fixed)
    return evolve(
        known.laid, fixed=fixed, tensors=tuple((at, storage, tensors[number]) for at, storage, number in known.places)
    )


def ranks() -> JobRanks:
    """The ranks of the job.

    A rank that cannot save keeps all others from saving.
    """
    return JobRanks.of(code="E693", words="cannot save, so no rank does")


def _dealt(state: dict[str, object]) -> _PlanCollector:
    """The part of this rank in DCP's distribution.

    All ranks exchange their plans for it.

    Raises: UcplError E693.
    """
    collecting = _PlanCollector()
    try:
        save(state, storage_writer=collecting, no_dist=_is_alone())
    except CheckpointException as error:
        failed = next(iter(failed for failed, _ in error.failures.values()))  # no Exception itself, as torch has it
        if isinstance(failed, UcplError):
            raise failed from error
        fail("E693", f"{type(failed).__name__}: {str(failed)[:200]}", Label("the saved state"))
    return collecting
