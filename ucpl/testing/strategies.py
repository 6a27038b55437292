"""Strategies for unusual models and layouts.

Hypothesis is imported at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import evolve

from ucpl.language import nodes, parse, print_file
from ucpl.layout import Layout, load, resolve
from ucpl.records import frozen
from ucpl.testing.laws import Example

if TYPE_CHECKING:
    from hypothesis import strategies as st

__all__ = ["layout_pairs", "layouts", "meshes", "models"]


# ---- the draws of a composite strategy -------------------------------------------------------------------------------

Drawn = TypeVar("Drawn")


class Draw(Protocol):
    """Hypothesis's argument of a composite strategy."""

    def __call__(self, strategy: st.SearchStrategy[Drawn], /) -> Drawn: ...


@cache
def booleans() -> st.SearchStrategy[bool]:
    from hypothesis import strategies as st

    return st.booleans()


@cache
def integers(low: int, high: int) -> st.SearchStrategy[int]:
    from hypothesis import strategies as st

    return st.integers(low, high)


def sampled(items: Sequence[Drawn]) -> st.SearchStrategy[Drawn]:
    from hypothesis import strategies as st

    return st.sampled_from(items)


def permutations(items: list[str]) -> st.SearchStrategy[list[str]]:
    from hypothesis import strategies as st

    return st.permutations(items)


# ---- optimizer states of a drawn layout ------------------------------------------------------------------------------


@frozen
class DrawnStates:
    """axis: the mesh axis that cuts flat buffers, of `ways` ranks.

    None: there are none.
    """

    draw: Draw
    model: nodes.Model
    axes: Sequence[str]  # of the mesh
    axis: str | None
    ways: int
    version: int  # of the language

    def lines(self) -> list[str]:
        return self.flat_states() if self.axis is not None else self.like_states()

    def like_states(self) -> list[str]:
        key = self.draw(sampled(["{key}.{state}", "state/{state}/{key}"]))
        if self.draw(booleans()):
            return ['  state fp32 = like in optim as "fp32/{key}"', f'  state * = like in optim as "{key}"']
        return [f'  state * = like in optim as "{key}"']

    def flat_states(self) -> list[str]:
        groups = self.groups()
        out = [line for _, line in groups]
        names = [n for n, _ in groups]
        word = "of" if self.version == 1 else "for"
        spoken = f" {word} {', '.join(names)}" if names else ""
        where = "".join(f".{{{a}}}" for a in self.axes)
        for state in ("fp32", "*") if self.draw(booleans()) else ("*",):
            pattern, buckets = self.flat()
            key = ("{state}" if state == "*" else state) + "/{bucket}" + where
            out.append(f'  state {state}{spoken} = {pattern} in optim{buckets} as "{key}"')
        return out

    def groups(self) -> list[tuple[str, str]]:
        if any(isinstance(i, nodes.Group) for i in self.model.items):
            order = self.draw(sampled(["", " order reversed", " order dealt 2"]))
            return [("*", f"  group * = model{order}")] if self.draw(booleans()) else []
        return []

    def flat(self) -> tuple[str, str]:
        axis, ways = self.axis, self.ways
        n, grain = self.draw(integers(1, 4)), self.draw(integers(1, 3))
        kind = self.draw(sampled(["", ", undefined"]))
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
        which = self.draw(integers(0, 2))
        pattern = self.draw(sampled((even, outer, inner)[which]))
        if which == 2 or self.draw(booleans()):
            return pattern, ""
        limit = self.draw(integers(1, 40))
        return (pattern, f" buckets {limit}") if self.version == 1 else (_limited(pattern, limit), "")


def _limited(pattern: str, limit: int) -> str:
    """The pattern whose one flat buffer ends at so many elements."""
    start = pattern.index("flat(") + len("flat")
    depth = 0
    for n, sign in enumerate(pattern[start:], start):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return f"{pattern[:n]}, {limit}{pattern[n:]}"
    raise ValueError(pattern)


# ---- one drawn layout ------------------------------------------------------------------------------------------------

DIMS = ("l", "e", "h", "g", "d", "v", "f")


@lru_cache(maxsize=4)
def _plain(model: nodes.Model) -> Layout:
    """The model, stored unchanged. Both layouts of a pair use its sizes."""
    probe = load(("<probe>", "ucpl 2\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))
    return resolve(probe, nodes.Call("probe"), model=model)


class DrawnLayout:
    """One layout being drawn.

    Cuts are chosen to fit the lengths that they cut.
    """

    def __init__(self, draw: Draw, model: nodes.Model, degrees: dict[str, int], whole: bool) -> None:
        self.draw, self.model, self.degrees, self.whole = draw, model, degrees, whole
        self.plain = _plain(model)
        self.sizes = self.plain.sizes
        self.tensors = self.plain.tensors
        self.rules: dict[str, tuple[str, str | None]] = {}  # dim -> (index rule, mesh axis that deals it)
        self.values: dict[str, str] = {}  # tensor -> how its entries say it is stored, if not as it is
        self.lines: list[str] = []
        self.state_axis: str | None = None  # that cuts flats, and nothing else
        self.seconds: set[str] = set()
        self.version = 2 if draw(booleans()) else 1

    def example(self, name: str) -> Example:
        lines = ["  mesh " + " ".join(self.degrees)]
        flats = self.draw(booleans())
        lines += self.second_mesh() if not flats else []
        if flats:
            self.state_axis = self.draw(sampled(sorted(self.degrees)))
        self.index_rules()
        lines += [line for d, (rule, axis) in self.rules.items() for line in self.dealt(d, rule, axis)]
        file = self.draw(sampled(["w_{rank}.pt", "w.pt", "w_{" + next(iter(self.degrees)) + "}.pt"]))
        key = self.draw(sampled(["", ' key "module/{key}"']))
        lines += [f'  file weights = torch "{file}"{key}', '  file optim = torch "o.pt"']
        lines += self.entries()
        axis = self.state_axis
        ways = self.degrees[axis] if axis is not None else 1
        lines += DrawnStates(self.draw, self.model, tuple(self.degrees), axis, ways, self.version).lines()
        models, of = _called(self.model) if self.draw(booleans()) else ((self.model,), self.model.name)
        text = f"{print_file(nodes.File('', self.version, models)).rstrip()}\n\n" + self.layout(name, of, lines)
        degrees = ", ".join(f"{k} = {v}" for k, v in self.degrees.items())
        return Example(text, f"{name}({degrees})", f"{name}.ucpl")

    def layout(self, name: str, of: str, lines: list[str]) -> str:
        """The statements of a layout, perhaps with a base.

        The base then has all of them but one, and the layout restores that one.
        """
        taken = ", ".join(self.degrees)
        paths = [line.split()[0].partition("[")[0] for line in lines]
        alone = [
            n for n, line in enumerate(lines) if " as " in line and " state " not in line and paths.count(paths[n]) == 1
        ]
        if not alone or self.draw(integers(0, 3)):
            body = "\n".join(lines)
            return f"layout {name}({taken}) of {of} {{\n{body}\n}}\n"
        n = self.draw(sampled(alone))
        below = "\n".join([*lines[:n], f"  {paths[n]} = none", *lines[n + 1 :]])
        handed = ", ".join(f"{a} = {a}" for a in self.degrees)
        return (
            f'layout "{name}.base"({taken}) of {of} {{\n{below}\n}}\n\n'
            f'layout {name}({taken}) of {of} extends "{name}.base"({handed}) {{\n{lines[n]}\n}}\n'
        )

    def second_mesh(self) -> list[str]:
        total = math.prod(self.degrees.values())
        if self.draw(integers(0, 3)) or total < 2:
            return []
        ways = self.draw(sampled([n for n in range(1, total + 1) if total % n == 0]))
        self.lines.append("")
        self.seconds = {"ep"}
        self.ways = ways
        return [f"  let ep = {ways}, edp = {total // ways}", "  mesh other: edp ep"]

    def index_rules(self) -> None:
        """The rules of the indices in brackets."""
        own = {i.name for i in self.model.items if isinstance(i, nodes.Index)}
        for dim in [d for d in self.sizes if d in DIMS and d not in own]:
            axes = [a for a in self.degrees if a != self.state_axis]
            if not axes or self.draw(integers(0, 2)):
                continue
            axis = self.draw(sampled(axes))
            n, ways = self.sizes[dim], self.degrees[axis]
            how = [f"{dim}@chunk({axis})", f"{dim}@spread({axis})", f"{dim}@{axis}[{self.pieces(n, ways)}]"]
            if n % ways == 0:
                how.append(f"{dim}@{axis}")
            laps = [k for k in range(1, n + 1) if n % (k * ways) == 0]
            if laps:
                lap = self.draw(sampled(laps))
                how.append(f"({dim}lap {dim}stage@{axis} {dim}slot)")
                digits = f"  dim {dim}lap = {lap}, {dim}stage = {ways}"
            chosen = self.draw(sampled(how))
            self.rules[dim] = (chosen, axis)
            if "lap" in chosen:
                self.rules[dim] = (chosen + f"\n{digits}", axis)

    def dealt(self, dim: str, rule: str, axis: str | None) -> list[str]:
        """The rule of an index, perhaps with `when`.

        A second rule then has a condition that does not hold.
        """
        if "\n" in rule or self.draw(booleans()):
            return [f"  index {dim} = {rule}"]
        degree = self.degrees[axis or ""]
        return [
            f"  index {dim} = {dim}@{axis} when {axis} != {degree}",
            f"  index {dim} = {rule} when {axis} == {degree}",
        ]

    def pieces(self, length: int, ways: int) -> str:
        cuts = sorted(self.draw(integers(0, length)) for _ in range(ways - 1))
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
            is_packed: bool = bool(fellows) and self.draw(booleans())
            if is_packed:
                mine.append(self.draw(sampled(fellows)))
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
        """Return True if shared dims of two tensors have equal ranges."""
        x, y = self.tensors[a], self.tensors[b]
        return all(x.indices[i] == y.indices[j] for i, d in enumerate(x.dims) for j, e in enumerate(y.dims) if d == e)

    def brackets(self, dims: list[str]) -> list[str]:
        """Dims in brackets.

        One mesh axis deals one of them at most, or elements off the diagonal had no home.
        """
        out: list[str] = []
        for d in dims:
            dealt = [self.rules[i][1] for i in out if i in self.rules]
            if self.draw(integers(0, 2)) == 0 and (d not in self.rules or self.rules[d][1] not in dealt):
                out.append(d)
        return out

    def free(self, indices: list[str]) -> list[str]:
        """Mesh axes that may cut an entry with these indices.

        They are of one mesh, and deal none of the indices.
        """
        dealt = {self.rules[i][1] for i in indices if i in self.rules}
        if self.seconds and not dealt and self.draw(integers(0, 2)) == 0:
            return ["ep"]
        return [a for a in self.degrees if a != self.state_axis and a not in dealt]

    def degree(self, axis: str) -> int:
        return self.ways if axis == "ep" else self.degrees[axis]

    def single(self, path: str) -> list[str]:
        dims = list(self.tensors[path].dims)
        out = []
        homes = [""]
        axes = [a for a in self.degrees if a != self.state_axis]
        if axes and self.draw(integers(0, 4)) == 0:
            axis = self.draw(sampled(axes))
            homes = [f" at {axis}[0]", *([f" at {axis}[-1]"] if self.draw(booleans()) else [])]
        for n, place in enumerate(homes):
            indices = self.brackets(dims)
            free = self.free(indices)
            pinned = place.partition("[")[0].removeprefix(" at ")
            if any(self.rules[i][1] == pinned for i in indices if i in self.rules):
                indices, free = [], self.free([])
            free = [a for a in free if a != pinned and (not pinned or a != "ep")]
            used: list[str] = []
            rest = [d for d in dims if d not in indices]
            shape = self.axes(list(self.draw(permutations(rest))), free, used)
            out += self.parted(self.entry(path, indices, shape, used, (place, n)), indices)
        return out

    def parted(self, line: str, indices: list[str]) -> list[str]:
        """Perhaps split a line in two, by values of the first index."""
        if not indices or self.draw(integers(0, 3)):
            return [line]
        first, n = indices[0], self.sizes[indices[0]]
        some = self.draw(sampled([f"{n // 2}..", f"..{n // 2}", ".. by 2", "0", f"-1, {n // 2}"]))
        others = f"not {'0' if some.startswith('.') else ''}{some}"
        return [line.replace(f"[{first}", f"[{first}[{said}]", 1) for said in (some, others)]

    def entry(self, path: str, indices: list[str], shape: str, used: list[str], home: tuple[str, int] = ("", 0)) -> str:
        """One line.

        `home`: the clause with its ranks, and the number of a tensor's second place.
        """
        place, number = home
        bracket = f"[{', '.join(indices)}]" if indices else ""
        names = "".join(f".{{{x}}}" for x in [*indices, *used])
        policy = ""
        indexed = {self.rules[i][1] for i in indices if i in self.rules}
        spare = [a for a in self.degrees if a not in used and a not in indexed and a != self.state_axis]
        if spare and not place and "ep" not in used and self.draw(integers(0, 3)) == 0:
            means = [] if self.state_axis else ["mean", *(["max"] if self.version == 1 else [])]
            words = [["same", "any", *means], ["same", "any"]][: self.draw(integers(1, min(2, len(spare))))]
            policy = "".join(f" {self.draw(sampled(w))} @{a}" for w, a in zip(words, spare, strict=False))
        if used == ["ep"] and not place and not indexed - {None} and self.draw(booleans()):
            place = " on other"
        value = self.values.setdefault(path, self.draw(sampled(["", "", "", " value x - 1", " value x + 2"])))
        return f'  {path}{bracket} = {shape or "()"}{policy}{value}{place} as "{path}{number or ""}{names}"'

    def pack(self, paths: list[str]) -> list[str]:
        """Pack two tensors: labelled terms, common dims in brackets or terms."""
        both = [self.tensors[p].dims for p in paths]
        common = [d for d in both[0] if d in both[1]]
        own = [[d for d in dims if d not in common] for dims in both]
        indices = self.brackets(common)
        rest = [d for d in common if d not in indices]
        at = self.draw(integers(0, len(rest)))
        outside, inside = rest[:at], rest[at:]
        if any(not o and not inside for o in own):
            return []
        free, used = self.free(indices), []
        prefix = paths[0].rpartition(".")[0]
        labels = [p.rpartition(".")[2] for p in paths]
        if inside and all(own) and self.draw(booleans()):  # (g (q: r d + k: d))
            terms = [self.product(list(self.draw(permutations(o))), [], [])[0] for o in own]
            length = math.prod(self.sizes[d] for d in inside) * sum(math.prod(self.sizes[d] for d in o) for o in own)
            text = f"({' '.join(inside)} ({labels[0]}: {terms[0]} + {labels[1]}: {terms[1]}))"
        else:
            cut: list[list[str]] = [[], []]
            texts, lengths = [], []
            for n, o in enumerate(own):
                text, size = self.product(list(self.draw(permutations([*inside, *o]))), free, cut[n])
                texts.append(text)
                lengths.append(size)
            if set(cut[0]) != set(cut[1]):
                return []  # a term that an axis does not cut would be stored more than once
            used += sorted(cut[0])
            length = sum(lengths) if all(n is not None for n in lengths) else None  # type: ignore[assignment,arg-type]
            text = f"({labels[0]}: {texts[0]} + {labels[1]}: {texts[1]})"
        if length is not None:
            text = self.cut(text, length, [a for a in free if a not in used], used)
        around = self.axes(list(self.draw(permutations(outside))), [a for a in free if a not in used], used)
        shape = f"{around} {text}".strip() if self.draw(booleans()) else f"{text} {around}".strip()
        path = f"{prefix}.pack" if prefix else "pack_" + "_".join(labels)
        return [self.entry(path, indices, shape, used)]

    def axes(self, dims: list[str], free: list[str], used: list[str]) -> str:
        """Dims as stored axes: each alone, or several multiplied."""
        out = []
        while dims:
            n = self.draw(integers(1, len(dims)))
            mine, dims = dims[:n], dims[n:]
            text, length = self.product(mine, [a for a in free if a not in used], used)
            if n > 1 or " " in text:
                text = f"({text})"
            if length is not None:
                text = self.cut(text, length, [a for a in free if a not in used], used)
            out.append(text)
        return " ".join(out)

    def product(self, dims: list[str], free: list[str], used: list[str]) -> tuple[str, int | None]:
        """Dims side by side, perhaps one cut or written as digits.

        Also the length, if all ranks agree on it.
        """
        out, length = [], 1
        known = True
        for dim in dims:
            text = dim
            rule = next((i for i in self.model.items if isinstance(i, nodes.Index) and i.name == dim), None)
            if rule is not None and self.draw(booleans()):
                text = f"({' '.join(self.draw(permutations([f'{dim}1', f'{dim}2'])))})"
            mine = [a for a in free if a not in used]
            if mine and self.draw(integers(0, 2)) == 0:
                before = len(used)
                text = self.cut(text, self.sizes[dim], mine, used)
                known &= len(used) == before and "pad" not in text
            elif self.draw(integers(0, 9)) == 0:
                text = f"({text}[..1] + {text}[1..])" if text == dim else text
            length *= self.sizes[dim]
            out.append(text)
            if self.version > 1 and self.draw(integers(0, 9)) == 0:
                copies = self.draw(integers(1, 3))
                length *= copies
                out.insert(self.draw(integers(0, len(out))), f"copies({copies})")
        return " ".join(out), length if known else None

    def cut(self, text: str, length: int, free: list[str], used: list[str]) -> str:
        """Perhaps padded, trimmed, cut once or twice."""
        if self.draw(integers(0, 5)) == 0:
            kind = self.draw(sampled(["", ", undefined", ", zero", *[", live"] * 3 * (text == min(self.sizes))]))
            n = self.draw(integers(1, 5))
            text, length = f"pad({text}, {n}{kind})", -(-length // n) * n
            if self.draw(integers(0, 3)) == 0:
                return f"trim({text})"
        if not free or self.draw(integers(0, 2)) == 0:
            return text
        axis = self.draw(sampled(free))
        used.append(axis)
        ways = self.degree(axis)
        grain = self.draw(integers(1, 3))
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
        chosen = self.draw(sampled(how))
        if chosen == "pad":
            text = f"pad({text}, {grain * ways})@{axis}"
        else:
            text += chosen
        rest = [a for a in free if a != axis]
        if rest and "ep" not in (axis, rest[0]) and self.draw(integers(0, 3)) == 0:
            used.append(rest[0])
            text += f"@{self.draw(sampled(['chunk', 'spread']))}({rest[0]})"
        return text


def _called(model: nodes.Model) -> tuple[tuple[nodes.Model, ...], str]:
    """The model with its sizes as parameters, which the layout gives.

    One passes them on to another that it extends.

    Each one's own values are wrong, so that a text means the same only if arguments and `extends` act.
    """
    sizes = {
        b.name: b.value
        for i in model.items
        if isinstance(i, nodes.Dims)
        for b in i.bindings
        if isinstance(b.value, nodes.Number)
    }
    named = {d: f"{d}.n" for d in sizes}
    parameters = tuple(nodes.Parameter(n, nodes.Number(1)) for n in named.values())
    handed = tuple(nodes.Argument(n, nodes.Name(n)) for n in named.values())
    dims = [nodes.Dims((nodes.Binding(d, nodes.Name(n)),)) for d, n in named.items()]
    rest: list[nodes.ModelItem] = [i for i in model.items if not isinstance(i, nodes.Dims)]
    rest += [
        evolve(i, bindings=tuple(b for b in i.bindings if b.name not in sizes))
        for i in model.items
        if isinstance(i, nodes.Dims) and any(b.name not in sizes for b in i.bindings)
    ]
    at = next(n for n, i in enumerate(rest) if isinstance(i, nodes.Tensor))
    first = rest[at]
    assert isinstance(first, nodes.Tensor)
    wrong = evolve(first, dims=(), kind="buffer")  # a tensor to be replaced in its place, and one to be removed
    below = [*rest[:at], wrong, *rest[at + 1 :], nodes.Tensor("odd", (), kind="frozen")]
    base = nodes.Model(f"{model.name}.base", (*dims, *below), parameters)
    above = nodes.Model(model.name, (first, nodes.Gone("tensor", ("odd",))), parameters, nodes.Call(base.name, handed))
    given = ", ".join(f'"{n}" = {sizes[d].value}' for d, n in named.items())
    return (base, above), f"{model.name}({given})"


# ---- strategies ------------------------------------------------------------------------------------------------------

RANKS_MAX = 12


def models() -> st.SearchStrategy[nodes.Model]:
    """Models of one to five tensors over named dims.

    Dims have one to six elements, some only a range; states; perhaps groups.
    """
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Draw) -> nodes.Model:
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
        file = parse("ucpl 2\nmodel made {\n" + "\n".join(lines) + "\n}\n", "made.ucpl")
        (model,) = file.statements
        assert isinstance(model, nodes.Model)
        return model

    return drawn()


@cache
def _ranges(size: int) -> st.SearchStrategy[str]:
    from hypothesis import strategies as st

    low = st.integers(0, size - 1)
    some = st.lists(low, min_size=1, max_size=min(3, max(1, size - 1))).map(lambda of: ", ".join(map(str, of)))
    return low.flatmap(
        lambda a: st.sampled_from((f"[{a}..]", f"[..{a + 1}]", f"[{a}.. by 2]", f"[{a}..{size}]", f"[not {a}.. by 2]"))
    ) | some.flatmap(lambda of: st.sampled_from((f"[{of}]", f"[not {of}]", f"[where([{of}], {size - 1})]")))


@cache
def meshes() -> st.SearchStrategy[dict[str, int]]:
    """Mesh axes with their degrees, major to minor, at most 12 ranks."""
    from hypothesis import strategies as st

    axes = st.lists(st.sampled_from(("pp", "dp", "tp")), min_size=1, max_size=3, unique=True)
    return axes.flatmap(lambda names: st.fixed_dictionaries({n: st.integers(1, 4) for n in names})).filter(
        lambda degrees: math.prod(degrees.values()) <= RANKS_MAX
    )


def layouts(model: nodes.Model, *, name: str = "laid", whole: bool = True) -> st.SearchStrategy[Example]:
    """Layouts of a model.

    Any mesh, any cut, pads, packs, brackets, homes, flats.

    `whole`: every state that the model has is stored, so that any two of them can be converted into each other.
    """
    return _laid()(model, name, whole)


# A strategy that is asked for in every example is made once: Hypothesis reads the source of each function that it composes.


@cache
def _laid() -> Callable[[nodes.Model, str, bool], st.SearchStrategy[Example]]:
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Draw, model: nodes.Model, name: str, whole: bool) -> Example:
        return DrawnLayout(draw, model, draw(meshes()), whole).example(name)

    return drawn


def layout_pairs(model: nodes.Model) -> st.SearchStrategy[tuple[Example, Example]]:
    """Two layouts of one model on different meshes.

    At least one degree changes.
    """
    return _paired()(model)


@cache
def _paired() -> Callable[[nodes.Model], st.SearchStrategy[tuple[Example, Example]]]:
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Draw, model: nodes.Model) -> tuple[Example, Example]:
        first = draw(meshes())
        second = draw(meshes().filter(lambda degrees: degrees != first))
        return (
            DrawnLayout(draw, model, first, True).example("source"),
            DrawnLayout(draw, model, second, True).example("target"),
        )

    return drawn
