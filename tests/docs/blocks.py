"""Fenced blocks of the pages.

Their places, the requests of their first lines, and their tests.

The info string of a block gives its kind (GitHub colours by its first word alone):

    ucpl file            a file              ucpl model, ucpl layout, ucpl top     statements of one place
    ucpl layout any      statements of a layout of any model
    ucpl cells CALL      a file; the `text` block after it shows the content of stored tensors
    ucpl wrong CODE      a file, or a fragment (`ucpl wrong CODE layout`): the code that it is refused with
    console              lines after `$` are run; a line `...` means any lines; no other line: any output
    console no-run       an example that a test cannot run
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from ucpl.language import nodes, parse, parse_call
from ucpl.layout import load, resolve
from ucpl.layout.by_index import whole_name
from ucpl.placement import Placement, locate

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
# A fragment that is wrong is held against a small model of its own, so that it is wrong for one reason.
WRONG = {
    "top": ("ucpl 2\n", "\n"),
    "model": (
        "ucpl 2\nmodel m {\n",
        '\n}\nlayout x() of m {\n  file weights = torch "a.pt"\n  * = ... as "{name}"\n}\n',
    ),
    "layout": (
        "ucpl 2\nmodel m {\n  dim r = 4, c = 2\n  a : r c\n}\n"
        'layout x(tp = 2, dp = 2) of m {\n  mesh dp tp\n  file weights = torch "{tp}.pt"\n',
        "\n}\n",
    ),
}
PLACES = {
    "top": ("ucpl 2\n", "\n"),
    "model": ("ucpl 2\nmodel m {\n", "\n}\n"),
    "layout": ("ucpl 2\nlayout x(tp = 2, pp = 2, dp = 4) of any {\n", "\n}\n"),
}


@frozen
class Block:
    page: str
    line: int
    info: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.info)}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, m.start()) + 1, tuple(m[2].split(maxsplit=2)), m[3])
        for m in MARK.finditer(text)
    ]


def whole(text: str, place: str) -> str:
    """A fragment as a file."""
    before, after = PLACES[place]
    return before + text + after


def complete(block: Block, base: str) -> str:
    """A block as a file that can be located.

    `base` is the file that a page's layout lines extend.
    """
    match block.info[1:]:
        case ["model"]:
            before, after = WRONG["model"]
            return before + block.text + after
        case ["layout"]:
            call = "layout page(tp = 2, pp = 2, dp = 2) of gpt extends base(tp = tp, pp = pp, dp = dp)"
            return f"{base}{call} {{\n{block.text}}}\n"
        case ["layout", "any"]:
            head = 'layout page(tp = 2, pp = 2, dp = 2) of any {\n  mesh pp dp tp\n  file weights = torch "{pp}_{dp}_{tp}.pt"\n'
            return f"{base}{head}{block.text}}}\n"
        case _:
            return block.text


def items_of(block: Block) -> list[Any]:
    """The records of a block, in order.

    Its statements, or those inside the place that it is a part of.
    """
    place = block.info[1] if len(block.info) > 1 else "file"
    if place not in PLACES:
        return list(parse(block.text, str(block)).statements)
    file = parse(whole(block.text, place), str(block))
    if place == "top":
        return list(file.statements)
    (only,) = file.statements
    assert isinstance(only, nodes.Model | nodes.Layout)
    return list(only.items)


# ---- records as text -------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A record in short: fields that are not their default, in order.

    Names of dims and numbers as they are.
    """
    match value:
        case nodes.Dim(name=name, range=None) | nodes.Dimension(name=str(name), size=None, range=None):
            return name
        case nodes.Number(value=number):
            return str(number)
        case nodes.Name(path=path):
            return f"${path}"
        case nodes.Text(value=text):
            return repr(text)
        case tuple():
            return f"[{', '.join(map(shown, value))}]"
        case _ if attrs.has(type(value)):
            parts = []
            for f in attrs.fields(type(value)):
                got = getattr(value, f.name)
                if f.name == "span" or (f.default is not attrs.NOTHING and got == f.default):
                    continue
                parts.append(shown(got) if f.default is attrs.NOTHING else f"{f.name}={shown(got)}")
            return f"{type(value).__name__.rstrip('_')}({', '.join(parts)})"
        case _:
            return repr(value)


def records(block: Block) -> str:
    """Every record of a block except its own line."""
    out = []
    for item in items_of(block):
        if isinstance(item, nodes.Model | nodes.Layout):
            inner, head = item.items, attrs.evolve(item, items=())  # type: ignore[arg-type]
            out.append(f"  {shown(head)}")
            out += [f"    {shown(i)}" for i in inner]
        else:
            out.append(f"  {shown(item)}")
    return "\n".join(out)


# ---- stored tensors -------------------------------------------------------------------------------------------------


def located(text: str, call: str | None = None) -> Placement:
    """The located layout of `call`.

    The default is the last one of the text, without arguments.
    """
    file = parse(text, "page.ucpl")
    layouts = [s for s in file.statements if isinstance(s, nodes.Layout)]
    models = [s for s in file.statements if isinstance(s, nodes.Model)]
    asked = parse_call(call) if call else nodes.Call(layouts[-1].name)
    return locate(resolve(load(("page.ucpl", text)), asked, model=models[0] if models else None))


def cells(placement: Placement) -> str:
    """One line a stored tensor.

    Its file, its key, and its cells; `.` is padding, `/` ends a row.
    """
    rows = []
    for part in placement.parts:
        for number, home in enumerate(part.homes):
            numel = 1
            for n in home.shape:
                numel *= n
            held = ["."] * numel
            p = part.pieces
            for i in range(len(p)):
                if p.home[i] != number:
                    continue
                tensor = placement.layout.tensors[placement.tensors[p.tensor[i]]]
                low, high, stride = p.low[i].tolist(), p.high[i].tolist(), p.stride[i].tolist()
                for index in product(*map(range, low, high)):
                    place = int(p.offset[i]) + sum((x - a) * s for x, a, s in zip(index, low, stride, strict=True))
                    whole = zip(index, tensor.indices, strict=False)  # dims beyond its own are no index
                    assert held[place] == ".", "two elements in one cell"
                    held[place] = whole_name(tensor.path) + ",".join(str(has[x]) for x, has in whole)
            width = home.shape[-1] if home.shape else 1
            lines = [" ".join(held[i : i + width]) for i in range(0, numel, max(width, 1))]
            rows.append((home.file, "/".join(map(str, home.key)), " / ".join(lines)))
    wide = max((len(f) for f, _, _ in rows), default=0)
    keys = max((len(k) for _, k, _ in rows), default=0)
    return "\n".join(f"{f.ljust(wide)}  {k.ljust(keys)}  {c}".rstrip() for f, k, c in rows)
