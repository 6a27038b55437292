"""A legacy folder of Megatron-LM as a checkpoint, under global names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve

from ucpl.extents import Extent, Key, NamedTensor, ParameterGroup, PickledCall, Setting, TensorRef, TrainState
from ucpl.extents.account import NotRead
from ucpl.extents.parallel_facts import ParallelFacts
from ucpl.files.carrying import lifted, marks_among
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import tensors_of
from ucpl.files.torch_files import TorchFile
from ucpl.files.unknown import Copy, Mark, hypers_of, unknown_keys, unlike
from ucpl.formats.leaving import EMPTY
from ucpl.formats.megatron import legacy_names as names
from ucpl.formats.megatron.folder import Step
from ucpl.formats.megatron.legacy_arguments import part_own
from ucpl.formats.megatron.legacy_modules import Modules, read_modules
from ucpl.formats.megatron.legacy_optimizer import GROUPS, KEPT, Optimizer, facts, read_optimizer
from ucpl.formats.megatron.legacy_ranks import LegacyRanks, read_ranks

__all__ = ["EXTRA", "NAME", "OPTIMIZER", "RNG", "WITHOUT", "opened", "unread_in"]

NAME = "megatron_legacy"
RNG, EXTRA, WITHOUT = "megatron_rng", "megatron_extra_state", "megatron_without_extra_state"
OPTIMIZER = "megatron_optimizer"
_RNG = "rng_state"


def opened(step: Step) -> Checkpoint:
    """Read the headers of all files.

    Raises: UcplError E540-E548, and errors of reading files (E400-E427).
    """
    ranks = read_ranks(step)
    modules = read_modules(ranks)
    optimizer = read_optimizer(ranks, modules)
    empty = _empty(modules, optimizer)
    for name in empty:
        del modules.homes[name]
    modules.order = tuple(name for name in modules.order if name not in empty)
    extents = dict(optimizer.extents)
    for place, held in modules.of.items():
        part = ranks.parts[place]
        extents |= {
            (part.file, one.stored): part.extent(one.stored, one.tensor) for one in held if 0 not in one.tensor.shape
        }
    carried = dict(optimizer.carried)
    version = str(ranks.top((0, 0, 0)).mapping().get("checkpoint_version", ""))
    rest: dict[object, object] = {}
    blobs = _rest(ranks, modules, carried, rest)
    if optimizer.rest:
        blobs[OPTIMIZER] = optimizer.rest
    if empty:
        blobs[EMPTY] = empty
    made = Checkpoint(
        top=step.top,
        root=step.root,
        tag=step.tag or step.root.resolve().name,
        format=NAME,
        version=version,
        extents=extents,
        carried_extents=carried,
        state=TrainState(
            NAME,
            version,
            tensors=_tensors(modules, optimizer),
            settings=_settings(ranks, modules, optimizer),
            groups=tuple(_without(group, empty) for group in optimizer.groups),
            scalars={
                state: {name: one for name, one in held.items() if name not in empty}
                for state, held in optimizer.scalars.items()
            },
            blobs=blobs,
            carried=rest,
            parallel=ParallelFacts(shardings=modules.shardings if ranks.tp > 1 else {}),
        ),
        files=(*(part.file for part in ranks.parts.values()), *(part.file for part in ranks.optims.values())),
        remarks=_remarks(modules),
        scalar_extents=optimizer.scalar_extents,
        own=facts(ranks, modules, optimizer),
    )
    mark = marks_among(extent for part in ranks.parts.values() for extent in part.extents())
    others = unread_in(ranks, frozenset(_own(ranks)), mark, is_trained=bool(optimizer.groups))
    return evolve(made, not_read=tuple(others))


def _tensors(modules: Modules, optimizer: Optimizer) -> tuple[NamedTensor, ...]:
    trained = {name for group in optimizer.groups for name in group.members}
    out = []
    for name in modules.order:
        dtype = modules.dtypes[name]
        kind = "parameter" if name in trained or not optimizer.groups else "frozen"
        if names.is_buffer(name) or not dtype.startswith(("f", "bf")):
            kind = "buffer"
        states = optimizer.states if name in trained else ()
        out.append(NamedTensor(name, modules.shardings[name].shape, dtype, kind, states))
    return tuple(out)


def _empty(modules: Modules, optimizer: Optimizer) -> dict[str, object]:
    """Tensors without elements, which no plan has."""
    trained = {name for group in optimizer.groups for name in group.members}
    shapes = {name: modules.shardings[name].shape for name in modules.order}
    return {
        name: {"dtype": modules.dtypes[name], "shape": list(shape), "buffer": bool(trained) and name not in trained}
        for name, shape in shapes.items()
        if 0 in shape
    }


def _without(group: ParameterGroup, empty: Mapping[str, object]) -> ParameterGroup:
    """A group whose members have elements."""
    members = tuple(name for name in group.members if name not in empty)
    return group if members == group.members else evolve(group, members=members, listed=group.members)


def _settings(ranks: LegacyRanks, modules: Modules, optimizer: Optimizer) -> dict[str, Setting]:
    origin = f"folders of ranks in {ranks.step.root.name}"
    out = {axis: Setting(n, origin) for axis, n in ranks.degrees.items()}
    if modules.vpp > 1:
        out["vpp"] = Setting(modules.vpp, f"models of virtual stages in {ranks.parts[0, 0, 0].file}")
    if ranks.tp > 1:
        out["tp_rule"] = Setting("chunk", "Megatron-Core's parallel layers cut in equal parts")
    dtypes = {modules.dtypes[name] for group in optimizer.groups for name in group.members}
    dtypes = dtypes or {d for d in modules.dtypes.values() if d.startswith(("f", "bf"))}
    for flag, dtype in (("bf16", "bf16"), ("fp16", "f16")):
        out[flag] = Setting(int(dtype in dtypes), "dtypes of the weights")
    out["optimizer"] = Setting(optimizer.form, "optimizer of the first rank")
    if ranks.pp > 1 and modules.tied:
        out["tied"] = Setting(1, "untie_embeddings_and_output_weights of args")
    if optimizer.groups:
        out["groups"] = Setting(len(optimizer.groups), GROUPS)
    return out


def _own(ranks: LegacyRanks) -> set[str]:
    """Keys of a rank's file that are read of each rank."""
    first = ranks.top((0, 0, 0))
    return {"optimizer", KEPT, *(key for key in map(str, first.mapping()) if key.startswith("model"))}


def _rest(
    ranks: LegacyRanks, modules: Modules, carried: dict[tuple[str, Key], Extent], rest: dict[object, object]
) -> dict[str, object]:
    """Carried values: `rest` of the first rank, and random states of all."""
    own = _own(ranks)
    out: dict[str, object] = {}
    random: dict[str, object] = {}
    for place, part in ranks.parts.items():
        for key, value in ranks.top(place).named():
            if key in own or (key != _RNG and part is not ranks.parts[0, 0, 0]):
                continue
            for step, tensor in tensors_of(value.held, part.file):
                extent = part.extent((*value.key, *step), tensor)
                carried[part.file, extent.key] = extent
            made = lifted(value.held, part.file)
            if key == _RNG:
                random[ranks.folders[place].folder] = made
            else:
                rest[key] = made
    if random:
        out[RNG] = random
    if modules.extra:
        extra: dict[str, object] = {}
        for name, value in modules.extra.items():
            part = next(p for p in ranks.parts.values() if p.file == value.file)
            for step, tensor in tensors_of(value.held, part.file):
                extent = part.extent((*value.key, *step), tensor)
                carried[part.file, extent.key] = extent
            extra[name] = lifted(value.held, part.file)
        out[EXTRA] = extra
    if modules.without:
        out[WITHOUT] = list(modules.without)
    iteration = rest.get("iteration")
    if type(iteration) is int:
        out["global_steps"] = iteration
    part_own(rest)
    return out


def _remarks(modules: Modules) -> tuple[str, ...]:
    out = []
    for name, homes in modules.homes.items():
        places = {(home.stage, home.key) for home in homes if home.ep is None}
        if len(places) > 1:
            text = ", ".join(f"{key[1]} of stage {stage}" for stage, key in sorted(places))
            out.append(f"`{name}` is stored as {text}: copies, held against each other")
    return tuple(out)


# ---- skipped values --------------------------------------------------------------------------------------------------


_OPTIMIZER, _RANDOM, _ARGUMENTS = "optimizer", "rng_state", "args"
_OF_RANK = frozenset(("rank", "local_rank"))  # arguments that differ from rank to rank in each run
_STATES = frozenset(("fp32_from_fp16_params", "optimizer", "param_groups", "state"))
_INNER = frozenset(("param_groups", "state"))
_BUCKETS = frozenset(("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded"))
_BY = "Megatron"


def unread_in(ranks: LegacyRanks, own: frozenset[str], mark: Mark, *, is_trained: bool) -> Iterator[NotRead]:
    """Find values that are not read.

    own: top-level keys that are read of each rank. is_trained: the optimizer is read.
    """
    parts = [*ranks.parts.values()]
    tops = [(part, part.value if isinstance(part.value, dict) else {}) for part in parts]
    rest = [{k: _plain(k, v) for k, v in top.items() if k not in own and k != _RANDOM} for _, top in tops]
    yield from unlike(((part, "", one) for part, one in zip(parts, rest, strict=True)), mark)
    for chunk in (key for key in own if key.startswith("model")):
        for stage in dict.fromkeys(place[1] for place in ranks.parts):
            of_stage = (one for place, one in ranks.parts.items() if place[1] == stage)
            yield from unlike(((one, f"{chunk}/", _no_tensors(one, chunk)) for one in of_stage), mark)
    if not is_trained:
        return
    found = [one for part, top in tops for one in _optimizers(part, top.get(_OPTIMIZER))]
    yield from unlike(((part, at, _lacking(value, _STATES)) for part, at, value in found), mark)
    numbers = dict.fromkeys(at for _, at, _ in found)
    for number in numbers:
        same = [one for one in found if one[1] == number]
        yield from unlike(((part, f"{_inner(at, value)[0]}param_groups/", hypers_of(_inner(at, value)[1]))
                           for part, at, value in same), mark)  # fmt: skip
    for part in ranks.optims.values():
        yield from _buckets(part)
    for part, at, value in found:
        lead, inner = _inner(at, value)
        if lead != at:
            yield from unknown_keys(part.file, inner, _INNER, lead, _BY)
        states = inner.get("state") if isinstance(inner, dict) else None
        for key in states if isinstance(states, dict) else ():
            if not isinstance(key, int) and key != "common_step":
                yield from unknown_keys(part.file, {key: None}, (), f"{lead}state/", _BY)


def _buckets(part: TorchFile) -> Iterator[NotRead]:
    """Unknown entries of distrib_optim.pt.

    Known ones are a buffer's number and, in a buffer, a pair of dtypes.
    """
    for n, one in enumerate(part.value if isinstance(part.value, list) else [part.value]):
        lead = f"{n}/" if isinstance(part.value, list) else ""
        for key, held in one.items() if isinstance(one, dict) else ():
            if not isinstance(key, int):
                yield from unknown_keys(part.file, {key: held}, _BUCKETS, lead, _BY)
            for pair in held if isinstance(key, int) and isinstance(held, dict) else ():
                if not isinstance(pair, tuple):
                    yield from unknown_keys(part.file, {pair: None}, (), f"{lead}{key}/", _BY)


def _no_tensors(part: TorchFile, chunk: str) -> dict[object, object]:
    """Values of a model's state dict that are no tensors."""
    held = part.value.get(chunk) if isinstance(part.value, dict) else None
    named = held.items() if isinstance(held, dict) else ()
    return {name: value for name, value in named if not isinstance(value, TensorRef | dict)}


def _plain(key: object, value: object) -> object:
    """Arguments of a run without those of one rank."""
    state = value.state if isinstance(value, PickledCall) else None
    if key != _ARGUMENTS or not isinstance(state, dict):
        return value
    return _lacking(state, _OF_RANK)


def _optimizers(part: TorchFile, held: object) -> Iterator[Copy]:
    """The optimizer of a rank, or those of its chain."""
    if isinstance(held, list):
        yield from ((part, f"{_OPTIMIZER}/{n}/", one) for n, one in enumerate(held))
    elif held is not None:
        yield part, f"{_OPTIMIZER}/", held


def _inner(at: str, value: object) -> tuple[str, object]:
    if isinstance(value, dict) and "param_groups" not in value and _OPTIMIZER in value:
        return f"{at}{_OPTIMIZER}/", value[_OPTIMIZER]
    return at, value


def _lacking(value: object, keys: frozenset[str]) -> object:
    return {key: one for key, one in value.items() if key not in keys} if isinstance(value, dict) else value
