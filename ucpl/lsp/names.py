"""The names known at a place.

They belong to its block, its bases, its uses, its model, and imported files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve

from ucpl.lsp.definitions import Definition, definitions_of
from ucpl.lsp.files import EditorTexts, shipped_blocks
from ucpl.lsp.outline import BLOCKS, Outline, TextBlock
from ucpl.records import frozen

__all__ = ["BlockInFile", "KnownName", "blocks_known", "chain_of", "find_block", "visible"]

DEPTH_MAX = 16  # of imports, of layouts that extend each other, of models inside models


@frozen(eq=False)
class BlockInFile:
    """A block of a file."""

    path: str
    outline: Outline
    block: TextBlock


@frozen(eq=False)
class KnownName:
    """A definition and its file."""

    path: str
    definition: Definition

    @property
    def kind(self) -> str:
        return self.definition.kind

    @property
    def name(self) -> str:
        return self.definition.name


def find_block(texts: EditorTexts, path: str, name: str, kinds: Sequence[str] = BLOCKS) -> BlockInFile | None:
    """A file's model or layout by name: own, imported, shipped."""
    for place in _files(texts, path):
        block = place.outline.block(kinds, name)
        if block is not None:
            return evolve(place, block=block)
    shipped = (_in_file(texts, path, name, kinds) for path, block in shipped_blocks() if block.name == name)
    return next((place for place in shipped if place is not None), None)


def _in_file(texts: EditorTexts, path: str, name: str, kinds: Sequence[str]) -> BlockInFile | None:
    outline = texts.outline(path)
    block = outline.block(kinds, name) if outline is not None else None
    return BlockInFile(path, outline, block) if outline is not None and block is not None else None


def _files(texts: EditorTexts, path: str) -> Iterator[BlockInFile]:
    """A file and its imports, each once.

    Every place is the top of its file.
    """
    seen: list[str] = []
    waiting = [path]
    while waiting and len(seen) < DEPTH_MAX * DEPTH_MAX:
        here = waiting.pop(0)
        outline = texts.outline(here)
        if here in seen or outline is None:
            continue
        seen.append(here)
        yield BlockInFile(here, outline, outline.top)
        for statement in outline.top.statements:
            if statement.word == "from" and len(statement.tokens) > 1 and statement.tokens[1].kind == "string":
                found = texts.imported(here, statement.tokens[1].value)
                waiting += [found] if found is not None else []


def blocks_known(texts: EditorTexts, path: str) -> Iterator[tuple[str, TextBlock]]:
    """Models and layouts that a file has and imports."""
    for place in _files(texts, path):
        for block in place.outline.blocks:
            yield place.path, block


def chain_of(texts: EditorTexts, place: BlockInFile) -> list[BlockInFile]:
    """A block and those that it extends, the outermost first."""
    out = [place]
    while out[-1].block.extends and len(out) < DEPTH_MAX:
        base = find_block(texts, out[-1].path, out[-1].block.extends, (place.block.kind,))
        if base is None or any(base.block is one.block for one in out):
            break
        out.append(base)
    return out


def model_of(texts: EditorTexts, place: BlockInFile) -> BlockInFile | None:
    """The model that a layout is of; a model is its own."""
    if place.block.kind == "model":
        return place
    of = place.block.of
    return find_block(texts, place.path, of, ("model",)) if of and of != "any" else None


def visible(texts: EditorTexts, place: BlockInFile) -> list[KnownName]:
    """Everything that has a name at a place, the nearest first."""
    found: list[KnownName] = []
    for one in chain_of(texts, place) if place.block.kind != "top" else ():
        found += _defined(texts, one, 0)
    model = model_of(texts, place) if place.block.kind == "layout" else None
    if model is not None:
        for one in chain_of(texts, model):
            found += _defined(texts, one, 0)
    tops: list[TextBlock] = []
    for one in (place, *([model] if model is not None else [])):
        if one.outline.top not in tops:
            tops.append(one.outline.top)
            found += [KnownName(one.path, d) for d in definitions_of(one.outline, one.outline.top)]
    return found


def _defined(texts: EditorTexts, place: BlockInFile, depth: int) -> list[KnownName]:
    """The names of a block, and those with a `use` prefix."""
    found = [KnownName(place.path, d) for d in definitions_of(place.outline, place.block)]
    for statement in place.block.statements:
        if statement.word != "use" or len(statement.tokens) < 2 or depth > DEPTH_MAX:
            continue
        prefix = statement.name_after("as")
        inner = find_block(texts, place.path, statement.tokens[1].value)
        if prefix and inner is not None and inner.block is not place.block:
            for known in _defined(texts, inner, depth + 4):
                own = evolve(known.definition, name=f"{prefix}.{known.name}")
                found.append(KnownName(known.path, own))
    return found
