"""Lists of kinds, `let kinds = ["mamba", "attention"]`, and wrong uses of them.

The faults: words that are in no list, and lists of another length than their dim. The words of a given config's lists are
checked, too. A spec may be of several configs, so a word that such a list lacks is a fault only if the list has another word
that the text never asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import combinations

from ucpl.language import nodes, print_expr
from ucpl.language.walk import walk
from ucpl.layout.name_remedies import nearest
from ucpl.records import frozen
from ucpl.texts import Json

__all__ = ["misspelt_kinds", "unknown_kinds"]

_ALIKE = 0.9  # of two words: `linear_atention` and `linear_attention` are, `full_attention` is not
Numbers = dict[str, nodes.Expr]


def misspelt_kinds(file: nodes.File) -> Iterator[str]:
    """Words of one list of a config that are nearly one word.

    A config may be absent.
    """
    numbers = _bound(s for s in walk(*file.statements) if isinstance(s, nodes.Let | nodes.Dims))
    asked: dict[str, dict[str, int]] = {}
    for node in walk(*file.statements):
        match node:
            case nodes.Function(name="where", args=(nodes.Name(path=path), nodes.Text(value=word))):
                value = numbers.get(path)
                key = value.path if isinstance(value, nodes.Name) else path
                asked.setdefault(key, {}).setdefault(word, node.span.line)
    for key, words in asked.items():
        for (one, line), (other, second) in combinations(words.items(), 2):
            letters = [re.sub(r"\d", "", word) for word in (one, other)]
            if letters[0] != letters[1] and SequenceMatcher(None, letters[0], letters[1]).ratio() > _ALIKE:
                yield (
                    f'"{other}" (line {second}) and "{one}" (line {line}) are asked of {key}, and are nearly one word.'
                    " If one is misspelt, write the other"
                )


def unknown_kinds(file: nodes.File, config: Mapping[str, Json] | None) -> Iterator[str]:
    """Remarks on `where(list, word)`, each with its line."""
    top = _bound(s for s in file.statements if isinstance(s, nodes.Let))
    words = frozenset(node.value for node in walk(*file.statements) if isinstance(node, nodes.Text))
    for statement in file.statements:
        match statement:
            case nodes.Let():
                yield from _asked(statement, _Known(top, config or {}, words))
            case nodes.Model(items=items, name=name, parameters=parameters):
                given = {p.name: p.default for p in parameters if p.default is not None}
                inside = _bound(i for i in items if isinstance(i, nodes.Let | nodes.Dims))
                known = _Known({**top, **given, **inside}, config or {}, words)
                for item in items:
                    yield from (f"{name}: {text}" for text in _asked(item, known))
                    if isinstance(item, nodes.Tensor):
                        yield from (f"{name}: {text}" for text in _shorter(item, known.numbers))


@frozen
class _Known:
    """Names with values, and the words of the text."""

    numbers: Numbers
    config: Mapping[str, Json]
    words: frozenset[str]

    def of_config(self, expr: nodes.Expr) -> tuple[str, list[str | int]] | None:
        """The name and the values of a list of the config.

        Only of one with words that the text lacks.
        """
        while isinstance(expr, nodes.Name) and expr.path in self.numbers:
            expr = self.numbers[expr.path]
        if not isinstance(expr, nodes.Name) or not expr.path.startswith("config."):
            return None
        value: object = self.config
        for step in expr.path.split(".")[1:]:
            value = value.get(step) if isinstance(value, Mapping) else None
        if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
            return None
        return (expr.path, value) if set(value) - self.words else None


def _bound(items: Iterable[nodes.Let | nodes.Dims]) -> Numbers:
    return {b.name: b.value for item in items for b in item.bindings}


def _listed(expr: nodes.Expr, known: Numbers) -> tuple[str, list[str | int]] | None:
    """The name and the values of a list that the text has."""
    name = print_expr(expr)
    value = known.get(expr.path) if isinstance(expr, nodes.Name) else expr
    if not isinstance(value, nodes.List):
        return None
    values = [i.value for i in value.items if isinstance(i, nodes.Text | nodes.Number)]
    return (name, values) if len(values) == len(value.items) else None


def _asked(item: nodes.Record, known: _Known) -> Iterator[str]:
    """Words that a list lacks, and lists of numbers."""
    for node in walk(item):
        if not isinstance(node, nodes.Function) or node.name != "where" or not node.args:
            continue
        listed = _listed(node.args[0], known.numbers) or known.of_config(node.args[0])
        if listed is None:
            continue
        name, values = listed
        line = f"(line {node.span.line or getattr(item, 'span', nodes.NOWHERE).line})"
        words = list(dict.fromkeys(v for v in values if isinstance(v, str)))
        match node.args[1:]:
            case (nodes.Text(value=word),) if word not in values:
                alike = next((w for w in words if word in w or w[:3] == word[:3]), words[0] if words else "")
                meant = nearest(word, words) or alike
                has = ", ".join(words) or "numbers"
                yield (
                    f'`{print_expr(node)}` {line}: "{word}" is not in {name}, which has {has}.'
                    + (f' Write `where({name}, "{meant}")`' if meant else " Write one of them")
                )
            case () if words:
                yield (
                    f"`{print_expr(node)}` {line} is of the positions that are not 0, and {name} has words. Write which one,"
                    f' `where({name}, "{words[0]}")`'
                )


def _shorter(item: nodes.Tensor, known: Numbers) -> Iterator[str]:
    """A dim with a list of kinds in brackets, of another length."""
    for dim in (d for d in item.dims if d.range is not None):
        size = known.get(dim.name or "")
        size = known.get(size.path) if isinstance(size, nodes.Name) else size
        asked = [known.get(n.path, n) if isinstance(n, nodes.Name) else n for n in dim.range.items] if dim.range else []
        for one in (a for a in asked if isinstance(a, nodes.Function) and a.name == "where" and a.args):
            listed = _listed(one.args[0], known)
            if isinstance(size, nodes.Number) and listed is not None and len(listed[1]) != size.value:
                name, values = listed
                yield (
                    f"`{item.path}` (line {item.span.line}) has `{dim.name}` by {name}, which has {len(values)} values for"
                    f" {size.value} of {dim.name}. Write one for each"
                )
