"""The optimizer of a legacy folder: masters, states, and parameter groups.

No file names the members of groups. A distributed optimizer has `distrib_optim.pt`, with a tensor of each state for
each buffer (see legacy_buffers). Others have torch's numbers in `model_optim_rng.pt`. Groups are filled by Megatron's
own rule: no weight decay for biases and tensors of one dim, separate groups for experts that ranks share, and for
embeddings with a decoupled learning rate.
"""

from __future__ import annotations

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Counted, Extent, Key, ParameterGroup, TensorRef, TorchDType
from ucpl.files.carrying import lifted
from ucpl.files.pickles import tensors_of
from ucpl.files.scalars import is_counted
from ucpl.files.skipping import skips_optimizer
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.megatron import legacy_names as names
from ucpl.formats.megatron.groups import decays_norms, has_no_decay, has_own_rate, is_decoupled
from ucpl.formats.megatron.homes import BufferRun, Legacy, StageGroups
from ucpl.formats.megatron.legacy_buffers import ALIGNED, BufferParameter, SavedBucket, buckets_of
from ucpl.formats.megatron.legacy_grouped import views
from ucpl.formats.megatron.legacy_modules import Local, Modules
from ucpl.formats.megatron.legacy_ranks import CODE, LegacyRanks, Place, optim_of
from ucpl.records import define, frozen

__all__ = ["FROZEN", "KEPT", "Optimizer", "read_optimizer"]

_STATES = {"param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_SAVED, _MASTERS = "numel_unpadded", "fp32_from_fp16_params"
KEPT, FROZEN = "ucpl", "frozen"  # keys of a target's files for tensors without a buffer: their weights share no storage
GROUPS = "Megatron-Core's rule: no weight decay for biases and tensors of one dim"


@define(eq=False)
class Optimizer:
    """Data read from the optimizer's files."""

    form: str = ""
    extents: dict[tuple[str, Key], Extent] = field(factory=dict)
    carried: dict[tuple[str, Key], Extent] = field(factory=dict)
    groups: tuple[ParameterGroup, ...] = ()
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    states: tuple[str, ...] = ()
    runs: list[BufferRun] = field(factory=list)
    stages: list[StageGroups] = field(factory=list)
    chained: bool = False
    rest: dict[str, object] = field(factory=dict)  # grad_scaler and its like, of the first rank


@frozen(eq=False)
class _Group:
    """A parameter group as saved. `at`: which optimizer has it."""

    at: int
    hyper: Value
    no_decay: bool
    is_expert: bool
    is_decoupled: bool


def read_optimizer(ranks: LegacyRanks, modules: Modules) -> Optimizer:
    """Raises: UcplError E540, E541, E545, E546, E548."""
    made = Optimizer()
    first = ranks.top((0, 0, 0)).find("optimizer")
    if first is None or skips_optimizer("optimizer"):
        return made
    made.chained = isinstance(first.held, list)
    one = _parts(first)[0]
    if "state" in one.mapping():
        made.form = "fp32"
    else:
        made.form = "float16" if "state" in one.at("optimizer").mapping() else "distributed"
    found = _groups(first)
    frozen_ = _listed_frozen(ranks)
    if made.form == "distributed":
        _distributed(ranks, modules, made, frozen_)
    members = _members(modules, found, frozen_, ranks)
    for g, group in enumerate(found):
        hyper = {
            k: _carry(ranks.parts[0, 0, 0], made, v) for k, v in group.hyper.named() if k not in ("params", "step")
        }
        made.groups = (*made.groups, ParameterGroup(str(g), tuple(members[g]), hyper))
    if made.form != "distributed":
        _numbered(ranks, modules, made, members, found)
    for group, names_in in zip(found, members, strict=True):
        step = group.hyper.find("step")
        if step is None or made.scalars.get("step"):
            continue
        if not is_counted(step.held):
            step.wrong("a number")
        made.scalars.setdefault("_", {}).update(dict.fromkeys(names_in, step.held))
    if "_" in made.scalars:
        made.scalars["step"] = made.scalars.pop("_")
    made.rest = {
        key: _carry(ranks.parts[0, 0, 0], made, value)
        for key, value in one.named()
        if key not in ("optimizer", "state", "param_groups", _MASTERS)
    }
    return made


def _listed_frozen(ranks: LegacyRanks) -> set[str]:
    """Tensors that a target's files list as being in no buffer.

    Raises: UcplError E541.
    """
    said = ranks.top((0, 0, 0)).find(KEPT)
    return set() if said is None else set(said.at(FROZEN).texts())


def facts(ranks: LegacyRanks, modules: Modules, made: Optimizer) -> Legacy:
    return Legacy(
        ranks.tp,
        ranks.pp,
        ranks.ep,
        modules.vpp,
        made.form,
        modules.homes,
        tuple(made.runs),
        tuple(made.stages),
        made.chained,
    )


def _parts(value: Value) -> list[Value]:
    """One optimizer, or several that are chained. Raises: UcplError E541."""
    if not isinstance(value.held, list):
        return [value]
    return value.items() or [value.wrong("a list of optimizers that has one")]


def _inner(value: Value) -> Value:
    return value if "param_groups" in value.mapping() else value.at("optimizer")


# ---- parameter groups --------------------------------------------------------------------------------------------------


def _groups(value: Value) -> list[_Group]:
    out = []
    for at, one in enumerate(_parts(value)):
        for group in _inner(one).at("param_groups").items():
            held = group.mapping()
            decay = next((held[k] for k in ("wd_mult", "pre_wd_mult") if k in held), 1.0)
            out.append(
                _Group(
                    at,
                    group,
                    decay == 0,
                    held.get("is_expert_parallel") is True,
                    is_decoupled({str(k): v for k, v in held.items()}),
                )
            )
    return out


def _members(modules: Modules, found: list[_Group], without: set[str], ranks: LegacyRanks) -> list[list[str]]:
    """The parameters of each group, in the model's order. Raises: UcplError E546."""
    out: list[list[str]] = [[] for _ in found]
    norms_decay = decays_norms(ranks.arguments)
    experts_apart, decoupled = any(g.is_expert for g in found), any(g.is_decoupled for g in found)
    for name in modules.order:
        shape = modules.shardings[name].shape
        if names.is_buffer(name) or not modules.dtypes[name].startswith(("f", "bf")) or name in without:
            continue
        mark = (
            experts_apart and names.is_expert(name),
            decoupled and has_own_rate(name),
        )
        near = [g for g, one in enumerate(found) if (one.is_expert, one.is_decoupled) == mark]
        no_decay = has_no_decay(name, shape, norms_decay=norms_decay)
        fitting = [g for g in near if found[g].no_decay == no_decay] if len(near) > 1 else near
        if len(fitting) != 1:
            fail(
                "E546",
                f"`{name}` is in {'none' if not fitting else 'several'} of the {len(found)} parameter groups by Megatron's"
                " rule, and the files do not say in which it is",
                Label(ranks.place, where="optimizer/param_groups"),
                remedy="save the run as torch_dist",
            )
        out[fitting[0]].append(name)
    return out


def _carry(part: TorchFile, made: Optimizer, value: Value) -> object:
    """A value that goes along, with the tensors in it."""
    for step, tensor in tensors_of(value.held, part.file):
        extent = part.extent((*value.key, *step), tensor)
        made.carried[part.file, extent.key] = extent
    return lifted(value.held, part.file)


# ---- a distributed optimizer -------------------------------------------------------------------------------------------


def _distributed(ranks: LegacyRanks, modules: Modules, made: Optimizer, frozen_: set[str]) -> None:
    made.states = tuple(_STATES.values())
    experts_apart = made.chained and ranks.ep > 1
    for stage in range(ranks.pp):
        for is_expert in (False, True) if experts_apart else (False,):
            by_rank: dict[Place, dict[tuple[int, str], tuple[SavedBucket, ...]]] = {}
            for tp in range(ranks.tp):
                for ep in range(ranks.ep) if is_expert else (0,):
                    place = (tp, stage, ep)
                    by_rank[place] = _buffers(ranks, modules, made, place, is_expert, frozen_)
            grouped = {one.name for place in by_rank for one in modules.of[place] if one.grouped is not None}
            _runs(ranks, made, (stage, is_expert), by_rank, grouped)


def _buffers(
    ranks: LegacyRanks, modules: Modules, made: Optimizer, place: Place, is_expert: bool, frozen_: set[str]
) -> dict[tuple[int, str], tuple[SavedBucket, ...]]:
    """The buckets of a rank's buffers, by number and dtypes.

    Raises: UcplError E541, E545, E548.
    """
    part = optim_of(ranks, place)
    top = Value.of(part, CODE)
    steps: tuple[int, ...] = (int(is_expert),) if made.chained else ()
    if isinstance(top.held, list) != made.chained:
        top.wrong("a list of optimizers" if made.chained else "a dict of buffers")
    if made.chained:
        items = top.items()
        if len(items) <= steps[0] or items[steps[0]].held is None:
            top.wrong(f"a list with a dict at {steps[0]}")
        top = items[steps[0]]
    held = top.mapping()
    if held.get("buckets_coalesced") is not True:
        fail(
            "E548",
            f"{part.file} has no buckets_coalesced: it is of a Megatron-LM before February 2024",
            Label(str(part.path)),
            remedy="load and save it with a later Megatron-LM (--ckpt-convert-update-legacy-dist-opt-format)",
        )
    mine = [
        one
        for one in modules.of[place]
        if (not made.chained or ranks.ep == 1 or one.is_expert == is_expert)
        and one.tensor.storage.dtype.startswith(("f", "bf"))
        and not names.is_buffer(one.name)
        and one.name not in frozen_
        and 0 not in one.tensor.shape  # it moves no other
    ]
    wanted = [
        (c, d) for c in range(modules.vpp) for d in dict.fromkeys(x.tensor.storage.dtype for x in mine if x.chunk == c)
    ]
    out: dict[tuple[int, str], tuple[SavedBucket, ...]] = {}
    buffers = [key for key in held if type(key) is int]
    if len(buffers) > len(wanted):
        top.wrong(f"buffers of {len(wanted)} virtual stages and dtypes")
    left, taken = list(wanted), set()
    for number in sorted(key for key in buffers if type(key) is int):
        inner = top.at(number)
        if len(inner.mapping()) != 1:
            inner.wrong("a dict of one pair of dtypes")
        dtypes, state = next(iter(inner.mapping().items()))
        text, dtype = _dtypes(inner, dtypes)
        found = Value(part.path, part.file, (*inner.key, text), state, CODE)
        while left and left[0][1] != dtype:
            left.pop(0)
        if not left:
            inner.wrong("a buffer of a dtype that the model has")
        chunk, _ = left.pop(0)
        taken.add((chunk, dtype))
        own = [one for one in mine if one.chunk == chunk and one.tensor.storage.dtype == dtype]
        buckets = _buckets(ranks, found, _units(own), modules, frozen_, place[1] == 0)
        key: Key = (*steps, number, text)
        if any(one.grouped is not None for one in own):
            out[number, text] = _views_apart(part, made, (key, found), buckets, own)
        else:
            out[number, text] = buckets
            _views(part, made, found, key, buckets)
    gone = next((x for x in mine if (x.chunk, x.tensor.storage.dtype) not in taken and x.name not in frozen_), None)
    if gone is not None:
        fail(
            "E545",
            f"{part.file} has no buffer of {gone.tensor.storage.dtype} for virtual stage {gone.chunk}, and `{gone.name}` is one"
            " of its parameters",
            Label(str(part.path), where="/".join(map(str, steps)) or "its buffers"),
            Label(ranks.place, where=gone.name),
        )
    return out


def _units(own: list[Local]) -> list[Local]:
    """A rank's parameters in its modules.

    A matrix for the experts in it.
    """
    out: dict[tuple[str, ...], Local] = {}
    for one in own:
        of = one.grouped
        key = (one.key[0], one.key[1])
        out.setdefault(key, one if of is None else evolve(one, name=_matrix(one), tensor=of.tensor))
    return list(out.values())


def _matrix(one: Local) -> str:
    """The name of a matrix: its first expert's, which is unique."""
    return f"{one.key[1]} of {one.key[0]}"


def _dtypes(inner: Value, key: object) -> tuple[str, str]:
    """("(torch.bfloat16, torch.float32)", "bf16"): of parameters and gradients. Raises: UcplError E541, E548."""
    if not isinstance(key, tuple) or len(key) != 2 or not all(type(one) is TorchDType for one in key):
        inner.wrong("a pair of dtypes as its key")
    said = [one.name for one in key if type(one) is TorchDType]
    if not said[0].startswith(("f", "bf")):
        fail(
            "E548",
            f"{inner.file} has parameters of {said[0]} (--fp8-param-gather), which are not read",
            Label(str(inner.path), where="/".join(map(str, inner.key))),
        )
    return f"({', '.join(f'torch.{DTYPES[one].torch}' for one in said)})", said[0]


def _buckets(
    ranks: LegacyRanks, found: Value, own: list[Local], modules: Modules, frozen_: set[str], is_first: bool
) -> tuple[SavedBucket, ...]:
    """Raises: UcplError E541, E545."""
    numel = found.at(_SAVED).whole()
    storages: dict[str, list[Local]] = {}
    for one in own:
        storages.setdefault(one.tensor.storage.name, []).append(one)
    shared = next((held for held in storages.values() if len(held) > 1), None)
    if shared is not None and sum(_numel(x) for x in own) > numel:  # the buffer's; others are not trained
        frozen_ |= {x.name for x in own} - {x.name for x in shared}
        own = shared
    is_placed = len({x.tensor.storage.name for x in own}) == 1 and len({x.tensor.offset for x in own}) == len(own)
    is_placed &= min((x.tensor.offset for x in own), default=1) == 0
    parameters = [
        BufferParameter(
            x.name,
            _numel(x),
            x.tensor.offset if is_placed else None,
            x.name == names.EMBEDDING and len({home.stage for home in modules.homes[x.name]}) > 1,
        )
        for x in reversed(own)
    ]
    if is_placed:
        parameters.sort(key=lambda p: p.place or 0)
    ways = buckets_of(parameters, numel, _bucket_sizes(ranks, own[0].chunk > 0 or not is_first))
    if len(ways) == 1:
        return ways[0]
    held = sum(p.numel for p in parameters)
    what = (
        "no order of them makes that up"
        if not ways
        else f"{len(ways)} bucket sizes make that up, and place them otherwise"
    )
    fail(
        "E545",
        f"{found.file}: a buffer of {numel} elements is of {len(parameters)} parameters with {held}; {what}",
        Label(str(found.path), f"{_SAVED} = {numel}", where="/".join(map(str, found.key))),
        Label(str(ranks.place), f"{len(parameters)} parameters, each from a multiple of 64"),
        remedy="save it as torch_dist (--ckpt-format torch_dist), which records the place of each",
    )


def _bucket_sizes(ranks: LegacyRanks, is_later: bool) -> tuple[int | None, ...]:
    """The bucket size of a buffer by the run's arguments.

    Megatron does not divide buffers of later stages or virtual stages.
    """
    said = ranks.numbers
    if is_later or said.get("overlap_grad_reduce") == 0:
        return (None,)
    if "overlap_grad_reduce" not in said:
        return ()
    return (said.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * said.get("data_parallel_size", 1)),)


def _numel(one: Local) -> int:
    n = 1
    for size in one.tensor.shape:
        n *= size
    return n


def _views(part: TorchFile, made: Optimizer, found: Value, key: Key, buckets: tuple[SavedBucket, ...]) -> None:
    """The runs of parameters in each state's tensor. Raises: UcplError E541."""
    numel = found.at(_SAVED).whole()
    for name, value in found.named():
        if name == _SAVED:
            continue
        tensor = value.tensor()
        if name not in _STATES:
            value.wrong(f"one of {', '.join(_STATES)}")
        if tensor.shape != (numel,):
            value.wrong(f"a tensor of shape [{numel}]")
        for number, bucket in enumerate(buckets):
            here = (*key, name) if len(buckets) == 1 else (*key, name, number)
            view = evolve(tensor, offset=tensor.offset + bucket.start * tensor.stride[0], shape=(bucket.numel,))
            made.extents[part.file, here] = part.extent(here, view)
    for name in _STATES:
        found.at(name)


def _views_apart(
    part: TorchFile, made: Optimizer, where: tuple[Key, Value], buckets: tuple[SavedBucket, ...], own: list[Local]
) -> tuple[SavedBucket, ...]:
    """Add views of parameters, and of experts of a matrix.

    Returns the buckets, with experts in place of matrices. Raises: UcplError E541.
    """
    key, found = where
    _views(part, made, found, key, buckets)
    members: dict[str, list[Local]] = {}
    for one in own:
        members.setdefault(one.name if one.grouped is None else _matrix(one), []).append(one)
    out = []
    for number, bucket in enumerate(buckets):
        for state in _STATES:
            here = (*key, state) if len(buckets) == 1 else (*key, state, number)
            whole = made.extents.pop((part.file, here))
            end = 0
            for name in bucket.names:
                begin = -(-end // ALIGNED) * ALIGNED
                held = members[name]
                end = begin + sum(_numel(one) for one in held)
                for one, view in zip(held, _parts_of(held, whole.offset + begin), strict=True):
                    made.extents[part.file, (*here, one.name)] = evolve(
                        whole, key=(*here, one.name), shape=view.shape, stride=view.stride, offset=view.offset
                    )
        names_in = tuple(one.name for name in bucket.names for one in members[name])
        out.append(evolve(bucket, names=names_in))
    return tuple(out)


def _parts_of(held: list[Local], begin: int) -> list[TensorRef]:
    """Views of a parameter that begins there, one per expert."""
    of = held[0].grouped
    if of is None:
        tensor, stride, out = held[0].tensor, 1, []
        for size in reversed(tensor.shape):
            out.append(stride)
            stride *= size
        return [evolve(tensor, offset=begin, stride=tuple(reversed(out)))]
    return views(evolve(of.tensor, offset=begin), of.count, is_first=of.matrix.endswith("1"))


def _runs(
    ranks: LegacyRanks,
    made: Optimizer,
    which: tuple[int, bool],
    by_rank: dict[Place, dict[tuple[int, str], tuple[SavedBucket, ...]]],
    grouped: set[str],
) -> None:
    """Make groups of parameters from buckets.

    which: the stage, and a flag for buckets of experts that ranks share. grouped: experts of GroupedMLP. Raises:
    UcplError E545 if tensor-parallel ranks have other groups.
    """
    stage, is_expert = which
    steps: tuple[int, ...] = (int(is_expert),) if made.chained else ()
    first = by_rank[0, stage, 0]
    for place, held in by_rank.items():
        odd = next(iter(held.keys() ^ first.keys()), None)
        if odd is not None:
            at = "/".join(map(str, (*steps, *odd)))
            fail(
                "E545",
                f"one rank's optimizer has buffer {at}, and another's has none",
                Label(ranks.folders[0, stage, 0].optim, where=at),
                Label(ranks.folders[place].optim, where=at),
            )
    for number, text in first:
        several = [by_rank[0, stage, ep][number, text] for tp, _, ep in by_rank if tp == 0]
        for (tp, _, ep), found in by_rank.items():
            mine, other = found.get((number, text), ()), by_rank[0, stage, ep][number, text]
            same = [b.names for b in mine] == [b.names for b in other]
            if not same or len(mine) != len(several[0]):
                fail(
                    "E545",
                    f"buffer {number} of tp rank {tp} of stage {stage} has its parameters in other buckets than another rank's",
                    Label(str(ranks.step.root), where="/".join(map(str, (*steps, number, text)))),
                )
        keys = "/".join(map(str, (*steps, number, text)))
        for b in range(len(several[0])):
            members = tuple(dict.fromkeys(name for one in several for name in one[b].names))
            apart = bool(grouped & set(members))
            made.runs.append(BufferRun(stage, (keys,), members, is_expert, b if len(several[0]) > 1 else None, apart))


# ---- an optimizer that is not distributed ----------------------------------------------------------------------------


def _numbered(
    ranks: LegacyRanks, modules: Modules, made: Optimizer, members: list[list[str]], found: list[_Group]
) -> None:
    """Read states by torch's numbers of each optimizer's parameters.

    Raises: UcplError E541, E546, E548.
    """
    if (odd := next((x for held in modules.of.values() for x in held if x.grouped is not None), None)) is not None:
        fail(
            "E548",
            f"`{odd.key[1]}` has all experts of a rank in one tensor, and its optimizer is not the distributed one: its states"
            " are not read",
            Label(ranks.place, where="optimizer"),
            remedy="weights alone: convert a copy without `optimizer`; or save it as torch_dist, which has experts apart",
        )
    states: dict[str, None] = {"fp32": None} if made.form == "float16" else {}
    for stage in range(ranks.pp):
        registered = dict.fromkeys(
            one.name for (tp, s, _), held in modules.of.items() if s == stage and tp == 0 for one in held
        )
        groups = tuple(tuple(n for n in registered if n in set(names_in)) for names_in in members)
        made.stages.append(StageGroups(groups, tuple(bool(g.at) for g in found)))
    for place, part in ranks.parts.items():
        local = {one.name: one for one in modules.of[place]}
        top = ranks.top(place).at("optimizer")
        for at, one in enumerate(_parts(top)):
            here = made.stages[place[1]].groups
            mine = [[local[n] for n in here[g] if n in local] for g, group in enumerate(found) if group.at == at]
            _one_numbered(part, made, one, mine, states)
    made.states = tuple(states)


def _one_numbered(
    part: TorchFile, made: Optimizer, one: Value, groups: list[list[Local]], states: dict[str, None]
) -> None:
    inner = _inner(one)
    stated = inner.at("param_groups").items()
    if len(stated) != len(groups):
        inner.at("param_groups").wrong(f"a list of {len(groups)} groups")
    masters = [group.items() for group in one.at(_MASTERS).items()] if made.form == "float16" else []
    if masters and [len(group) for group in masters] != [len(members) for members in groups]:
        one.at(_MASTERS).wrong(f"a master of each parameter of {len(groups)} groups")
    for g, (members, group) in enumerate(zip(groups, stated, strict=True)):
        numbers = group.at("params").items()
        if len(numbers) != len(members):
            fail(
                "E546",
                f"group {g} of {part.file} has {len(numbers)} parameters, and {len(members)} are in it by Megatron's rule",
                Label(str(part.path), where="/".join(map(str, group.key))),
                remedy="save it as torch_dist (--ckpt-format torch_dist), which names them",
            )
        for m, (number, local) in enumerate(zip(numbers, members, strict=True)):
            kept = inner.at("state").find(number.whole())
            for state, value in kept.named() if kept is not None else ():
                _state(part, made, local, (state, value), states)
            if masters:
                _state(part, made, local, ("fp32", masters[g][m]), states)


def _state(part: TorchFile, made: Optimizer, local: Local, held: tuple[str, Value], states: dict[str, None]) -> None:
    state, value = held
    if type(value.held) is not TensorRef:
        if not is_counted(value.held):
            value.wrong("a tensor or a number")
        made.scalars.setdefault(state, {})[local.name] = value.held
    elif state == "step" and value.held.shape == ():
        made.scalars.setdefault(state, {})[local.name] = part.read_scalar(value.key, value.held)
        made.scalar_extents.setdefault(state, {})[local.name] = part.extent(value.key, value.held)
    elif value.held.shape != local.tensor.shape:
        fail(
            "E546",
            f"{state} of number {value.key[-2]} is {list(value.held.shape)}, and `{local.name}`, which has that number by"
            f" Megatron's rule, is {list(local.tensor.shape)}",
            Label(str(part.path), where="/".join(map(str, value.key))),
            remedy="save it as torch_dist (--ckpt-format torch_dist), which names them",
        )
    else:
        states[state] = None
        made.extents[part.file, value.key] = part.extent(value.key, value.held)
