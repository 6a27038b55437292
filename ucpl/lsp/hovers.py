"""The hover of a name, as Markdown: line, size, origin, share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import prod

from ucpl.lsp.context import CursorContext
from ucpl.lsp.definitions import lefts_of
from ucpl.lsp.files import Config, EditorTexts
from ucpl.lsp.names import BlockInFile, KnownName, model_of
from ucpl.lsp.outline import Statement
from ucpl.lsp.sizes import TensorShare, TextSizes
from ucpl.lsp.targets import meant
from ucpl.lsp.words import FUNCTIONS, WORDS
from ucpl.records import frozen

__all__ = ["Hover", "hover"]

LINE_MAX = 400  # characters of a statement that are shown
LAYOUTS_MAX = 12
_NUMBERS = ("let", "dim", "parameter", "axis", "index")


@frozen
class Hover:
    """Markdown about characters start .. stop."""

    text: str
    start: int
    stop: int


def hover(texts: EditorTexts, context: CursorContext, sizes: Callable[[str], TextSizes]) -> Hover | None:
    """The hover of the name at a place.

    `sizes`: of a file, by its path.
    """
    token = context.token
    if token is None or token.kind not in ("name", "string"):
        return None
    if token.text.startswith("config."):
        lines = _config_lines(texts.config(context.place.path), token.text)
        return Hover("\n\n".join(lines), token.start, token.stop)
    found = meant(texts, context)
    if not found and context.word == "entry" and context.statement is not None and token in lefts_of(context.statement):
        rows = _entry_rows(context, token.value, sizes(context.place.path))
        return Hover("\n\n".join(rows), token.start, token.stop) if rows else None
    if not found and token.kind == "name":
        text = WORDS.get(token.text) or FUNCTIONS.get(token.text)
        return Hover(f"**{token.text}**: {text}", token.start, token.stop) if text else None
    if not found:
        return None
    lines = list(_lines(texts, context, found, sizes))
    return Hover("\n\n".join(lines), token.start, token.stop)


def _config_lines(config: Config | None, name: str) -> list[str]:
    if config is None:
        return [f"`{name}`", "there is no config.json next to this file; the settings can name one"]
    value: object = config.values
    for step in name.split(".")[1:]:
        value = value.get(step) if isinstance(value, dict) else None
    shown = f"{value!r}"[:LINE_MAX]
    return [f"`{name}` = `{shown}`" if value is not None else f"`{name}` has no value", f"from {config.path}"]


def _lines(
    texts: EditorTexts, context: CursorContext, found: list[KnownName], sizes: Callable[[str], TextSizes]
) -> Iterator[str]:
    first = found[0]
    for known in found:
        yield f"```ucpl\n{_shown(texts, known)}\n```"
    here = context.scope
    if first.path != here.path:
        yield f"from {os.path.basename(first.path)}"
    if first.kind in _NUMBERS:
        yield from _number_lines(texts, here, first, sizes(here.path))
    elif first.kind in ("tensor", "entry"):
        yield from _tensor_lines(texts, here, first, sizes(here.path))
    elif first.kind in ("layout", "model"):
        yield from _block_lines(first, sizes(first.path))


def _shown(texts: EditorTexts, known: KnownName) -> str:
    """The statement of a definition as it is written."""
    one: Statement = known.definition.statement
    outline = texts.outline(known.path)
    text = outline.text[one.start : one.stop] if outline is not None else known.name
    return text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]} …"


def _number_lines(texts: EditorTexts, here: BlockInFile, known: KnownName, sizes: TextSizes) -> Iterator[str]:
    value = sizes.number(here.block.name, known.name)
    what = {"let": "number", "axis": "mesh axis"}.get(known.kind, known.kind)
    if value is None and known.kind == "index":
        yield "how this index is dealt"
        return
    if value is None and known.kind in ("axis", "parameter"):
        yield f"{what} of `{known.definition.block.name}`: the call gives it"
        return
    if value is None:
        yield f"{what} `{known.name}` has no value" + (
            "" if sizes.config else ": there is no config.json next to the file"
        )
        return
    call = sizes.calls.get(here.block.name, "")
    origins = [f"with {sizes.config.path}"] if sizes.config is not None and _rests_on_config(texts, known) else []
    origins += [f"in {call}"] if call else []
    yield f"{what} `{known.name}` = **{value}**" + (f", {', '.join(origins)}" if origins else "")


def _rests_on_config(texts: EditorTexts, known: KnownName) -> bool:
    return "config." in _shown(texts, known)


def _entry_rows(context: CursorContext, path: str, sizes: TextSizes) -> list[str]:
    """The first rank's part of an entry that joins several tensors."""
    held = sizes.held(context.block.name, path)
    return [f"`{path}`", _table([held], 0)] if held is not None else []


def _tensor_lines(texts: EditorTexts, here: BlockInFile, known: KnownName, sizes: TextSizes) -> Iterator[str]:
    model = model_of(texts, here)
    if model is None:
        return
    tensor = sizes.tensor(model.block.name, known.name)
    if tensor is not None:
        dims = " · ".join(
            f"{d if '#' not in d else 'size'} {n}" for d, n in zip(tensor.dims, tensor.counts, strict=True)
        )
        kind = "" if tensor.kind == "parameter" else f", {tensor.kind}"
        yield f"{dims or 'no dims'} = **{prod(tensor.counts):,}** elements{', ' + tensor.dtype if tensor.dtype else ''}{kind}"
    elif sizes.config is None:
        yield "its sizes are not known: there is no config.json next to the file"
    names = [here.block.name] if here.block.kind == "layout" else sizes.layouts_of(model.block.name)
    rows = [held for name in names[:LAYOUTS_MAX] if (held := sizes.held(name, known.name)) is not None]
    if rows:
        yield _table(rows, tensor.numel if tensor is not None else 0)


def _table(rows: list[TensorShare], whole: int) -> str:
    return "\n".join(["| layout | the first rank holds | as |", "|---|---|---|", *(_row(held, whole) for held in rows)])


def _row(held: TensorShare, whole: int) -> str:
    ranks = f" of {held.ranks} ranks" if held.ranks > 1 else ""
    share = "nothing" if not held.elements else "all of it" if held.elements == whole else f"{held.elements:,} elements"
    stored = "; ".join(
        f"{f'{count} × ' if count > 1 else ''}{list(shape)} `{_cell(key)}`{' …' if count > 1 else ''}"
        for count, shape, key in held.stored
    )
    return f"| `{held.call}`{ranks} | {share} | {stored} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _block_lines(known: KnownName, sizes: TextSizes) -> Iterator[str]:
    if known.kind == "model":
        layouts = sizes.layouts_of(known.name)
        yield (
            f"laid out by {', '.join(f'`{name}`' for name in layouts)}"
            if layouts
            else "no layout of this file is of it"
        )
        return
    placement = sizes.placement(known.name)
    if placement is not None:
        layout = placement.layout
        yield f"`{sizes.calls[known.name]}`: {layout.ranks} rank{'s' * (layout.ranks > 1)}, {len(layout.tensors)} tensors"
