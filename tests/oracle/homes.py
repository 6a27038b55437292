"""Every stored tensor on every rank, position by position."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import groupby, product
from math import prod
from typing import Any

from attrs import evolve, frozen

from tests.oracle.cells import Cell, Padding, cells_of, join
from tests.oracle.names import Meaning, Numbers, Refused, Tensor, digits_of
from ucpl.language import nodes

__all__ = ["Home", "Padding", "homes"]


@frozen
class Home:
    """One stored tensor on one rank.

    A cell is (tensor, index in positions of that tensor), or a Padding; row-major.
    """

    rank: int
    form: str
    file: str
    key: str
    state: str
    shape: tuple[int, ...]
    cells: list[Any]
    policy: dict[str, str]  # tensor -> the rule of its copies
    value: dict[str, tuple[Fraction, Fraction]]  # tensor -> stored = a * x + b
    dtype: str | None
    is_alias: bool


def is_product(item: Any) -> bool:
    """`value x * scale`: a stored element is the value over its scale."""
    said = next((c.args[0] for c in item.clauses if c.word == "value"), None)
    names = [getattr(side, "path", "") for side in (getattr(said, "left", None), getattr(said, "right", None))]
    return getattr(said, "operator", "") == "*" and sorted(names) == ["scale", "x"]


def demand_pairs(local: Local) -> None:
    """Two cells share a byte.

    Those of one tensor that are 2i and 2i + 1 along one dim, which is one in all bytes.
    """
    if not local.shape or local.shape[-1] % 2:
        raise Refused("the last axis has a byte of one element")
    dims = set()
    for low, high in zip(local.cells[::2], local.cells[1::2], strict=True):
        if isinstance(low, Padding) and isinstance(high, Padding):
            continue
        if isinstance(low, Padding) or isinstance(high, Padding) or low[0] != high[0]:
            raise Refused("a byte of two tensors")
        apart = [d for d, (a, b) in enumerate(zip(low[1], high[1], strict=True)) if a != b]
        if len(apart) != 1 or low[1][apart[0]] % 2 or high[1][apart[0]] != low[1][apart[0]] + 1:
            raise Refused("a byte of elements that are not 2i and 2i + 1")
        dims.add(apart[0])
    if len(dims) > 1:
        raise Refused("bytes of two dims")


@frozen
class Local:
    """An entry's content on a rank for one choice of its indices."""

    entry: nodes.Entry
    choice: tuple[tuple[str, int, Any], ...]  # (name, local position, cell)
    names: dict[str, Any]  # for templates
    shape: tuple[int, ...]
    cells: list[Any]


def homes(meaning: Meaning, stated: Any = None) -> list[Home]:
    """Homes on all ranks. `stated`.

    (file rule, key, coordinates) -> flats, for groups `from FILE "key"`.
    """
    check_meshes(meaning)
    return [home for rank in range(meaning.ranks) for home in _Rank(meaning, rank, stated).homes()]


def check_meshes(meaning: Meaning) -> None:
    """Check the axes of a line `on MESH`.

    It cuts by axes of that mesh, uses them after `at`, in clauses about copies and in its key;
    a rank has one coordinate on an axis, on every mesh.
    """
    lines: list[nodes.Entry | nodes.States] = [*meaning.entries, *meaning.lines]
    for line in lines:
        said = {c.word: c.args for c in line.clauses}
        if "on" not in said:
            continue
        mesh = next((m for m in meaning.meshes if m.name == said["on"][0]), None)
        if mesh is None:
            raise Refused(f"no mesh is called {said['on'][0]}")
        known = {a for m in meaning.meshes for a in m.axes}
        axes = {a for axis in (line.shape if isinstance(line.shape, tuple) else ()) for a in _cuts(axis)}
        axes |= {c.args[0] for c in line.clauses if c.word == "at"}
        axes |= {a for c in line.clauses if c.word == "copies" and c.args[0] != "same" for a in c.args[1]}
        holes = " ".join(re.findall(r"\{([^{}:]*)", said.get("as", ("",))[0]))
        axes |= known & set(re.findall(r"[A-Za-z_]\w*", re.sub(r"size\([^()]*\)|[\w.]+\.size", "", holes)))
        for index in line.indices if isinstance(line, nodes.Entry) else ():
            rules = [meaning.indices[d] for d in digits_of(index) if d in meaning.indices]
            axes |= {a for axis in (index, *rules) for a in _cuts(axis) if meaning.degree(a) > 1}
        for axis in axes & known:
            if axis not in mesh.axes:
                raise Refused(f"{axis} is no axis of mesh {mesh.name}")
            first = next(m for m in meaning.meshes if axis in m.axes)
            steps = {prod(meaning.degree(b) for b in m.axes[m.axes.index(axis) + 1 :]) for m in (first, mesh)}
            if len(steps) > 1 and meaning.degree(axis) > 1:
                raise Refused(f"{axis} has other coordinates on mesh {mesh.name}")


class _Rank:
    def __init__(self, meaning: Meaning, rank: int, stated: Any) -> None:
        self.meaning, self.numbers, self.stated = meaning, meaning.numbers, stated
        self.rank = {"rank": rank}
        for mesh in meaning.meshes:
            rest = rank
            for axis in reversed(mesh.axes):
                rest, here = divmod(rest, meaning.degree(axis))
                self.rank.setdefault(axis, here)

    # ---- small readings ------------------------------------------------------------------------------------------------

    def clause(self, item: Any, word: str, default: Any = None) -> Any:
        return next((c.args for c in item.clauses if c.word == word), default)

    def is_here(self, item: Any) -> bool:
        return all(
            self.rank[c.args[0]] == self.numbers.value(c.args[1]) % self.meaning.degree(c.args[0])
            for c in item.clauses
            if c.word == "at"
        )

    def value(self, dim: str, index: dict[str, int]) -> int:
        """The index of a dim from its digits."""
        if dim in index:
            return index[dim]
        total = 0
        for digit in digits_of(self.meaning.indices[dim]):
            total = total * self.numbers.name(digit) + self.value(digit, index)
        return total

    def knows(self, dim: str, index: dict[str, int]) -> bool:
        if dim in index:
            return True
        digits = digits_of(self.meaning.indices[dim]) if dim in self.meaning.indices else [dim]
        return digits != [dim] and all(self.knows(d, index) for d in digits)

    def choices(self, axis: nodes.Axis, chosen: tuple[Any, ...] = ()) -> list[tuple[str, int, Any]]:
        """Values of one index on this rank, with their numbers there.

        A dim by an index that was `chosen` before it has the size that belongs to it.
        """
        numbers = self.numbers_of({k: v for _, _, cell in chosen for k, v in cell.index})
        name = next(iter(digits_of(axis)), "")
        match axis:
            case nodes.Dim(name=name, range=nodes.Among() as brackets):
                wanted = numbers.among(brackets, numbers.name(name))
                return [
                    c for c in self.choices(nodes.Dim(name), chosen) if self.value(name, dict(c[2].index)) in wanted
                ]
            case nodes.Stack(terms=terms) if all(t.label is None and isinstance(t.axes[0], nodes.Dim) for t in terms):
                if len(terms) > 1:
                    return [c for t in terms for c in self.choices(t.axes[0], chosen)]
        return [(name, i, c) for i, c in enumerate(cells_of(axis, numbers, self.rank, self.meaning.indices))]

    def values(self, axis: nodes.Axis, chosen: tuple[Any, ...]) -> Any:
        """The values of an index in brackets.

        Equal for two that are the same values of one dim.
        """
        numbers = self.numbers_of({k: v for _, _, cell in chosen for k, v in cell.index})
        match axis:
            case nodes.Dim(name=name, range=brackets):
                return name, frozenset(numbers.among(brackets, numbers.name(name)))
        return axis

    def names_of(self, choice: tuple[tuple[str, int, Any], ...]) -> dict[str, Any]:
        env: dict[str, Any] = {}
        for name, local, cell in choice:
            env |= {**dict(cell.index), f"{name}.local": local, name: self.value(name, dict(cell.index))}
        return env

    def targets(self, entry: nodes.Entry) -> dict[str | None, str]:
        path = self.meaning.aliases.get(entry.path, entry.path)
        out: dict[str | None, str] = {}
        for label in _labels(entry.shape or ()) or [None]:
            names = [f"{path[: m.start()]}.{label}" for m in reversed(list(re.finditer(r"\.", path)))]
            names.append(label or "")
            among = [path] if label is None else [names[0], f"{path}.{label}", *names[1:]]
            out[label] = next((t for t in among if t in self.meaning.tensors), among[0])
        return out

    # ---- entries -------------------------------------------------------------------------------------------------------

    def locals(self, entries: list[nodes.Entry]) -> list[Local]:
        """In the order of a model's parameters.

        Entries that share the first indices are one loop body.
        """

        def walk(run: list[nodes.Entry], depth: int, chosen: tuple[Any, ...]) -> list[tuple[nodes.Entry, Any]]:
            out: list[tuple[nodes.Entry, Any]] = []
            for _, same in groupby(run, key=lambda e: [self.values(i, chosen) for i in e.indices[depth : depth + 1]]):
                body = list(same)
                lead = body[0].indices[depth : depth + 1]
                if not lead:
                    out += [(e, chosen) for e in body]
                    continue
                for one in self.choices(lead[0], chosen):
                    out += walk(body, depth + 1, (*chosen, one))
            return out

        found = []
        for entry, choice in walk([e for e in entries if self.is_here(e)], 0, ()):
            local = self.local(entry, choice)
            if local is not None:
                found.append(local)
        return found

    def local(
        self, entry: nodes.Entry, choice: tuple[Any, ...], lacked: dict[str, set[str]] | None = None
    ) -> Local | None:
        """The content of an entry for one choice.

        `lacked`: dims that the entry is without. An element's index along them is 0.
        """
        fixed = {k: v for _, _, cell in choice for k, v in cell.index}
        targets = {label: self.of_size(path, fixed) for label, path in self.targets(entry).items()}
        numbers = self.numbers_of(fixed)
        whole = dict(targets)
        for label, (path, tensor) in whole.items() if lacked is not None else ():
            kept = [i for i, d in enumerate(tensor.dims) if d not in (lacked or {})[self.whole(path)]]
            of = tuple(tensor.dims[i] for i in kept), tuple(tensor.ranges[i] for i in kept)
            targets[label] = path, evolve(tensor, dims=of[0], ranges=of[1])

        def exists(index: dict[str, int], live: bool = False) -> bool:
            return all(
                self.value(d, index) in r or (live and self.value(d, index) >= numbers.name(d))
                for _, t in targets.values()
                for d, r in zip(t.dims, t.ranges, strict=True)
                if self.knows(d, index)
            )

        if not exists(fixed):
            return None
        axes = []
        for axis in entry.shape or ():
            cells = cells_of(axis, numbers, self.rank)
            axes.append([c for c in cells if exists({**fixed, **dict(c.index)}, isinstance(c, Padding) and c.is_live)])
        out: list[Any] = []
        for combination in product(*axes):
            cell = join(combination) if combination else Cell()
            if isinstance(cell, Padding) and not cell.is_live:
                out.append(cell)
                continue
            path, tensor = targets[cell.label]
            names = [*fixed, *(n for n, _ in cell.index)]
            need = [x for d in tensor.dims for x in self.leaves(d, names)]
            if sorted(need) != sorted(names):
                raise Refused(f"{entry.path}: {path} has the dims {need}, the pattern names {names}")
            index = fixed | dict(cell.index)
            at = [(self.value(d, index), numbers.name(d), r) for d, r in zip(tensor.dims, tensor.ranges, strict=True)]
            place = (path, tuple(r.index(i) if i < size else len(r) + i - size for i, size, r in at))
            if lacked is not None:
                known = dict(zip(tensor.dims, place[1], strict=True))
                place = (path, tuple(known.get(d, 0) for d in whole[cell.label][1].dims))
            out.append(evolve(cell, of=place) if isinstance(cell, Padding) else place)
        env = self.names_of(choice)
        owner = self.meaning.aliases.get(entry.path)
        named = next((c.args[0] for c in entry.clauses if c.word == "named"), None)
        env |= {"name": named or owner or entry.path, "alias": entry.path, "owner": owner or entry.path}
        return Local(entry, choice, env, tuple(map(len, axes)), out)

    def numbers_of(self, fixed: dict[str, int]) -> Numbers:
        """Numbers where indices have these values.

        Dims by an index have one size there.
        """
        sizes = {d: n[self.value(i, fixed)] for d, i, n in self.varying() if self.knows(i, fixed)}
        return Numbers({**self.numbers.given, **sizes}, self.numbers.written, self.numbers.config)

    def varying(self) -> list[tuple[str, str, list[int]]]:
        """Dims that have another size for each value of an index.

        The dim, the index, the sizes.
        """
        return [(dim, index, self.numbers.name(dim)) for dim, index in self.meaning.by.items()]

    def of_size(self, path: str, fixed: dict[str, int]) -> tuple[str, Tensor]:
        """The layers of one size: a tensor of their own.

        For a tensor whose layers differ in size.
        """
        tensor = self.meaning.tensors[path]
        mine = [v for v in self.varying() if v[0] in tensor.dims]
        if not mine:
            return path, tensor
        index = mine[0][1]
        if index not in tensor.dims or not self.knows(index, fixed) or any(v[1] != index for v in mine):
            raise Refused(f"{path} has layers of different sizes in one tensor")
        here = [n[self.value(index, fixed)] for _, _, n in mine]
        ranges = list(tensor.ranges)
        for dim, size in zip([v[0] for v in mine], here, strict=True):
            ranges[tensor.dims.index(dim)] = tuple(range(size))
        at = tensor.dims.index(index)
        ranges[at] = tuple(i for i in ranges[at] if [n[i] for _, _, n in mine] == here)
        ordered = sorted(range(len(mine)), key=lambda m: tensor.dims.index(mine[m][0]))
        text = ", ".join(f"{mine[m][0].rpartition('.')[2]}={here[m]}" for m in ordered)
        return f"{path}[{text}]", evolve(tensor, ranges=tuple(ranges))

    def leaves(self, dim: str, names: list[str]) -> list[str]:
        digits = digits_of(self.meaning.indices[dim]) if dim in self.meaning.indices else [dim]
        if dim in names or digits == [dim]:
            return [dim]
        return [x for d in digits for x in self.leaves(d, names)]

    # ---- homes ---------------------------------------------------------------------------------------------------------

    def homes(self) -> list[Home]:
        out: list[Home] = []
        for local in self.locals(self.meaning.entries):
            template = self.clause(local.entry, "as")
            rule = self.file(local.entry, "weights")
            if template and rule.form is not None:
                out.append(self.home(local.entry, rule, template[0], local, "weight", {}))
        for line in self.meaning.lines:
            rule = self.file(line, "optim" if "optim" in self.meaning.files else "weights")
            if rule.form is None or not self.is_here(line):
                continue
            out += self.like(line, rule) if isinstance(line.shape, str) else self.flats(line, rule)
        return out

    def file(self, item: Any, default: str) -> nodes.Files:
        return self.meaning.files[self.clause(item, "in", (default,))[0]]

    def home(self, item: Any, rule: nodes.Files, template: str, local: Local, state: str, env: dict[str, Any]) -> Home:
        here = {**self.rank, **local.names, **env, "state": state}
        self.check_indices(local.entry, (template, rule.template, rule.key or ""), here)
        key = self.numbers.render(template, here)
        here["key"] = key
        held = dict.fromkeys(c[0] for c in local.cells if not isinstance(c, Padding))
        dtype = self.clause(item, "dtype", (None,))[0]
        if dtype == "u8" and isinstance(item, nodes.Entry):  # the bits of one of two types, not a cast
            own = {self.meaning.tensors[path].dtype for path in self.targets(local.entry).values()}
            dtype = f"{own.pop()} in u8" if own in ({"f4_e2m1fn"}, {"f8_e8m0fnu"}) else dtype
        if {dtype or self.meaning.tensors[self.whole(p)].dtype for p in held} & {"f4_e2m1fn", "f4_e2m1fn in u8"}:
            demand_pairs(local)
        return Home(
            self.rank["rank"],
            rule.form or "",
            self.numbers.render(rule.template, here) + ".safetensors" * (rule.form == "memory"),
            self.numbers.render(rule.key, here) if rule.key else key,
            state,
            local.shape,
            local.cells,
            {path: self.policy(self.entry_of(local, path), item) for path in held},
            {path: self.value_of(self.entry_of(local, path), item, state) for path in held},
            dtype,
            isinstance(item, nodes.Entry) and item.path in self.meaning.aliases,
        )

    def check_indices(self, entry: nodes.Entry, templates: tuple[str, ...], here: dict[str, Any]) -> None:
        """A dim outside brackets has no value in names.

        Its digits have none, too.
        """
        of = [self.meaning.tensors[path] for path in self.targets(entry).values() if path in self.meaning.tensors]
        dims = [d for tensor in of for d in tensor.dims]
        unsaid = {x for d in dims for x in (d, f"{d}.local", *self.leaves(d, []))} - here.keys()
        for hole in (m[1] for t in templates for m in re.finditer(r"\{([^{}:]*)", t)):
            for word in re.findall(r"[A-Za-z_][\w.]*", re.sub(r"size\([^()]*\)", "", hole)):
                if word in unsaid:
                    raise Refused(f"{entry.path} has no index {word}")

    def whole(self, path: str) -> str:
        """The tensor of the text that layers of one size are of."""
        return re.sub(r"\[(\w+=\d+(, )?)+\]$", "", path) if self.meaning.by else path

    def entry_of(self, local: Local, path: str) -> nodes.Entry:
        """The entry with the cut of a tensor: its own.

        Of a flat's member, the first that is here.
        """
        if local.entry.path:
            return local.entry
        return next(e for e in self.meaning.entries if self.whole(path) in self.targets(e).values() and self.is_here(e))

    def said(self, speaker: Any) -> dict[str, str]:
        """The rule of the copies along each axis.

        Of an axis that no clause names, they are the same.
        """
        return {axis: c.args[0] for c in speaker.clauses if c.word == "copies" for axis in c.args[1]}

    def policy(self, entry: nodes.Entry, item: Any) -> str:
        """The rule of an entry's copies on this rank.

        It comes from the entry or the line that stores it.

        Along `any`, the first coordinate leads and the others are not read; none leads among tensors at one
        coordinate. A mean, a sum or a maximum is over the coordinates of its axes, with this rank's own.
        """
        speaks = any(word != "same" for word in self.said(entry).values())
        speaker = entry if speaks else item
        said = self.said(speaker)
        pinned = {c.args[0] for c in speaker.clauses if c.word == "at"}
        loose = {a for a, word in said.items() if word == "any"} - (self.parted(entry, item) - pinned)
        if any(a in pinned or self.rank[a] for a in loose):
            return "any"
        over = [a for a, word in said.items() if word in ("mean", "sum", "max") and self.meaning.degree(a) > 1]
        if over:
            return f"{said[over[0]]} " + " ".join(f"{a}={self.rank[a]}" for a in sorted(over))
        return "lead" if loose else "same"

    def parted(self, entry: nodes.Entry, item: Any) -> set[str]:
        """Axes along which no two ranks hold the same.

        Those that cut every part of the stored tensor.
        """
        bound = [self.meaning.indices[d] for i in entry.indices for d in digits_of(i) if d in self.meaning.indices]
        own = entry.shape if isinstance(entry.shape, tuple) else ()
        cut = {a for axis in (*own, *entry.indices, *bound) for a in _cuts(axis)} - _sometimes(own)
        return cut | ({a for axis in item.shape for a in _cuts(axis)} if isinstance(item.shape, tuple) else set())

    def value_of(self, entry: nodes.Entry, item: Any, state: str) -> tuple[Fraction, Fraction]:
        """The storage of a state of a tensor.

        The entry speaks of the parameter itself, the line of all in it.
        """
        itself = {"weight", "fp32", "master", "param"} | self.meaning.derived | self.meaning.origins
        return self.affine(entry if state in itself and self.clause(entry, "value") else item)

    def affine(self, item: Any) -> tuple[Fraction, Fraction]:
        said = self.clause(item, "value")
        if said is None or is_product(item):
            return Fraction(1), Fraction(0)
        at = [Numbers({**self.numbers.given, "x": x}, self.numbers.written).value(said[0]) for x in (0, 1)]
        return Fraction(at[1] - at[0]), Fraction(at[0])

    # ---- states ----------------------------------------------------------------------------------------------------------

    def states_of(self, line: nodes.States, group: str | None) -> list[str]:
        """The states that a line stores for a group.

        Those it names, or those that no other line names.
        """

        def kept(s: nodes.State) -> bool:
            return not s.scalar and (s.groups is None or group is None or group in s.groups)

        model = [n for s in self.meaning.states if kept(s) for n in s.names]
        known = [n for s in self.meaning.states for n in s.names]
        if line.names is not None:
            return [n for n in line.names if n == "weight" or n in model or n not in known]
        spoken = {
            n
            for other in self.meaning.lines
            if other.names and (other.groups is None or group is None or group in other.groups)
            for n in other.names
        }
        return [n for n in model if n not in spoken | self.meaning.derived]

    def is_trained(self, entry: nodes.Entry) -> bool:
        return all(self.meaning.tensors[p].kind == "parameter" for p in self.targets(entry).values())

    def like(self, line: nodes.States, rule: nodes.Files) -> list[Home]:
        out: list[Home] = []
        numbers: Counter[object] = Counter()  # those at one place are counted for themselves
        for position, name in enumerate(line.groups or (None,)):
            group = self.meaning.groups.get(name) if name else None
            trained = [e for e in self.meaning.entries if e.path not in self.meaning.aliases and self.is_trained(e)]
            if group is not None and group.members is not None:
                trained = self.of_members(group.members, trained, self.named_apart(line, group))
            members: Counter[object] = Counter()
            for entry in trained:
                at = frozenset(
                    (c.args[0], self.numbers.value(c.args[1]) % self.meaning.degree(c.args[0]))
                    for c in entry.clauses
                    if c.word == "at"
                )
                env = {"group": position, "member": members[at], "number": numbers[at], "bucket": numbers[at]}
                members[at] += 1
                numbers[at] += 1
                own, said = self.clause(entry, "as"), self.clause(line, "as")
                if own is None and said is None:
                    continue
                template = own[0] if said is None else said[0].replace("{key}", own[0] if own else "{key}")
                for state in self.states_of(line, name):
                    lacked = self.lacked(state)
                    if lacked is None:
                        out += [self.home(line, rule, template, x, state, env) for x in self.locals([entry])]
                    elif all(path in lacked for path in self.targets(entry).values()):
                        short = evolve(entry, shape=_short(entry.shape, self, lacked, entry, line.shape == "like(1)"))
                        here = [self.local(short, x.choice, lacked) for x in self.locals([entry])]
                        out += [self.home(line, rule, template, x, state, env) for x in here if x is not None]
        return out

    def lacked(self, state: str) -> dict[str, set[str]] | None:
        """Tensors with a state `without` dims.

        Each has the dims that the state lacks; None for any other state.
        """
        said = next((s for s in self.meaning.states if state in s.names and s.without), None)
        if said is None:
            return None
        own = None if said.groups is None else {g.name: g for g in self.meaning.model_groups}
        members = {m for g in said.groups or () for m in (own or {})[g].members or ()}
        out: dict[str, set[str]] = {}
        for path, tensor in self.meaning.tensors.items():
            if tensor.kind != "parameter" or (own is not None and path not in members):
                continue
            ranked = [(3 if n == path else 2, w) for w in said.without for n in w.of or () if fnmatchcase(path, n)]
            ranked += [(1, w) for w in said.without if w.of is None]
            if ranked:
                out[path] = {*max(ranked, key=lambda one: one[0])[1].dims}
        return out

    def flats(self, line: nodes.States, rule: nodes.Files) -> list[Home]:
        out, bucket = [], 0
        assert isinstance(line.shape, tuple)
        (axis,) = line.shape
        for name in line.groups or (None,):
            group = self.meaning.groups.get(name) if name else None
            for env, members in self.runs(line, group):
                cells = cells_of(axis, self.numbers, self.rank, None, None, members)
                flat = Local(nodes.Entry("", (), ()), (), {}, (len(cells),), cells)
                for state in self.states_of(line, name):
                    here = {**env, "bucket": bucket, "group": name or ""}
                    out.append(self.home(line, rule, self.clause(line, "as")[0], flat, state, here))
                bucket += 1
        return out

    def named_apart(self, line: nodes.States, group: nodes.Group) -> set[str]:
        """Packs in own groups of the layout with the same states."""
        if not group.of_model:
            return set()
        return {
            member
            for other in self.meaning.lines
            if {*(other.names or "*")} & {*(line.names or "*")}
            for name in other.groups or ()
            if not (own := self.meaning.groups[name]).of_model
            for member in own.members or ()
        }

    def of_members(
        self, members: tuple[str, ...], entries: list[nodes.Entry], apart: Set[str] = frozenset()
    ) -> list[nodes.Entry]:
        """Entries of members.

        A tensor without a line of its own is in its packs, but those apart; each is a member once.
        """
        alone = {e.path for e in entries}
        found = [
            e
            for m in members
            for e in entries
            if e.path == m or (m not in alone and m in self.targets(e).values() and e.path not in apart)
        ]
        return [e for i, e in enumerate(found) if not any(e is other for other in found[:i])]

    def runs(self, line: nodes.States, group: nodes.Group | None) -> list[tuple[dict[str, Any], list[list[Any]]]]:
        """(names for templates, cells of tensors) of a group's flats here."""
        entries = [e for e in self.meaning.entries if e.path not in self.meaning.aliases]
        if group is not None and group.members is not None:
            entries = self.of_members(group.members, entries, self.named_apart(line, group))
        else:
            gone = {m for g in (group.without or () if group else ()) for m in self.meaning.groups[g].members or ()}
            out_of = {e.path for e in self.of_members(tuple(gone), entries)}
            entries = [e for e in entries if e.path not in out_of and self.is_trained(e)]
        once: set[Any] = set()
        tensors = []
        for local in self.locals(entries):  # a second home on this rank is the same parameter
            held = {c for c in local.cells if not isinstance(c, Padding)}
            if local.cells and not held & once:
                once |= held
                tensors.append(local)
        if group is not None and group.stated is not None:
            by_name = {self.numbers.render(self.clause(t.entry, "as")[0], {**self.rank, **t.names}): t for t in tensors}
            return [self.named([by_name[n] for n, _ in flat], {}) for flat in self.stated(*group.stated, self.rank)]
        out = []
        for chosen in product(*(self.choices(a) for a in (group.indices if group else ()))):
            env = self.names_of(chosen)
            mine = [t for t in tensors if all(t.names.get(k) == v for k, v in env.items())]
            if group is not None and group.order == "reversed":
                mine = mine[::-1]
            elif group is not None and group.order is not None:
                ways = self.numbers.value(group.order)
                mine = [t for i in range(ways) for t in mine[i::ways]]
            out += [self.named(flat, env) for flat in self.buckets(line, mine)]
        return out

    def named(self, flat: list[Local], env: dict[str, Any]) -> tuple[dict[str, Any], list[list[Any]]]:
        """Cells of the tensors.

        A flat of one tensor may be called by its name.
        """
        if len(flat) == 1:
            said = self.clause(flat[0].entry, "as")
            own = {**self.rank, **flat[0].names, "state": "weight"}
            env = {"name": self.numbers.render(said[0], own) if said else flat[0].entry.path, **env}
        return env, [t.cells for t in flat]

    def buckets(self, line: nodes.States, tensors: list[Local]) -> list[list[Local]]:
        """A flat is closed once this rank's part has enough elements.

        They count before padding and cutting.
        """
        limit = self.clause(line, "buckets")
        if limit is None:
            return [tensors] if tensors else []
        assert isinstance(line.shape, tuple)
        axis: Any = line.shape[0]
        while not isinstance(axis, nodes.Flat):
            axis = axis.axis if not isinstance(axis, nodes.Stack) else axis.terms[0].axes[0]
        out: list[list[Local]] = []
        full: list[Local] = []
        for one in tensors:
            full.append(one)
            held = cells_of(axis, self.numbers, self.rank, None, None, [t.cells for t in full])
            if len(held) >= self.numbers.value(limit[0]):
                out.append(full)
                full = []
        return [*out, full] if full else out


def _short(
    axes: tuple[nodes.Axis, ...] | None, of: _Rank, lacked: dict[str, set[str]], entry: nodes.Entry, is_one: bool
) -> tuple[nodes.Axis, ...]:
    """Axes without the dims that a state lacks.

    An axis of them alone goes, or has one element.
    """
    targets = of.targets(entry)
    one = nodes.Stack((nodes.Term(None, ()),))

    def without(axis: nodes.Axis, label: str | None) -> nodes.Axis | None:
        match axis:
            case nodes.Dim(name=name):
                own = [targets[label]] if label in targets else [*targets.values()]
                gone = {x for path in own for d in lacked[path] for x in (d, *of.leaves(d, []))}
                return None if name in gone else axis
            case nodes.Stack(terms=terms):
                made = []
                for t in terms:
                    kept = [k for a in t.axes if (k := without(a, t.label or label)) is not None]
                    made += [evolve(t, axes=tuple(kept))] if any(not isinstance(k, nodes.Copies) for k in kept) else []
                return nodes.Stack(tuple(made)) if made else None
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner):
                kept_inner = without(inner, label)
                return None if kept_inner is None else evolve(axis, axis=kept_inner)
        return axis

    found = [without(axis, None) for axis in axes or ()]
    return tuple(axis or one for axis in found if axis is not None or is_one)


def _labels(axes: tuple[nodes.Axis, ...]) -> list[str | None]:
    out: list[str | None] = []
    for axis in axes:
        match axis:
            case nodes.Stack(terms=terms):
                for t in terms:
                    out += [t.label] if t.label is not None else _labels(t.axes)
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner):
                out += _labels((inner,))
    return list(dict.fromkeys(out))


def _cuts(axis: nodes.Axis) -> set[str]:
    """Mesh axes that cut anything inside an axis."""
    match axis:
        case nodes.Cut(axis=inner, splits=splits):
            return {s.mesh_axis for s in splits} | _cuts(inner)
        case nodes.Stack(terms=terms):
            return {a for t in terms for inner in t.axes for a in _cuts(inner)}
        case nodes.Pad(axis=inner) | nodes.Trim(axis=inner) | nodes.Flat(axis=inner):
            return _cuts(inner)
    return set()


def _sometimes(axes: tuple[nodes.Axis, ...]) -> set[str]:
    """Mesh axes that cut some terms of a sum and not all."""
    out: set[str] = set()
    for axis in axes:
        match axis:
            case nodes.Stack(terms=terms):
                each = [{a for inner in t.axes for a in _cuts(inner)} for t in terms]
                out |= {a for cut in each for a in cut if not all(a in other for other in each)}
                out |= {a for t in terms for a in _sometimes(t.axes)}
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner):
                out |= _sometimes((inner,))
    return out
