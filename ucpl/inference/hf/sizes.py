"""The meaning of a size: the product or sum of config keys.

The size follows them in every version of the class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement, permutations, product
from math import prod

from attrs import evolve, field

from ucpl.inference.hf.recipes import FusedParts
from ucpl.inference.hf.records import ModelFacts, Vector, agrees, identifier, moves
from ucpl.inference.hf.splits import OutputSplit
from ucpl.inference.hf.varying import COUNTS, EXPERTS, HEADS, WIDTH
from ucpl.records import define, frozen

__all__ = ["Axis", "DimSize", "SizeSolver", "Stacked"]

_GROUPS = re.compile(r"^(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)$")
_HEADS = re.compile(rf"^(?!mamba_)(?:{HEADS.pattern})")
_HEAD = re.compile(r"^(head_dim|d_kv|kv_channels|attention_head_dim|v_head_dim|qk_head_dim|global_head_dim)$")
_FFN = re.compile(r"(intermediate_size(_mlp)?|ffn_dim|d_ff|n_inner|ffn_hidden_size|inner_dim)$")
_VOCAB = re.compile(r"^(vocab_size|n_vocab|padded_vocab_size)$")
_SSM = {
    "ssm_heads": re.compile(r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads|num_heads)$"),
    "ssm_head": re.compile(r"^(mamba_d_head|mamba_head_dim|mamba_headdim|head_dim)$"),
    "ssm_groups": re.compile(r"^(mamba_n_groups|mamba_ngroups|n_groups)$"),
    "ssm_state": re.compile(r"^(mamba_d_state|ssm_state_size|state_size)$"),
    "ssm_rank": re.compile(r"^(mamba_dt_rank|time_step_rank)$"),
}
_PLAIN = {"vocab": _VOCAB, "width": WIDTH, "ffn": _FFN, "experts": EXPERTS, "groups": _GROUPS, "heads": _HEADS, **_SSM}
_SHORT = {
    "num_attention_heads": "n", "n_head": "n", "num_heads": "n", "n_heads": "n", "encoder_attention_heads": "encoder_n",
    "decoder_attention_heads": "decoder_n", "num_key_value_heads": "g", "num_kv_heads": "g", "head_dim": "d", "d_kv": "d",
    "num_experts": "e", "num_local_experts": "e", "n_routed_experts": "e", "linear_num_key_heads": "linear_g",
}  # fmt: skip
_CUT = {"heads": "equal", "groups": "equal", "linear_keys": "equal", "ssm_heads": "equal", "ssm_groups": "equal"}
_CUT |= {"ffn": "chunk", "vocab": "chunk", "inner": "chunk"}
_FACTORS = (2, 3, 4)
_SHARED = re.compile(r"^(n|num)_shared_experts$")
_ATTENTION = re.compile(r"att", re.IGNORECASE)
_TRIES_MAX = 2_000  # of one axis


@frozen
class DimSize:
    """One dim.

    Its name, its text in the language, and its size per version.
    `cut`: its cut by tensor parallelism.
    """

    name: str
    text: str
    vector: Vector
    key: str = ""  # the last key that it is made of: words of it choose between two that are equal
    cut: str | None = None


@frozen
class Stacked:
    """An axis of parts end to end, per value of outer dims."""

    outer: tuple[DimSize, ...]
    parts: tuple[tuple[str, tuple[DimSize, ...]], ...]


Axis = tuple[DimSize, ...] | Stacked


@define
class SizeSolver:
    """All that sizes of a model can be."""

    facts: ModelFacts
    keys: dict[str, Vector] = field(init=False)
    _roles: dict[str, list[DimSize]] = field(init=False, factory=dict)
    _known: dict[Vector, list[tuple[DimSize, ...]]] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        versions = [self.facts.numbers, *(v.numbers for v in self.facts.variations)]
        self.keys = {k: tuple(v[k] for v in versions) for k in versions[0] if all(k in v for v in versions)}
        if len(versions) > 1:
            self.keys = {k: v for k, v in self.keys.items() if len(set(v)) > 1 or COUNTS.search(_last(k))}

    @property
    def is_built(self) -> bool:
        """True if a class was built; otherwise only roles are known."""
        return bool(self.facts.variations)

    # ---- questions -----------------------------------------------------------------------------------------------

    def axis(self, vector: Vector, roles: list[tuple[str, ...]], name: str) -> tuple[DimSize, ...] | None:
        """The dims of an axis: by its roles, or else by keys.

        None: an unexplained number.
        """
        for role in roles:
            found = self._solved(((role, ""),), vector, name)
            if found is not None:
                return found[0]
        if not self.is_built or not moves(vector):
            return None
        return min(self._following(vector), key=lambda sizes: -_likeness(name, sizes), default=self.expressed(vector))

    def stacked(self, vector: Vector, recipe: FusedParts, name: str) -> Stacked | None:
        """The parts of a fused axis, if their sizes always add up."""
        terms = tuple((recipe.outer + roles, label) for label, roles in recipe.parts)
        found = self._solved(terms, vector, name)
        if found is None:
            return None
        n = len(recipe.outer)
        parts = tuple((label, sizes[n:]) for (_, label), sizes in zip(terms, found, strict=True))
        return Stacked(found[0][:n], parts)

    def split(self, vector: Vector, split: OutputSplit, name: str) -> Stacked | None:
        """The equal parts of a fused axis by the class's source.

        None if dims do not explain the size of a part.
        """
        if any(v % split.count for v in vector):
            return None
        part = tuple(v // split.count for v in vector)
        roles: list[tuple[str, ...]] = [("ffn",), ("inner",)]
        if split.count > 2 or split.kind == "by_head":
            roles = [("heads", "head")] if _ATTENTION.search(name) else []
        found = self.axis(part, roles, name)
        if found is None or not any(s.cut for s in found):
            return None
        outer = {"joined": 0, "strided": len(found), "by_head": 1}[split.kind]
        if outer > len(found) or (split.kind == "by_head" and len(found) < 2):
            return None
        inner = found[outer:] or (self.role("one")[0],)
        return Stacked(found[:outer], tuple((label, inner) for label in split.labels))

    def count(self, vector: Vector, container: str) -> DimSize | None:
        """The key that counts a container.

        If the class has other counts, it is the key that changed with it.
        """
        wanted = EXPERTS if "expert" in container.rpartition(".")[2] else COUNTS
        keys = [k for k in self.keys if wanted.search(_last(k))]
        found = [k for k in keys if agrees(vector, self.keys[k])]
        moved = self.is_built and moves(vector)
        if moved and not found:
            (one,) = self.expressed(vector) or (None,)
            return one
        if len(found) > 1 and not moved:
            best = max(_likeness(container, (self.of_key(k),)) for k in found)
            found = [k for k in found if best and _likeness(container, (self.of_key(k),)) == best]
        return self.of_key(found[0]) if len(found) == 1 or (found and moved) else None

    # ---- answers -------------------------------------------------------------------------------------------------

    def of_key(self, path: str, cut: str | None = None) -> DimSize:
        """The dim that a key of the config is."""
        level, _, key = path.rpartition(".")
        name = _SHORT.get(key, key)
        inner = [p.removesuffix("_config") for p in level.split(".") if p not in ("", "text_config")]
        text = f"config.{path}"
        if path in self.facts.absent:
            text = f"default({text}, {self.facts.absent[path]})"
        return DimSize("_".join([*inner, name]), text, self.keys[path], path, cut)

    def _solved(
        self, terms: tuple[tuple[tuple[str, ...], str], ...], vector: Vector, name: str
    ) -> list[tuple[DimSize, ...]] | None:
        """One size for each role of all terms.

        The products must add up to the vector.
        """
        roles = list(dict.fromkeys(role for term, _ in terms for role in term))
        if not roles:
            return None
        choices = [sorted(self.role(r), key=lambda s: -_likeness(name, (s,))) for r in roles]
        if prod(map(len, choices)) > _TRIES_MAX:
            choices = [c[:4] for c in choices]
        for choice in product(*choices):
            meant = dict(zip(roles, choice, strict=True))
            sizes = [tuple(meant[r] for r in term) for term, _ in terms]
            if all(not v or sum(prod(s.vector[i] for s in term) for term in sizes) == v for i, v in enumerate(vector)):
                return sizes
        return None

    def role(self, role: str) -> list[DimSize]:
        """The candidates for a role."""
        if role not in self._roles:
            self._roles[role] = list(self._candidates(role))
        return self._roles[role]

    def _candidates(self, role: str) -> Iterator[DimSize]:
        cut = _CUT.get(role)
        pattern = _PLAIN.get(role)
        if role.startswith("="):
            pattern = re.compile(rf"^{role[1:]}$")
        if pattern is not None:
            found = [self.of_key(k, cut) for k in self.keys if pattern.search(_last(k))]
            yield from (s if s.cut != "equal" or s.vector[0] > 1 else _uncut(s) for s in found)
        match role:
            case "head":
                yield from (self.of_key(k) for k in self.keys if _HEAD.search(_last(k)))
                yield from self._quotients()
            case "groups":
                yield from self.role("heads")  # a class without groups has as many as heads
            case "one":
                yield DimSize("one", "1", tuple(1 for _ in range(1 + len(self.facts.variations))))
            case "qk":
                yield from self._sums("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim")
            case "ffn":
                yield from self._shared(role)
                yield from (_times(4, self.of_key(k), "f", "chunk") for k in self.keys if WIDTH.search(_last(k)))
            case "inner":
                yield from self._expanded()
            case "linear_keys":
                yield from (evolve(s, cut=cut) for s in self.role("=linear_num_key_heads"))
            case "linear_ratio":
                yield from self._ratios("linear_num_value_heads", "linear_num_key_heads", "linear_r")

    def _shared(self, role: str) -> Iterator[DimSize]:
        """The inner width of several shared experts, which are one module."""
        widths = [self.of_key(k) for k in self.keys if _PLAIN[role].search(_last(k))]
        for shared in (self.of_key(k) for k in self.keys if _SHARED.search(_last(k))):
            for width in widths:
                if width.key.rpartition(".")[0] == shared.key.rpartition(".")[0]:
                    yield _product(f"shared_{width.name}", shared, width, _CUT[role])

    def _quotients(self) -> Iterator[DimSize]:
        """The width of a head: the model's width over its heads."""
        for width in self.role("width"):
            for heads in self.role("heads"):
                same_level = width.key.rpartition(".")[0] == heads.key.rpartition(".")[0]
                if same_level and width.vector[0] % heads.vector[0] == 0:
                    yield _over(
                        width, heads, heads.name[:-1] + "d" if heads.name.endswith("n") else f"{heads.name}_width"
                    )

    def _ratios(self, above: str, below: str, name: str) -> Iterator[DimSize]:
        for a, b in product(self.role(f"={above}"), self.role(f"={below}")):
            if a.vector[0] % b.vector[0] == 0:
                yield _over(a, b, name)

    def _sums(self, a: str, b: str, name: str) -> Iterator[DimSize]:
        for x, y in product(self.role(f"={a}"), self.role(f"={b}")):
            vector = tuple(p + q for p, q in zip(x.vector, y.vector, strict=True))
            yield DimSize(name, f"{x.text} + {y.text}", vector, x.key)

    def _expanded(self) -> Iterator[DimSize]:
        """The width of a state-space layer."""
        for expand in (self.of_key(k) for k in self.keys if _last(k) in ("mamba_expand", "expand")):
            for width in self.role("width"):
                yield _product("inner", expand, width, "chunk")
        for width in self.role("width"):
            yield _times(2, width, "inner", "chunk")
        yield from (
            self.of_key(k, "chunk") for k in self.keys if _last(k) in ("intermediate_size", "mamba_intermediate")
        )

    # ---- without a role ------------------------------------------------------------------------------------------

    def _following(self, vector: Vector) -> list[tuple[DimSize, ...]]:
        """Dims that a size follows, the simplest kind alone."""
        if self._known is None:
            self._known = {}
            for sizes in self._simple():
                key = tuple(prod(s.vector[i] for s in sizes) for i in range(len(vector)))
                known = self._known.setdefault(key, [])
                if not known or len(known[0]) == len(sizes):
                    known.append(sizes)
        if 0 not in vector:
            return self._known.get(vector, [])
        found = [sizes for key, several in self._known.items() if agrees(vector, key) for sizes in several]
        return [sizes for sizes in found if len(sizes) == min(map(len, found))]

    # ---- by the keys that move a size ----------------------------------------------------------------------------

    def movers(self, vector: Vector) -> list[str]:
        """The keys that change a size when each alone changes."""
        versions = self.facts.variations
        first = next((i for i, v in enumerate(versions) if v.changed), len(versions))
        base = first if first and not versions[first - 1].changed and self._is_base(first - 1) else 0
        return [v.changed for v, n in zip(versions, vector[1:], strict=True) if v.changed and n and n != vector[base]]

    def _is_base(self, number: int) -> bool:
        """True if a version differs in the number of experts alone."""
        own, other = self.facts.numbers, self.facts.variations[number].numbers
        return all(other.get(key) == n for key, n in own.items() if not EXPERTS.search(_last(key)))

    def expressed(self, vector: Vector) -> tuple[DimSize] | None:
        """A size as an expression of the keys that move it.

        These are one, two or three keys.
        """
        keys = self.movers(vector)
        if len(keys) == 1 and keys[0] in self.facts.items:
            return self._item(keys[0], vector)
        if not 0 < len(keys) <= _MOVERS_MAX or not all(k in self.keys for k in keys):
            return None
        for order in permutations([self.of_key(k) for k in keys]):
            for size in _EXPRESSED[len(order)](*order):
                if agrees(vector, size.vector):
                    return (size,)
        return None

    def _item(self, path: str, vector: Vector) -> tuple[DimSize] | None:
        """The item of a list with this size, or None."""
        versions = [self.facts.items, *(v.items for v in self.facts.variations)]
        lists = [v.get(path, []) for v in versions]
        found = []
        for i in range(len(lists[0])):
            made = tuple(items[i] if i < len(items) else -1 for items in lists)
            if agrees(vector, made):
                found.append(DimSize(f"{identifier(_last(path))}_{i}", f"config.{path}[{i}]", made, path))
        return (found[0],) if len(found) == 1 else None

    def _simple(self) -> Iterator[tuple[DimSize, ...]]:
        named = [
            s for role in ("vocab", "ffn", "heads", "groups", "experts") for s in self.role(role) if s.key in self.keys
        ]
        named = list({s.key: s for s in reversed(named) if "*" not in s.text}.values())
        singles = named + [self.of_key(k) for k in self.keys if k not in {s.key for s in named}]
        singles += self.role("head")
        yield from ((s,) for s in singles)
        for s in singles:
            for n in _FACTORS:
                yield (_times(n, s, f"{s.name}_x{n}", None),)
            for n in (1, 2):
                vector = tuple(v + n for v in s.vector)
                yield (DimSize(f"{s.name}_{n}", f"{s.text} + {n}", vector, s.key),)
        yield from product(self.role("heads") + self.role("groups"), self.role("head"))
        for a, b in combinations_with_replacement(singles, 2):
            if a is not b and a.key.rpartition(".")[0] == b.key.rpartition(".")[0]:
                yield (a, b)


def _of_one(a: DimSize) -> Iterator[DimSize]:
    for n in (2, 3, 4, 8, 16):
        yield _times(n, a, f"{a.name}_x{n}", None)
    for n in (2, 4, 8):
        if a.vector[0] % n == 0:  # `/` leaves no remainder
            yield _made(f"{a.name}_by_{n}", f"{a.text} / {n}", [v // n for v in a.vector], a)
    for n in (1, 2):
        yield _made(f"{a.name}_{n}", f"{a.text} + {n}", [v + n for v in a.vector], a)
        yield _made(f"{a.name}_less_{n}", f"{a.text} - {n}", [v - n for v in a.vector], a)
    yield _made(f"{a.name}_squared", f"{a.text} * {a.text}", [v * v for v in a.vector], a)


def _of_two(a: DimSize, b: DimSize) -> Iterator[DimSize]:
    both = list(zip(a.vector, b.vector, strict=True))
    name = f"{a.name}_{b.name}"
    for n in (1, 2, 3, 4):
        yield _made(name, f"{f'{n} * ' if n > 1 else ''}{a.text} * {b.text}", [n * x * y for x, y in both], a)
    yield _made(f"{name}_squared", f"{a.text} * {b.text} * {b.text}", [x * y * y for x, y in both], a)
    yield _made(name, f"{a.text} + {b.text}", [x + y for x, y in both], a)
    yield _made(f"{a.name}_less_{b.name}", f"{a.text} - {b.text}", [x - y for x, y in both], a)
    if not all(v for v in b.vector):
        return
    whole = f"({a.text} - {a.text} % {b.text})" if a.vector[0] % b.vector[0] else a.text
    over, ratio = [x // y for x, y in both], f"{whole} / {b.text}"
    for more, text in ((0, ""), (1, " + 1"), (2, " + 2")):
        end = f"_{more}" if more else ""
        yield _made(f"{a.name}_by_{b.name}{end}", f"{ratio}{text}", [n + more for n in over], a)
        squared = f"({ratio}) * ({ratio}){text}"
        yield _made(f"{a.name}_by_{b.name}_squared{end}", squared, [n * n + more for n in over], a)


def _of_three(a: DimSize, b: DimSize, c: DimSize) -> Iterator[DimSize]:
    all_ = list(zip(a.vector, b.vector, c.vector, strict=True))
    name = f"{a.name}_{b.name}_{c.name}"
    yield _made(name, f"{a.text} * {b.text} * {c.text}", [x * y * z for x, y, z in all_], a)
    yield _made(name, f"{a.text} * {b.text} * {c.text} * {c.text}", [x * y * z * z for x, y, z in all_], a)
    yield _made(name, f"{a.text} + {b.text} + {c.text}", [x + y + z for x, y, z in all_], a)
    yield _made(name, f"{a.text} * {b.text} + {c.text}", [x * y + z for x, y, z in all_], a)
    yield _made(name, f"{a.text} * ({b.text} + {c.text})", [x * (y + z) for x, y, z in all_], a)


_EXPRESSED: dict[int, Callable[..., Iterator[DimSize]]] = {1: _of_one, 2: _of_two, 3: _of_three}
_MOVERS_MAX = max(_EXPRESSED)


def _made(name: str, text: str, vector: list[int], of: DimSize) -> DimSize:
    return DimSize(name, text, tuple(vector), of.key)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _likeness(name: str, sizes: tuple[DimSize, ...]) -> int:
    """The number of a key's words in a tensor's name.

    `encoder` of `encoder_layers`.
    """
    words = set(re.findall(r"[a-z]+", name.lower().replace("_", " ")))
    return sum(len(words & set(re.findall(r"[a-z]+", s.key.lower().replace("_", " ")))) for s in sizes)


def _uncut(size: DimSize) -> DimSize:
    return evolve(size, cut=None)


def _times(n: int, size: DimSize, name: str, cut: str | None) -> DimSize:
    return DimSize(name, f"{n} * {size.text}", tuple(n * v for v in size.vector), size.key, cut)


def _product(name: str, a: DimSize, b: DimSize, cut: str | None) -> DimSize:
    return DimSize(
        name, f"{a.text} * {b.text}", tuple(x * y for x, y in zip(a.vector, b.vector, strict=True)), b.key, cut
    )


def _over(a: DimSize, b: DimSize, name: str) -> DimSize:
    return DimSize(name, f"{a.text} / {b.text}", tuple(x // y for x, y in zip(a.vector, b.vector, strict=True)), b.key)
