"""Keys of a config that are misspelt, or of another kind.

Keys that arithmetic needs are errors if they are absent. These are in conditions and comparisons, which accept any value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucpl.language import nodes, print_expr
from ucpl.language.walk import walk
from ucpl.texts import Json

__all__ = ["odd_keys"]

_TRUTHS = {"true": "true", "True": "true", "false": "false", "False": "false"}
_ALIKE = 0.9  # `num_expert` and `num_experts`, not `head_dim` and `v_head_dim`


def odd_keys(file: nodes.File, config: Mapping[str, Json] | None) -> Iterator[tuple[str, str]]:
    """Keys of the config with remarks, each with its line."""
    if not config:
        return
    read = {n.path for n in walk(*file.statements) if isinstance(n, nodes.Name) and n.path.startswith("config.")}
    both = [n for n in walk(*file.statements) if isinstance(n, nodes.Function) and n.name == "default"]
    tried = {n.path for n in walk(*both) if isinstance(n, nodes.Name)}  # keys of several configs
    for statement in file.statements:
        items = statement.items if isinstance(statement, nodes.Model | nodes.Layout) else (statement,)
        for item in items:
            for node in walk(item):
                line = f"(line {item.span.line})"
                match node:
                    case nodes.Name(path=path) if path in read and (said := _odd_key(path, config, read & tried)):
                        yield path, f"`{path}` {line} {said}"
                    case nodes.Binary(
                        operator="==" | "!=", left=nodes.Name(path=path) as left, right=nodes.Text() as word
                    ):
                        value = _value(path, config, file)
                        shown = f"`{print_expr(node)}` {line} compares"
                        if isinstance(value, list):
                            yield (
                                path,
                                f"{shown} a list with a word. Write `where({print_expr(left)}, {print_expr(word)})`",
                            )
                        elif isinstance(value, bool) and word.value in _TRUTHS:
                            meant = _truth(node, word.value, path)
                            yield path, f"{shown} true or false, which is 1 or 0, with a text. Write `{meant}`"


def _odd_key(path: str, config: Mapping[str, Json], tried: set[str]) -> str:
    """The fault of one key, or an empty text."""
    *steps, last = path.split(".")[1:]
    node: Json = dict(config)
    for step in steps:
        node = node.get(step) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return ""
    value = node.get(last)
    if isinstance(value, str) and value in _TRUTHS:
        return (
            f'is the text "{value}", which holds as a condition. Write {_TRUTHS[value]} in the config, without quotes'
        )
    if last in node:
        return ""
    from difflib import get_close_matches  # a tenth of the work of a good file would be its import

    near = get_close_matches(last, list(node), 1, _ALIKE)
    other = ".".join(["config", *steps, near[0]]) if near else ""
    return f"is no key of the config, which has `{other}`. Write that" if other and other not in tried else ""


def _value(path: str, config: Mapping[str, Json], file: nodes.File) -> Json:
    """The value of a key, perhaps by the name of a `let`."""
    lets = {b.name: b.value for s in file.statements if isinstance(s, nodes.Let) for b in s.bindings}
    said = lets.get(path)
    path = said.path if isinstance(said, nodes.Name) else path
    node: Json = dict(config) if path.startswith("config.") else None
    for step in path.split(".")[1:]:
        node = node.get(step) if isinstance(node, dict) else None
    return node


def _truth(node: nodes.Binary, word: str, path: str) -> str:
    return path if (node.operator == "==") == (_TRUTHS[word] == "true") else f"not {path}"
