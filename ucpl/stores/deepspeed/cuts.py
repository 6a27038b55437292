"""How each tensor is cut over tensor-parallel ranks, from what DeepSpeed writes beside the tensors: universal_checkpoint_info.

`affine_map` lists, for each rank, which views of the whole tensor make up its shard, as torch.as_strided would take them
(deepspeed 0.19.8, checkpoint/affine.py). Older releases have lists of patterns (checkpoint/constants.py). Read here is what
is sections of one dim, or a copy on every rank; everything else is refused, never taken for something near it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.stores.deepspeed.order import Shape
from ucpl.stores.torch_files import TorchFile

INFO = "universal_checkpoint_info"
VERSION = 1  # of affine_map
_PATTERN_CHARACTERS_MAX = 400
_GROUP_REPEATED = re.compile(r"\)[*+?{]")  # what can make matching take for ever

Info = Mapping[str, Any]


def shardings_of(file: TorchFile, info: Any, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Sharding]:
    """Every tensor that `info` describes. `shapes`: of each parameter, on each tp rank. Raises: UcplError E462, E463."""
    if not isinstance(info, dict):
        return {}
    affine = info.get("affine_map")
    maps: Mapping[Any, Any] = {}
    if isinstance(affine, dict):
        if affine.get("version") != VERSION:
            _refuse(file, "affine_map", f"it is of version {affine.get('version')!r}; {VERSION} is read")
        params = affine.get("params")
        maps = params if isinstance(params, dict) else {}
    described = _Patterns(file, maps)
    unsupported = _Patterns(file, info.get("autotp_unsupported_parameter_patterns") or {})
    lists = _Lists(file, info)
    out: dict[str, Sharding] = {}
    for name, local in shapes.items():
        reason = unsupported.find(name)
        entry = described.find(name)
        if entry is not None:
            out[name] = _affine(file, name, entry, len(local))
        elif reason is not None:
            _refuse(file, name, f"DeepSpeed itself says that it cannot be converted: {reason}")
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


def _refuse(file: TorchFile, name: str, why: str) -> NoReturn:
    fail("E462", f"{name}: {why}", Label(str(file.path), where=f"{INFO}: {name}"))


class _Patterns:
    """Values by regular expressions of names, matched from the start, as DeepSpeed does."""

    def __init__(self, file: TorchFile, table: Mapping[Any, Any]) -> None:
        self.file = file
        self.table = {p: v for p, v in table.items() if isinstance(p, str)}
        self.compiled: list[tuple[re.Pattern[str], Any]] | None = None

    def find(self, name: str) -> Any:
        exact = f"^{re.escape(name)}$"
        if exact in self.table:
            return self.table[exact]
        if self.compiled is None:  # those that are no single name, written as DeepSpeed writes one
            wide = {
                p: v for p, v in self.table.items() if not (p.startswith("^") and p.endswith("$") and _is_name(p[1:-1]))
            }
            self.compiled = [(self.pattern(p), v) for p, v in wide.items()]
        return next((v for p, v in self.compiled if p.match(name)), None)

    def pattern(self, text: str) -> re.Pattern[str]:
        if len(text) > _PATTERN_CHARACTERS_MAX or _GROUP_REPEATED.search(text):
            _refuse(self.file, text[:80], "a pattern that may take for ever to match")
        try:
            return re.compile(text)
        except re.error as error:
            _refuse(self.file, text, f"no regular expression: {error}")


def _is_name(escaped: str) -> bool:
    return re.escape(re.sub(r"\\(.)", r"\1", escaped)) == escaped


class _Lists:
    """The lists of patterns of releases before affine_map. A parameter that none of them names is cut along dim 0."""

    def __init__(self, file: TorchFile, info: Info) -> None:
        self.file = file
        self.is_there = isinstance(info.get("tp_replicated_parameter_patterns"), list)
        self.replicated = self.listed(info, "tp_replicated_parameter_patterns")
        self.rows = self.listed(info, "parameter_with_row_parallelism_patterns")
        self.halves = self.listed(info, "parameter_with_2_sub_params_cat_dim_0")
        self.average = self.listed(info, "parameter_to_average_patterns")
        self.vocabulary = self.listed(info, "vocabulary_parameter_patterns")
        self.rows_of_vocabulary = info.get("original_vocab_size")
        subs = info.get("parameter_with_sub_params")
        table: dict[str, Any] = {}
        for sub in subs if isinstance(subs, list) else []:
            if isinstance(sub, dict):
                table |= dict.fromkeys(sub.get("patterns") or (), sub)
        self.subs = _Patterns(file, table)
        widths = info.get("sub_param_shard_widths")
        self.widths = _Patterns(file, widths if isinstance(widths, dict) else {})

    def listed(self, info: Info, key: str) -> _Patterns:
        found = info.get(key)
        return _Patterns(self.file, dict.fromkeys(found if isinstance(found, list) else (), True))

    def sharding(self, name: str, local: Sequence[Shape]) -> Sharding | None:
        """None where the lists are missing, or say what copies do not: the average of several ranks."""
        if not self.is_there or self.average.find(name):
            return None
        origin = f"{INFO} of {self.file.file}"
        if self.replicated.find(name):
            return Sharding(local[0], origin=f"tp_replicated_parameter_patterns of {origin}")
        sub = self.subs.find(name)
        if sub is not None:
            return self.fused(name, sub, local, f"parameter_with_sub_params of {origin}")
        if self.halves.find(name):
            widths = [tuple(s[0] // 2 for s in local)] * 2
            if any(s[0] % 2 for s in local):
                _refuse(self.file, name, "parameter_with_2_sub_params_cat_dim_0, and an odd number of rows")
            return _sharding(name, local, 0, widths, f"parameter_with_2_sub_params_cat_dim_0 of {origin}")
        is_row = self.rows.find(name) is not None
        dim = 1 if is_row and len(local[0]) > 1 else 0
        what = "parameter_with_row_parallelism_patterns" if is_row else "no list names it, so along dim 0:"
        if not local[0]:
            return None
        rows = sum(s[0] for s in local)
        if self.vocabulary.find(name) and self.rows_of_vocabulary not in (None, rows):
            _refuse(self.file, name, f"a vocabulary of {self.rows_of_vocabulary} padded to {rows} rows")
        return _sharding(name, local, dim, [tuple(s[dim] for s in local)], f"{what} of {origin}")

    def fused(self, name: str, sub: Mapping[str, Any], local: Sequence[Shape], origin: str) -> Sharding:
        dim, shape = sub.get("partition_dim"), sub.get("shape")
        if type(dim) is not int or not isinstance(shape, list | tuple) or not 0 <= dim < min(len(local[0]), len(shape)):
            _refuse(self.file, name, "parameter_with_sub_params is of another form")
        stated = self.widths.find(name)
        if stated is not None:
            widths = [tuple(int(w) for w in row) for row in stated]
            if any(len(row) != len(local) for row in widths):
                _refuse(self.file, name, f"sub_param_shard_widths of another number of ranks than {len(local)}")
            return _sharding(name, local, dim, widths, origin)
        sizes = shape[dim]
        if isinstance(sizes, int):  # a count of equal parts
            whole = sum(s[dim] for s in local)
            if sizes < 1 or whole % sizes:
                _refuse(self.file, name, f"{whole} does not divide into {sizes} parts")
            sizes = [whole // sizes] * sizes
        if any(type(n) is not int or n % len(local) for n in sizes):
            _refuse(self.file, name, f"parts of {list(sizes)} over {len(local)} ranks, and no sub_param_shard_widths")
        return _sharding(name, local, dim, [(n // len(local),) * len(local) for n in sizes], origin)


def _sharding(name: str, local: Sequence[Shape], dim: int, widths: list[tuple[int, ...]], origin: str) -> Sharding:
    sections = tuple(Section(sum(row), row) for row in widths)
    whole = (*local[0][:dim], sum(s.size for s in sections), *local[0][dim + 1 :])
    return Sharding(whole, dim, sections, origin)


# ---- affine maps -----------------------------------------------------------------------------------------------------------


def _affine(file: TorchFile, name: str, entry: Any, degree: int) -> Sharding:
    origin = f"affine_map of {file.file}"
    try:
        whole = tuple(int(n) for n in entry["logical_shape"])
        ranks = {int(rank): spec for rank, spec in entry["ranks"].items()}
        if sorted(ranks) != list(range(degree)):
            _refuse(file, name, f"affine_map of {len(ranks)} ranks, there are files of {degree}")
        shards = [tuple(int(n) for n in ranks[tp]["shard_shape"]) for tp in range(degree)]
        pieces = [[_Piece(p) for p in ranks[tp]["pieces"]] for tp in range(degree)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        _refuse(file, name, "affine_map is of another form")
    if any(p.scale != 1.0 for row in pieces for p in row):
        _refuse(file, name, "a rank holds it scaled, so that its moments and learning rate are scaled, too")
    dims = [
        d
        for d in range(len(whole))
        if any(s[d] != whole[d] for s in (*shards, *(p.shape for row in pieces for p in row)))
    ]
    every = [dims[0]] if len(dims) == 1 else [0] if not dims and whole else []
    if len(dims) > 1 or (not every and whole):
        _refuse(file, name, "its pieces are parts of several dims")
    if not whole:
        return Sharding(whole, origin=origin)
    (dim,) = every
    runs = [_runs(file, name, whole, shard, row, dim) for shard, row in zip(shards, pieces, strict=True)]
    if not dims and all(row == [(0, whole[dim])] for row in runs):
        return Sharding(whole, origin=origin)
    if len({len(row) for row in runs}) != 1:
        _refuse(file, name, "ranks hold different numbers of pieces of it")
    sections: list[Section] = []
    base = 0
    for column in zip(*runs, strict=True):  # one section: (start, width) on each rank
        if degree > 1 and len(set(column)) == 1 and column[0][1]:
            start, width = column[0]
            if start != base:
                _refuse(file, name, f"a piece begins at {start}, the one before ends at {base}")
            sections.append(Section(width, None))
            base += width
            continue
        first = base
        for start, width in column:
            if width and start != base:
                _refuse(file, name, f"a piece begins at {start}, the one before ends at {base}")
            base += width
        sections.append(Section(base - first, tuple(width for _, width in column)))
    if base != whole[dim]:
        _refuse(file, name, f"its pieces end at {base} of {whole[dim]}")
    return Sharding(whole, dim, tuple(sections), origin)


class _Piece:
    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.shape = tuple(int(n) for n in entry["shape"])
        self.source = int(entry["source"][0])
        self.source_strides = tuple(int(n) for n in entry["source"][1])
        self.dest = int(entry["dest"][0])
        self.dest_strides = tuple(int(n) for n in entry["dest"][1])
        self.scale = float(entry.get("scale", 1.0))
        if not len(self.shape) == len(self.source_strides) == len(self.dest_strides):
            raise ValueError("a piece of uneven ranks")


def strides(shape: Shape) -> tuple[int, ...]:
    """Of a row-major tensor."""
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * shape[i + 1]
    return tuple(out)


def _runs(
    file: TorchFile, name: str, whole: Shape, shard: Shape, pieces: list[_Piece], dim: int
) -> list[tuple[int, int]]:
    """(start, width) along `dim` of each piece, which must fill the shard end to end in this order."""
    of_whole, of_shard = strides(whole), strides(shard)
    out: list[tuple[int, int]] = []
    end = 0
    for piece in pieces:
        width = piece.shape[dim]
        for given, expected in ((piece.source_strides, of_whole), (piece.dest_strides, of_shard)):
            if any(n > 1 and a != b for n, a, b in zip(piece.shape, given, expected, strict=True)):
                _refuse(file, name, f"a piece with the strides {list(given)}, where {list(expected)} are the tensor's")
        start, rest = divmod(piece.source, of_whole[dim] or 1)
        if width and (rest or piece.dest != end * of_shard[dim]):
            _refuse(file, name, "a piece that is no run of positions of one dim, or not in its turn")
        out.append((start, width))
        end += width
    if end != shard[dim]:
        _refuse(file, name, f"pieces of {end} positions make up a shard of {shard[dim]}")
    return out


# ---- written ---------------------------------------------------------------------------------------------------------------


def info_of(shardings: Mapping[str, Sharding], degree: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    """universal_checkpoint_info of a target, as AutoTP would publish it: maps, and lists for readers that know no maps.

    `kept`: the source's, for what does not depend on the degree.
    """
    regenerated = {
        "affine_map",
        "parameter_with_row_parallelism_patterns",
        "parameter_with_sub_params",
        "sub_param_shard_widths",
        "tp_replicated_parameter_patterns",
        "parameter_with_2_sub_params_cat_dim_0",
    }
    out: dict[str, Any] = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [],
        "tp_replicated_parameter_patterns": [],
        "vocabulary_parameter_patterns": [],
        "parameter_with_sub_params": [],
        "autotp_unsupported_parameter_patterns": {},
        **{k: v for k, v in kept.items() if k not in regenerated},
    }
    maps: dict[str, Any] = {}
    widths: dict[str, Any] = {}
    for name, s in shardings.items():
        pattern = f"^{re.escape(name)}$"
        maps[pattern] = _map(s, degree)
        if (
            s.dim == 0
            and len(s.shape) == 2
            and ("embed" in name or "lm_head" in name)
            and "original_vocab_size" not in kept
        ):
            out["vocabulary_parameter_patterns"].append(pattern)
            out.setdefault("original_vocab_size", s.shape[0])
        if s.dim is None:
            out["tp_replicated_parameter_patterns"].append(pattern)
        elif len(s.sections) > 1 and all(x.widths is not None for x in s.sections):
            shape: list[Any] = [-1] * len(s.shape)
            shape[s.dim] = tuple(x.size for x in s.sections)
            out["parameter_with_sub_params"].append({"patterns": [pattern], "shape": shape, "partition_dim": s.dim})
            widths[pattern] = [list(x.widths or ()) for x in s.sections]
        elif len(s.sections) > 1:
            pass  # parts of it are copies, which only the map can say
        elif s.dim == 1:
            out["parameter_with_row_parallelism_patterns"].append(pattern)
    for key in ("parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns"):
        out[key] = sorted(out[key])
    if widths:
        out["sub_param_shard_widths"] = widths
    out["affine_map"] = {"version": VERSION, "params": maps}
    return out


def _map(s: Sharding, degree: int) -> dict[str, Any]:
    ranks: dict[int, Any] = {}
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
