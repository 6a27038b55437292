"""The layers of a pipeline, as a checkpoint states them."""

from __future__ import annotations

from attrs import evolve, field

from ucpl.records import frozen


@frozen
class Layer:
    """One layer of a pipeline, numbered across all stages.

    A function among the layers saves nothing. A tied module is several layers; where such a layer is only a function of the
    module, it has no file, and its stage holds the module's parameters all the same.
    """

    number: int
    file: str | None = None  # prefix of its files' names: "layer_03"
    names: tuple[tuple[str, str], ...] = ()  # (name in the file, tensor)
    tied: str | None = None  # key of the tied module


@frozen
class Pipeline:
    """All layers, and the first layer of each stage.

    `bounds` ends with their count: (0, 3, 5) is layers 0 1 2 | 3 4.
    """

    layers: tuple[Layer, ...]
    bounds: tuple[int, ...]
    elements: tuple[int, ...]  # trained elements of each layer, as partition_method 'parameters' weighs it
    methods: tuple[str, ...] = ()  # partition methods that deal the layers so; several where both do
    origin: str = ""
    # tensor -> the stage whose copy counts, where copies of a tied module's tensor may differ
    trusted: dict[str, int] = field(factory=dict)
    buffers: tuple[str, ...] = ()  # tensors in layers that are no parameters
    experts: tuple[int, ...] = ()  # trained elements of all experts of each layer, besides `elements`
    is_by_tp: bool = False  # every tensor-parallel rank has files of its own, even where there is one

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def is_by_layer(self) -> bool:
        """True if each layer has files of its own.

        Otherwise a stage's tensors are in its ranks' files, by their full names.
        """
        return any(layer.file is not None for layer in self.layers)

    def weights(self, ep: int = 1) -> tuple[int, ...]:
        """The weights of partition_method 'parameters', with experts dealt over `ep` ranks."""
        experts = self.experts or (0,) * len(self.elements)
        return tuple(own + more // ep for own, more in zip(self.elements, experts, strict=True))

    @property
    def sizes(self) -> list[int]:
        """Layers of each stage."""
        return [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def stage(self, layer: int) -> int:
        return next(s for s in range(self.stages) if self.bounds[s] <= layer < self.bounds[s + 1])

    def members(self, key: str) -> tuple[str, ...]:
        """Tensors of a tied module."""
        return next((tuple(t for _, t in x.names) for x in self.layers if x.tied == key and x.names), ())

    def places(self) -> dict[str, list[tuple[int, Layer, str | None]]]:
        """tensor -> (stage, layer, name in the layer's file).

        The name is None if that layer is a function and has no file.
        """
        out: dict[str, list[tuple[int, Layer, str | None]]] = {}
        for layer in self.layers:
            for name, tensor in layer.names:
                out.setdefault(tensor, []).append((self.stage(layer.number), layer, name))
        for layer in self.layers:
            if layer.tied is None or layer.file is not None:
                continue
            here = self.stage(layer.number)
            for tensor in self.members(layer.tied):
                if all(stage != here for stage, _, _ in out[tensor]):
                    out[tensor].append((here, layer, None))
        return {tensor: sorted(found, key=lambda x: (x[0], x[1].number)) for tensor, found in out.items()}

    def dealt(self, bounds: tuple[int, ...], origin: str) -> Pipeline:
        """The same layers on other stages, all copies of a tensor alike."""
        return evolve(self, bounds=bounds, methods=(), origin=origin, trusted={})


def layer_file(stem: str, tp: int | str | None) -> str:
    """The name of a layer's file.

    tp: the rank, or its placeholder in a template; None if files are not by rank.
    """
    if tp is None:
        return f"{stem}-model_states.pt"
    return f"{stem}-model_{tp:02}-model_states.pt" if isinstance(tp, int) else f"{stem}-model_{tp}-model_states.pt"


METHODS = ("uniform", "parameters")


def deal(method: str, elements: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Bounds of the stages by a partition_method of PipelineModule.

    `elements`: of each layer.
    """
    return uniform(len(elements), stages) if method == "uniform" else balanced(list(elements), stages)


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds of partition_method 'uniform'.

    If layers do not divide evenly, the first stages have one more. With fewer layers than stages the last stages have
    none. Source: deepspeed 0.19.8, runtime/utils.py.
    """
    if layers <= stages:
        return tuple(min(s, layers) for s in range(stages + 1))
    each, more = divmod(layers, stages)
    return tuple(s * each + min(s, more) for s in range(stages + 1))


def balanced(weights: list[int], stages: int) -> tuple[int, ...]:
    """Bounds of partition_method 'parameters': even stages, with DeepSpeed's ties."""
    n = len(weights)
    if n <= stages:
        return uniform(n, stages)
    inf = float("inf")
    most = [[inf] * (stages + 1) for _ in range(n + 1)]
    least = [[inf] * (stages + 1) for _ in range(n + 1)]
    cost = [[inf] * (stages + 1) for _ in range(n + 1)]
    place = [[0] * (stages + 1) for _ in range(n + 1)]
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    most[0][0] = cost[0][0] = 0
    for i in range(1, n + 1):
        for j in range(1, min(i, stages) + 1):
            for k in range(i):
                high = max(most[k][j - 1], sums[i] - sums[k])
                low = min(least[k][j - 1], sums[i] - sums[k])
                if cost[i][j] >= high - low:
                    cost[i][j], most[i][j], least[i][j], place[i][j] = high - low, high, low, k
    bounds = [n]
    for j in range(stages, 0, -1):
        bounds.append(place[bounds[-1]][j])
    return tuple(reversed(bounds))
