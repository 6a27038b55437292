"""Sections of a config by a name: `let t = config.text_config`, then `t.hidden_size` for `config.text_config.hidden_size`.

A section has no value of its own, so its names are written out before anything else reads a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TypeVar, cast

from attrs import AttrsInstance, evolve

from ucpl.language import nodes
from ucpl.language.walk import rewritten, walk

__all__ = ["Sections", "written_out"]

Sections = Mapping[str, str]  # a name, and the key that it means: t, config.text_config
Item = TypeVar("Item", bound=AttrsInstance)


def written_out(file: nodes.File, known: MutableMapping[str, Sections]) -> nodes.File:
    """The file with the keys of sections in full.

    `known`: the sections of each model and layout, to which those of this file are added.
    """
    if not any(_is_key(b.value) for s in walk(*file.statements) if isinstance(s, nodes.Let) for b in s.bindings):
        if not any(known.values()):
            return file
    of_file = _sections(file.statements, {})
    here = {s.name: s for s in file.statements if isinstance(s, nodes.Model | nodes.Layout)}
    found: dict[str, Sections] = {}

    def sections(name: str) -> Sections:
        """Sections that a block may name.

        They are its own, those of its model, of its base and of the file.
        """
        if name not in here:
            return known.get(name, {})
        if name not in found:
            found[name] = of_file  # a block that extends itself is refused later
            block = here[name]
            bases = [block.extends.name] if block.extends is not None else []
            bases += [block.of] if isinstance(block, nodes.Layout) else []
            inherited = {t: key for base in reversed(bases) for t, key in sections(base).items()}
            found[name] = _sections(block.items, {**of_file, **inherited})
        return found[name]

    for name in here:
        known[name] = sections(name)
    of_blocks = {id(s): known[s.name] for s in here.values()}
    statements = tuple(_full(s, of_blocks.get(id(s), of_file)) for s in file.statements)
    return evolve(file, statements=statements) if any(of_blocks.values()) or of_file else file


def _sections(items: Iterable[AttrsInstance], outer: Sections) -> Sections:
    found = dict(outer)
    for item in items:
        for binding in item.bindings if isinstance(item, nodes.Let) else ():
            found.pop(binding.name, None)  # an inner name hides the outer one
            path = _key(binding.value.path, found) if isinstance(binding.value, nodes.Name) else ""
            if path.partition(".")[0] == "config":
                found[binding.name] = path
    return found


def _is_key(value: nodes.Expr) -> bool:
    return isinstance(value, nodes.Name) and value.path.partition(".")[0] == "config"


def _key(path: str, sections: Sections) -> str:
    head, _, rest = path.partition(".")
    return f"{sections[head]}.{rest}" if rest and rest != "size" and head in sections else path


def _full(statement: Item, sections: Sections) -> Item:
    """A statement with full keys.

    A `let` that only names a section is left out.
    """
    names = [n.path for n in walk(statement) if isinstance(n, nodes.Name)] if sections else []
    heads = {n.partition(".")[0] for n in names if _key(n, sections) != n}
    if not heads:
        return statement
    alone = heads - {*names}

    def change(node: AttrsInstance) -> AttrsInstance | None:
        return evolve(node, path=_key(node.path, sections)) if isinstance(node, nodes.Name) else None

    def kept(items: Sequence[nodes.ModelItem | nodes.LayoutItem]) -> tuple[nodes.ModelItem | nodes.LayoutItem, ...]:
        out: list[nodes.ModelItem | nodes.LayoutItem] = []
        for item in items:
            if isinstance(item, nodes.Let):
                item = evolve(item, bindings=tuple(b for b in item.bindings if b.name not in alone))
            if not isinstance(item, nodes.Let) or item.bindings:
                out.append(item)
        return tuple(out)

    made = rewritten(statement, change)
    return cast(Item, evolve(made, items=kept(made.items))) if isinstance(made, nodes.Model | nodes.Layout) else made  # type: ignore[arg-type]
