"""Optimizer states of a rank in one object (`dp_zero_gather_scatter`).

Megatron-Core up to 0.15 saves them so without --ckpt-fully-parallel-save: the first data-parallel rank has each buffer
complete, as in the legacy `distrib_optim.pt`. The object is a list of one dict, {number of the buffer: {(dtype of
parameters, dtype of gradients): {param, exp_avg, exp_avg_sq, numel_unpadded}}}. A buffer has the parameters in reverse
order of registration, and lacks the padding at the ends of its buckets (legacy_buffers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Extent, Key, TorchDType
from ucpl.files.carrying import strides
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.dcp.masters import is_rounded
from ucpl.formats.dcp.metadata import METADATA, Metadata
from ucpl.formats.megatron.buckets import (
    ALIGNMENT,
    HEAD,
    WORDS,
    Bucket,
    ChunkBox,
    ChunkLayers,
    ParameterRun,
    RankGrid,
    RankShares,
)
from ucpl.formats.megatron.legacy_buffers import BufferParameter, buckets_of
from ucpl.formats.megatron.roles import COMPLETE, MASTERS
from ucpl.records import define, frozen

__all__ = ["CompleteBuffers", "complete_buffers"]

_FLAG, _NUMEL = "buckets_coalesced", "numel_unpadded"


@frozen(eq=False)
class CompleteBuffers:
    """The states of all buffers, each under a name of its own.

    `weights`: the chunks of the model's tensors, which masters must agree with.
    """

    buckets: tuple[Bucket, ...]
    extents: dict[str, Extent]
    weights: Mapping[tuple[str, Key], Extent]

    def shares(
        self, metadata: Metadata, names: tuple[str, ...], root: Path, arguments: Mapping[object, object]
    ) -> RankShares:
        """The parts of ranks, for a search of the parameters' order."""
        return _Shares(metadata, names, self.buckets, root, complete=self, arguments=arguments)

    def piece(self, run: ParameterRun, entry: str) -> Extent:
        """The elements of a run in the tensor of its buffer."""
        extent = self.extents[entry]
        numel = sum(box.numel for box in run.boxes)
        return evolve(extent, shape=(numel,), offset=extent.offset + run.at * extent.stride[0])


def complete_buffers(
    objects: Iterable[tuple[str, TorchFile]], weights: Mapping[tuple[str, Key], Extent]
) -> CompleteBuffers:
    """Read the objects of all ranks. Raises: UcplError E455, E533."""
    buckets: list[Bucket] = []
    extents: dict[str, Extent] = {}
    for name, part in objects:
        match = COMPLETE.fullmatch(name)
        assert match is not None  # these are the names of such objects
        top = Value(part.path, part.file, (name,), part.value)
        for number, buffer in _buffers(top):
            for dtypes, held in buffer.mapping().items():
                place = (number, _dtypes(buffer, dtypes))
                states = Value(part.path, part.file, (*buffer.key, place[1]), held)
                made = Bucket(int(match["chain"] or 0), int(match["group"]), place, 0)
                for state, value in states.named():
                    if state == _NUMEL:
                        continue
                    tensor = value.tensor()
                    if len(tensor.shape) != 1:
                        value.wrong("a tensor of one dim")
                    entry = f"{name}/{number}/{place[1]}/{state}"
                    made.states[state] = entry
                    extents[entry] = part.extent((name, number, place[1], state), tensor)
                if len({extents[entry].shape for entry in made.states.values()}) != 1:
                    states.wrong("states of one length")
                buckets.append(made)
    return CompleteBuffers(tuple(buckets), extents, weights)


def _buffers(top: Value) -> Iterable[tuple[int, Value]]:
    items = top.items() if isinstance(top.held, list) else [top]
    if len(items) != 1 or not isinstance(items[0].held, dict):
        top.wrong("a list of one dict")
    for key in items[0].mapping():
        if isinstance(key, int) and not isinstance(key, bool):
            buffer = items[0].at(key)
            if not isinstance(buffer.held, dict) or any(isinstance(one, list) for one in buffer.held.values()):
                fail(
                    "E533",
                    f"`{top.key[0]}` has a list for each buffer: it is of a Megatron-LM before February 2024",
                    Label(str(top.path), where=str(top.key[0])),
                    remedy="load and save it with a later Megatron-LM (--ckpt-convert-update-legacy-dist-opt-format)",
                )
            yield key, buffer
        elif key != _FLAG:
            items[0].wrong("a dict of buffers by number")


def _dtypes(buffer: Value, key: object) -> str:
    """ "(torch.bfloat16, torch.float32)": of parameters and of gradients."""
    names = [f"torch.{DTYPES[one.name].torch}" for one in key if type(one) is TorchDType] if type(key) is tuple else []
    if len(names) != 2:
        buffer.wrong("a pair of dtypes as its key")
    return f"({', '.join(names)})"


@define(eq=False, slots=False)
class _Shares(RankShares):
    """The parameters of ranks in complete buffers.

    `arguments`: of the run, which bucket sizes follow from.
    """

    complete: CompleteBuffers = field(kw_only=True)
    arguments: Mapping[object, object] = field(kw_only=True)
    is_first: bool = False  # the stage whose buffers are divided
    shared: str = ""  # the embedding that two stages have

    def runs(self) -> tuple[list[ParameterRun], list[str]]:
        """The runs in an order that the weights confirm.

        Only the weights show that an order is right: its lengths are those of other orders, too. Raises: UcplError E533
        if a master is not its weight.
        """
        found, copied = super().runs()
        for run in found:
            entry = next((run.bucket.states[name] for name in MASTERS if name in run.bucket.states), None)
            if entry is not None and len(run.boxes) == 1:
                self.check_master(run.boxes[0], self.complete.piece(run, entry), entry)
        return found, copied

    def check_master(self, box: ChunkBox, piece: Extent, entry: str) -> None:
        weight = self.complete.weights.get((METADATA, (box.name, *box.begin)))
        if weight is None or weight.shape != box.shape:
            return
        master = evolve(piece, shape=box.shape, stride=tuple(s * piece.stride[0] for s in strides(box.shape)))
        if not is_rounded(self.root, weight, master):
            fail(
                "E533",
                f"a buffer has the parameters in another order than `.metadata`: its master of `{box.name}` is not that weight",
                Label(str(self.root / METADATA), where=entry),
                Label(str(self.root / weight.file), where=box.name),
                remedy="load the run, save it with --ckpt-fully-parallel-save, which names each parameter, and convert"
                " that folder; or --weights-alone",
            )

    def on_stage(
        self, mine: Sequence[Bucket], names: Sequence[str], grid: RankGrid, stage: int, here: ChunkLayers
    ) -> list[ParameterRun] | None:
        self.is_first = here.is_first
        is_tied = grid.pp > 1 and not any(name.startswith(HEAD) for name in names)
        self.shared = WORDS if is_tied else ""
        return super().on_stage(mine, names, grid, stage, here)

    def walked(
        self, buckets: Sequence[Bucket], parameters: list[tuple[ChunkBox, ...]] | None
    ) -> list[ParameterRun] | None:
        """The run of each parameter in the buffer.

        None if they do not fit. Raises: UcplError E533 if several bucket sizes fit.
        """
        if len(buckets) != 1 or parameters is None:
            return None
        (bucket,) = buckets
        entry = next(iter(bucket.states.values()))
        length = self.complete.extents[entry].numel
        boxes = {str(n): some for n, some in enumerate(parameters)}
        own = [
            BufferParameter(n, sum(box.numel for box in some), is_shared=some[0].name == self.shared)
            for n, some in reversed(boxes.items())
        ]
        ways = buckets_of(own, length, self.sizes()) if own else []
        if len(ways) > 1:
            fail(
                "E533",
                f"a buffer of {length} elements has {len(own)} parameters, and {len(ways)} bucket sizes place"
                " them differently",
                Label(str(self.root / METADATA), where=entry),
                remedy="load the run, save it with --ckpt-fully-parallel-save, which names each parameter, and convert"
                " that folder; or --weights-alone",
            )
        numels = {one.name: one.numel for one in own}
        out = []
        for saved in ways[0] if ways else ():
            at = 0
            for name in saved.names:
                at = -(-at // ALIGNMENT) * ALIGNMENT
                out.append(ParameterRun(boxes[name], 0, bucket, saved.start + at))
                at += numels[name]
        return out if ways else None

    def sizes(self) -> tuple[int | None, ...]:
        """The bucket size by the run's arguments.

        Buffers of later stages have one bucket.
        """
        overlap, ranks = self.arguments.get("overlap_grad_reduce"), self.arguments.get("data_parallel_size", 1)
        if not self.is_first or overlap is False:
            return (None,)
        if overlap is not True or not isinstance(ranks, int):
            return ()
        said = self.arguments.get("ddp_bucket_size")
        return (said if isinstance(said, int) and said else max(40_000_000, 1_000_000 * ranks),)
