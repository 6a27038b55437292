"""The parameter of each run in the distributed optimizer's buckets (`dp_reshardable`).

This is Megatron's default. A bucket is the flat run of a model-parallel rank's parameters. It is stored as a piece for
each run of a parameter on a data-parallel rank, and for each gap between them. No file names the parameters: Megatron
places them in reverse order of registration, each at a multiple of 64 elements. The order of registration is one of
those of `orders`. The sizes of the pieces must agree with it, and the masters with the weights; both are checked before
anything is converted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.formats.dcp.metadata import METADATA, Metadata
from ucpl.formats.megatron.groups import is_expert
from ucpl.formats.megatron.orders import orders_of
from ucpl.records import define, frozen

__all__ = [
    "ALIGNMENT",
    "HEAD",
    "WORDS",
    "Bucket",
    "ChunkBox",
    "RankGrid",
    "ParameterRun",
    "RankShares",
    "ChunkLayers",
    "buckets_in",
    "runs_of",
]

ALIGNMENT = 64  # elements; each parameter begins at a multiple
_END = 1024  # elements; the padding of a bucket is shorter: to a multiple of 128 and of the data-parallel ranks
_BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,9})\.gbuf_idx_(?P<gbuf>\d{1,9})"
    r"\.dtype_\((?P<dtype>[^()]*)\)\.bucket_idx_(?P<bucket>\d{1,9})\.(?P<state>[A-Za-z0-9_]+)"
)
_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?<!mtp\.)layers)\.(?:(?P<layer>\d{1,9})\.)?(?P<rest>.+)", re.DOTALL)
_EXPERT = re.compile(r".*(?<![^.])experts\.(?:(?:local_)?experts\.)?(?:(?P<expert>\d{1,9})\.)?.+", re.DOTALL)
_AHEAD = re.compile(
    r"(?:.*\.)?mtp\.layers\.(?P<layer>\d{1,9})\..+", re.DOTALL
)  # predicts tokens ahead, on the last stage
_FIRST = "embedding."  # registered before the layers
WORDS = "embedding.word_embeddings.weight"  # the last stage has a copy of it if the head is tied
HEAD = "output_layer."
_GATE, _UP = "_w", "_v"  # one parameter, saved as two tensors

Shape = tuple[int, ...]


@frozen
class ChunkBox:
    """Of a tensor: where it begins, and its shape."""

    name: str
    begin: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)


@frozen
class Bucket:
    """A bucket of one rank.

    `chain`: its optimizer in a chain of them; `group`: the model-parallel rank; `buffer`: the model chunk.
    """

    chain: int
    group: int
    buffer: tuple[int, str]
    number: int
    states: dict[str, str] = field(factory=dict)  # state -> name in `.metadata`


@frozen
class ParameterRun:
    """Elements of a rank's part of a parameter in one piece.

    The run begins at `low` of the part, and the piece at `at` of the bucket.
    """

    boxes: tuple[ChunkBox, ...]  # one behind the other, they make up the rank's part
    low: int
    bucket: Bucket
    at: int


@frozen
class RankGrid:
    """Ranks of one optimizer.

    Tp x ep x pp groups, tp the fastest.
    """

    tp: int
    ep: int
    pp: int
    experts: int

    def held(self, ep: int) -> range:
        each = self.experts // self.ep
        return range(each * ep, each * (ep + 1))


@frozen
class ChunkLayers:
    """Layers of a rank in one model chunk, and the model's ends."""

    layers: range
    is_first: bool
    is_last: bool


def buckets_in(names: Sequence[str], root: Path) -> tuple[Bucket, ...]:
    """Raises: UcplError E533 for a name that is none of a bucket."""
    out: dict[tuple[int, int, tuple[int, str], int], Bucket] = {}
    for name in names:
        match = _BUCKET.fullmatch(name)
        if match is None:
            fail(
                "E533",
                f"`{name}` is of the optimizer, and neither a parameter's state nor a bucket of them",
                Label(str(root / METADATA), where=name),
            )
        place = (
            int(match["chain"] or 0),
            int(match["group"]),
            (int(match["gbuf"]), match["dtype"]),
            int(match["bucket"]),
        )
        out.setdefault(place, Bucket(*place)).states[match["state"]] = name
    return tuple(out[place] for place in sorted(out))


def runs_of(
    shares: RankShares, agree: Callable[[Sequence[ParameterRun]], bool]
) -> tuple[list[ParameterRun], list[str], tuple[str, ...]]:
    """As `RankShares.runs`, with the order of registration that fits.

    Orders fit by the sizes of the pieces. Of several, the first is right whose masters `agree` with the weights: a norm's
    weight and bias are of one size. Raises: UcplError E533 if no order fits, for the first.
    """
    fitting: list[tuple[list[ParameterRun], list[str], tuple[str, ...]]] = []
    refused: UcplError | None = None
    for order in orders_of(shares.names):
        try:
            fitting.append((*evolve(shares, names=order).runs(), order))
        except UcplError as error:
            refused = refused or error
    if not fitting:
        assert refused is not None  # there is one order at least
        raise refused
    alike = len({tuple((run.boxes, run.low, run.bucket.number, run.at) for run in runs) for runs, *_ in fitting}) == 1
    return fitting[0] if alike else next((one for one in fitting if agree(one[0])), fitting[0])


@define(eq=False, slots=False)
class RankShares:
    """The ranks' parts of parameters, from the chunks of the weights."""

    metadata: Metadata
    names: tuple[str, ...]  # of parameters, in order of registration
    buckets: tuple[Bucket, ...]
    root: Path
    stages: int = 0  # of the pipeline, where they are known
    has_ends: bool = False  # up to 0.14 (`fully_sharded_bucket_space`) buckets have the padding at their ends, too
    units: dict[str, dict[Shape, list[ChunkBox]]] = field(factory=dict)  # tensor -> layer and expert -> its chunks

    def runs(self) -> tuple[list[ParameterRun], list[str]]:
        """All runs, and names with copies on several ranks.

        Of copies the first rank's are used. Raises: UcplError E533 if the pieces' sizes are not those of the
        parameters.
        """
        owner: dict[ChunkBox, tuple[int, int, tuple[int, str]]] = {}
        copied: dict[str, None] = {}
        out: list[ParameterRun] = []
        for chain in sorted({b.chain for b in self.buckets}):
            for run in self.of_chain(chain):
                place = (run.bucket.chain, run.bucket.group, run.bucket.buffer)
                if all(owner.setdefault(box, place) == place for box in run.boxes):
                    out.append(run)
                else:
                    copied |= dict.fromkeys(box.name for box in run.boxes)
        return out, list(copied)

    def check_states(self) -> None:
        """Check that all buckets of an optimizer have the same states.

        Raises: UcplError E533 for a state of a single bucket, which runs of copies would not meet.
        """
        states = {b.chain: {s for o in self.buckets if o.chain == b.chain for s in o.states} for b in self.buckets}
        sizes = Counter(self.metadata.tensors[e].shape for b in self.buckets for e in b.states.values())
        for bucket in self.buckets:
            lacking = sorted(states[bucket.chain] - bucket.states.keys())
            size = max((self.metadata.tensors[e].shape for e in bucket.states.values()), key=lambda shape: sizes[shape])
            odd = next((e for e in bucket.states.values() if self.metadata.tensors[e].shape != size), None)
            if not lacking and odd is None:
                continue
            owner = next(
                b for b in self.buckets if b.chain == bucket.chain and (odd is not None or lacking[0] in b.states)
            )
            entry = odd or owner.states[lacking[0]]
            fail(
                "E533",
                f"`{entry}` is a state of some buckets alone"
                if odd is None
                else f"`{entry}` is no state of a complete bucket",
                Label(str(self.root / METADATA), where=entry),
                remedy="--weights-alone converts the weights",
            )

    # ---- which ranks there are ---------------------------------------------------------------------------------------

    def of_chain(self, chain: int) -> list[ParameterRun]:
        mine = [b for b in self.buckets if b.chain == chain]
        names = [n for n in self.names if not self.has_chains or is_expert(n) == (chain > 0)]
        groups = len({b.group for b in mine})
        tp = max((self.parts(name) for name in names), default=1)
        experts = self.experts if any(map(is_expert, names)) else 0
        # Half of the experts of all layers have as many elements as all experts of half of the layers: the number of
        # stages is that of the tensors on every rank.
        ep = groups // (tp * self.stages) if experts and self.stages and tp else 1
        found = None
        is_dense = all(b.group < groups for b in mine)
        if is_dense and tp * ep and groups % (tp * ep) == 0 and not (experts and experts % ep):
            found = self.on_grid(mine, names, RankGrid(tp, ep, groups // (tp * ep), experts))
        if found is not None:
            self.stages = self.stages or groups // (tp * ep)
            return found
        entry = next(iter(mine[0].states.values()))
        fail(
            "E533",
            f"the pieces of the optimizer's buckets are not the parameters in the order of {METADATA}, of {groups} groups that"
            f" are {tp} tensor-parallel ranks each",
            Label(str(self.root / METADATA), "of bucket pieces", where=entry),
            Label(str(self.root / METADATA), "first parameter of that optimizer", where=names[0] if names else entry),
            remedy="buckets name no parameter, so that those of a run with frozen ones are not read. Load the run, save it with"
            " --dist-ckpt-optim-fully-reshardable, or, where only some layers of a stack are frozen, as legacy files"
            " (--ckpt-format torch), and convert that folder; or --weights-alone",
        )

    def on_grid(self, mine: Sequence[Bucket], names: Sequence[str], grid: RankGrid) -> list[ParameterRun] | None:
        """Runs of all buckets of one optimizer on this grid, or None."""
        buffers = sorted({b.buffer for b in mine})
        out: list[ParameterRun] = []
        done = 0
        for chunk, buffer in enumerate(buffers):
            for stage in range(grid.pp):
                is_last = stage == grid.pp - 1 and chunk == len(buffers) - 1
                left = self.layers - done
                each = self.layers // (grid.pp * len(buffers))  # most often; else as many as fit
                for count in [left] if is_last else dict.fromkeys([min(each, left), *range(left + 1)]):
                    here = ChunkLayers(range(done, done + count), stage == 0 and chunk == 0, is_last)
                    found = self.on_stage([b for b in mine if b.buffer == buffer], names, grid, stage, here)
                    if found is not None:
                        break
                else:
                    return None
                out += found
                done += count
        return out

    def on_stage(
        self, mine: Sequence[Bucket], names: Sequence[str], grid: RankGrid, stage: int, here: ChunkLayers
    ) -> list[ParameterRun] | None:
        out: list[ParameterRun] = []
        for ep in range(grid.ep):
            for tp in range(grid.tp):
                group = tp + grid.tp * (ep + grid.ep * stage)
                parameters = self.parameters(names, here, grid, (tp, ep))
                found = self.walked([b for b in mine if b.group == group], parameters)
                if found is None:
                    return None
                out += found
        return out

    def walked(
        self, buckets: Sequence[Bucket], parameters: list[tuple[ChunkBox, ...]] | None
    ) -> list[ParameterRun] | None:
        """A rank's buckets, piece by piece. None: the parameters do not fit."""
        left = list(parameters or ())
        out: list[ParameterRun] = []
        for bucket in buckets:
            entry = bucket.states.get("param") or next(iter(bucket.states.values()))
            low = size = 0
            if len(self.metadata.tensors[entry].shape) != 1:
                return None
            (end,) = self.metadata.tensors[entry].shape
            for chunk in self.metadata.tensors[entry].chunks:
                begin, length = chunk.offset[0], chunk.shape[0]
                if low == size:
                    if begin % ALIGNMENT:
                        continue  # a gap behind a parameter
                    following = sum(box.numel for box in left[-1]) if left else 0
                    if self.has_ends and begin + length == end and length < _END and following != length:
                        continue
                    if not left:
                        return None
                    boxes, low, size = left.pop(), 0, following
                out.append(ParameterRun(boxes, low, bucket, begin))
                low += length
                if low > size:
                    return None
            if low != size:
                return None
        return None if left or parameters is None else out

    # ---- parameters of a rank ----------------------------------------------------------------------------------------

    def parameters(
        self, names: Sequence[str], here: ChunkLayers, grid: RankGrid, rank: tuple[int, int]
    ) -> list[tuple[ChunkBox, ...]] | None:
        """The boxes of each parameter of a rank, in order of registration.

        None: chunks have other cuts. rank: its tp and ep coordinates.
        """
        allowed = frozenset(names)
        outside = [n for n in names if _LAYER.fullmatch(n) is None]
        first, last = ([n for n in outside if n.startswith(_FIRST) == is_first] for is_first in (True, False))
        has_words = here.is_first or (
            here.is_last and any(map(_AHEAD.fullmatch, last))
        )  # these layers embed tokens, too
        units = [(n, 0, 0) for n in first if here.is_first or (has_words and n == WORDS)]
        for layer in here.layers:
            units += self.of_layer([n for n in self.by_layer[layer] if n in allowed], layer, grid.held(rank[1]))
        units += self.behind(last, grid.held(rank[1])) if here.is_last else []
        if here.is_last and not has_words and WORDS in first and not any(n.startswith(HEAD) for n in last):
            units.append((WORDS, 0, 0))
        out = []
        for name, layer, expert in units:
            if name.endswith(_UP):  # behind its gate
                continue
            boxes = self.part(name, layer, expert, rank[0], grid.tp)
            if boxes is None:
                return None
            out.append(boxes)
        return out

    def behind(self, names: Sequence[str], held: range) -> list[tuple[str, int, int]]:
        """(tensor, layer, expert) of everything registered behind the layers.

        Layers of multi-token prediction may have experts.
        """
        out: list[tuple[str, int, int]] = []
        by_layer: dict[str, list[str]] = {}
        for name in names:
            match = _AHEAD.fullmatch(name)
            by_layer.setdefault(match["layer"] if match is not None else "", []).append(name)
        for name in names:
            match = _AHEAD.fullmatch(name)
            if match is None:
                out.append((name, 0, 0))
            elif name == by_layer[match["layer"]][0]:
                out += self.of_layer(by_layer[match["layer"]], 0, held)
        return out

    def of_layer(self, names: Sequence[str], layer: int, held: range) -> list[tuple[str, int, int]]:
        """(tensor, layer, expert) of a rank's tensors in a layer.

        An expert is a module: all of its tensors, then those of the next expert.
        """
        out: list[tuple[str, int, int]] = []
        stacked = [n for n in names if "expert" in self.leads(n)]
        for name in names:
            if name in stacked:
                out += [(n, layer, expert) for expert in held for n in stacked] if name == stacked[0] else []
                continue
            number = _expert_of(name)
            if number is None or number in held:
                out.append((name, layer, 0))
        return out

    def part(self, name: str, layer: int, expert: int, rank: int, ways: int) -> tuple[ChunkBox, ...] | None:
        """The part of one of `ways` tensor-parallel ranks of a layer's parameter.

        None: chunks have other cuts.
        """
        out: list[ChunkBox] = []
        both = (name, name.removesuffix(_GATE) + _UP) if name.endswith(_GATE) else (name,)
        for one in both:
            found = self.unit(one, layer, expert)
            if len(found) == 1:
                out += found if len(both) == 1 or ways == 1 else ()
            elif len(found) % ways:
                return None
            else:
                out += found[rank::ways]
        return tuple(out) or None

    def unit(self, name: str, layer: int, expert: int) -> list[ChunkBox]:
        """Chunks of one layer, and of one expert, in order."""
        at = tuple({"layer": layer, "expert": expert}[lead] for lead in self.leads(name))
        if name not in self.units:
            held: dict[Shape, list[ChunkBox]] = {}
            for c in self.metadata.tensors[name].chunks if name in self.metadata.tensors else ():  # by begin
                if all(size == 1 for size in c.shape[: len(at)]):
                    held.setdefault(c.offset[: len(at)], []).append(ChunkBox(name, c.offset, c.shape))
            self.units[name] = held
        return self.units[name].get(at, [])

    def parts(self, name: str) -> int:
        """The number of tensor-parallel parts of a tensor, except for SwiGLU's."""
        return 1 if "linear_fc1." in name else len(self.unit(name, 0, 0))

    def leads(self, name: str) -> tuple[str, ...]:
        """The meaning of a tensor's first dims: layers if stacked, then experts."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return ("expert",) if _AHEAD.fullmatch(name) and is_expert(name) and _expert_of(name) is None else ()
        out = () if match["layer"] is not None else ("layer",)
        return (*out, "expert") if is_expert(name) and _expert_of(name) is None else out

    @cached_property
    def has_chains(self) -> bool:
        return len({b.chain for b in self.buckets}) > 1

    @cached_property
    def layers(self) -> int:
        return len(self.by_layer)

    @cached_property
    def by_layer(self) -> list[list[str]]:
        """Of each layer, the tensors that have something of it."""
        matches = [(name, match) for name in self.names if (match := _LAYER.fullmatch(name)) is not None]
        counts = [0]
        for name, match in matches:
            number = int(match["layer"]) if match["layer"] is not None else None
            counts.append(self.counted(name, number, "layer"))
        count = max(counts)
        return [[n for n, m in matches if m["layer"] is None or int(m["layer"]) == i] for i in range(count)]

    @cached_property
    def experts(self) -> int:
        return max([1, *(self.counted(name, _expert_of(name), "expert") for name in self.names if is_expert(name))])

    def counted(self, name: str, number: int | None, lead: str) -> int:
        """The least number of layers or experts, from one tensor.

        The tensor has this number, or stacks them. There are no more than tensors, or chunks of one. Raises: UcplError
        E533.
        """
        stored = self.metadata.tensors[name]
        leads = self.leads(name)
        most = len(self.names) if number is not None else len(stored.chunks)
        if number is None and len(stored.shape) < len(leads):
            count = most + 1
        else:
            count = 1 + number if number is not None else stored.shape[leads.index(lead)]
        if count > most:
            fail(
                "E533",
                f"`{name}` is of {lead}s, and fewer are stored than its name and shape imply",
                Label(str(self.root / METADATA), f"{list(stored.shape)}, {len(stored.chunks)} chunks", where=name),
            )
        return count


def _expert_of(name: str) -> int | None:
    """The expert that a tensor is of by its name."""
    match = _EXPERT.fullmatch(name) if is_expert(name) else None
    return int(match["expert"]) if match is not None and match["expert"] is not None else None
