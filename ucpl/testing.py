"""Laws of layouts, for this project's tests and for yours: there and back through another layout is the identity.

    from ucpl.testing import assert_round_trip
    assert_round_trip("my.ucpl:megatron(tp = 2, pp = 2)", "my.ucpl:megatron(tp = 4, pp = 1)")

Every logical element gets a number of its own, is laid out as the source says, carried over by the moves of the plan, and
compared with what the target says by itself: an element in a wrong place names itself. Strategies of Hypothesis
(`models`, `meshes`, `layouts`, `layout_pairs`) make models and layouts that no person would write.

Not here: files and bytes. Nothing is read or written, and torch is never imported.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ucpl.api import parse_target
from ucpl.errors import UcplError, fail
from ucpl.extents import Key, key_text
from ucpl.frontends.texts import text_at
from ucpl.graph import build
from ucpl.layout import Layout, Library, load, resolve
from ucpl.layout.scope import Value
from ucpl.proofs.coverage import prove
from ucpl.regions import Part, Placement, element_name, locate
from ucpl.schedule import Moves, Plan, order
from ucpl.syntax import nodes, parse, parse_call, print_file

if TYPE_CHECKING:
    from hypothesis import strategies as st

__all__ = [
    "Example",
    "Report",
    "assert_round_trip",
    "gather",
    "lay_out",
    "layout_pairs",
    "layouts",
    "meshes",
    "models",
    "run",
    "roundtrip",
]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Place = tuple[str, Key]
Whole = dict[tuple[str, str], F64]  # (tensor, state) -> its elements, in the shape that it has

ELEMENTS_MAX = 400_000  # of a model that `roundtrip` numbers
REMAINDERS = frozenset({"E108", "E160", "E203", "E204"})  # degrees that do not suit the sizes


@frozen
class Example:
    """A text and a call of one of its layouts: what the strategies give. Prints as something that can be run."""

    text: str
    call: str
    name: str = "example.ucpl"

    def __str__(self) -> str:
        return f"{self.text}# {self.call}\n"

    __repr__ = __str__

    def layout(self) -> Layout:
        return resolve(load((self.name, self.text)), parse_call(self.call))


# ---- numbers laid out ------------------------------------------------------------------------------------------------


def numbered(placement: Placement, same: dict[str, str]) -> Whole:
    """Each element of each tensor and state with a number of its own. `same`: states that hold the numbers of another one."""
    out: Whole = {}
    states = sorted({same.get(p.state, p.state) for p in placement.parts} | set(same.values()))
    start = 1  # zero is what padding holds
    for state in states:
        for path, tensor in placement.layout.tensors.items():
            out[path, state] = np.arange(start, start + tensor.numel, dtype=np.float64).reshape(tensor.counts)
            start += tensor.numel
    for state, origin in same.items():
        for path in placement.layout.tensors:
            out[path, state] = out[path, origin]
    return out


def lay_out(placement: Placement, whole: Whole) -> dict[Place, F64]:
    """Every stored tensor as a flat array, from the boxes of a placement. Padding is NaN."""
    out: dict[Place, F64] = {}
    for part in placement.parts:
        a, b = part.value
        for home, rows in _rows_of(part):
            flat = np.full(math.prod(home.shape), np.nan)
            for row in rows:
                path = placement.tensors[int(part.pieces.tensor[row])]
                index, box = _where(placement, part, row, path)
                flat[index] = a * whole[path, part.state][box].ravel() + b
            out[home.file, home.key] = flat
    return out


def gather(placement: Placement, stored: dict[Place, F64]) -> Whole:
    """Whole tensors from stored ones; declared copies are not compared here (a plan's checks do that)."""
    out: Whole = {}
    for part in placement.parts:
        a, b = part.value
        for home, rows in _rows_of(part):
            for row in rows:
                path = placement.tensors[int(part.pieces.tensor[row])]
                tensor = placement.layout.tensors[path]
                whole = out.setdefault((path, part.state), np.full(tensor.counts, np.nan))
                index, box = _where(placement, part, row, path)
                whole[box] = ((stored[home.file, home.key][index] - b) / a).reshape(whole[box].shape)
    return out


def _rows_of(part: Part) -> Iterator[tuple[Any, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, home in enumerate(part.pieces.home.tolist()):
        rows.setdefault(home, []).append(row)
    for number, home in enumerate(part.homes):
        yield home, rows.get(number, [])


def _where(placement: Placement, part: Part, row: int, path: str) -> tuple[I64, tuple[slice, ...]]:
    """Positions of one piece in its stored tensor, and the box of its logical tensor, both in the tensor's order."""
    pieces, dims = part.pieces, len(placement.layout.tensors[path].dims)
    low, high = pieces.low[row, :dims], pieces.high[row, :dims]
    index = np.array(pieces.offset[row], dtype=np.int64)
    for n, step in zip((high - low).tolist(), pieces.stride[row, :dims].tolist(), strict=True):
        index = index[..., None] + np.arange(n) * step
    return index.ravel(), tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))


# ---- a plan carried out ----------------------------------------------------------------------------------------------


def run(plan: Plan, stored: dict[Place, F64]) -> dict[Place, F64]:
    """The moves of a plan on flat arrays. Places that nothing is moved to are NaN.

    Raises AssertionError for a place that is written twice and for copies that differ.
    """
    sources = [stored[s.file, s.key] for s in plan.sources]
    targets = [np.full(t.numel, np.nan) for t in plan.targets]
    checks: list[tuple[Moves, int]] = []
    sums: dict[int, tuple[F64, I64, Moves]] = {}
    for moves in plan.moves:
        for row in range(len(moves)):
            if moves.kind == "check":
                checks.append((moves, row))
                continue
            number = int(moves.target[row])
            target, (source_at, target_at) = targets[number], _ends(moves, row)
            values = _converted(moves, sources[int(moves.source[row])][source_at], moves.kind)
            if moves.kind == "copy":
                assert np.isnan(target[target_at]).all(), f"{_named(plan, number)} is written twice"
                target[target_at] = values
            else:
                total, count, _ = sums.setdefault(
                    number, (np.zeros_like(target), np.zeros(len(target), np.int64), moves)
                )
                np.add.at(total, target_at, values)
                np.add.at(count, target_at, 1)
    for number, (total, count, moves) in sums.items():
        some = count > 0
        assert np.isnan(targets[number][some]).all(), f"{_named(plan, number)} is copied to and accumulated"
        whole = total[some] / count[some] if moves.kind == "mean" else total[some]
        targets[number][some] = moves.target_value[0] * whole + moves.target_value[1]
    for moves, row in checks:
        source_at, target_at = _ends(moves, row)
        values = _converted(moves, sources[int(moves.source[row])][source_at], "copy")
        there = targets[int(moves.target[row])][target_at]
        bad = np.flatnonzero(values != there)
        if len(bad):
            s = plan.sources[int(moves.source[row])]
            raise AssertionError(
                f"{plan.tensors[int(moves.tensor[row])]}: a copy in {key_text(s.key)} of {s.file} at {source_at[bad[0]]}"
                f" holds element {values[bad[0]]:g}, and {there[bad[0]]:g} was moved to {_named(plan, int(moves.target[row]))}"
            )
    for number, stored_tensor in enumerate(plan.targets):
        if stored_tensor.shares is not None:
            targets[number] = targets[stored_tensor.shares]
    return {(t.file, t.key): a for t, a in zip(plan.targets, targets, strict=True)}


def _converted(moves: Moves, values: F64, kind: str) -> F64:
    (a, b), (c, d) = moves.source_value, moves.target_value
    logical = (values - b) / a
    return logical if kind in ("mean", "sum") else c * logical + d


def _ends(moves: Moves, row: int) -> tuple[I64, I64]:
    source = np.array(moves.source_offset[row], dtype=np.int64)
    target = np.array(moves.target_offset[row], dtype=np.int64)
    for n, s, t in zip(
        moves.shape[row].tolist(), moves.source_stride[row].tolist(), moves.target_stride[row].tolist(), strict=True
    ):
        steps = np.arange(n)
        source, target = source[..., None] + steps * s, target[..., None] + steps * t
    return source.ravel(), target.ravel()


def _named(plan: Plan, target: int) -> str:
    t = plan.targets[target]
    return f"{key_text(t.key)} of {t.file}"


# ---- the law ---------------------------------------------------------------------------------------------------------

Side = str | Example | Layout | Placement


def assert_round_trip(source: Side, target: Side, *, drop: tuple[str, ...] = ()) -> int:
    """There by the moves of a plan, compared with what the target says by itself; then back. How many elements there are.

    source, target: layouts of one model, as calls (`"FILE.ucpl:layout(tp = 2)"`), examples, resolved or located.
    drop:           names of tensors and states that the target may leave out; there is no way back then.

    Raises AssertionError naming the tensor and the element; UcplError where the plan itself is refused.
    """
    here, there = _located(source), _located(target)
    if not drop:
        _plan(
            there, here, ()
        )  # a source of partial sums has no way back: refused before its copies are taken for addends
    same = _derived_from(here, there)
    whole = numbered(here, same)
    stored = lay_out(here, whole)
    moved = _moved(here, there, stored, whole, same, drop)
    if not drop:
        back = _moved(there, here, moved, whole, same, ())
        for (path, state), array in gather(here, back).items():
            wrong = np.argwhere(array != whole[path, state])
            assert not len(wrong), (
                f"{state} of {element_name(here.layout, path, tuple(wrong[0].tolist()))} came back changed"
            )
    return sum(t.numel for t in here.layout.tensors.values())


def _located(side: Side) -> Placement:
    match side:
        case Placement():
            return side
        case Layout():
            return locate(side)
        case Example():
            return locate(side.layout())
        case str():
            library, call = parse_target(side)
            return locate(resolve(library, call))


def _derived_from(*placements: Placement) -> dict[str, str]:
    """States that one of the layouts derives hold the numbers of what they are derived from, on both sides."""
    out: dict[str, str] = {}
    for placement in placements:
        for d in placement.layout.derived:
            if out.get(d.source, d.source) != d.state:
                out.setdefault(d.state, out.get(d.source, d.source))
    return {state: origin for state, origin in out.items() if state != origin}


def _plan(source: Placement, target: Placement, drop: tuple[str, ...]) -> Plan:
    untyped = {
        (home.file, home.key)
        for part in source.parts
        if part.dtype is None and not any(s.name == part.state for s in source.layout.states)
        for home in part.homes
    }
    typed = all(t.dtype for t in source.layout.tensors.values())

    def dtype_of(file: str, key: Key) -> str | None:
        return "f32" if (file, key) in untyped else None

    graph = build(source, target, drop=drop, dtype_of=None if typed else dtype_of)
    prove(graph)
    return order(graph)


def _moved(
    source: Placement,
    target: Placement,
    stored: dict[Place, F64],
    whole: Whole,
    same: dict[str, str],
    drop: tuple[str, ...],
) -> dict[Place, F64]:
    """What the moves make of stored arrays. Raises AssertionError at the first place that differs from the target."""
    plan = _plan(source, target, drop)
    moved = run(plan, stored)
    wanted = lay_out(target, whole)
    assert set(moved) == set(wanted), f"stored on one side only: {sorted(set(moved) ^ set(wanted), key=str)[:3]}"
    for place, array in wanted.items():
        got = moved[place]
        wrong = np.flatnonzero((got != array) & ~(np.isnan(got) & np.isnan(array)))
        if len(wrong):
            raise AssertionError(
                f"{key_text(place[1])} of {place[0]}, position {wrong[0]}: {_owner(source, whole, got[wrong[0]])}"
                f" instead of {_owner(target, whole, array[wrong[0]])}"
            )
    return moved


def _owner(placement: Placement, whole: Whole, number: float) -> str:
    """The element that has this number."""
    for (path, state), array in whole.items():
        found = np.argwhere(array == number)
        if len(found):
            return f"{state} of {element_name(placement.layout, path, tuple(found[0].tolist()))}"
    return "nothing" if np.isnan(number) else f"the number {number:g}"


# ---- a file of the user's, tried at many degrees -----------------------------------------------------------------------


@frozen
class Report:
    """What `roundtrip` did with one layout."""

    layout: str
    tried: tuple[str, ...]  # "megatron(tp = 2) -> megatron(tp = 3)", each there and back
    refused: tuple[str, ...]  # the same, with the reason: a cut that leaves a remainder
    sizes: dict[str, int] = field(factory=dict)  # sizes chosen here, since the text gives none (or too large ones)
    elements: int = 0  # carried there and back, all tries together

    def __str__(self) -> str:
        lines = [f"{self.layout}: {len(self.tried)} round trips, {self.elements} elements, {len(self.refused)} refused"]
        if self.sizes:
            lines.append("  sizes: " + ", ".join(f"{k} = {v}" for k, v in self.sizes.items()))
        lines += [f"  {t}" for t in self.tried]
        lines += [f"  refused: {t}" for t in self.refused]
        return "\n".join(lines)


def roundtrip(
    file_text: str,
    layout_name: str | None = None,
    examples: int = 20,
    *,
    name: str = "<text>",
    model: nodes.Model | None = None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, int] | None = None,
    seed: int = 0,
) -> tuple[Report, ...]:
    """Carry each layout of a text (or one of them) there and back between changed degrees of its mesh.

    model:  what layouts `of any` are over; they are left out without one.
    config: a config.json. sizes: sizes of dims; a dim that has none, or makes the model too large to number, gets a small one.

    Degrees that do not suit the sizes (a cut leaves a remainder) are counted as refused. Raises AssertionError at the first
    element that does not come back, UcplError for a text that is wrong.
    """
    library = load((name, file_text), read=text_at)
    file = parse(file_text, name)
    chosen = [s for s in file.statements if isinstance(s, nodes.Layout) and layout_name in (None, s.name)]
    if not chosen and layout_name is not None:
        library.layout(layout_name)
    if model is None:
        models = [s for s in file.statements if isinstance(s, nodes.Model)]
        model = models[0] if len(models) == 1 else None
    kept = [s for s in chosen if s.of != "any" or model is not None]
    if not kept:
        fail("E114", f"{name} has no layout of a model of its own", remedy="name a model with --model FILE:NAME")
    return tuple(_try_layout(library, s, examples, model, config, dict(sizes or {}), seed) for s in kept)


def _try_layout(
    library: Library,
    layout: nodes.Layout,
    examples: int,
    model: nodes.Model | None,
    config: dict[str, Any] | None,
    sizes: dict[str, int],
    seed: int,
) -> Report:
    chance = random.Random(f"{seed} {layout.name}")
    over = model if layout.of == "any" else _model_of(library, layout.of)
    small = _small_sizes(library, layout, over, config, sizes, chance)
    parameters = _mesh_parameters(library, layout)
    tried: dict[str, None] = {}
    refused: dict[str, None] = {}
    elements = 0

    def located(degrees: dict[str, int]) -> Placement:
        call = nodes.Call(layout.name, tuple(nodes.Argument(k, nodes.Number(v)) for k, v in degrees.items()))
        given: dict[str, Value] = {**sizes, **small}
        return locate(
            resolve(library, call, model=model if layout.of == "any" else None, config=config, define_sizes=given)
        )

    for _ in range(examples * 4):
        if len(tried) + len(refused) >= max(1, examples) or (tried and not parameters):
            break
        a = {p: chance.choice((1, 2, 3, 4)) for p in parameters}
        b = {p: chance.choice((1, 2, 3, 4)) for p in parameters}
        if a == b and parameters:
            continue
        said = f"{_call_text(layout.name, a)} -> {_call_text(layout.name, b)}"
        if said in tried or said in refused:
            continue
        try:
            elements += assert_round_trip(located(a), located(b))
            tried[said] = None
        except UcplError as error:
            if error.diagnostics[0].code not in REMAINDERS:
                raise
            refused[f"{said}: {error.diagnostics[0].message}"] = None
        except AssertionError as error:
            raise AssertionError(f"{said}: {error}") from None
    return Report(layout.name, tuple(tried), tuple(refused), small, elements)


def _call_text(name: str, degrees: dict[str, int]) -> str:
    return f"{name}({', '.join(f'{k} = {v}' for k, v in degrees.items())})"


def _model_of(library: Library, name: str) -> nodes.Model:
    found = library.model(name).node
    assert isinstance(found, nodes.Model)
    return found


def _mesh_parameters(library: Library, layout: nodes.Layout) -> tuple[str, ...]:
    """Parameters that are degrees: axes of a mesh of the layout or of one that it extends; and those without a value."""
    chain = library.chain(layout.name)
    axes = {a for link in chain for i in link.node.items if isinstance(i, nodes.Mesh) for a in i.axes}
    return tuple(p.name for p in layout.parameters if p.name in axes or p.default is None)


def _small_sizes(
    library: Library,
    layout: nodes.Layout,
    model: nodes.Model | None,
    config: dict[str, Any] | None,
    sizes: dict[str, int],
    chance: random.Random,
) -> dict[str, int]:
    """Sizes of dims that rest on a config that is not there; of all dims where the model is too large to number."""
    bindings = [b for i in (model.items if model else ()) if isinstance(i, nodes.Dims) for b in i.bindings]
    out = {
        b.name: chance.choice((4, 6, 8, 12)) for b in bindings if b.name not in sizes and _lacks(b.value, config or {})
    }
    literal = [b for b in bindings if isinstance(b.value, nodes.Number) and b.name not in sizes]
    while literal and model is not None and _elements(model, {**sizes, **out}, config) > ELEMENTS_MAX:
        largest = max(literal, key=lambda b: b.value.value if isinstance(b.value, nodes.Number) else 0)
        literal.remove(largest)
        out[largest.name] = chance.choice((4, 6, 8, 12))
    return out


def _elements(model: nodes.Model, sizes: dict[str, int], config: dict[str, Any] | None) -> int:
    probe = load(("<probe>", "ucpl 1\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))
    try:
        layout = resolve(probe, nodes.Call("probe"), model=model, config=config, define_sizes=dict(sizes))
    except UcplError:
        return 0  # what is wrong with it is said where the layout itself is resolved
    return sum(t.numel for t in layout.tensors.values())


def _lacks(expr: nodes.Expr, config: dict[str, Any]) -> bool:
    match expr:
        case nodes.Name(path=path) if path.startswith("config."):
            return config.get(path.removeprefix("config.")) is None
        case nodes.Function(name="default", args=args):
            return all(_lacks(a, config) for a in args)
        case nodes.Function(args=args) | nodes.List(items=args):
            return any(_lacks(a, config) for a in args)
        case nodes.Unary(operand=operand):
            return _lacks(operand, config)
        case nodes.Binary(left=left, right=right):
            return _lacks(left, config) or _lacks(right, config)
        case _:
            return False


# ---- strategies: models and layouts that no person would write ----------------------------------------------------------

DIMS = ("l", "e", "h", "g", "d", "v", "f")
RANKS_MAX = 12


def models() -> st.SearchStrategy[nodes.Model]:
    """Models of one to five tensors over named dims of one to six, some with only a range of a dim; states; perhaps groups."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Callable[..., Any]) -> nodes.Model:
        sizes = {
            d: draw(st.integers(1, 6))
            for d in draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=4, unique=True))
        }
        lines = ["  dim " + ", ".join(f"{k} = {v}" for k, v in sizes.items()), "  dtype f32"]
        split = next((d for d, n in sizes.items() if n in (4, 6) and draw(st.booleans())), None)
        if split is not None:
            lines += [f"  dim {split}1 = 2, {split}2 = {sizes[split]} / 2", f"  index {split} = ({split}1 {split}2)"]
        names = draw(st.lists(st.sampled_from(("a", "b", "c", "x.p", "x.q", "y")), min_size=1, max_size=5, unique=True))
        trained = []
        ranges = {d: draw(_ranges(n)) for d, n in sizes.items()}
        for name in names:
            dims = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True))
            shown = [d + (ranges[d] if d != split and draw(st.integers(0, 3)) == 0 else "") for d in dims]
            kind = draw(st.sampled_from(("", "", "", "", " is buffer", " is frozen")))
            trained += [name] * (not kind)
            lines.append(f"  {name} : {' '.join(shown) or '()'}{kind}")
        lines.append("  state fp32, exp_avg : f32")
        if len(trained) > 1 and draw(st.booleans()):
            at = draw(st.integers(1, len(trained) - 1))
            lines += [f"  group first = {', '.join(trained[:at])}", f"  group second = {', '.join(trained[at:])}"]
        file = parse("ucpl 1\nmodel made {\n" + "\n".join(lines) + "\n}\n", "made.ucpl")
        (model,) = file.statements
        assert isinstance(model, nodes.Model)
        return model

    return drawn()


def _ranges(size: int) -> st.SearchStrategy[str]:
    from hypothesis import strategies as st

    low = st.integers(0, size - 1)
    return low.flatmap(lambda a: st.sampled_from((f"[{a}..]", f"[..{a + 1}]", f"[{a}.. by 2]", f"[{a}..{size}]")))


def meshes() -> st.SearchStrategy[dict[str, int]]:
    """Mesh axes with their degrees, major to minor; at most a dozen ranks."""
    from hypothesis import strategies as st

    axes = st.lists(st.sampled_from(("pp", "dp", "tp")), min_size=1, max_size=3, unique=True)
    return axes.flatmap(lambda names: st.fixed_dictionaries({n: st.integers(1, 4) for n in names})).filter(
        lambda degrees: math.prod(degrees.values()) <= RANKS_MAX
    )


def layouts(model: nodes.Model, *, name: str = "laid", whole: bool = True) -> st.SearchStrategy[Example]:
    """Layouts of a model: any mesh, any cut, pads, packs, brackets, homes, flats.

    whole: every state that the model has is stored, so that any two of them can be converted into each other.
    """
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Callable[..., Any]) -> Example:
        return _Drawn(draw, model, draw(meshes()), whole).example(name)

    return drawn()


def layout_pairs(model: nodes.Model) -> st.SearchStrategy[tuple[Example, Example]]:
    """Two layouts of one model, on different meshes: at least one degree changes."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Callable[..., Any]) -> tuple[Example, Example]:
        first = draw(meshes())
        second = draw(meshes().filter(lambda degrees: degrees != first))
        return (
            _Drawn(draw, model, first, True).example("source"),
            _Drawn(draw, model, second, True).example("target"),
        )

    return drawn()


class _Drawn:
    """One layout being drawn. Cuts are chosen to fit the lengths that they cut."""

    def __init__(self, draw: Callable[..., Any], model: nodes.Model, degrees: dict[str, int], whole: bool) -> None:
        self.draw, self.model, self.degrees, self.whole = draw, model, degrees, whole
        probe = load(("<probe>", "ucpl 1\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))
        self.plain = resolve(probe, nodes.Call("probe"), model=model)
        self.sizes = self.plain.sizes
        self.tensors = self.plain.tensors
        self.rules: dict[str, tuple[str, str | None]] = {}  # dim -> (index rule, mesh axis that deals it)
        self.lines: list[str] = []
        self.state_axis: str | None = None  # that cuts flats, and nothing else
        self.seconds: set[str] = set()

    def example(self, name: str) -> Example:
        lines = ["  mesh " + " ".join(self.degrees)]
        flats = self.draw(_booleans())
        lines += self.second_mesh() if not flats else []
        if flats:
            self.state_axis = self.draw(_sampled(sorted(self.degrees)))
        self.index_rules()
        lines += [f"  index {d} = {rule}" for d, (rule, _) in self.rules.items()]
        file = self.draw(_sampled(["w_{rank}.pt", "w.pt", "w_{" + next(iter(self.degrees)) + "}.pt"]))
        key = self.draw(_sampled(["", ' key "module/{key}"']))
        lines += [f'  file weights = torch "{file}"{key}', '  file optim = torch "o.pt"']
        lines += self.entries()
        lines += self.flat_states() if flats else self.like_states()
        body = "\n".join(lines)
        text = (
            f"{print_file(nodes.File('', 1, (self.model,))).rstrip()}\n\n"
            f"layout {name}({', '.join(self.degrees)}) of {self.model.name} {{\n{body}\n}}\n"
        )
        degrees = ", ".join(f"{k} = {v}" for k, v in self.degrees.items())
        return Example(text, f"{name}({degrees})", f"{name}.ucpl")

    def second_mesh(self) -> list[str]:
        total = math.prod(self.degrees.values())
        if self.draw(_integers(0, 3)) or total < 2:
            return []
        ways = self.draw(_sampled([n for n in range(1, total + 1) if total % n == 0]))
        self.lines.append("")
        self.seconds = {"ep"}
        self.ways = ways
        return [f"  let ep = {ways}, edp = {total // ways}", "  mesh other: edp ep"]

    def index_rules(self) -> None:
        """How brackets are dealt."""
        own = {i.name for i in self.model.items if isinstance(i, nodes.Index)}
        for dim in [d for d in self.sizes if d in DIMS and d not in own]:
            axes = [a for a in self.degrees if a != self.state_axis]
            if not axes or self.draw(_integers(0, 2)):
                continue
            axis = self.draw(_sampled(axes))
            n, ways = self.sizes[dim], self.degrees[axis]
            how = [f"{dim}@chunk({axis})", f"{dim}@spread({axis})", f"{dim}@{axis}[{self.pieces(n, ways)}]"]
            if n % ways == 0:
                how.append(f"{dim}@{axis}")
            laps = [k for k in range(1, n + 1) if n % (k * ways) == 0]
            if laps:
                lap = self.draw(_sampled(laps))
                how.append(f"({dim}lap {dim}stage@{axis} {dim}slot)")
                digits = f"  dim {dim}lap = {lap}, {dim}stage = {ways}"
            chosen = self.draw(_sampled(how))
            self.rules[dim] = (chosen, axis)
            if "lap" in chosen:
                self.rules[dim] = (chosen + f"\n{digits}", axis)

    def pieces(self, length: int, ways: int) -> str:
        cuts = sorted(self.draw(_integers(0, length)) for _ in range(ways - 1))
        return ", ".join(str(b - a) for a, b in zip([0, *cuts], [*cuts, length], strict=True))

    # ---- entries ---------------------------------------------------------------------------------------------------------

    def entries(self) -> list[str]:
        out: list[str] = []
        left = list(self.tensors)
        while left:
            mine = [left.pop(0)]
            first = self.tensors[mine[0]]
            fellows = [
                p
                for p in left
                if self.tensors[p].kind == first.kind
                and p.rpartition(".")[0] == mine[0].rpartition(".")[0]
                and self.fits(mine[0], p)
                and not self.in_groups()
            ]
            if fellows and self.draw(_booleans()):
                mine.append(self.draw(_sampled(fellows)))
                left.remove(mine[1])
                packed = self.pack(mine)
                if packed:
                    out += packed
                    continue
                left.insert(0, mine.pop())
            out += self.single(mine[0])
        return out

    def in_groups(self) -> bool:
        return any(isinstance(i, nodes.Group) for i in self.model.items)

    def fits(self, a: str, b: str) -> bool:
        """Two tensors may be packed where they have the same range of each dim that they share."""
        x, y = self.tensors[a], self.tensors[b]
        return all(
            (x.counts[i], x.starts[i], x.steps[i]) == (y.counts[j], y.starts[j], y.steps[j])
            for i, d in enumerate(x.dims)
            for j, e in enumerate(y.dims)
            if d == e
        )

    def brackets(self, dims: list[str]) -> list[str]:
        """Dims in brackets; one mesh axis deals one of them at most, or elements off the diagonal had no home."""
        out: list[str] = []
        for d in dims:
            dealt = [self.rules[i][1] for i in out if i in self.rules]
            if self.draw(_integers(0, 2)) == 0 and (d not in self.rules or self.rules[d][1] not in dealt):
                out.append(d)
        return out

    def free(self, indices: list[str]) -> list[str]:
        """Mesh axes that may cut an entry with these indices: of one mesh, and dealing none of the indices."""
        dealt = {self.rules[i][1] for i in indices if i in self.rules}
        if self.seconds and not dealt and self.draw(_integers(0, 2)) == 0:
            return ["ep"]
        return [a for a in self.degrees if a != self.state_axis and a not in dealt]

    def degree(self, axis: str) -> int:
        return self.ways if axis == "ep" else self.degrees[axis]

    def single(self, path: str) -> list[str]:
        dims = list(self.tensors[path].dims)
        out = []
        homes = [""]
        axes = [a for a in self.degrees if a != self.state_axis]
        if axes and self.draw(_integers(0, 4)) == 0:
            axis = self.draw(_sampled(axes))
            homes = [f" at {axis}[0]", *([f" at {axis}[-1]"] if self.draw(_booleans()) else [])]
        for n, place in enumerate(homes):
            indices = self.brackets(dims)
            free = self.free(indices)
            pinned = place.partition("[")[0].removeprefix(" at ")
            if any(self.rules[i][1] == pinned for i in indices if i in self.rules):
                indices, free = [], self.free([])
            free = [a for a in free if a != pinned and (not pinned or a != "ep")]
            used: list[str] = []
            rest = [d for d in dims if d not in indices]
            shape = self.axes(list(self.draw(_permutations(rest))), free, used)
            out.append(self.entry(path, indices, shape, used, place, n))
        return out

    def entry(self, path: str, indices: list[str], shape: str, used: list[str], place: str, number: int) -> str:
        bracket = f"[{', '.join(indices)}]" if indices else ""
        names = "".join(f".{{{x}}}" for x in [*indices, *used])
        policy = ""
        indexed = {self.rules[i][1] for i in indices if i in self.rules}
        spare = [a for a in self.degrees if a not in used and a not in indexed and a != self.state_axis]
        if spare and not place and "ep" not in used and self.draw(_integers(0, 3)) == 0:
            means = [] if self.state_axis else ["mean"]
            policy = f" {self.draw(_sampled(['same', 'any', *means]))} @{spare[0]}"
        return f'  {path}{bracket} = {shape or "()"}{policy}{place} as "{path}{number or ""}{names}"'

    def pack(self, paths: list[str]) -> list[str]:
        """Two tensors in one: labelled terms, common dims in brackets, beside the terms or around them."""
        both = [self.tensors[p].dims for p in paths]
        common = [d for d in both[0] if d in both[1]]
        own = [[d for d in dims if d not in common] for dims in both]
        indices = self.brackets(common)
        rest = [d for d in common if d not in indices]
        at = self.draw(_integers(0, len(rest)))
        outside, inside = rest[:at], rest[at:]
        if any(not o and not inside for o in own):
            return []
        free, used = self.free(indices), []
        prefix = paths[0].rpartition(".")[0]
        labels = [p.rpartition(".")[2] for p in paths]
        if inside and all(own) and self.draw(_booleans()):  # (g (q: r d + k: d))
            terms = [self.product(list(self.draw(_permutations(o))), [], [])[0] for o in own]
            length = math.prod(self.sizes[d] for d in inside) * sum(math.prod(self.sizes[d] for d in o) for o in own)
            text = f"({' '.join(inside)} ({labels[0]}: {terms[0]} + {labels[1]}: {terms[1]}))"
        else:
            cut: list[list[str]] = [[], []]
            texts, lengths = [], []
            for n, o in enumerate(own):
                text, size = self.product(list(self.draw(_permutations([*inside, *o]))), free, cut[n])
                texts.append(text)
                lengths.append(size)
            if set(cut[0]) != set(cut[1]):
                return []  # a term that an axis does not cut would be stored more than once
            used += sorted(cut[0])
            length = sum(lengths) if all(n is not None for n in lengths) else None  # type: ignore[assignment,arg-type]
            text = f"({labels[0]}: {texts[0]} + {labels[1]}: {texts[1]})"
        if length is not None:
            text = self.cut(text, length, [a for a in free if a not in used], used)
        around = self.axes(list(self.draw(_permutations(outside))), [a for a in free if a not in used], used)
        shape = f"{around} {text}".strip() if self.draw(_booleans()) else f"{text} {around}".strip()
        path = f"{prefix}.pack" if prefix else "pack_" + "_".join(labels)
        return [self.entry(path, indices, shape, used, "", 0)]

    def axes(self, dims: list[str], free: list[str], used: list[str]) -> str:
        """Dims as stored axes: each alone, or several multiplied."""
        out = []
        while dims:
            n = self.draw(_integers(1, len(dims)))
            mine, dims = dims[:n], dims[n:]
            text, length = self.product(mine, [a for a in free if a not in used], used)
            if n > 1 or " " in text:
                text = f"({text})"
            if length is not None:
                text = self.cut(text, length, [a for a in free if a not in used], used)
            out.append(text)
        return " ".join(out)

    def product(self, dims: list[str], free: list[str], used: list[str]) -> tuple[str, int | None]:
        """Dims side by side, perhaps one of them cut inside or written as its digits; the length where all ranks agree."""
        out, length = [], 1
        known = True
        for dim in dims:
            text = dim
            rule = next((i for i in self.model.items if isinstance(i, nodes.Index) and i.name == dim), None)
            if rule is not None and self.draw(_booleans()):
                text = f"({' '.join(self.draw(_permutations([f'{dim}1', f'{dim}2'])))})"
            mine = [a for a in free if a not in used]
            if mine and self.draw(_integers(0, 2)) == 0:
                before = len(used)
                text = self.cut(text, self.sizes[dim], mine, used)
                known &= len(used) == before and "pad" not in text
            elif self.draw(_integers(0, 9)) == 0:
                text = f"({text}[..1] + {text}[1..])" if text == dim else text
            length *= self.sizes[dim]
            out.append(text)
        return " ".join(out), length if known else None

    def cut(self, text: str, length: int, free: list[str], used: list[str]) -> str:
        """Perhaps padded, trimmed, cut once or twice."""
        if self.draw(_integers(0, 5)) == 0:
            kind = self.draw(_sampled(["", ", undefined", ", zero", ", live"]))
            n = self.draw(_integers(1, 5))
            text, length = f"pad({text}, {n}{kind})", -(-length // n) * n
            if self.draw(_integers(0, 3)) == 0:
                return f"trim({text})"
        if not free or self.draw(_integers(0, 2)) == 0:
            return text
        axis = self.draw(_sampled(free))
        used.append(axis)
        ways = self.degree(axis)
        grain = self.draw(_integers(1, 3))
        how = [
            f"@chunk({axis})",
            f"@chunk({axis}, {grain})",
            f"@spread({axis})",
            f"@{axis}[{self.pieces(length, ways)}]",
            "pad",
        ]
        if length % grain == 0:
            how.append(f"@spread({axis}, {grain})")
        if length % ways == 0:
            how += [f"@{axis}"] * 3
        chosen = self.draw(_sampled(how))
        if chosen == "pad":
            text = f"pad({text}, {grain * ways})@{axis}"
        else:
            text += chosen
        rest = [a for a in free if a != axis]
        if rest and "ep" not in (axis, rest[0]) and self.draw(_integers(0, 3)) == 0:
            used.append(rest[0])
            text += f"@{self.draw(_sampled(['chunk', 'spread']))}({rest[0]})"
        return text

    # ---- states ----------------------------------------------------------------------------------------------------------

    def like_states(self) -> list[str]:
        key = self.draw(_sampled(["{key}.{state}", "state/{state}/{key}"]))
        if self.draw(_booleans()):
            return ['  state fp32 = like in optim as "fp32/{key}"', f'  state * = like in optim as "{key}"']
        return [f'  state * = like in optim as "{key}"']

    def flat_states(self) -> list[str]:
        groups = self.groups()
        out = [line for _, line in groups]
        names = [n for n, _ in groups]
        spoken = f" of {', '.join(names)}" if names else ""
        where = "".join(f".{{{a}}}" for a in self.degrees)
        for state in ("fp32", "*") if self.draw(_booleans()) else ("*",):
            pattern, buckets = self.flat()
            key = ("{state}" if state == "*" else state) + "/{bucket}" + where
            out.append(f'  state {state}{spoken} = {pattern} in optim{buckets} as "{key}"')
        return out

    def groups(self) -> list[tuple[str, str]]:
        if self.in_groups():
            order = self.draw(_sampled(["", " order reversed", " order dealt 2"]))
            return [("*", f"  group * = model{order}")] if self.draw(_booleans()) else []
        return []

    def flat(self) -> tuple[str, str]:
        axis = self.state_axis
        assert axis is not None
        ways = self.degrees[axis]
        n, grain = self.draw(_integers(1, 4)), self.draw(_integers(1, 3))
        kind = self.draw(_sampled(["", ", undefined"]))
        even = [
            f"flat(pad(each, {ways * grain}{kind})@{axis})",
            f"flat(pad((each), {ways}{kind})@{axis})",
            f"pad(flat(pad(each, {ways})@{axis}), {n})",
        ]
        outer = [
            f"pad(flat(each), {ways * grain}{kind})@{axis}",
            f"flat(each)@chunk({axis}, {grain})",
            f"flat(each)@spread({axis})",
            f"pad(trim(flat(pad(each, {n}))), {ways})@{axis}",
            f"trim(flat(pad(each, {n})))@chunk({axis})",
            f"pad((flat(pad(each, {n}))), {ways})@{axis}",
            f"(pad(flat(each), {ways}{kind}))@{axis}",
            f"pad(pad(flat(each), {ways})@{axis}, {n}{kind})",
            f"trim(pad(flat(pad(each, {n}))@chunk({axis}), {grain}))",
            f"trim((flat(pad(each, {n}))))@chunk({axis})",
        ]
        inner = [
            f"flat(each@chunk({axis}))",
            f"flat(each@spread({axis}))",
            f"pad(flat(pad(each@chunk({axis}), {n})), {grain})",
        ]
        which = self.draw(_integers(0, 2))
        pattern = self.draw(_sampled((even, outer, inner)[which]))
        buckets = f" buckets {self.draw(_integers(1, 40))}" if which < 2 and self.draw(_booleans()) else ""
        return pattern, buckets


def _booleans() -> st.SearchStrategy[bool]:
    from hypothesis import strategies as st

    return st.booleans()


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    from hypothesis import strategies as st

    return st.integers(low, high)


def _sampled(items: list[Any]) -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    return st.sampled_from(items)


def _permutations(items: list[str]) -> st.SearchStrategy[list[str]]:
    from hypothesis import strategies as st

    return st.permutations(items)
