"""A model's experts as a layout that extends a shipped one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import TypeVar

from attrs import AttrsInstance, evolve

from ucpl.errors import Label, fail
from ucpl.extents.parallel_facts import Expert, Experts, expert_file, pack
from ucpl.extents.pipeline import Pipeline
from ucpl.inference.parallel import Base, Cuts, Extended, Note, extended, pattern
from ucpl.inference.stages import arguments, stage_of, with_argument
from ucpl.language import nodes
from ucpl.language.walk import inside, rewritten
from ucpl.layout.expand import items_of
from ucpl.layout.scope import Scope
from ucpl.placement.sharding import TP
from ucpl.records import frozen

EP = "ep"
MP_HOLE = "{pp * size(tp) + tp:02}"  # in the name of an expert's file
GROUP_ELEMENTS_MAX = 178_956_971  # max_group_size of moe/utils.py, split_params_into_different_moe_groups_for_optimizer


@frozen(eq=False)
class DealtExperts:
    """Experts over `ep` ranks, by prefix of their layer.

    Each has (stage, number among its own) on stages of a pipeline.
    """

    experts: Experts
    ep: int
    places: dict[str, tuple[int, int]]
    stages: int = 1
    is_stored: bool = False  # as files are, not as DeepSpeed looks for them

    @classmethod
    def of(cls, experts: Experts, ep: int, pipeline: Pipeline | None, is_stored: bool = False) -> DealtExperts:
        counts: dict[int, int] = {}
        places: dict[str, tuple[int, int]] = {}
        for module in experts.modules:
            stage = 0 if pipeline is None else pipeline.stage(int(module.partition(".")[0]))
            places[module] = stage, counts.get(stage, 0)
            counts[stage] = counts.get(stage, 0) + 1
        if is_stored:
            layers = {one.module: one.layer for one in experts.of.values()}
            places = {module: (stage, layers[module]) for module, (stage, _) in places.items()}
        return cls(experts, ep, places, 1 if pipeline is None else pipeline.stages, is_stored)

    def tps(self, one: Expert) -> tuple[int | None, ...]:
        """Tensor-parallel ranks whose files hold a tensor.

        None: those whose ranks hold the expert. DeepSpeed writes an expert from the first rank that holds it and reads
        it by each rank's own number, so a target has a file for each.
        """
        return one.tps if self.is_stored and not self.experts.is_within_tp and one.tps else (None,)


def degree_of(base: Base, source: Experts) -> tuple[Base, Experts, int, tuple[Note, ...]]:
    """(base, experts, ep, notes).

    The call's degree, and the base without its argument.
    Raises: UcplError E478.
    """
    plain, given = arguments(base, (EP,))
    asked = Label("<call>", where=base.call.name)
    if stage_of(plain) not in ((1, 2, 3) if source.is_fused else (1, 2)):
        why, remedy = "deepspeed.moe, which DeepSpeed saves with ZeRO stage 1 or 2", ""
        if source.is_fused:
            why, remedy = (
                "AutoEP, which is written at ZeRO stage 1, 2 or 3",
                "zero1, zero2 or zero3, with an ep that divides dp",
            )
        fail("E478", f"`{base.call.name}` for {why}", asked, remedy=remedy)
    dp, tp = plain.asked("dp"), plain.asked(TP)
    # Complete experts stay complete; with one tensor-parallel rank, this is DeepSpeed's default.
    experts = evolve(source, is_within_tp=tp == 1 or (source.is_within_tp and base.inherited.get(TP, (1, ""))[0] != 1))
    ranks, said = (dp, "dp") if experts.is_within_tp else (dp * tp, "dp * tp")
    ep, origin = experts.ep, "as the source's"
    if source.is_fused and EP in base.inherited:
        origin += f": {base.inherited[EP][1]}"
    if EP in given:
        ep, origin = Scope().integer(given[EP]), "given"
    if ep < 1 or ranks % ep:
        fail(
            "E478", f"ep = {ep} does not divide {said} = {ranks}: each expert would not be on equally many ranks", asked
        )
    if source.is_fused:
        _check_auto_ep(plain, ranks // ep, asked)
    for module, count in {one.module: one.count for one in experts.of.values()}.items():
        if count % ep:
            fail("E478", f"{count} experts of {module.rstrip('.')} do not divide by ep = {ep}", asked)
    _demand_alike(base.model, experts, ep, asked)
    if base.asked("elastic") and tp > 1:
        _check_last(base.model, experts, ep, asked)
    if ep != experts.ep:
        _check_whole_groups(base.model, experts, ep, asked)
    notes: tuple[Note, ...] = (
        ("experts of a rank", f"ep {ep}", origin),
        ("edp", ranks // ep, f"{said} / ep: ranks that hold the same experts"),
    )
    return plain, experts, ep, notes


def _check_auto_ep(base: Base, edp: int, asked: Label) -> None:
    """Check that AutoEP's layers are combined with supported options only.

    Their tensors hold several experts, which round robin would deal as one.
    """
    if base.asked(TP) > 1:
        remedy = "tp = 1, with an ep that divides dp; plain() is one file of all"
        fail("E478", "AutoEP's experts with tensor parallelism are not written", asked, remedy=remedy)
    if edp > 1 and base.asked("round_robin"):
        remedy = "round_robin = 0, and round_robin_gradients off in the config of the run that loads it"
        fail("E478", "round_robin deals AutoEP's tensors, of several experts each", asked, remedy=remedy)


def _demand_alike(model: nodes.Model, experts: Experts, ep: int, asked: Label) -> None:
    """Check that all ranks train the same of their experts.

    DeepSpeed states this once for all ranks.
    """
    trained = {name for item in model.items if isinstance(item, nodes.Group) for name in item.members or ()}
    first: dict[tuple[str, str, int], str] = {}
    for name, one in experts.of.items():
        local, each = one.number % (one.count // ep), one.count // ep
        other = first.setdefault((one.module, one.inner, 0 if one.is_fused else local), name)
        if (name in trained) == (other in trained):
            continue
        texts = [f"{n} is {'trained' if n in trained else 'frozen'}" for n in (other, name)]
        why = "in one tensor of the module" if one.is_fused else f"expert {local} of {each} on their ranks"
        fail(
            "E478",
            f"{texts[0]} and {texts[1]}, and at ep = {ep} both are {why}: DeepSpeed states one rank's parameters, for all",
            asked,
            remedy=f"Name both alike, or all: '{one.every}'"
            + ("." if one.is_fused else "; or another ep; ep = 1 has all numbers apart."),
        )


def _check_last(model: nodes.Model, experts: Experts, ep: int, asked: Label) -> None:
    """Check that a rank's last expert is trained.

    With tensor parallelism and without names of groups, its number in param_shapes gives the number of experts.
    """
    trained = {name for item in model.items if isinstance(item, nodes.Group) for name in item.members or ()}
    highest: dict[str, int] = {}
    for name in trained & experts.of.keys():
        one = experts.of[name]
        highest[one.module] = max(highest.get(one.module, 0), one.number % (one.count // ep))
    for module, count in {one.module: one.count for one in experts.of.values()}.items():
        last = count // ep - 1
        if highest.get(module, last) < last:
            frozen_ = next(one for one in experts.of.values() if one.module == module and one.number == last)
            fail(
                "E478",
                f"{frozen_.name} is frozen, the last expert of a rank at ep = {ep}, and an elastic checkpoint names no groups:"
                " with tensor parallelism the number of a rank's experts would be unknown",
                asked,
                remedy="elastic = 0; or tp = 1; or freeze others of a rank's experts, and not the last",
            )


def _check_whole_groups(model: nodes.Model, experts: Experts, ep: int, asked: Label) -> None:
    """Check that no group of experts would be split.

    DeepSpeed opens another group once a rank's experts have too many elements in one; this is not implemented here.
    """
    numels = {path: prod(shape) for path, shape in shapes_of(model).items()}
    groups = [g.members or () for g in model.items if isinstance(g, nodes.Group)]
    for degree in (experts.ep, ep):
        local = [[numels[m] for m in g if experts.rank(m, degree) == 0] for g in groups if g and g[0] in experts.of]
        for held, following in zip(local, (*local[1:], *([[]] if local else [])), strict=True):
            more = following[0] if following and degree == experts.ep else 0  # the elements that opened the next group
            if sum(held) + more > GROUP_ELEMENTS_MAX:
                fail(
                    "E478",
                    f"at ep = {degree} the experts of a rank are not in one parameter group of {GROUP_ELEMENTS_MAX} elements,"
                    " and DeepSpeed would not make the same groups at another degree",
                    asked,
                )


def with_experts(base: Base, dealt: DealtExperts, cuts: Cuts, name: str) -> Extended:
    """Experts on their own mesh, with groups and flat buffers.

    Fewer ranks share these.
    """
    own, experts = items_of(base.library, base.call), dealt.experts
    ranks: nodes.Expr = nodes.Name("dp")
    if not experts.is_within_tp:
        ranks = nodes.Binary("*", ranks, nodes.Name(TP))
    axes = ("ep", "edp") if experts.is_data_first else ("edp", "ep")
    items: list[nodes.LayoutItem] = [
        nodes.Let((nodes.Binding("edp", nodes.Binary("/", ranks, nodes.Name(EP))),)),
        *(
            nodes.Let((nodes.Binding("expert_ways", edp_for_dp(binding.value)),))
            for item in own
            if isinstance(item, nodes.Let)
            for binding in item.bindings
            if binding.name == "ways"
        ),
        nodes.Mesh("expert", ("pp", *axes, *((TP,) if experts.is_within_tp else ()))),
    ]
    if stage_of(base) == 3:
        items += stacks(base, dealt.experts, dealt.ep)
        items += groups_of_stacks(base, dealt.experts, dealt.ep, own)
    else:
        items += _expert_entries(base, dealt, cuts)
        items += _expert_groups(own, base.model, experts)
    return extended(with_argument(base, EP, dealt.ep), name, (nodes.Parameter(EP),), items)


def _expert_entries(base: Base, dealt: DealtExperts, cuts: Cuts) -> list[nodes.LayoutItem]:
    """The files of experts, and a line for each tensor."""
    tensors = {item.path for item in base.model.items if isinstance(item, nodes.Tensor)}
    files: dict[str, nodes.LayoutItem] = {}
    entries: list[nodes.LayoutItem] = []
    for tensor, one in dealt.experts.of.items():
        if tensor not in tensors:
            continue
        stage, layer = dealt.places[one.module]
        short = f"layer_{layer}_expert_{one.number}"
        files.setdefault(short, nodes.Files(short, "torch", expert_file(layer, one.number, MP_HOLE)))
        at = [nodes.Clause("at", (EP, nodes.Number(dealt.experts.rank(tensor, dealt.ep))))] if dealt.ep > 1 else []
        at += [nodes.Clause("at", ("pp", nodes.Number(stage)))] if dealt.stages > 1 else []
        axes = pattern(cuts[tensor]) if tensor in cuts else (nodes.Rest(),)
        where = (nodes.Clause("in", (short,)), nodes.Clause("as", (one.name,)))
        for only in dealt.tps(one):
            more = [nodes.Clause("at", (TP, nodes.Number(only)))] if only is not None else []
            entries.append(nodes.Entry(tensor, (), axes, (*at, *more, *where)))
    return [*files.values(), *entries]


def _expert_groups(own: Sequence[nodes.LayoutItem], model: nodes.Model, experts: Experts) -> Iterator[nodes.LayoutItem]:
    """The groups of experts, and the base's lines with edp for dp."""
    groups = [item for item in model.items if isinstance(item, nodes.Group)]
    for number, group in enumerate(groups):
        if not group.members or group.members[0] not in experts.of:
            continue
        for item in own:
            if isinstance(item, nodes.Group) and item.of_model:
                order = item.order if item.order is None or isinstance(item.order, str) else edp_for_dp(item.order)
                yield evolve(item, name=group.name, of_model=False, members=group.members, order=order)
        yield from states_of(own, group.name, number)


# ---- experts over `edp` ---------------------------------------------------------------------------------------------------


Record = TypeVar("Record", bound=AttrsInstance)
Shape = tuple[int, ...]


def shapes_of(model: nodes.Model) -> dict[str, Shape]:
    """Shapes of all tensors of a checkpoint's model, with named dims resolved."""
    known = {
        b.name: b.value.value
        for i in model.items
        if isinstance(i, nodes.Dims)
        for b in i.bindings
        if isinstance(b.value, nodes.Number)
    }
    return {
        item.path: tuple(d.size or int(known.get(d.name or "", 1)) for d in item.dims)
        for item in model.items
        if isinstance(item, nodes.Tensor)
    }


def states_of(own: Sequence[nodes.LayoutItem], group: str, number: int) -> Iterator[nodes.LayoutItem]:
    """The base's state lines of one group, with edp."""
    for item in own:
        if isinstance(item, nodes.States) and item.groups == ("*",) and not isinstance(item.shape, str):
            clauses = [
                evolve(c, args=tuple(_numbered(a, number) for a in c.args)) if c.word == "as" else c
                for c in item.clauses
            ]
            shape = None if item.shape is None else tuple(edp_for_dp(axis) for axis in item.shape)
            yield evolve(item, groups=(group,), shape=shape, clauses=(nodes.Clause("on", ("expert",)), *clauses))


def _numbered(text: object, number: int) -> object:
    return text.replace("{bucket}", str(number)) if isinstance(text, str) else text


def edp_for_dp(node: Record) -> Record:
    """The record with edp in place of dp.

    Ways of dealing are then those among edp.
    """
    return rewritten(node, _change)


def _change(node: AttrsInstance) -> AttrsInstance | None:
    match node:
        case nodes.Name(path="dp"):
            return evolve(node, path="edp")
        case nodes.Name(path="ways"):
            return evolve(node, path="expert_ways")
        case nodes.Split(mesh_axis="dp"):
            return evolve(inside(node, _change), mesh_axis="edp")
        case _:
            return None


def stacks(base: Base, experts: Experts, ep: int) -> list[nodes.LayoutItem]:
    """A stack for each parameter of experts on each expert-parallel rank.

    No expert is stored alone.
    """
    tensors = {item.path: item for item in base.model.items if isinstance(item, nodes.Tensor)}
    ranked: dict[tuple[str, int], list[nodes.Tensor]] = {}
    out: list[nodes.LayoutItem] = []
    for name, one in experts.of.items():
        if name in tensors:
            ranked.setdefault((one.fused, experts.rank(name, ep)), []).append(tensors[name])
            out.append(nodes.Entry(name, (), None))
    for (fused, rank), members in ranked.items():
        first, *rest = ([nodes.Dim(d.name or "") for d in item.dims] for item in members)
        rows = [first[0], *(dims[0] for dims in rest)]
        stack = nodes.Stack(tuple(nodes.Term(item.path, (row,)) for item, row in zip(members, rows, strict=True)))
        at = (nodes.Clause("at", ("ep", nodes.Number(rank))),) if ep > 1 else ()
        where = (nodes.Clause("in", ("weights",)), nodes.Clause("as", (fused,)))
        out.append(nodes.Entry(f"{fused}@{rank}", (), (stack, *first[1:]), (*at, *where)))
    return out


def groups_of_stacks(
    base: Base, experts: Experts, ep: int, own: Sequence[nodes.LayoutItem]
) -> Iterator[nodes.LayoutItem]:
    """The sub-groups of experts, behind those of all other parameters."""
    shapes = shapes_of(base.model)
    size, dp = base.asked("sub_group_size"), base.asked("dp")
    at = 0
    for group in (item for item in base.model.items if isinstance(item, nodes.Group)):
        members = group.members or ()
        if not members or members[0] not in experts.of:
            at += len(pack([shapes[name] for name in members], dp, size))
            continue
        fused: dict[str, Shape] = {}
        for name in members:
            one = experts.of[name]
            fused[one.fused] = (one.count // ep, *shapes[name])
        packed = pack([*fused.values()], dp // ep, size)
        for i, (first, last) in enumerate(zip([0, *accumulate(packed)], accumulate(packed), strict=False)):
            called = group.name if len(packed) == 1 else f"{group.name}.{i}"
            names = tuple(f"{name}@{rank}" for name in [*fused][first:last] for rank in range(ep))
            yield nodes.Group(called, members=names)
            yield from states_of(own, called, at + i)
        at += len(packed)
