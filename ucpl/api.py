"""The Python API: what the command line does, as functions. `import ucpl` gives these names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Key
from ucpl.frontends.infer import Inferred, infer, with_arguments
from ucpl.graph import Graph, build
from ucpl.layout import Layout, Library, expand, load, resolve
from ucpl.layout.scope import Value
from ucpl.proofs import fit
from ucpl.regions import Placement, locate
from ucpl.schedule import Plan, order
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.registry import open_checkpoint
from ucpl.syntax import nodes, parse_call, print_file


@frozen(eq=False)
class Side:
    """One side of a plan: a located layout, and what it was made of."""

    library: Library
    call: nodes.Call
    model: nodes.Model | None
    placement: Placement
    inherited: dict[str, tuple[Value, str]]

    @property
    def layout(self) -> Layout:
        return self.placement.layout


def parse_target(text: str) -> tuple[Library, nodes.Call]:
    """`zero1(dp=8)` or `path/to/file.ucpl:megatron(tp=2)`: a library that knows the layout, and the call."""
    head, colon, rest = text.partition(".ucpl:")
    if colon:
        path = Path(head + ".ucpl")
        return load((str(path), read_text(path))), parse_call(rest)
    return load(), parse_call(text)


def read_text(path: Path) -> str:
    """A text file of the user's. Raises E170 where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        fail("E170", f"{path} cannot be read: {reason}", Label(str(path)))


def side(
    text: str,
    *,
    model: nodes.Model | None = None,
    inherited: dict[str, tuple[Value, str]] | None = None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    rank: int | None = None,
) -> Side:
    """Resolve and locate a layout by its call."""
    library, call = parse_target(text)
    layout = resolve(library, call, model=model, config=config, define_sizes=sizes, inherited=inherited)
    return Side(library, call, model, locate(layout, rank=rank), inherited or {})


def source_side(
    checkpoint: Checkpoint, text: str | None, config: dict[str, Any] | None = None, sizes: dict[str, Value] | None = None
) -> tuple[Side, nodes.Model | None]:
    """The source of a conversion: inferred, or as a spec says; it must describe the checkpoint. Raises E320-E323."""
    if text is None:
        found = infer(checkpoint)
        made = Side(found.library, found.call, found.model, found.placement, found.inherited)
        model: nodes.Model | None = found.model
    else:
        from ucpl.frontends.infer import inherited_settings, model_of, stated_of

        library, call = parse_target(text)
        known = library.layout(call.name)
        assert isinstance(known.node, nodes.Layout)
        model = model_of(checkpoint, {}) if known.node.of == "any" else None
        layout = resolve(
            library, call, model=model, config=config, define_sizes=sizes, inherited=inherited_settings(checkpoint)
        )
        made = Side(library, call, model, locate(layout, stated=stated_of(checkpoint)), inherited_settings(checkpoint))
        if model is None:
            named = library.model(layout.model_name).node
            assert isinstance(named, nodes.Model)
            model = named
    fit.demand(made.placement, checkpoint)
    return made, model


def make_plan(
    source: Side,
    target: Side,
    *,
    checkpoint: Checkpoint | None = None,
    drop: tuple[str, ...] = (),
    name: str = "convert",
) -> tuple[Graph, Plan]:
    """Build, prove and order. Deterministic: the same specs give the same plan."""
    graph = build(source.placement, target.placement, drop=drop, dtype_of=dtype_of(checkpoint))
    plan = order(graph, name=name, spec_digest=spec_digest(source, target), layout_text=closed_text(target))
    return graph, plan


def dtype_of(checkpoint: Checkpoint | None) -> Callable[[str, Key], str | None] | None:
    if checkpoint is None:
        return None
    known = {(f, tuple(map(str, k))): e.dtype for (f, k), e in checkpoint.extents.items()}
    return lambda file, key: known.get((file, tuple(map(str, key))))


def closed_text(target: Side) -> str:
    """The target's .ucpl text, closed where the layout is of any model."""
    if target.model is None:
        return ""
    known = target.library.layout(target.call.name)
    assert isinstance(known.node, nodes.Layout)
    if known.node.of != "any":
        return ""
    layout = expand(target.library, target.call, target.model, inherited=target.inherited)
    return print_file(nodes.File("layout.ucpl", 1, (target.model, layout)))


def spec_digest(source: Side, target: Side) -> str:
    """SHA-256 over the closure of files and parameters of both sides."""
    digest = hashlib.sha256()
    for one in (source, target):
        digest.update(one.layout.call.encode())
        for name, file in sorted(one.library.files.items()):
            digest.update(f"\0{Path(name).name}\0".encode())
            digest.update(file.text.encode())
        if one.model is not None:
            digest.update(print_file(nodes.File("", 1, (one.model,))).encode())
    return digest.hexdigest()


def target_side(
    text: str,
    source: Side,
    model: nodes.Model | None,
    *,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
) -> Side:
    """The target of a conversion: what its call leaves open comes from the source, with its origin."""
    inherited = {k: (v, o) for k, (v, o) in source.inherited.items()}
    return side(text, model=model, inherited=inherited, config=config, sizes=sizes)


__all__ = [
    "Checkpoint",
    "Inferred",
    "Side",
    "UcplError",
    "infer",
    "make_plan",
    "open_checkpoint",
    "side",
    "source_side",
    "target_side",
    "with_arguments",
]
