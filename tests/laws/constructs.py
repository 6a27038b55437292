"""The constructs of the language that a text uses.

Its records, the words of its clauses, and the kinds that a record comes in.
"""

from __future__ import annotations

import attrs

from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.language.words import CLAUSE_WORDS

# Records without a meaning of their own, or for a complete file.
CARRIERS = {
    "File",
    "Span",
    "Record",
    "Name",
    "Number",
    "Text",
    "Binding",
    "Argument",
    "Call",
    "Dimension",
    "Term",
    "Clause",
}
KINDS = {
    "pad zero", "pad live", "pad undefined", "cut equal", "cut sizes", "cut chunk", "cut spread", "not in brackets", "step",
    "label", "glob", "class of tensors", "none", "buffer", "frozen", "scalar", "order reversed", "order dealt", "second mesh",
    "state like", "key of a file", "group of an index", "condition of an index", "parameter with a default", "layout extends",
    "model extends", "dim by an index", "second home", "copies any", "copies mean", "copies sum", "copies max", "copies same",
}  # fmt: skip


def every() -> set[str]:
    """All that there is."""
    records = {n for n, r in vars(nodes).items() if isinstance(r, type) and attrs.has(r) and n not in CARRIERS}
    return records | {f"clause {word}" for word in CLAUSE_WORDS - {"same", "mean", "sum", "max", "any"}} | KINDS


def used(file: nodes.File) -> set[str]:
    out: set[str] = set()
    for item in walk(*file.statements):
        out.add(type(item).__name__)
        out |= _kinds(item)
    return (out | _homes(file)) & every()


def _kinds(item: nodes.Record) -> set[str]:
    match item:
        case nodes.Clause(word="copies", args=(word, _)):
            return {f"copies {word}"}
        case nodes.Clause(word=word):
            return {f"clause {word}"}
        case nodes.Pad(kind=kind):
            return {f"pad {kind}"}
        case nodes.Split(kind=kind):
            return {f"cut {kind}"}
        case nodes.Among(items=items, others=others):
            steps = any(isinstance(i, nodes.Range) and i.step is not None for i in items)
            return _said((others, "not in brackets"), (steps, "step"))
        case nodes.Term(label=label):
            return _said((label is not None, "label"))
        case nodes.Entry(glob=glob, of=of, shape=shape, path=path):
            wild = path == "*" or of is not None
            return _said((bool(glob), "glob"), (wild, "class of tensors"), (shape is None, "none"))
        case nodes.Tensor(kind=kind):
            return {kind}
        case nodes.State(scalar=scalar):
            return _said((scalar, "scalar"))
        case nodes.Group(order=order, indices=indices):
            dealt = order is not None and order != "reversed"
            return _said(
                (order == "reversed", "order reversed"), (dealt, "order dealt"), (bool(indices), "group of an index")
            )
        case nodes.Mesh(name=name):
            return _said((bool(name), "second mesh"))
        case nodes.States(shape=shape):
            return _said((shape == "like", "state like"), (shape is None, "none"))
        case nodes.Files(key=key, form=form):
            return _said((key is not None, "key of a file"), (form is None, "none"))
        case nodes.Index(when=when):
            return _said((when is not None, "condition of an index"))
        case nodes.Parameter(default=default):
            return _said((default is not None, "parameter with a default"))
        case nodes.Layout(extends=extends):
            return _said((extends is not None, "layout extends"))
        case nodes.Model(extends=extends):
            return _said((extends is not None, "model extends"))
        case nodes.Binding(by=by):
            return _said((by is not None, "dim by an index"))
    return set()


def _said(*found: tuple[bool, str]) -> set[str]:
    return {name for there, name in found if there}


def _homes(file: nodes.File) -> set[str]:
    """Return True if a tensor has two lines of one layout."""
    for layout in file.statements:
        paths = [i.path for i in getattr(layout, "items", ()) if isinstance(i, nodes.Entry) and not i.indices]
        if len(paths) > len(set(paths)):
            return {"second home"}
    return set()
