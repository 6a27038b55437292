"""A pipeline's layers as a layout that extends a shipped one.

For a source the stages are those found. For a target at another degree, layers are dealt by the source's
partition_method, if its stages identify one; `partition` and `stages` with pp override it.
"""

from __future__ import annotations

from itertools import pairwise

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents.pipeline import METHODS, Layer, Pipeline, deal, layer_file
from ucpl.inference.parallel import Base, Cuts, Extended, Note, extended, pattern
from ucpl.language import nodes
from ucpl.layout.expand import items_of
from ucpl.layout.scope import Scope

TP_HOLE = "{tp:02}"  # in the name of a layer's file
STAGES, PARTITION, LAYERS = "stages", "partition", "layers"
_NOWHERE, _WEIGHTS = "nowhere", "weights"
_LAYERS_MAX = 1_000_000  # as many as a layout may store


def arguments(base: Base, names: tuple[str, ...]) -> tuple[Base, dict[str, nodes.Expr]]:
    """The base without the call's arguments `names`, and these.

    The called layout does not have them.
    """
    own = {p.name for p in base.layout.parameters}
    found = {a.name: a.value for a in base.call.arguments if a.name in names and a.name not in own}
    kept = tuple(a for a in base.call.arguments if a.name is None or a.name not in found)
    return evolve(base, call=evolve(base.call, arguments=kept)), {str(name): value for name, value in found.items()}


def is_dealt(base: Base) -> bool:
    """Test whether a call has arguments on the layers of stages."""
    return bool(arguments(base, (STAGES, PARTITION, LAYERS))[1])


def notes_of(pipeline: Pipeline) -> tuple[Note, ...]:
    out: list[Note] = [("layers of stages", pipeline.sizes, pipeline.origin)]
    for tensor, stage in pipeline.trusted.items():
        out.append(
            (f"copy of {tensor}", f"stage {stage}", "the source: no gradient moves the copies on its other stages")
        )
    return tuple(out)


def dealt(base: Base, pipeline: Pipeline, ep: int) -> tuple[Base, Pipeline, tuple[Note, ...]]:
    """The layers at the call's pipeline-parallel degree, and the plain base.

    The base lacks the arguments on stages. `ep`: the number of ranks over which each layer's experts are dealt. Raises:
    UcplError E476 if two methods are possible, E477 if the stages are impossible.
    """
    plain, given = arguments(base, (STAGES, PARTITION, LAYERS))
    scope = Scope()
    asked = Label("<call>", where=base.call.name)
    if LAYERS in given:
        pipeline = _longer(pipeline, scope.integer(given[LAYERS]), asked)
    count = len(pipeline.layers)
    sizes = _listed(scope.evaluate(given[STAGES]), pipeline) if STAGES in given else None
    if sizes is not None and not any(a.name == "pp" for a in plain.call.arguments):
        plain = with_argument(plain, "pp", len(sizes))
    degree = plain.asked("pp")
    if degree < 1:
        fail("E477", f"pp = {degree}: at least one stage is needed", asked)
    if sizes is not None:
        if len(sizes) != degree:
            fail("E477", f"stages = {sizes} are {len(sizes)} stages, and pp is {degree}", asked)
        made = pipeline.dealt(_bounds(sizes), "given")
    elif degree > count:  # before so many stages are made
        fail("E477", f"{count} layers on {degree} stages leave one without any", asked)
    elif PARTITION in given:
        method = scope.evaluate(given[PARTITION])
        if method not in METHODS:
            fail(
                "E477",
                f"partition = {method!r}",
                asked,
                remedy=f"one of {', '.join(METHODS)}; or list the stages: stages = [3, 2]",
            )
        made = pipeline.dealt(deal(str(method), pipeline.weights(ep), degree), f"partition_method {method}, given")
    elif degree == pipeline.stages:
        made = pipeline.dealt(pipeline.bounds, "as the source's")
    else:
        made = _redealt(pipeline, degree, ep)
    if 0 in made.sizes:
        fail("E477", f"{count} layers on {degree} stages leave one without any: {made.sizes}", asked)
    trusted = tuple(note for note in notes_of(pipeline) if note[0].startswith("copy of"))
    return plain, made, (("layers of stages", made.sizes, made.origin), *trusted)


def _listed(listed: object, pipeline: Pipeline) -> list[int]:
    """The number of layers of each stage in the call.

    Raises: UcplError E477.
    """
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


def with_argument(base: Base, name: str, value: int) -> Base:
    """The base with this argument in its call."""
    kept = tuple(a for a in base.call.arguments if a.name != name)
    return evolve(base, call=evolve(base.call, arguments=(*kept, nodes.Argument(name, nodes.Number(value)))))


def stage_of(base: Base) -> int | None:
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
        experts=(*pipeline.experts, *(0 for _ in extra)) if pipeline.experts else (),
        bounds=(*pipeline.bounds[:-1], count),
    )


def _redealt(pipeline: Pipeline, degree: int, ep: int) -> Pipeline:
    ways = {method: deal(method, pipeline.weights(ep), degree) for method in pipeline.methods}
    if degree == 1:
        ways = {"": (0, len(pipeline.layers))}
    if len(set(ways.values())) != 1:
        text = (
            " and ".join(f"{[b - a for a, b in pairwise(x)]} by '{m}'" for m, x in ways.items())
            or "its stages are dealt by neither 'uniform' nor 'parameters'"
        )
        fail(
            "E476",
            f"{len(pipeline.layers)} layers on pp = {degree}: {text}, and the source does not determine it",
            Label("<call>", where=f"pp = {degree}"),
            Label("<source>", pipeline.origin, where=f"layers of stages {pipeline.sizes}"),
        )
    method, bounds = next(iter(ways.items()))
    origin = f"partition_method {method}, which the source's stages {pipeline.sizes} follow" if method else "one stage"
    if pipeline.stages == 1 and degree > 1:
        origin = "both partition methods deal so"
    return pipeline.dealt(bounds, origin)


def pipelined(base: Base, pipeline: Pipeline, cuts: Cuts, name: str) -> Extended:
    """An entry for each place of a tensor, the trusted copy first."""
    tensors = {item.path for item in base.model.items if isinstance(item, nodes.Tensor)}
    items: list[nodes.LayoutItem] = []
    for layer in pipeline.layers:
        if layer.file is not None:
            name_of_file = layer_file(layer.file, TP_HOLE if pipeline.is_by_tp else None)
            items.append(nodes.Files(_file(layer.number), "torch", name_of_file))
    if pipeline.is_by_layer:
        items.append(nodes.Files(_NOWHERE, None))
    for tensor, places in pipeline.places().items():
        if tensor not in tensors:
            continue  # it has no elements
        first = pipeline.trusted.get(tensor)
        axes = pattern(cuts[tensor]) if tensor in cuts else (nodes.Rest(),)
        for stage, layer, local in sorted(
            places, key=lambda x: (first is not None and x[0] != first, x[0], x[1].number)
        ):
            clauses: list[nodes.Clause] = []
            if first is not None and stage != first:
                clauses.append(nodes.Clause("copies", ("any", ("pp",))))
            if pipeline.stages > 1:
                clauses.append(nodes.Clause("at", ("pp", nodes.Number(stage))))
            file, key = (
                (_file(layer.number), local) if layer.file is not None and local is not None else (_NOWHERE, tensor)
            )
            clauses.append(nodes.Clause("in", (file if pipeline.is_by_layer else _WEIGHTS,)))
            clauses.append(nodes.Clause("as", (key,)))
            items.append(nodes.Entry(tensor, (), axes, tuple(clauses)))
    return extended(base, name, (), items)


def _file(layer: int) -> str:
    return f"layer_{layer:02d}"
