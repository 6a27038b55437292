"""What runs, as the files that its framework would write: an engine of DeepSpeed, or a module and its optimizer.

The framework itself says what goes into which file: DeepSpeed's engine through its checkpoint engine, everything else through
DCP's planner, which shares out what several ranks hold. Tensors are taken where they lie; nothing is written here.

How DCP shares out is kept: where all ranks have what they had at the save before, of other values, they need not speak of it.
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
from ucpl.live.agreement import Ranks
from ucpl.live.tensors import is_placed, unreadable
from ucpl.records import define, frozen
from ucpl.remotes.vaults.records import Named
from ucpl.vault.files import ToSave, archives, text_file, torch_file
from ucpl.vault.trees import Held, held_in, one_tensor

__all__ = ["Ready", "Shares", "files_of", "looked_at", "of_state", "ranks", "ready", "sizes_of"]

TOP = "/vault"  # where DeepSpeed believes to write


@frozen(eq=False)
class Ready:
    """What a rank is about to save, as far as it looks at that by itself.

    engine: of DeepSpeed, which ranks ask together. Of all else, the state dict, what DCP's planner has of it, and what its
    plans rest on; None: there is something among it that may tell more of itself.
    """

    engine: _Engine | None
    state: dict[str, object]
    planner: DefaultSavePlanner
    held: _Held | None


def ready(what: object) -> Ready:
    """Raises: UcplError E693, and whatever a framework says of what it is given."""
    planner = DefaultSavePlanner()
    if any(cls.__name__ == "DeepSpeedEngine" for cls in type(what).__mro__):
        return Ready(cast(_Engine, what), {}, planner, None)
    state = {
        key: value.state_dict() if not isinstance(value, torch.Tensor) and isinstance(value, Stateful) else value
        for key, value in _state_of(what).items()
    }
    planner.set_up_planner(state, None, _is_alone() or dist.get_rank() == 0)
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor) and (why := unreadable(value)):
            fail("E693", f"{name} is {why}", Label("what is saved", where=name))
    return Ready(None, state, planner, _held(planner))


def files_of(one: Ready, step: int, shares: Shares) -> list[ToSave]:
    """The files that this rank would write. All ranks call it together. Raises: UcplError E693.

    shares: what DCP dealt out at the save before, of one rank; it is brought up to date.
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
    remedy = "give an engine of DeepSpeed, (module, optimizer), a state dict as dcp.save takes it, or a writer a layout"
    fail("E693", f"a {type(what).__name__} is not kept", Label("what is saved"), remedy=remedy)


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------------


class _Captured:
    """Stands where an engine's checkpoint engine stood: what it is told to write is kept by reference."""

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
        """Of each tensor its own elements are taken: there is nothing to clone for."""
        return False


class _Engine(Protocol):
    """What is asked of an engine of DeepSpeed."""

    checkpoint_engine: object
    global_rank: int
    _copy_recovery_script: Callable[..., None]

    def save_checkpoint(self, save_dir: str, tag: str) -> object: ...


@contextmanager
def _capturing(engine: _Engine) -> Iterator[_Captured]:
    before = engine.checkpoint_engine
    engine.checkpoint_engine = captured = _Captured(before)
    engine._copy_recovery_script = _nothing  # a script of DeepSpeed's that goes beside its files
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
    files = [torch_file(name, held_in(value, name)) for name, value in captured.found.items()]
    if engine.global_rank == 0:
        files.append(text_file("latest", tag.encode()))
    return files


# ---- everything else, by DCP -------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Share:
    """What one rank writes, as DCP dealt it out."""

    held: _Held | None  # what the rank had
    plan: SavePlan
    results: list[WriteResult]  # where its values lie in its file
    laid: ToSave | None  # its file, without the tensors, which need not live as long
    places: tuple[tuple[int, str, int], ...]  # of each tensor there: byte, storage, number in the plan
    metadata: Metadata | None  # on the first rank: of all
    text: bytes  # the same, as it is written


@define(eq=False)
class Shares:
    """What is kept from save to save. `is_known`: what was written last is what was dealt out before.

    are_named: the files say what lies where in them.
    """

    known: _Share | None = None
    is_known: bool = False
    are_named: bool = False


class _Collecting(StorageWriter):
    """What DCP's planner gives one rank to write, and on the first rank the metadata of all."""

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
    """A rank's file of what it was given to write, and where each value lies in it. Raises: UcplError E440, E441, E693."""
    name = f"__{0 if _is_alone() else dist.get_rank()}_0.distcp"
    parts: list[Held | bytes] = []
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
    """The same file, which says what lies where in it: values that are no tensors, and tensors with elements."""
    named = [
        Named(one.index.fqn, "", one.storage_data.offset, one.size_in_bytes, "", ())
        for item, one in zip(plan.items, results, strict=True)
        if item.type == WriteItemType.BYTE_IO
    ]
    for at, storage, tensor in file.tensors:
        index = plan.items[int(storage.partition(":")[0])].index  # as `archives` numbers them
        name = f"{index.fqn}@{','.join(map(str, index.offset or ()))}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        named.append(Named(name, storage, at, tensor.numel() * tensor.element_size(), dtype, tuple(tensor.shape)))
    return evolve(file, named=tuple(named))


_Held = tuple[object, ...]  # all that DCP asks about what a rank has, but the values


def looked_at(one: Ready, shares: Shares) -> tuple[dict[str, object], bool]:
    """Values by the names that DCP has for them, and whether they are those that were saved last, of other values."""
    is_as_before = one.held is not None and shares.known is not None and shares.known.held == one.held
    return dict(one.planner.state_dict), is_as_before


def sizes_of(values: Mapping[str, object]) -> dict[str, int]:
    """How many bytes DCP would write of each value that is no tensor."""
    found = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            file = io.BytesIO()
            torch.save(value, file)
            found[name] = len(file.getvalue())
    return found


def of_state(one: Ready, shares: Shares) -> list[ToSave]:
    """The files that this rank would write of a state dict. All ranks call it together. Raises: UcplError E693."""
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
        shares.known = _Share(one.held, collecting.plan, collecting.results, *_apart(file), metadata, text)
    files = [file] if file is not None else []
    if shares.known.text:
        files.append(text_file(".metadata", shares.known.text))
    return files


def _held(planner: DefaultSavePlanner) -> _Held | None:
    """What DCP's plans rest on. None: there is something among it that may tell more of itself."""
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
    """A file without its tensors, and where they lie in it."""
    if file is None:
        return None, ()
    # As `archives` numbers them.
    places = tuple((at, storage, int(storage.partition(":")[0])) for at, storage, _ in file.tensors)
    return evolve(file, tensors=()), places


def _as_before(
    held: _Held | None, planner: DefaultSavePlanner, known: _Share | None
) -> tuple[ToSave | None, _Share] | None:
    """What a rank writes where it has what it had before; None: that has to be dealt out, or refused, by all together.

    Where values lie that are no tensors may change: one rank alone has the metadata, which says where.
    """
    if known is None or held is None or known.held != held:
        return None
    try:
        file = _refilled(known, planner)
        if file is not None or known.laid is None:
            return file, known
        file, results = _file_of(known.plan, planner)
    except Exception:  # whatever it is, all ranks raise it once it is dealt out anew
        return None
    if known.metadata is None:
        return None
    if file is not None and known.laid is not None and known.laid.named:
        file = _named(file, known.plan, results)
    known.metadata.storage_data |= {one.index: one.storage_data for one in results}
    laid, places = _apart(file)
    return file, evolve(known, results=results, laid=laid, places=places, text=pickle.dumps(known.metadata))


def _refilled(known: _Share, planner: SavePlanner) -> ToSave | None:
    """The file as it was laid out, of other values. None: there is one of another length that is no tensor, or no file."""
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


def ranks() -> Ranks:
    """The ranks of the job, where one that cannot save keeps all others from saving."""
    return Ranks.of(code="E693", words="cannot save, so that no rank does")


def _dealt(state: dict[str, object]) -> _Collecting:
    """What DCP gives this rank to write, once all have told what they have. Raises: UcplError E693."""
    collecting = _Collecting()
    try:
        save(state, storage_writer=collecting, no_dist=_is_alone())
    except CheckpointException as error:
        failed = next(iter(failed for failed, _ in error.failures.values()))  # no Exception itself, as torch has it
        if isinstance(failed, UcplError):
            raise failed from error
        fail("E693", f"{type(failed).__name__}: {str(failed)[:200]}", Label("what is saved"))
    return collecting
