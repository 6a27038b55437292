"""One layout, drawn: any mesh, cuts that fit the lengths that they cut, packs, brackets, homes."""

from __future__ import annotations

import math
from functools import lru_cache

from attrs import evolve

from ucpl.layout import Layout, load, resolve
from ucpl.syntax import nodes, print_file
from ucpl.testing.choices import Draw, booleans, integers, permutations, sampled
from ucpl.testing.drawn_states import States
from ucpl.testing.laws import Example

__all__ = ["DIMS", "DrawnLayout"]

DIMS = ("l", "e", "h", "g", "d", "v", "f")


@lru_cache(maxsize=4)
def _plain(model: nodes.Model) -> Layout:
    """The model, laid out as it is: both layouts of a pair ask for its sizes."""
    probe = load(("<probe>", "ucpl 1\nlayout probe() of any {\n  file weights = none\n  * = ...\n}\n"))
    return resolve(probe, nodes.Call("probe"), model=model)


class DrawnLayout:
    """One layout being drawn. Cuts are chosen to fit the lengths that they cut."""

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
        lines += States(self.draw, self.model, tuple(self.degrees), axis, ways).lines()
        models, of = _called(self.model) if self.draw(booleans()) else ((self.model,), self.model.name)
        text = f"{print_file(nodes.File('', 1, models)).rstrip()}\n\n" + self.layout(name, of, lines)
        degrees = ", ".join(f"{k} = {v}" for k, v in self.degrees.items())
        return Example(text, f"{name}({degrees})", f"{name}.ucpl")

    def layout(self, name: str, of: str, lines: list[str]) -> str:
        """The statements; perhaps all of them but one in a base, which takes that one back where the layout says it."""
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
        """How brackets are dealt."""
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
        """The rule of an index, perhaps under a condition that holds, beside one that does not."""
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
        """Two tensors may be packed where they have the same range of each dim that they share."""
        x, y = self.tensors[a], self.tensors[b]
        return all(x.indices[i] == y.indices[j] for i, d in enumerate(x.dims) for j, e in enumerate(y.dims) if d == e)

    def brackets(self, dims: list[str]) -> list[str]:
        """Dims in brackets; one mesh axis deals one of them at most, or elements off the diagonal had no home."""
        out: list[str] = []
        for d in dims:
            dealt = [self.rules[i][1] for i in out if i in self.rules]
            if self.draw(integers(0, 2)) == 0 and (d not in self.rules or self.rules[d][1] not in dealt):
                out.append(d)
        return out

    def free(self, indices: list[str]) -> list[str]:
        """Mesh axes that may cut an entry with these indices: of one mesh, and dealing none of the indices."""
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
        """Perhaps one line for some values of the first index, and one for all others."""
        if not indices or self.draw(integers(0, 3)):
            return [line]
        first, n = indices[0], self.sizes[indices[0]]
        some = self.draw(sampled([f"{n // 2}..", f"..{n // 2}", ".. by 2", "0", f"-1, {n // 2}"]))
        others = f"not {'0' if some.startswith('.') else ''}{some}"
        return [line.replace(f"[{first}", f"[{first}[{said}]", 1) for said in (some, others)]

    def entry(self, path: str, indices: list[str], shape: str, used: list[str], home: tuple[str, int] = ("", 0)) -> str:
        """One line. `home`: the clause that says on which ranks, and the number of a tensor's second place."""
        place, number = home
        bracket = f"[{', '.join(indices)}]" if indices else ""
        names = "".join(f".{{{x}}}" for x in [*indices, *used])
        policy = ""
        indexed = {self.rules[i][1] for i in indices if i in self.rules}
        spare = [a for a in self.degrees if a not in used and a not in indexed and a != self.state_axis]
        if spare and not place and "ep" not in used and self.draw(integers(0, 3)) == 0:
            means = [] if self.state_axis else ["mean", "max"]
            words = [["same", "any", *means], ["same", "any"]][: self.draw(integers(1, min(2, len(spare))))]
            policy = "".join(f" {self.draw(sampled(w))} @{a}" for w, a in zip(words, spare, strict=False))
        if used == ["ep"] and not place and not indexed - {None} and self.draw(booleans()):
            place = " on other"
        value = self.values.setdefault(path, self.draw(sampled(["", "", "", " value x - 1", " value x + 2"])))
        return f'  {path}{bracket} = {shape or "()"}{policy}{value}{place} as "{path}{number or ""}{names}"'

    def pack(self, paths: list[str]) -> list[str]:
        """Two tensors in one: labelled terms, common dims in brackets, beside the terms or around them."""
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
        """Dims side by side, perhaps one of them cut inside or written as its digits; the length where all ranks agree."""
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
    """The model with its sizes as parameters, which the layout gives: one hands them on to another that it extends.

    What each has of its own is wrong, so that a text means the same only where arguments and `extends` act.
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
    wrong = evolve(first, dims=(), kind="buffer")  # what is replaced, in its place, and what is taken back
    below = [*rest[:at], wrong, *rest[at + 1 :], nodes.Tensor("odd", (), kind="frozen")]
    base = nodes.Model(f"{model.name}.base", (*dims, *below), parameters)
    above = nodes.Model(model.name, (first, nodes.Gone("tensor", ("odd",))), parameters, nodes.Call(base.name, handed))
    given = ", ".join(f'"{n}" = {sizes[d].value}' for d, n in named.items())
    return (base, above), f"{model.name}({given})"
