"""Facts about a pipeline's layers, or a model's experts, as a layout in the language that extends a shipped one.

For a source the stages are those found. For a target at another degree layers are dealt as the source's partition_method
deals them, where its stages tell which one it is; `partition` and `stages` beside pp say it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, TypeVar

from attrs import AttrsInstance, evolve

from ucpl.errors import Label, fail
from ucpl.extents.experts import Experts
from ucpl.extents.pipeline import METHODS, Layer, Pipeline, deal
from ucpl.frontends.parallel import STORED, TARGET, Base, Extended, Note, extended
from ucpl.layout.expand import items_of
from ucpl.layout.scope import Scope, Value
from ucpl.syntax import nodes
from ucpl.syntax.walk import inside, rewritten

if TYPE_CHECKING:
    from ucpl.stores.checkpoint import Checkpoint

Record = TypeVar("Record", bound=AttrsInstance)

STAGES, PARTITION, LAYERS, EP = "stages", "partition", "layers", "ep"
_NOWHERE = "nowhere"
_LAYERS_MAX = 1_000_000  # as many as a layout may store
GROUP_ELEMENTS_MAX = 178_956_971  # max_group_size of moe/utils.py, split_params_into_different_moe_groups_for_optimizer


def arguments(base: Base, names: tuple[str, ...]) -> tuple[Base, dict[str, nodes.Expr]]:
    """The base without the call's arguments `names`, and those. The layout called does not know them."""
    own = {p.name for p in base.layout.parameters}
    found = {a.name: a.value for a in base.call.arguments if a.name in names and a.name not in own}
    kept = tuple(a for a in base.call.arguments if a.name is None or a.name not in found)
    return evolve(base, call=evolve(base.call, arguments=kept)), {str(name): value for name, value in found.items()}


def target(base: Base, source: Checkpoint | None) -> Extended | None:
    """The layout of a target where the source is a pipeline or has experts, else None. Raises: UcplError E475-E478."""
    if source is not None and source.pipeline is not None:
        return target_pipeline(base, source.pipeline)
    if source is not None and source.experts is not None:
        return target_experts(base, source.experts)
    if evolve(base, inherited={}).asked("pp") > 1:
        fail(
            "E475",
            f"`{base.call.name}` with pipeline stages: the source is no pipeline, and nothing says which tensors are a layer",
            Label("<call>", where="pp"),
        )
    return None


# ---- pipelines -----------------------------------------------------------------------------------------------------------


def stored_pipeline(base: Base, pipeline: Pipeline) -> Extended:
    """The layout of a checkpoint whose layers lie so."""
    return evolve(_pipelined(base, pipeline, STORED), notes=notes_of(pipeline))


def notes_of(pipeline: Pipeline) -> tuple[Note, ...]:
    out: list[Note] = [("layers of stages", pipeline.sizes, pipeline.origin)]
    for tensor, stage in pipeline.trusted.items():
        out.append(
            (f"copy of {tensor}", f"stage {stage}", "the source: no gradient moves the copies on its other stages")
        )
    return tuple(out)


def target_pipeline(base: Base, pipeline: Pipeline) -> Extended:
    """The layout of a target with these layers, at the pipeline-parallel degree of the call.

    Raises: UcplError E476 where two methods deal the layers and nothing says which, E477 where the stages are impossible.
    """
    plain, given = arguments(base, (STAGES, PARTITION, LAYERS))
    scope = Scope()
    asked = Label("<call>", where=base.call.name)
    if _stage_of(plain) != 1:
        fail("E477", f"`{base.call.name}` for a PipelineModule, which DeepSpeed trains with ZeRO stage 1", asked)
    if LAYERS in given:
        count = scope.integer(given[LAYERS])
        pipeline = _longer(pipeline, count, asked)
    count = len(pipeline.layers)
    sizes = _listed(pipeline, scope.evaluate(given[STAGES])) if STAGES in given else None
    if sizes is not None and not any(a.name == "pp" for a in plain.call.arguments):
        plain = _with_argument(plain, "pp", len(sizes))
    degree = plain.asked("pp")
    if degree < 1:
        fail("E477", f"pp = {degree}: layers lie on a stage at least", asked)
    if sizes is not None:
        if len(sizes) != degree:
            fail("E477", f"stages = {sizes} are {len(sizes)} stages, and pp is {degree}", asked)
        made = pipeline.dealt(_bounds(sizes), "given")
    elif degree > count:  # before so many stages are made
        fail("E477", f"{count} layers on {degree} stages leave one without any", asked)
    elif PARTITION in given:
        made = _dealt_by(pipeline, scope.evaluate(given[PARTITION]), degree, asked)
    elif degree == pipeline.stages:
        made = pipeline.dealt(pipeline.bounds, "as the source's")
    else:
        made = _redealt(pipeline, degree)
    if 0 in made.sizes:
        fail("E477", f"{count} layers on {degree} stages leave one without any: {made.sizes}", asked)
    trusted = tuple(note for note in notes_of(pipeline) if note[0].startswith("copy of"))
    return evolve(_pipelined(plain, made, TARGET), notes=(("layers of stages", made.sizes, made.origin), *trusted))


def _listed(pipeline: Pipeline, listed: Value) -> list[int]:
    """`stages = [3, 2]`: layers of each stage, all of them together. Raises: UcplError E477."""
    sizes = [n for n in listed if isinstance(n, int)] if isinstance(listed, list) else []
    count = len(pipeline.layers)
    if not sizes or min(sizes) < 0 or sum(sizes) != count:
        fail(
            "E477",
            f"stages = {listed} are {sum(sizes)} layers, and there are {count}",
            Label("<call>", where=f"stages = {listed}"),
            Label("<source>", f"{count} layers, functions among them", where=str(pipeline.sizes)),
        )
    return sizes


def _dealt_by(pipeline: Pipeline, method: Value, degree: int, asked: Label) -> Pipeline:
    """`partition = "uniform"`. Raises: UcplError E477."""
    if method not in METHODS:
        fail(
            "E477",
            f"partition = {method!r}",
            asked,
            remedy=f"one of {', '.join(METHODS)}; or list the stages: stages = [3, 2]",
        )
    return pipeline.dealt(deal(str(method), pipeline.elements, degree), f"partition_method {method}, given")


def _with_argument(base: Base, name: str, value: int) -> Base:
    more = nodes.Argument(name, nodes.Number(value))
    return evolve(base, call=evolve(base.call, arguments=(*base.call.arguments, more)))


def _stage_of(base: Base) -> int | None:
    """ZeRO's stage, as the layout's framework statement says."""
    for item in items_of(base.library, base.call):
        if isinstance(item, nodes.Framework):
            for argument in item.call.arguments:
                if argument.name == "stage" and isinstance(argument.value, nodes.Number):
                    return argument.value.value
    return None


def _bounds(sizes: list[int]) -> tuple[int, ...]:
    return tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))


def _longer(pipeline: Pipeline, count: int, asked: Label) -> Pipeline:
    """With functions behind the last layer."""
    more = count - len(pipeline.layers)
    if more < 0:
        fail("E477", f"layers = {count}, and the source has {len(pipeline.layers)} at least", asked)
    if count > _LAYERS_MAX:
        fail("E477", f"layers = {count}, and {_LAYERS_MAX} are allowed", asked)
    extra = tuple(Layer(len(pipeline.layers) + i) for i in range(more))
    return evolve(
        pipeline,
        layers=(*pipeline.layers, *extra),
        elements=(*pipeline.elements, *(0 for _ in extra)),
        bounds=(*pipeline.bounds[:-1], count),
    )


def _redealt(pipeline: Pipeline, degree: int) -> Pipeline:
    ways = {method: deal(method, pipeline.elements, degree) for method in pipeline.methods}
    if degree == 1:
        ways = {"": (0, len(pipeline.layers))}
    if len(set(ways.values())) != 1:
        said = (
            " and ".join(f"{[b - a for a, b in pairwise(x)]} by '{m}'" for m, x in ways.items())
            or "its stages are dealt by neither 'uniform' nor 'parameters'"
        )
        fail(
            "E476",
            f"{len(pipeline.layers)} layers on pp = {degree}: {said}, and the source does not say which",
            Label("<call>", where=f"pp = {degree}"),
            Label("<source>", pipeline.origin, where=f"layers of stages {pipeline.sizes}"),
        )
    method, bounds = next(iter(ways.items()))
    origin = f"partition_method {method}, which the source's stages {pipeline.sizes} follow" if method else "one stage"
    if pipeline.stages == 1 and degree > 1:
        origin = "both partition methods deal so"
    return pipeline.dealt(bounds, origin)


def _pipelined(base: Base, pipeline: Pipeline, name: str) -> Extended:
    """An entry for each place of each tensor: the copy that counts first."""
    tensors = {item.path for item in base.model.items if isinstance(item, nodes.Tensor)}
    items: list[nodes.LayoutItem] = []
    for layer in pipeline.layers:
        if layer.file is not None:
            items.append(nodes.Files(_file(layer.number), "torch", layer.file))
    items.append(nodes.Files(_NOWHERE, None))
    for tensor, places in pipeline.places().items():
        if tensor not in tensors:
            continue  # it has no elements
        first = pipeline.trusted.get(tensor)
        for stage, layer, local in sorted(
            places, key=lambda x: (first is not None and x[0] != first, x[0], x[1].number)
        ):
            clauses: list[nodes.Clause] = []
            if first is not None and stage != first:
                clauses.append(nodes.Clause("copies", ("any", ("pp",))))
            if pipeline.stages > 1:
                clauses.append(nodes.Clause("at", ("pp", nodes.Number(stage))))
            clauses.append(nodes.Clause("in", (_file(layer.number) if local is not None else _NOWHERE,)))
            clauses.append(nodes.Clause("as", (local if local is not None else tensor,)))
            items.append(nodes.Entry(tensor, (), (nodes.Rest(),), tuple(clauses)))
    return extended(base, name, (), items)


def _file(layer: int) -> str:
    return f"layer_{layer:02d}"


# ---- experts ---------------------------------------------------------------------------------------------------------------


def stored_experts(base: Base, experts: Experts) -> Extended:
    """The layout of a checkpoint with these experts."""
    return _with_experts(base, experts, experts.ep, STORED)


def target_experts(base: Base, experts: Experts) -> Extended:
    """The layout of a target with these experts, at the expert-parallel degree of the call. Raises: UcplError E478."""
    plain, given = arguments(base, (EP,))
    asked = Label("<call>", where=base.call.name)
    if _stage_of(plain) not in (1, 2):
        fail("E478", f"`{base.call.name}` for deepspeed.moe, which DeepSpeed saves with ZeRO stage 1 or 2", asked)
    dp = plain.asked("dp")
    ep, origin = experts.ep, "as the source's"
    if EP in given:
        ep, origin = Scope().integer(given[EP]), "given"
    counts = {one.module: one.count for one in experts.of.values()}
    if ep < 1 or dp % ep:
        fail("E478", f"ep = {ep} does not divide dp = {dp}: each expert would not be on equally many ranks", asked)
    for module, count in counts.items():
        if count % ep:
            fail("E478", f"{count} experts of {module.rstrip('.')} do not divide by ep = {ep}", asked)
    if ep != experts.ep:
        _demand_whole_groups(base.model, experts, ep, asked)
    return evolve(
        _with_experts(plain, experts, ep, TARGET),
        notes=(
            ("experts of a rank", f"ep {ep}", origin),
            ("edp", dp // ep, "dp / ep: ranks that hold the same experts"),
        ),
    )


def _demand_whole_groups(model: nodes.Model, experts: Experts, ep: int, asked: Label) -> None:
    """DeepSpeed opens another group once a rank's experts would have too many elements in one: that is not made here."""
    numels = {item.path: prod(d.size or 1 for d in item.dims) for item in model.items if isinstance(item, nodes.Tensor)}
    groups = [g.members or () for g in model.items if isinstance(g, nodes.Group)]
    for degree in (experts.ep, ep):
        local = [[numels[m] for m in g if experts.rank(m, degree) == 0] for g in groups if g and g[0] in experts.of]
        for held, following in zip(local, (*local[1:], []), strict=True):
            more = following[0] if following and degree == experts.ep else 0  # what opened the next group
            if sum(held) + more > GROUP_ELEMENTS_MAX:
                fail(
                    "E478",
                    f"at ep = {degree} the experts of a rank are not in one parameter group of {GROUP_ELEMENTS_MAX} elements,"
                    " and DeepSpeed would not make the same groups at another degree",
                    asked,
                )


def _with_experts(base: Base, experts: Experts, ep: int, name: str) -> Extended:
    """Experts on a mesh of their own, in groups and flat buffers that dp / ep ranks share."""
    own = items_of(base.library, base.call)
    items: list[nodes.LayoutItem] = [
        nodes.Let((nodes.Binding("edp", nodes.Binary("/", nodes.Name("dp"), nodes.Name(EP))),)),
        *(
            nodes.Let((nodes.Binding("expert_ways", _edp(binding.value)),))
            for item in own
            if isinstance(item, nodes.Let)
            for binding in item.bindings
            if binding.name == "ways"
        ),
        nodes.Mesh("expert", ("pp", "ep", "edp", "tp") if experts.is_data_first else ("pp", "edp", "ep", "tp")),
        *_expert_entries(base.model, experts, ep),
    ]
    groups = [item for item in base.model.items if isinstance(item, nodes.Group)]
    for number, group in enumerate(groups):
        if group.members and group.members[0] in experts.of:
            items += _expert_states(own, group, number)
    return extended(_with_argument(base, EP, ep), name, (nodes.Parameter(EP),), items)


def _expert_entries(model: nodes.Model, experts: Experts, ep: int) -> list[nodes.LayoutItem]:
    """Experts' own files, and an entry in one of them for each of their tensors."""
    tensors = {item.path for item in model.items if isinstance(item, nodes.Tensor)}
    of_file: dict[str, str] = {}
    for one in experts.of.values():
        of_file.setdefault(one.file, one.file.removesuffix("_mp_rank_00_model_states.pt"))
    items: list[nodes.LayoutItem] = [nodes.Files(short, "torch", file) for file, short in of_file.items()]
    for tensor, one in experts.of.items():
        if tensor not in tensors:
            continue
        clauses = [nodes.Clause("in", (of_file[one.file],)), nodes.Clause("as", (one.name,))]
        if ep > 1:
            clauses.insert(0, nodes.Clause("at", ("ep", nodes.Number(experts.rank(tensor, ep)))))
        items.append(nodes.Entry(tensor, (), (nodes.Rest(),), tuple(clauses)))
    return items


def _expert_states(own: Sequence[nodes.LayoutItem], group: nodes.Group, number: int) -> list[nodes.LayoutItem]:
    """A group of experts, and the base's lines of states for it, with edp for dp."""
    items: list[nodes.LayoutItem] = []
    for item in own:
        if isinstance(item, nodes.Group) and item.of_model:
            order = item.order if item.order is None or isinstance(item.order, str) else _edp(item.order)
            items.append(evolve(item, name=group.name, of_model=False, members=group.members, order=order))
    for item in own:
        if isinstance(item, nodes.States) and item.groups == ("*",) and not isinstance(item.shape, str):
            clauses = [
                evolve(c, args=tuple(_numbered(a, number) for a in c.args)) if c.word == "as" else c
                for c in item.clauses
            ]
            shape = None if item.shape is None else tuple(map(_edp, item.shape))
            seen = nodes.Clause("on", ("expert",))
            items.append(evolve(item, groups=(group.name,), shape=shape, clauses=(seen, *clauses)))
    return items


def _numbered(text: object, number: int) -> object:
    return text.replace("{bucket}", str(number)) if isinstance(text, str) else text


def _edp(node: Record) -> Record:
    """The same with edp where dp stands, as an axis or in an expression, and with the ways of dealing among edp."""
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
