"""The ranks that wrote a step's files, with their coordinates.

Every model-parallel rank has a tp and a pp coordinate, and its data-parallel ranks have an ep coordinate. The names of
the files, `dp_world_size`, `mp_world_size` and `checkpoint_parallel_dimensions` must describe one topology. All
combinations that cannot be read yet are rejected here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import PickledCall
from ucpl.extents.pipeline import layer_file
from ucpl.files.checkpoint import Order
from ucpl.files.header_watch import ahead
from ucpl.files.torch_files import Pickles, TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed import auto_ep
from ucpl.formats.deepspeed.names import StepFiles, layer_place, model_file, read_shard
from ucpl.records import frozen

_LAYERS = "its layers are in files of their own (PipelineModule)"


@frozen(eq=False)
class ModelRank:
    """A model-parallel rank without ZeRO: coordinates, and the caller's order."""

    coordinates: dict[str, int]
    order: Order | None = None
    origin: str = ""  # evidence for the names of the module's groups, if not param_shapes


@frozen(eq=False)
class ModelRankFiles:
    """The files of one model-parallel rank."""

    tp: int
    pp: int
    metas: tuple[TorchFile, ...]  # of model states: one, or at stage 3 one for each dp rank
    optims: tuple[TorchFile, ...]  # of optimizer states, by dp rank; none without ZeRO
    is_restated: bool = False  # the optimizer states have fields that the model states lack

    @property
    def first(self) -> TorchFile:
        return self.metas[0]


@frozen(eq=False)
class Topology:
    """All ranks' files of a step, and the degrees that they make."""

    listing: StepFiles
    stage: int
    dp: int
    tp: int
    pp: int
    shards: tuple[ModelRankFiles, ...]  # by pp and tp coordinate, the last fastest: the numbers of mp_rank_NN

    @property
    def first(self) -> TorchFile:
        """The file with the values that all ranks share."""
        return self.shards[0].first

    @property
    def config(self) -> TorchFile:
        """The file with ds_config and the orders of the optimizer's buffers."""
        return self.shards[0].optims[0] if self.shards[0].is_restated else self.first

    @property
    def optim(self) -> TorchFile | None:
        return self.shards[0].optims[0] if self.shards[0].optims else None

    @property
    def metas(self) -> tuple[TorchFile, ...]:
        return tuple(part for shard in self.shards for part in shard.metas)

    @property
    def optims(self) -> tuple[TorchFile, ...]:
        return tuple(part for shard in self.shards for part in shard.optims)


def not_yet(path: Path, why: str) -> NoReturn:
    fail("E457", f"this checkpoint is of a kind that is not read yet: {why}", Label(str(path)))


def topology_of(listing: StepFiles) -> Topology:
    """Read the headers of all ranks' files. Raises: UcplError E400-E427, E452-E457."""
    root = listing.root
    _reject_names(listing)
    if not listing.models:
        fail(
            "E452",
            f"{root} has no file of model states",
            *(Label(str(root / name)) for name in ("", *listing.files[:1])),
        )
    ahead(root / listing.files[0], [partial(read_shard, root, name) for name in listing.files])
    is_sliced = any(dp is not None for dp, _ in listing.models)  # stage 3
    ranks = 1 + max(mp for _, mp in (*listing.models, *listing.optims))
    models, states = Pickles(), Pickles()  # most are those of all ranks
    rows = [_metas(listing, mp, is_sliced, models) for mp in range(ranks)]
    tp, pp = _degrees(listing, rows[0][0], ranks)
    _reject_kinds(listing, rows, (tp, pp))
    dp = 0
    shards = []
    for mp, metas in enumerate(rows):
        mine = _of_rank(listing, mp)
        dp = _dp_degree(mine, metas[0], is_sliced)
        optims = tuple(read_shard(root, mine.optims[rank, mp], states) for rank in range(dp)) if mine.optims else ()
        is_older = _lacks_shapes(metas[0], listing)
        if is_older:
            from ucpl.formats.deepspeed.older_experts import restated

            metas = tuple(restated(meta, optims, listing, mp) for meta in metas)
        shards.append(ModelRankFiles(mp % tp, mp // tp, metas[:dp], optims, is_older))
    stage = _stage([part for shard in shards for part in shard.optims], is_sliced)
    if listing.layers and stage > 1:
        not_yet(shards[0].optims[0].path, f"a PipelineModule at ZeRO stage {stage}, which DeepSpeed does not train")
    return Topology(listing, stage, dp, tp, pp, tuple(shards))


def _lacks_shapes(meta: TorchFile, listing: StepFiles) -> bool:
    """Test whether the model states lack the orders of the optimizer's buffers.

    This is so before 0.19.4 with experts.
    """
    return bool(listing.experts and listing.optims) and "param_shapes" not in Value.of(meta).mapping()


# ---- files that cannot be read yet
# -------------------------------------------------------------------------------------


def _reject_names(listing: StepFiles) -> None:
    """Reject folders by names alone."""
    root = listing.root
    old = [name for name in listing.optims.values() if "_optim_states" not in name]
    if old:
        not_yet(root / old[0], "its shards are named as before release 0.3.17")
    if (root / "offloaded_tensors").is_dir():
        not_yet(root / "offloaded_tensors", "its optimizer state is in swap files (NVMe offload)")
    if listing.layers and listing.experts:  # DeepSpeed saves a pipeline with experts by rank, not by layer
        not_yet(root / listing.experts[0], "it has experts and files of layers")


def _reject_kinds(listing: StepFiles, rows: list[tuple[TorchFile, ...]], degrees: tuple[int, int]) -> None:
    """Reject folders by the contents of model states."""
    first = rows[0][0]
    _, pp = degrees
    for part in (part for row in rows for part in row):
        has_module = Value.of(part).at("module").held is not None
        if has_module and listing.layers:
            not_yet(part.path, "it has a module and files of layers")
        if not has_module and not listing.layers:
            not_yet(part.path, _LAYERS)
    if pp > 1 and not (listing.layers or listing.experts):
        not_yet(first.path, f"it has {pp} stages of a pipeline and no files of layers")
    for name in listing.experts_optims:  # without ZeRO; with it, they are there and have nothing
        part = read_shard(listing.root, name)
        if any(held is not None for held in Value.of(part).mapping().values()):
            beside = "next to the shards of ZeRO" if listing.optims else "and no shard of ZeRO"
            not_yet(part.path, f"it has an optimizer of experts {beside}")
    if auto_ep.layers_of(first) is not None:
        _reject_auto_ep(first, degrees, listing)


def _reject_auto_ep(first: TorchFile, degrees: tuple[int, int], listing: StepFiles) -> None:
    """Reject AutoEP with other parallelism, and AutoEP without files."""
    if not listing.experts and all(dp is None for dp, _ in listing.models):
        not_yet(first.path, "its experts are AutoEP's, and none of them has a file")
    folded = Value.of(first).find(auto_ep.FOLDING)
    if degrees != (1, 1) or (folded is not None and folded.held):
        not_yet(first.path, "it combines AutoEP's experts with tensor or pipeline parallelism")


# ---- degrees ---------------------------------------------------------------------------------------------------------


def _metas(listing: StepFiles, mp: int, is_sliced: bool, known: Pickles) -> tuple[TorchFile, ...]:
    """The files of model states of one model-parallel rank.

    That of its first dp rank must exist.
    """
    root = listing.root
    mine = {dp: name for (dp, at), name in listing.models.items() if at == mp}
    if (0 if is_sliced else None) not in mine:
        missing = root / model_file(3 if is_sliced else 0, 0, mp)
        fail(
            "E452",
            f"{missing.name} is missing",
            Label(str(missing), "not there"),
            Label(str(root), "files of other ranks"),
        )
    order = sorted(mine, key=lambda dp: -1 if dp is None else dp)
    return tuple(read_shard(root, mine[dp], known) for dp in order)


def _degrees(listing: StepFiles, first: TorchFile, ranks: int) -> tuple[int, int]:
    """(tp, pp), whose product is the number of model-parallel ranks.

    One can be stated; the kind in the files' names gives the other.
    """
    meta = Value.of(first)
    world = meta.find("mp_world_size")
    if world is not None and world.whole(1) != ranks:
        fail(
            "E454",
            f"there are files of {ranks} model-parallel ranks, and mp_world_size is {world.held}",
            Label(str(first.path), where="mp_world_size"),
            Label(str(listing.root)),
        )
    dims = meta.find("checkpoint_parallel_dimensions")
    if listing.layers:
        tp = _tp_of_layers(listing)
        if ranks % tp:
            fail(
                "E454",
                f"there are files of {ranks} model-parallel ranks, and of {tp} tensor-parallel ranks of a layer",
                Label(str(first.path)),
                Label(str(listing.root / listing.layers[-1])),
            )
        return tp, ranks // tp
    stated = dims.find("pp_degree") if dims is not None else None
    pp = stated.whole(1) if stated is not None else 1
    if ranks % pp:
        fail(
            "E454",
            f"there are files of {ranks} model-parallel ranks, and pp_degree is {pp}",
            Label(str(first.path), where="checkpoint_parallel_dimensions/pp_degree"),
            Label(str(listing.root)),
        )
    return ranks // pp, pp


def _tp_of_layers(listing: StepFiles) -> int:
    """The tensor-parallel degree, from the names of layers' files.

    Each layer has a file for each rank.
    """
    held: dict[int, dict[int | None, str]] = {}
    for name in listing.layers:
        number, _, tp = layer_place(name)
        held.setdefault(number, {})[tp] = name
    ranks = {tp for mine in held.values() for tp in mine}
    if None in ranks and len(ranks) > 1:
        one, other = (
            next(m[tp] for m in held.values() for tp in m if (tp is None) == alone) for alone in (True, False)
        )
        fail(
            "E453",
            "one folder has files of layers of two runs: some are of a tensor-parallel rank and some are not",
            Label(str(listing.root / one)),
            Label(str(listing.root / other)),
        )
    degree = 1 + max(tp or 0 for tp in ranks)
    for number, mine in held.items():
        lacking = next((tp for tp in range(degree) if tp not in mine), None)
        if lacking is not None and None not in ranks:
            stem = layer_place(next(iter(mine.values())))[1]
            missing = layer_file(stem, lacking)
            fail(
                "E452",
                f"{missing} is missing: layer {number} on tensor-parallel rank {lacking} of {degree}",
                Label(str(listing.root / missing), "not there"),
                Label(str(listing.root / next(iter(mine.values())))),
            )
    return degree


def _of_rank(listing: StepFiles, mp: int) -> StepFiles:
    """One model-parallel rank's files."""
    return StepFiles(
        listing.root,
        {place: name for place, name in listing.models.items() if place[1] == mp},
        {place: name for place, name in listing.optims.items() if place[1] == mp},
        listing.prefix,
    )


def _dp_degree(listing: StepFiles, part: TorchFile, is_sliced: bool) -> int:
    """The data-parallel degree: names of files and `dp_world_size` must agree."""
    degree = Value.of(part).at("dp_world_size").whole(1)
    said = Label(str(part.path), f"dp_world_size is {degree}", where="dp_world_size")
    kinds = {"optim_states": {dp: name for (dp, _), name in listing.optims.items()}} if listing.optims else {}
    if is_sliced:
        kinds["model_states"] = {dp: name for (dp, _), name in listing.models.items() if dp is not None}
        if not listing.optims:
            fail("E452", "no rank's optimizer shard is there", said, Label(str(listing.root)))
    for what, names in kinds.items():
        beyond = sorted(rank for rank in names if rank >= degree)
        if beyond:
            other = listing.root / names[beyond[0]]
            fail("E454", f"dp rank {beyond[0]} has a file, but there are {degree} ranks", said, Label(str(other)))
        if len(names) < degree:
            _missing(listing.root, what, names, said, degree)
    return degree


def _missing(root: Path, what: str, names: dict[int, str], said: Label, degree: int) -> NoReturn:
    """Report the first missing file.

    `names`: the existing ones, by dp rank.
    """
    first = next(rank for rank in range(degree) if rank not in names)
    some = min(names)
    missing = names[some].replace(f"zero_pp_rank_{some}_", f"zero_pp_rank_{first}_")
    more = f" (and of {degree - len(names) - 1} more ranks)" if degree - len(names) > 1 else ""
    fail(
        "E452",
        f"{missing} is missing{more}: dp rank {first} of {degree} has no {what}",
        Label(str(root / missing), "not there"),
        said,
    )


# ---- the stage -------------------------------------------------------------------------------------------------------


def _stage(optims: list[TorchFile], is_sliced: bool) -> int:
    stages: dict[int, TorchFile] = {}
    for part in optims:
        stages.setdefault(_stage_of(part), part)
    if len(stages) > 1:
        (one, a), (other, b) = sorted(stages.items())[:2]
        fail(
            "E456",
            f"one folder has shards of stage {one} and of stage {other}",
            Label(str(a.path), f"stage {one}"),
            Label(str(b.path), f"stage {other}"),
        )
    stage = next(iter(stages), 0)
    if (stage == 3) != is_sliced:
        where = Label(str(stages[stage].path), f"zero_stage {stage}") if stages else Label("", "no optimizer shard")
        fail("E456", f"optimizer shards of stage {stage} do not go with these model states", where)
    return stage


def _stage_of(part: TorchFile) -> int:
    """BF16_Optimizer states none: its shards are of stage 1."""
    state = Value.of(part).at("optimizer_state_dict")
    if "zero_stage" not in state.mapping():
        return 1
    stated = state.at("zero_stage")
    held = stated.held
    if type(held) is PickledCall and len(held.args) == 1:  # ZeroStageEnum(2)
        held = held.args[0]
    if type(held) is not int or held not in (1, 2, 3):
        stated.wrong("1, 2 or 3")
    return held
