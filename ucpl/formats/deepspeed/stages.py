"""A pipeline's layers, its tied modules, and the layers of each stage.

The bounds of the stages are not stored. They follow from the layers that each stage's param_shapes name, and from the
partition methods of PipelineModule. Source: deepspeed 0.19.8: runtime/pipe/module.py (`_partition_layers`).
"""

from __future__ import annotations

from collections.abc import Container
from math import prod

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import TensorRef
from ucpl.extents.pipeline import METHODS, Layer, Pipeline, deal, layer_file
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.module import Groups, RankModule, groups_of
from ucpl.formats.deepspeed.names import layer_number
from ucpl.formats.deepspeed.order import Shape
from ucpl.formats.deepspeed.topology import Topology, not_yet
from ucpl.records import frozen

_TIED = "tied_modules."
_LAYERS_MAX = 1 << 16
_SPARE_LAYERS_MAX = 3  # functions behind the last layer with a file that are thought of


@frozen(eq=False)
class LayerTensors:
    """A layer's tensors by their names in it, of one tensor-parallel rank."""

    where: TorchFile
    refs: dict[str, TensorRef]
    stem: str | None = None  # of its files; None: they are in the rank's own files, by full names


Layers = dict[int, LayerTensors]  # by number: those that hold tensors
Names = dict[str, tuple[tuple[str, str], ...]]  # key of a tied module -> (name in it, tensor)


@frozen(eq=False)
class _Stated:
    """Statements of each stage's model states, of its first tensor-parallel rank."""

    metas: tuple[TorchFile, ...]
    shapes: list[dict[str, Shape]]  # trained tensors of all groups
    buffers: list[tuple[str, ...]]
    tied: list[dict[str, dict[str, Shape]]]  # key of a tied module -> trained tensor, in it -> shape
    own: dict[int, int]  # layer -> stage

    experts: dict[int, int] = field(factory=dict)  # layer -> trained elements of the experts that a rank holds

    @classmethod
    def of(cls, metas: tuple[TorchFile, ...], beside: StageFacts) -> _Stated:
        experts, stated_groups = beside.experts, beside.groups or tuple(map(groups_of, metas))
        every = [{name: shape for group in groups for name, shape in group.items()} for groups in stated_groups]
        shapes = [{name: shape for name, shape in mine.items() if name not in experts} for mine in every]
        elements: dict[int, int] = {}
        for mine in every:
            for name, shape in mine.items():
                if name in experts and (number := layer_number(name)) is not None:
                    elements[number] = elements.get(number, 0) + prod(shape)
        stated = [Value.of(meta).find("buffer_names") for meta in metas]
        buffers = [names.texts() if names is not None else () for names in stated]
        tied = [_tied_modules(mine) for mine in shapes]
        return cls(metas, shapes, buffers, tied, _own(metas, shapes, buffers), elements)


@frozen(eq=False)
class StageFacts:
    """Facts outside the files of layers.

    is_by_tp: each tensor-parallel rank has files of its own. tied: tensors of tied modules whose layers no file has.
    The rest: tensors of experts, which are in files of their own, and the number of ranks over which they are dealt.
    """

    is_by_tp: bool = False
    tied: Names = field(factory=dict)
    experts: Container[str] = frozenset()
    ep: int = 1
    groups: tuple[Groups, ...] = ()  # of each stage, where no param_shapes state them


def pipeline_of(files: Layers, topology: Topology, beside: StageFacts) -> Pipeline:
    """All layers and the bounds of the stages. Raises: UcplError E452, E456-E459."""
    stated = _Stated.of(tuple(shard.first for shard in topology.shards if shard.tp == 0), beside)
    for number, s in stated.own.items():
        if number not in files:
            missing = layer_file(f"layer_{number:02d}", 0 if beside.is_by_tp else None)
            fail(
                "E452",
                f"{missing} is missing: stage {s} holds layer {number}",
                Label(str(topology.first.root / missing), "not there"),
                Label(str(stated.metas[s].path), where="param_shapes"),
            )
    layers = {number: _layer(number, file, stated) for number, file in files.items()}
    known = {tensor for layer in layers.values() for _, tensor in layer.names}
    known |= {tensor for names in beside.tied.values() for _, tensor in names}
    for s, mine in enumerate(stated.shapes):
        for name in mine:
            if name not in known:
                fail(
                    "E459",
                    f"{name} is in param_shapes of stage {s} and in no layer's file",
                    Label(str(stated.metas[s].path), where="param_shapes"),
                    Label(str(stated.metas[s].root), f"{len(files)} files of layers"),
                )
    held = [set(keys) for keys in stated.tied]
    buffers = dict.fromkeys(name for mine in stated.buffers for name in mine if name in known)
    made = _dealt(_Found(layers, beside.tied), stated, held)
    experts = tuple(stated.experts.get(layer.number, 0) * beside.ep for layer in made.layers)
    return evolve(made, buffers=tuple(buffers), is_by_tp=beside.is_by_tp, experts=experts)


def layers_of(modules: list[RankModule]) -> tuple[Layers, Names]:
    """The layers of stages in one file each, from the tensors' names.

    `3.weight` is of layer 3, `tied_modules.embed.weight` of a tied module.
    """
    layers: Layers = {}
    tied: dict[str, dict[str, str]] = {}
    for module in modules:
        for name, ref in module.tensors.items():
            number = layer_number(name)
            if number is not None:
                layers.setdefault(number, LayerTensors(module.file, {})).refs[name.partition(".")[2]] = ref
            elif name.startswith(_TIED) and name.count(".") > 1:
                key, _, inner = name.removeprefix(_TIED).partition(".")
                tied.setdefault(key, {})[inner] = name
            else:
                not_yet(module.file.path, f"{name} is of no layer of a pipeline")
    return dict(sorted(layers.items())), {key: tuple(names.items()) for key, names in tied.items()}


def refs_of(file: TorchFile) -> dict[str, TensorRef]:
    """The tensors of a layer's file."""
    return {name: value.held for name, value in Value.of(file).named() if isinstance(value.held, TensorRef)}


def _tied_modules(shapes: dict[str, Shape]) -> dict[str, dict[str, Shape]]:
    keys: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if name.startswith(_TIED):
            key, _, inner = name.removeprefix(_TIED).partition(".")
            keys.setdefault(key, {})[inner] = shape
    return keys


def _own(
    metas: tuple[TorchFile, ...], shapes: list[dict[str, Shape]], buffers: list[tuple[str, ...]]
) -> dict[int, int]:
    """The stage of each layer that has a tensor on some stage."""
    own: dict[int, int] = {}
    for s, (mine, kept) in enumerate(zip(shapes, buffers, strict=True)):
        for name in (*mine, *kept):
            number = layer_number(name)
            if number is None:
                continue
            if own.setdefault(number, s) != s:
                first = own[number]
                fail(
                    "E456",
                    f"stages {first} and {s} both say that they hold layer {number}",
                    Label(str(metas[first].path), where="param_shapes"),
                    Label(str(metas[s].path), where="param_shapes"),
                )
    return own


def _layer(number: int, held: LayerTensors, stated: _Stated) -> Layer:
    file, refs = held.where, held.refs
    tied = None if number in stated.own else _tied_key(number, file, refs, stated.tied)
    prefix = f"{_TIED}{tied}." if tied is not None else f"{number}."
    for name, ref in refs.items():
        known = next((mine[prefix + name] for mine in stated.shapes if prefix + name in mine), ref.shape)
        if known != ref.shape:
            fail(
                "E458",
                f"{prefix}{name} has the shape {list(ref.shape)} in its layer's file and {list(known)} in param_shapes",
                Label(str(file.path), where=name),
                Label(str(stated.metas[stated.own.get(number, 0)].path), where="param_shapes"),
            )
    return Layer(number, held.stem, tuple((name, prefix + name) for name in refs), tied)


def _tied_key(
    number: int, file: TorchFile, refs: dict[str, TensorRef], held: list[dict[str, dict[str, Shape]]]
) -> str | None:
    """The tied module of a layer.

    Its trained tensors are all in the layer's file.
    Their shapes are equal, too.
    """
    keys = {
        key
        for keys in held
        for key, inner in keys.items()
        if all(name in refs and refs[name].shape == shape for name, shape in inner.items())
    }
    if len(keys) > 1:
        not_yet(
            file.path, f"its layer {number} may be any of the tied modules {', '.join(sorted(keys))}, which are alike"
        )
    return next(iter(keys), None)


def _elements(layers: tuple[Layer, ...], stated: _Stated) -> tuple[int, ...]:
    """Trained elements of all layers in turn, as DeepSpeed counts them.

    A tied module counts each time that it is a layer.
    """
    trained = {name: prod(shape) for mine in stated.shapes for name, shape in mine.items()}
    own = {x.number: sum(trained.get(tensor, 0) for _, tensor in x.names) for x in layers}
    of_key = {x.tied: own[x.number] for x in layers if x.tied is not None and x.names}
    return tuple(own[x.number] if x.names else of_key.get(x.tied or "", 0) for x in layers)


@frozen(eq=False)
class _Found:
    """Layers with known numbers, and tied modules with known stages only."""

    layers: dict[int, Layer]
    tied: Names


def _dealt(found: _Found, stated: _Stated, held: list[set[str]]) -> Pipeline:
    """The pipeline with the bounds of its stages.

    They follow from the layers on each stage, and from the partition method that makes them.
    """
    own, stages, last = stated.own, len(held), max(found.layers, default=-1)
    if last > _LAYERS_MAX:
        not_yet(stated.metas[0].path, f"a pipeline with a layer {last}")
    for is_last_behind in (True, False):
        for count in range(last + 1, last + 2 + _SPARE_LAYERS_MAX):
            direct = _direct(own, stages, count)
            guess = _completed(found, count, held, direct, is_last_behind)
            fitting: dict[str, tuple[tuple[Layer, ...], tuple[int, ...]]] = {}
            for method in METHODS:
                if method == "parameters" and guess is None:
                    continue
                elements = _elements(guess, stated) if guess is not None else (0,) * count
                weights = tuple(n + stated.experts.get(number, 0) for number, n in enumerate(elements))
                bounds = deal(method, weights, stages)
                layers = _completed(found, count, held, bounds, is_last_behind)
                if layers is None or not _agrees(layers, bounds, own, held):
                    continue
                if method == "uniform" or _elements(layers, stated) == elements:
                    fitting[method] = (layers, bounds)
            if fitting:
                layers, bounds = next(iter(fitting.values()))
                how = f"param_shapes of each stage; partition_method {' and '.join(fitting)} deals so"
                methods = tuple(m for m, dealt in fitting.items() if dealt == (layers, bounds))
                origin = how if stages > 1 else "there is one stage"
                return Pipeline(layers, bounds, _elements(layers, stated), methods, origin)
        for count in range(last + 1, last + 2 + _SPARE_LAYERS_MAX):
            bounds = _direct(own, stages, count)
            made = _completed(found, count, held, bounds, is_last_behind)
            if made is not None and _agrees(made, bounds, own, held):
                return Pipeline(made, bounds, _elements(made, stated), (), "param_shapes of each stage")
    not_yet(stated.metas[0].path, "its stages do not have consecutive layers")


def _direct(own: dict[int, int], stages: int, count: int) -> tuple[int, ...]:
    """Bounds of stages from known layers.

    A stage begins with its first known layer, or behind the last known layer of the stages before it.
    """
    bounds = [0]
    for s in range(1, stages):
        mine = [number for number, stage in own.items() if stage == s]
        before = [number + 1 for number, stage in own.items() if stage < s]
        bounds.append(min(mine) if mine else max([*before, bounds[-1] + 1]))
    return (*bounds, count)


def _completed(
    found: _Found, count: int, held: list[set[str]], bounds: tuple[int, ...], is_last_behind: bool
) -> tuple[Layer, ...] | None:
    """All layers, including functions.

    A tied module that a stage holds without a file is a function there. A tied module is at least two layers. The last
    stage's function is behind all files, if `is_last_behind`. If no file has a tied module, its first layer is the one
    that holds its tensors.
    """
    files, named = found.layers, set[str]()
    out = [files.get(n, Layer(n)) for n in range(count)]
    last = max(files, default=-1)
    for s, keys in enumerate(held):
        low, high = bounds[s], bounds[s + 1]
        is_behind = is_last_behind and s == len(held) - 1
        free = [n for n in range(low, high) if n not in files and (not is_behind or n > last)]
        for key in sorted(keys):
            here = [n for n in range(low, high) if out[n].tied == key]
            elsewhere = any(x.tied == key for x in out[:low]) or any(key in other for other in held[s + 1 :])
            if here and (elsewhere or len(here) > 1):
                continue
            if not free:
                return None
            number = free.pop()
            out[number] = Layer(number, names=found.tied.get(key, ()) if key not in named else (), tied=key)
            named.add(key)
    return tuple(out)


def _agrees(layers: tuple[Layer, ...], bounds: tuple[int, ...], own: dict[int, int], held: list[set[str]]) -> bool:
    """Test whether every stage holds exactly the layers of its param_shapes."""
    if any(not bounds[s] <= number < bounds[s + 1] for number, s in own.items()):
        return False
    return all({x.tied for x in layers[bounds[s] : bounds[s + 1]]} - {None} == keys for s, keys in enumerate(held))


def canonical(pipeline: Pipeline) -> list[str]:
    """All tensors in a PipelineModule's order.

    Tied modules come first, in the order of their first layers, then layers.
    """
    tied = [t for x in pipeline.layers if x.tied is not None for _, t in x.names]
    rest = [t for x in pipeline.layers if x.tied is None for _, t in x.names]
    return list(dict.fromkeys((*tied, *rest)))
