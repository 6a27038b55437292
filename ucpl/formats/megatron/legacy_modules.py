"""The model in the state dicts of all ranks.

Names and places of tensors. On a rank, layers count from 0 in each virtual stage, and experts from 0 in each layer.
Megatron deals layers to the first virtual stages of all stages, then to the second ones.
"""

from __future__ import annotations

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import Key, Sharding, TensorRef
from ucpl.files.values import Value
from ucpl.formats.megatron import legacy_names as names
from ucpl.formats.megatron.homes import LegacyHome
from ucpl.formats.megatron.legacy_grouped import Grouped, experts_in, is_grouped
from ucpl.formats.megatron.legacy_ranks import LegacyRanks, Place
from ucpl.records import define, frozen

__all__ = ["Local", "Modules", "read_modules"]

_EXTRA = "_extra_state"


@frozen(eq=False)
class Local:
    """One tensor of a rank.

    `name`: in the complete model; `is_expert`: other expert-parallel ranks have other experts.
    """

    name: str
    key: tuple[str, ...]
    tensor: TensorRef
    chunk: int
    is_expert: bool
    grouped: Grouped | None = None  # the rank's matrix of all experts that it is a view of

    @property
    def stored(self) -> Key:
        """Its key in plans: an expert of a matrix has a number."""
        return self.key if self.grouped is None else (*self.key[:-1], self.grouped.number)


@define(eq=False)
class Modules:
    """Tensors of all ranks, in each rank's order of registration."""

    vpp: int
    tied: bool  # the output layer of the last stage is the embedding of the first
    of: dict[Place, list[Local]] = field(factory=dict)
    homes: dict[str, tuple[LegacyHome, ...]] = field(factory=dict)
    shardings: dict[str, Sharding] = field(factory=dict)
    order: tuple[str, ...] = ()
    layers: dict[str, list[int]] = field(factory=dict)  # by prefix: how many each (virtual stage, stage) has
    without: tuple[str, ...] = ()  # `_extra_state` of modules that have none
    extra: dict[str, Value] = field(factory=dict)  # values of state dicts that are no tensors

    dtypes: dict[str, str] = field(factory=dict)


def read_modules(ranks: LegacyRanks) -> Modules:
    """Raises: UcplError E541-E544, E548."""
    chunks = _chunks(ranks)
    tied = _is_tied(ranks)
    made = Modules(len(chunks), tied)
    held = {place: [_tensors(ranks.top(place).at(chunk)) for chunk in chunks] for place in ranks.parts}
    starts = _starts(ranks, made, held)
    _refuse_unknown(ranks, held)
    for place in ranks.parts:
        made.of[place] = []
        for c, chunk in enumerate(chunks):
            here, grouped = _experts_apart(held[place][c], ranks, place)
            counts = names.numbered([n for n, v in here.items() if type(v.held) is TensorRef])
            for name, value in here.items():
                whole = _named(name, place, starts[c, place[1]], counts, ranks)
                if type(value.held) is not TensorRef:
                    if place[0] == 0 and value.held is not None:
                        made.extra.setdefault(whole, value)
                    elif place[0] == 0 and name.endswith(_EXTRA):
                        made.without = (*made.without, whole) if whole not in made.without else made.without
                    continue
                if tied and name == names.OUTPUT:
                    whole = names.EMBEDDING
                mine = ranks.ep > 1 and names.is_expert(name)
                of = grouped.get(name)
                key = (chunk, name) if of is None else (chunk, of.matrix, str(of.number))
                made.of[place].append(Local(whole, key, value.held, c, mine, of))
    _place(ranks, made)
    _shape(ranks, made)
    return made


def _chunks(ranks: LegacyRanks) -> tuple[str, ...]:
    """The names of virtual stages' models. Raises: UcplError E541."""
    top = ranks.top((0, 0, 0))
    if "model" in top.mapping():
        return ("model",)
    found: list[str] = []
    while f"model{len(found)}" in top.mapping():
        found.append(f"model{len(found)}")
    if not found:
        top.at("model")
    return tuple(found)


def _is_tied(ranks: LegacyRanks) -> bool:
    said = ranks.arguments
    if "untie_embeddings_and_output_weights" in said:
        return said["untie_embeddings_and_output_weights"] is False
    return said.get("share_embeddings_and_output_weights") is True


def _tensors(value: Value) -> dict[str, Value]:
    """Raises: UcplError E548 for a model in nested dicts."""
    out = {}
    for name, one in value.named():
        if isinstance(one.held, dict):
            fail(
                "E548",
                f"{value.file} has its model in nested dicts ({name}), as Megatron-LM saved it before Megatron-Core's models",
                Label(str(one.path), where=f"model/{name}"),
                remedy="load and save it with a later Megatron-LM; or say it in a layout of framework torch()",
            )
        if any(c in name for c in "/{}*"):
            one.wrong("a tensor whose name has none of / { } *")
        out[name] = one
    return out


def _experts_apart(
    held: dict[str, Value], ranks: LegacyRanks, place: Place
) -> tuple[dict[str, Value], dict[str, Grouped]]:
    """A rank's tensors with GroupedMLP's expert by expert, and their matrices."""
    tensors = {name: value.held for name, value in held.items() if type(value.held) is TensorRef}
    if not any(map(is_grouped, tensors)):
        return held, {}
    found = experts_in(tensors, ranks.ep, ranks.numbers, str(ranks.parts[place].path))
    out: dict[str, Value] = {}
    for name, value in held.items():
        if name not in {of.matrix for _, of in found.values()}:
            out[name] = value
            continue
        lead = name.rpartition(".")[0]
        mine = [own for own, (_, of) in found.items() if of.matrix.rpartition(".")[0] == lead]
        for own in sorted(
            mine, key=lambda own: (found[own][1].number, found[own][1].matrix)
        ):  # where SequentialMLP has them
            out[own] = evolve(held[found[own][1].matrix], held=found[own][0])
    return out, {own: of for own, (_, of) in found.items()}


def _starts(
    ranks: LegacyRanks, made: Modules, held: dict[Place, list[dict[str, Value]]]
) -> dict[tuple[int, int], dict[str, int]]:
    """The first layer of each (virtual stage, stage), by prefix.

    Raises: UcplError E544.
    """
    out: dict[tuple[int, int], dict[str, int]] = {}
    total: dict[str, int] = {}
    for c in range(made.vpp):
        for stage in range(ranks.pp):
            here = [name for name, v in held[0, stage, 0][c].items() if type(v.held) is TensorRef]
            counts: dict[str, int] = {}
            for name in here:
                if (found := names.layer_of(name)) is not None:
                    counts[found[0]] = max(counts.get(found[0], 0), found[1] + 1)
            out[c, stage] = dict(total)
            for prefix, count in counts.items():
                made.layers.setdefault(prefix, [0] * (made.vpp * ranks.pp))[c * ranks.pp + stage] = count
                total[prefix] = total.get(prefix, 0) + count
    stated = ranks.numbers.get("num_layers")
    if stated is not None and len(total) == 1 and total != {next(iter(total)): stated}:
        found_layers = next(iter(total.values()))
        fail(
            "E544",
            f"the run's arguments say {stated} layers, and the files of {ranks.pp} stages hold {found_layers}",
            Label(ranks.place, f"num_layers = {stated}", where="args"),
            Label(str(ranks.step.root), f"layers of stages {next(iter(made.layers.values()))}"),
        )
    return out


def _refuse_unknown(ranks: LegacyRanks, held: dict[Place, list[dict[str, Value]]]) -> None:
    """Reject forms without a name for each tensor.

    Raises: UcplError E548.
    """
    said = ranks.arguments
    etp = ranks.numbers.get("expert_tensor_parallel_size")
    experts = [n for c in held[0, 0, 0] for n in c if names.is_expert(n)]
    for name in experts:
        if names.expert_of(name) is None and not is_grouped(name) and max(ranks.ep, ranks.tp) > 1:
            if not name.endswith(_EXTRA):
                _reject(ranks, f"`{name}` is of experts, and its name has no expert's number", name)
    if experts and etp not in (None, ranks.tp):
        _reject(ranks, f"experts are cut over {etp} ranks, and the rest of the model over {ranks.tp}", "args")
    if said.get("moe_mlp_glu_interleave_size") not in (None, 0):
        _reject(ranks, "gate and up projections of linear_fc1 are interleaved (moe_mlp_glu_interleave_size)", "args")


def _reject(ranks: LegacyRanks, what: str, where: str) -> None:
    fail(
        "E548",
        f"{what}; that is not read",
        Label(ranks.place, where=where),
        remedy="save it as torch_dist (--ckpt-format torch_dist), which is read; or say it in a layout of framework torch()",
    )


def _named(name: str, place: Place, starts: dict[str, int], counts: dict[str, int], ranks: LegacyRanks) -> str:
    """A rank's name of a tensor as in the complete model."""
    if (expert := names.expert_of(name)) is not None and ranks.ep > 1:
        name = names.with_expert(name, place[2] * counts.get(expert[0], 0) + expert[1])
    if (layer := names.layer_of(name)) is not None:
        name = names.with_layer(name, starts.get(layer[0], 0) + layer[1])
    return name


def _place(ranks: LegacyRanks, made: Modules) -> None:
    """Set homes and the model's order.

    Raises: UcplError E541 if ranks of one stage do not have the same tensors.
    """
    homes: dict[str, dict[LegacyHome, None]] = {}
    keyed: dict[str, tuple[int, int, int, int, int]] = {}
    for (tp, stage, ep), held in made.of.items():
        if tp:
            _check_same(ranks, made, (tp, stage, ep))
            continue
        anchor = -1
        for i, one in enumerate(held):
            home = LegacyHome(stage, one.key, ep if one.is_expert else None)
            if not one.is_expert:
                anchor += 1
            homes.setdefault(one.name, {})[home] = None
            keyed.setdefault(one.name, (one.chunk, stage, anchor, ep if one.is_expert else -1, i))
    made.homes = {name: tuple(found) for name, found in homes.items()}
    made.order = tuple(sorted(keyed, key=lambda name: keyed[name]))


def _check_same(ranks: LegacyRanks, made: Modules, place: Place) -> None:
    first = {one.name: one for one in made.of[0, place[1], place[2]]}
    mine = {one.name: one for one in made.of[place]}
    for name in (*first, *mine):
        one, other = first.get(name), mine.get(name)
        if one is None or other is None:
            there = ranks.parts[place if one is None else (0, *place[1:])]
            fail(
                "E541",
                f"`{name}` is on one tensor-parallel rank and not on another",
                Label(str(there.path), "is here", where=name),
                Label(str(ranks.parts[(0, *place[1:]) if one is None else place].path), "not here", where=name),
            )
        if one.tensor.shape != other.tensor.shape or one.tensor.storage.dtype != other.tensor.storage.dtype:
            fail(
                "E543",
                f"`{name}` is {list(one.tensor.shape)} {one.tensor.storage.dtype} on one tensor-parallel rank and"
                f" {list(other.tensor.shape)} {other.tensor.storage.dtype} on another",
                Label(str(ranks.parts[0, place[1], place[2]].path), where=name),
                Label(str(ranks.parts[place].path), where=name),
            )


def _shape(ranks: LegacyRanks, made: Modules) -> None:
    """Set complete shapes, from the cuts of tensors.

    Raises: UcplError E542, E543.
    """
    local: dict[str, tuple[int, ...]] = {}
    for place, held in made.of.items():
        for one in held:
            shape = local.setdefault(one.name, one.tensor.shape)
            dtype = made.dtypes.setdefault(one.name, one.tensor.storage.dtype)
            if shape != one.tensor.shape or dtype != one.tensor.storage.dtype:
                fail(
                    "E543",
                    f"`{one.name}` is {list(shape)} {dtype} in one place and {list(one.tensor.shape)}"
                    f" {one.tensor.storage.dtype} in another",
                    Label(str(ranks.parts[place].path), where="/".join(one.key)),
                )
    blocks = str(ranks.arguments.get("transformer_impl") or "")
    dialect = names.NameRules(local, ranks.tp, ranks.numbers, ranks.place, blocks)
    made.shardings = {name: dialect.sharding(name) for name in made.order}
    _hold_against(ranks, made, dialect)


def _hold_against(ranks: LegacyRanks, made: Modules, dialect: names.NameRules) -> None:
    """Compare sizes with the run's arguments.

    Raises: UcplError E543.
    """
    said = ranks.numbers
    gated = next((n for n in ("swiglu", "gated_linear_unit") if n in said), None)
    wanted: list[tuple[str, str, int, int]] = []
    for name in made.order:
        shape = made.shardings[name].shape
        if name == names.EMBEDDING:
            wanted += [(name, "hidden_size", 1, 1), (name, "padded_vocab_size", 0, 1)]
        if name.endswith("mlp.linear_fc2.weight"):
            wanted += [(name, "ffn_hidden_size", 1, 1)]
        if gated is not None and name.endswith(".linear_fc1.weight") and dialect.gated(name) != bool(said[gated]):
            fail(
                "E543",
                f"`{name}` is {'a gate and an up projection' if dialect.gated(name) else 'one projection'} by its shape,"
                f" and the run's arguments say {gated} = {bool(said[gated])}",
                Label(ranks.place, where=name),
            )
    for name, word, dim, times in wanted:
        size = said.get(word)
        shape = made.shardings[name].shape
        if size is not None and shape[dim] != size * times:
            fail(
                "E543",
                f"`{name}` is {list(shape)} over all ranks, and the run's arguments say {word} = {size}",
                Label(ranks.place, f"{word} = {size}", where="args"),
                Label(ranks.place, f"cut over tp {ranks.tp}", where=name),
            )
