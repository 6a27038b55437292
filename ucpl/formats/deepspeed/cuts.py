"""Cuts over tensor-parallel ranks, from universal_checkpoint_info.

`affine_map` lists, for each rank, the views of the complete tensor that make up its shard, in terms of torch.as_strided
(deepspeed 0.19.8, checkpoint/affine.py). Older releases have lists of patterns (checkpoint/constants.py). This module
reads sections of one dim, and copies on every rank; everything else is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value, kind_text
from ucpl.formats.deepspeed.affine import affine_sharding, refuse, strides
from ucpl.formats.deepspeed.names import INFO
from ucpl.formats.deepspeed.order import Shape
from ucpl.records import frozen

VERSION = 1  # of affine_map
_PATTERN_CHARACTERS_MAX = 400
_GROUP_REPEATED = re.compile(r"\)[*+?{]")  # such patterns can take too long to match

Shapes = Mapping[str, Sequence[Shape]]  # of each parameter, on each tp rank


def shardings_of(file: TorchFile, info: Value | None, shapes: Shapes) -> dict[str, Sharding]:
    """Every tensor that universal_checkpoint_info describes. Raises: UcplError E455, E462, E463."""
    if info is None or not isinstance(info.held, dict):
        return {}
    described = _Patterns.of(file, _affine_maps(file, info))
    unsupported = _Patterns.of(file, info.find("autotp_unsupported_parameter_patterns"))
    lists = _Lists(file, info)
    out: dict[str, Sharding] = {}
    for name, local in shapes.items():
        reason = unsupported.find(name)
        entry = described.find(name)
        if entry is not None:
            out[name] = affine_sharding(entry, name, len(local))
        elif reason is not None:
            said = reason.held if isinstance(reason.held, str) else kind_text(reason.held)
            refuse(file, name, f"DeepSpeed itself says that it cannot be converted: {said}")
        elif (found := lists.sharding(name, local)) is not None:
            out[name] = found
    for name, sharding in out.items():
        for tp, shape in enumerate(shapes[name]):
            if sharding.local(tp) != shape:
                fail(
                    "E463",
                    f"{name} is {list(shape)} on tp rank {tp}, and {list(sharding.local(tp))} by {sharding.origin}",
                    Label(str(file.path), where=f"{INFO}: {name}"),
                )
    return out


def is_by_lists(info: Value | None) -> bool:
    """Test whether the lists of patterns are the model's own, not AutoTP's.

    A model's own code cuts in equal parts.
    """
    if info is None or not isinstance(info.held, dict):
        return False
    of_autotp = ("affine_map", "sub_param_shard_widths", "autotp_unsupported_parameter_patterns")
    return info.find("tp_replicated_parameter_patterns") is not None and all(
        info.find(key) is None for key in of_autotp
    )


def vocabulary_of(file: TorchFile, info: Value | None, names: Iterable[str]) -> dict[str, int]:
    """Tensors with words as rows, and the number of rows without padding.

    Raises: UcplError E462.
    """
    words = info.find("original_vocab_size") if info is not None and isinstance(info.held, dict) else None
    listed = info.find("vocabulary_parameter_patterns") if info is not None and words is not None else None
    if listed is None or words is None:
        return {}
    patterns = _Patterns.made(file, {one.text(): one for one in listed.items()})
    return {name: words.whole() for name in names if patterns.find(name) is not None}


def _affine_maps(file: TorchFile, info: Value) -> Value | None:
    affine = info.find("affine_map")
    if affine is None:
        return None
    version = affine.find("version")
    if version is None or version.held != VERSION:
        text = "none" if version is None else kind_text(version.held)
        refuse(file, "affine_map", f"it is of version {text}; {VERSION} is read")
    return affine.find("params")


@frozen(eq=False)
class _Patterns:
    """Values by regular expressions of names, matched from the start."""

    file: TorchFile
    table: dict[str, Value] = field(factory=dict)
    _compiled: list[tuple[re.Pattern[str], Value]] = field(factory=list)  # those that are no single name

    @classmethod
    def of(cls, file: TorchFile, table: Value | None) -> _Patterns:
        return cls.made(file, dict(table.named()) if table is not None else {})

    @classmethod
    def made(cls, file: TorchFile, table: dict[str, Value]) -> _Patterns:
        out = cls(file, table)
        for text, value in table.items():  # written as DeepSpeed writes one name, or to be matched
            if not (text.startswith("^") and text.endswith("$") and _is_name(text[1:-1])):
                out._compiled.append((out.pattern(text), value))
        return out

    def find(self, name: str) -> Value | None:
        exact = self.table.get(f"^{re.escape(name)}$")
        return exact if exact is not None else next((v for p, v in self._compiled if p.match(name)), None)

    def pattern(self, text: str) -> re.Pattern[str]:
        if len(text) > _PATTERN_CHARACTERS_MAX or _GROUP_REPEATED.search(text):
            refuse(self.file, text[:80], "a pattern that may take too long to match")
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            refuse(self.file, text, f"no regular expression: {error}")


def _is_name(escaped: str) -> bool:
    return re.escape(re.sub(r"\\(.)", r"\1", escaped)) == escaped


class _Lists:
    """The lists of patterns of releases before affine_map.

    A parameter that no list names is cut along dim 0.
    """

    def __init__(self, file: TorchFile, info: Value) -> None:
        self.file = file
        self.is_there = info.find("tp_replicated_parameter_patterns") is not None
        self.replicated = self.listed(info, "tp_replicated_parameter_patterns")
        self.rows = self.listed(info, "parameter_with_row_parallelism_patterns")
        self.halves = self.listed(info, "parameter_with_2_sub_params_cat_dim_0")
        self.average = self.listed(info, "parameter_to_average_patterns")
        subs = info.find("parameter_with_sub_params")
        table: dict[str, Value] = {}
        for sub in subs.items() if subs is not None else []:
            patterns = sub.find("patterns")
            table |= dict.fromkeys(patterns.texts() if patterns is not None else (), sub)
        self.subs = _Patterns.made(file, table)
        self.widths = _Patterns.of(file, info.find("sub_param_shard_widths"))

    def listed(self, info: Value, key: str) -> _Patterns:
        found = info.find(key)
        return _Patterns.made(self.file, {one.text(): one for one in found.items()} if found is not None else {})

    def sharding(self, name: str, local: Sequence[Shape]) -> Sharding | None:
        """The cut of a tensor, or None.

        None: the lists are missing, or the tensor is an average of several ranks.
        """
        if not self.is_there or self.average.find(name) is not None:
            return None
        origin = f"{INFO} of {self.file.file}"
        if self.replicated.find(name) is not None:
            return Sharding(local[0], origin=f"tp_replicated_parameter_patterns of {origin}")
        sub = self.subs.find(name)
        if sub is not None:
            return self.fused(name, sub, local, f"parameter_with_sub_params of {origin}")
        if not local[0]:
            return None
        if self.halves.find(name) is not None:
            widths = [tuple(s[0] // 2 for s in local)] * 2
            if any(s[0] % 2 for s in local):
                refuse(self.file, name, "parameter_with_2_sub_params_cat_dim_0, and an odd number of rows")
            return _sharding(local, 0, widths, f"parameter_with_2_sub_params_cat_dim_0 of {origin}")
        is_row = self.rows.find(name) is not None
        dim = 1 if is_row and len(local[0]) > 1 else 0
        what = "parameter_with_row_parallelism_patterns" if is_row else "no list names it, so along dim 0:"
        return _sharding(local, dim, [tuple(s[dim] for s in local)], f"{what} of {origin}")

    def fused(self, name: str, sub: Value, local: Sequence[Shape], origin: str) -> Sharding:
        """The cut of a tensor of several parts, each cut separately."""
        dim, shape = sub.at("partition_dim").whole(), sub.at("shape").items()
        if not dim < min(len(local[0]), len(shape)):
            refuse(self.file, name, "parameter_with_sub_params is of another form")
        stated = self.widths.find(name)
        if stated is not None:
            widths = [tuple(width.whole() for width in row.items()) for row in stated.items()]
            if any(len(row) != len(local) for row in widths):
                refuse(self.file, name, f"sub_param_shard_widths of another number of ranks than {len(local)}")
            return _sharding(local, dim, widths, origin)
        count = shape[dim].held
        if type(count) is int:  # of equal parts
            whole = sum(s[dim] for s in local)
            if not 1 <= count <= whole or whole % count:
                refuse(self.file, name, f"{whole} does not divide into {kind_text(count)} of parts")
            sizes = [whole // count] * count
        else:
            sizes = [size.whole() for size in shape[dim].items()]
        if any(size % len(local) for size in sizes):
            refuse(self.file, name, f"parts of {sizes} over {len(local)} ranks, and no sub_param_shard_widths")
        return _sharding(local, dim, [(size // len(local),) * len(local) for size in sizes], origin)


def _sharding(local: Sequence[Shape], dim: int, widths: list[tuple[int, ...]], origin: str) -> Sharding:
    sections = tuple(Section(sum(row), row) for row in widths)
    whole = (*local[0][:dim], sum(s.size for s in sections), *local[0][dim + 1 :])
    return Sharding(whole, dim, sections, origin)


# ---- written ---------------------------------------------------------------------------------------------------------------


def info_of(shardings: Mapping[str, Sharding], degree: int, kept: Mapping[str, object]) -> dict[str, object]:
    """universal_checkpoint_info of a target, in AutoTP's form.

    It has maps, and lists for readers without maps. `kept`: the source's, for values that do not depend on the degree.
    """
    regenerated = {
        "affine_map",
        "parameter_with_row_parallelism_patterns",
        "parameter_with_sub_params",
        "sub_param_shard_widths",
        "tp_replicated_parameter_patterns",
        "parameter_with_2_sub_params_cat_dim_0",
    }
    rows: list[str] = []
    replicated: list[str] = []
    subs: list[object] = []
    out: dict[str, object] = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": rows,
        "tp_replicated_parameter_patterns": replicated,
        "vocabulary_parameter_patterns": [],
        "parameter_with_sub_params": subs,
        "autotp_unsupported_parameter_patterns": {},
        **{k: v for k, v in kept.items() if k not in regenerated},
    }
    vocabulary = out["vocabulary_parameter_patterns"]
    if isinstance(vocabulary, list):  # one of its own: the source's is every file's
        vocabulary = out["vocabulary_parameter_patterns"] = list(vocabulary)
    maps: dict[str, object] = {}
    widths: dict[str, object] = {}
    for name, s in shardings.items():
        pattern = f"^{re.escape(name)}$"
        maps[pattern] = _map(s, degree)
        if (
            s.dim == 0
            and len(s.shape) == 2
            and ("embed" in name or "lm_head" in name)
            and "original_vocab_size" not in kept
            and isinstance(vocabulary, list)
        ):
            vocabulary.append(pattern)
            out.setdefault("original_vocab_size", s.shape[0])
        if s.dim is None:
            replicated.append(pattern)
        elif len(s.sections) > 1 and all(x.widths is not None for x in s.sections):
            shape: list[object] = [-1] * len(s.shape)
            shape[s.dim] = tuple(x.size for x in s.sections)
            subs.append({"patterns": [pattern], "shape": shape, "partition_dim": s.dim})
            widths[pattern] = [list(x.widths or ()) for x in s.sections]
        elif len(s.sections) > 1:
            pass  # parts of it are copies, which only the map can say
        elif s.dim == 1:
            rows.append(pattern)
    rows.sort()
    replicated.sort()
    if widths:
        out["sub_param_shard_widths"] = widths
    out["affine_map"] = {"version": VERSION, "params": maps}
    return out


def _map(s: Sharding, degree: int) -> dict[str, object]:
    ranks: dict[int, object] = {}
    of_whole = strides(s.shape)
    for tp in range(degree):
        shard = s.local(tp)
        of_shard = strides(shard)
        pieces = []
        start = end = 0
        for x in s.sections if s.dim is not None else (Section(0, None),):
            shape, source, dest, locations = list(s.shape), 0, 0, list(range(degree))
            if s.dim is not None:
                width = x.size if x.widths is None else x.widths[tp]
                low = start if x.widths is None else start + sum(x.widths[:tp])
                shape[s.dim], source, dest = width, low * of_whole[s.dim], end * of_shard[s.dim]
                locations = locations if x.widths is None else [tp]
                start, end = start + x.size, end + width
            pieces.append(
                {
                    "shape": shape,
                    "source": [source, list(of_whole)],
                    "dest": [dest, list(of_shard)],
                    "locations": locations,
                }
            )
        ranks[tp] = {"shard_shape": list(shard), "pieces": pieces}
    return {"logical_shape": list(s.shape), "ranks": ranks}
