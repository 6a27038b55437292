"""Companion weights of a container, written anew for a changed target.

The target can have another training dtype, or dropped, new or reshaped parameters, or the file can differ from the shards.
In these cases the companion files are made of the source's shards, by a layout of exactly these files (`layout beside()`).
This is a separate conversion into a folder next to the target. The target's own run then copies its files like all others.

Not here: the comparison of a file with the shards (module `companion_checks`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field

from ucpl.errors import UcplError
from ucpl.extents import DTYPES
from ucpl.records import frozen
from ucpl.registry import format_of_models
from ucpl.storage.reading import fetch_all

if TYPE_CHECKING:
    from ucpl.conversion.planning import Prepared
    from ucpl.conversion.side import Side
    from ucpl.extents import NamedTensor
    from ucpl.extents.containers import Container
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.language import nodes
    from ucpl.placement import Placement
    from ucpl.planning.plan import Plan

__all__ = [
    "RewrittenFiles",
    "CannotRewrite",
    "WantedFiles",
    "rewritten_files",
    "own_names",
    "wanted_files",
    "with_dtype",
]

INDEX = ".index.json"
LAYOUT = "beside"
CONFIG = "config.json"
_UNSPELLED = frozenset('*{}"\\')  # characters that a quoted name cannot contain literally


class CannotRewrite(Exception):
    """Why files of weights cannot be written anew."""


@frozen
class WantedTensor:
    """One tensor of a target's file.

    `owner`: the first name of the tensor, if `path` is its second name.
    """

    path: str
    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    owner: str = ""


@frozen(eq=False)
class WantedFiles:
    """The tensors that the target's files of one model should hold.

    `why`: the difference from the headers of the present files; empty if there is none. Elements are not compared.
    """

    name: str  # "model.safetensors"
    files: tuple[str, ...]  # shards and their index
    lines: tuple[WantedTensor, ...]
    why: str = ""
    foreign: tuple[str, ...] = ()  # tensors of the files that the shards lack


@frozen(eq=False)
class RewrittenFiles:
    """Files of weights made for a target, and their index texts."""

    wish: WantedFiles
    plan: Plan
    texts: dict[str, str] = field(factory=dict)  # their index, by its name below the container


def own_names(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Names in a PEFT file -> names of the module's tensors.

    PEFT's files leave out the adapter's name.
    """
    import re
    from pathlib import PurePosixPath

    path = PurePosixPath(name)
    if path.stem != "adapter_model":
        return {}
    called = path.parent.name  # a folder of the adapter's name, or one that a loop has named
    is_there = any(f".{called}." in f"{t.name}." for t in checkpoint.state.tensors)
    adapter = re.escape(called if called and is_there else "default")
    left_out = re.compile(rf"(\.modules_to_save)?\.{adapter}(?=\.|\Z)")
    return {left_out.sub("", t.name): t.name for t in checkpoint.state.tensors}


# ---- the content of the files ---------------------------------------------------------------------------------------------


def wanted_files(made: Prepared, container: Container, name: str, files: tuple[str, ...]) -> WantedFiles:
    """The tensors that the target's files of this name should hold.

    Raises: UcplError if the headers of the present files cannot be read.
    """
    from ucpl.formats.named_files import open_files

    source, plan = made.checkpoint, made.plan
    assert source is not None
    ours, theirs = _tensors(source.state.tensors), _tensors(plan.target.tensors)
    own = own_names(source, name)
    there = open_files(container.top, [file for file in files if not file.endswith(INDEX)])
    lines: list[WantedTensor] = []
    why: list[str] = []
    foreign: list[str] = []
    for (file, key), extent in there.extents.items():
        path = own.get(str(key[0]), str(key[0])) if len(key) == 1 else "/".join(map(str, key))
        owner = plan.target.aliases.get(path, source.state.aliases.get(path, path))
        was, now = ours.get(owner), theirs.get(owner)
        if now is None or (path != owner and path not in plan.target.aliases):
            (foreign if was is None else why).append(f"{path} is left out" if was is not None else path)
            continue
        dtype = now.dtype if was is None or extent.dtype == was.dtype else extent.dtype
        lines.append(WantedTensor(path, str(key[0]), file, dtype, now.shape, owner if owner != path else ""))
        if dtype != extent.dtype:
            why.append(f"in {dtype}, {extent.dtype} in the source's")
        elif now.shape != extent.shape:
            why.append(f"{path} is {list(now.shape)}, {list(extent.shape)} in the source's")
    if not own and lines:
        new = [t for t in theirs.values() if t.name not in ours]
        lines += [WantedTensor(t.name, t.name, lines[-1].file, t.dtype, t.shape) for t in new]
        why += [f"{t.name} is new" for t in new]
    return WantedFiles(name, files, tuple(lines), _few(why), tuple(foreign))


def _tensors(tensors: tuple[NamedTensor, ...]) -> dict[str, NamedTensor]:
    return {t.name: t for t in tensors}


def _few(why: list[str]) -> str:
    """Reasons once each, the first ones."""
    once = list(dict.fromkeys(why))
    return "; ".join(once[:3]) + (f"; and {len(once) - 3} more" if len(once) > 3 else "")


# ---- how they are made ------------------------------------------------------------------------------------------------------


def rewritten_files(made: Prepared, container: Container, wish: WantedFiles) -> RewrittenFiles:
    """The conversion that makes them. Raises: CannotRewrite."""
    if not wish.lines:
        raise CannotRewrite(f"nothing is left of {wish.name}")
    if wish.foreign:
        raise CannotRewrite(f"the shards have no {wish.foreign[0]}, which {wish.name} has")
    odd = next(
        (line for line in wish.lines if "/" in line.key or _UNSPELLED & {*line.path, *line.key, *line.file}), None
    )
    if odd is not None:
        raise CannotRewrite(f"{odd.key} cannot be written in a layout")
    try:
        plan = _plan(made, wish)
    except UcplError as error:
        raise CannotRewrite(
            f"{wish.name} cannot be made of the target's tensors: {error.diagnostics[0].message}"
        ) from None
    return RewrittenFiles(wish, plan, _indexes(container, wish))


def _plan(made: Prepared, wish: WantedFiles) -> Plan:
    """From the source's shards to these files alone."""
    from ucpl.conversion.planning import dtype_of
    from ucpl.graph import build
    from ucpl.planning import order
    from ucpl.verification.proof.coverage import prove

    target = _side(made.target, wish)
    here = _from_masters(made.source, wish)
    known = {line.owner or line.path for line in wish.lines}
    states = {part.state for part in here.parts if part.state != "weight"}
    gone = tuple(sorted((here.layout.tensors.keys() - known) | states))
    frozen = made.target.changes.frozen if made.target.changes is not None else frozenset[str]()
    graph = build(here, target.placement, drop=gone, freeze=frozen, dtype_of=dtype_of(made.checkpoint))
    prove(graph)
    digest = hashlib.sha256(f"{made.plan.spec_digest}\0{_text(wish)}".encode()).hexdigest()
    return order(graph, name=LAYOUT, spec_digest=digest)


def _from_masters(source: Side, wish: WantedFiles) -> Placement:
    """The source without weights that are better computed from their masters.

    These are the weights that are stored in another dtype than the file needs.
    """
    from ucpl.conversion.training import stored_dtypes, with_masters, without_weights

    stored = stored_dtypes(source)
    other = {line.owner or line.path for line in wish.lines if stored.get(line.owner or line.path) != line.dtype}
    return without_weights(source.placement, with_masters(source.placement) & other)


def _side(target: Side, wish: WantedFiles) -> Side:
    """The files as a layout over their tensors of the target's model."""
    from ucpl.conversion.filling import with_fills
    from ucpl.conversion.requests import Called
    from ucpl.conversion.side import located
    from ucpl.language import nodes, parse_call
    from ucpl.layout import load

    if target.given.model is None or not target.called.is_of_any:
        raise CannotRewrite("the target is of a model of its own")
    dtypes = {line.owner or line.path: line.dtype for line in wish.lines}
    aliases = {line.path for line in wish.lines if line.owner}
    items: list[nodes.ModelItem] = []
    for item in target.given.model.items:
        match item:
            case nodes.Tensor() if item.path in dtypes:
                items.append(evolve(item, dtype=dtypes[item.path]))
            case nodes.Alias() if item.path in aliases:
                items.append(item)
            case nodes.Let() | nodes.Dims() | nodes.Index():  # the sizes of tensors
                items.append(item)
            case _:
                pass
    model = evolve(target.given.model, items=tuple(items))
    one = Called(load((f"{LAYOUT}.ucpl", _text(wish))), parse_call(f"{LAYOUT}()"))
    fills = tuple(text for text in target.given.fill if not text.startswith("state "))
    one = with_fills(one, fills, model)
    given = evolve(target.given, model=model, inherited={}, fill=fills)
    return located(one, given)


def _text(wish: WantedFiles) -> str:
    """`layout beside()`, with one line for each tensor.

    If a file has only second names of a tensor, the first of them is the tensor's line.
    """
    from ucpl.language.words import quote

    files = {file: f"f{n}" for n, file in enumerate(dict.fromkeys(line.file for line in wish.lines))}
    named = {line.path for line in wish.lines if not line.owner}
    out = ["ucpl 2", f"layout {LAYOUT}() of any {{", "  framework torch()"]
    for file, name in files.items():
        out.append(f"  file {name} = {'safetensors' if file.endswith('.safetensors') else 'torch'} {quote(file)}")
    for line in wish.lines:
        path = line.path
        if line.owner and line.owner not in named:
            named.add(path := line.owner)
        out.append(f"  {quote(path)} = ... in {files[line.file]} as {quote(line.key)} lossy")
    return "\n".join([*out, "  * is alias = none", "  derive fp32 from weight", "}", ""])


def _indexes(container: Container, wish: WantedFiles) -> dict[str, str]:
    """The index of several files, with their present tensors and sizes."""
    found: dict[str, str] = {}
    for name in (file for file in wish.files if file.endswith(INDEX)):
        try:
            value = json.loads(_text_of(container, name))
            metadata = dict(value.get("metadata") or {})
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise CannotRewrite(f"{name} cannot be read") from None
        elements = {line.key: _numel(line.shape) for line in wish.lines}
        metadata["total_size"] = sum(elements[line.key] * DTYPES[line.dtype].itemsize for line in wish.lines)
        if "total_parameters" in metadata:
            metadata["total_parameters"] = sum(elements.values())
        value |= {"metadata": metadata, "weight_map": {line.key: Path(line.file).name for line in wish.lines}}
        found[name] = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return found


def _text_of(container: Container, name: str) -> str:
    """Raises: UcplError E400, where the disk refuses; UnicodeDecodeError."""
    from ucpl.files.header_watch import reading

    with reading(container.top / name), (container.top / name).open("rb") as file:
        fetch_all(file.fileno())
        return (container.top / name).read_text(encoding="utf-8")


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def with_dtype(container: Container, made: tuple[RewrittenFiles, ...]) -> dict[str, str]:
    """config.json with the dtype and vocabulary of the model's files.

    The result is empty if the file has these already, or if there is no such file.
    """
    whole = [one for one in made if Path(one.wish.name).stem in ("model", "pytorch_model")]
    if not whole or all(file.name != CONFIG for file in container.files):
        return {}
    try:
        text = _text_of(container, CONFIG)
    except UnicodeDecodeError:
        return {}
    targets = whole[0].plan.targets
    now = format_of_models().config_rewritten(text, targets)
    return {CONFIG: now} if now != text else {}
