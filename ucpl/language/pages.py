"""Complete files as text: columns, comments and blank lines.

`print_file` writes records that have no text; `format_text` tidies a text and keeps its comments. Both are one writer,
so that a printed file is already tidy. `upgraded` tidies a text in the newest version of the language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from attrs import Factory, evolve, field

from ucpl.errors import Diagnostic, UcplError
from ucpl.language import nodes
from ucpl.language.parser import parse
from ucpl.language.printer import StatementRow, row_of, rows_of_plain, statements_of
from ucpl.language.source import Source
from ucpl.language.walk import walk
from ucpl.language.words import INSTEAD
from ucpl.records import frozen
from ucpl.resources import VERSION

__all__ = ["format_text", "print_file", "upgraded"]


# ---- comments and blank lines, and the statement of each -------------------------------------------------------------

_SPACE = " \t\r"
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*')
_HEADER = re.compile(r"#[^\n]*|ucpl[ \t]+[0-9]+")
_BRACE = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|#[^\n]*|\{')


@frozen
class Notes:
    """Comments and blank lines around the statements of one text.

    Statements are identified by their start. `above`: the lines before a statement, "" for a blank one. `beside`: the
    comment after it on its last line. A body has more: `opened` is the comment after its brace, `below` the lines
    before the brace that closes it (for a file, before the end), under the start of the model or layout (-1 for the
    file).
    """

    above: dict[int, list[str]] = Factory(dict)
    beside: dict[int, str] = Factory(dict)
    opened: dict[int, str] = Factory(dict)
    below: dict[int, list[str]] = Factory(dict)
    header_above: list[str] = Factory(list)
    header_beside: list[str] = Factory(list)


_Item = nodes.Statement | nodes.ModelItem | nodes.LayoutItem


def comments_of(file: nodes.File) -> Notes:
    """Notes of a file, from the text that it was parsed from."""
    notes = Notes()
    text = file.text + "\n"  # so that a comment at the very end has a line
    header = next(m for m in _HEADER.finditer(text) if not m[0].startswith("#"))
    notes.header_above.extend(_blank_and_comments(text[: header.start()]))
    notes.header_beside.append(_sequence(notes, text, file.statements, range(header.end(), len(text)), -1))
    return notes


def _sequence(notes: Notes, text: str, items: Sequence[_Item], within: range, owner: int) -> str:
    """Collect the notes around consecutive items of a part of the text.

    Returns the comment next to its begin.
    """
    beside_begin = ""
    before: int | None = None
    place = within.start
    for item in (*(i for i in items if not getattr(i, "joined", False)), None):
        start = within.stop if item is None else item.span.start
        rest, _, lines = text[place:start].partition("\n")
        beside = rest[rest.find("#") :].rstrip(_SPACE) if "#" in rest else ""
        if before is None:
            beside_begin = beside
        else:
            notes.beside[before] = beside
        above = _blank_and_comments(lines)
        if item is None:
            notes.below[owner] = above
            break
        stop = item.span.stop
        if isinstance(item, nodes.Model | nodes.Layout):
            brace = next(m.end() for m in _BRACE.finditer(text, start) if m[0] == "{")
            notes.opened[start] = _sequence(notes, text, item.items, range(brace, item.span.stop - 1), start)
            stop = brace
        notes.above[start] = above + _inside(text, start, stop)
        before, place = start, item.span.stop
    return beside_begin


def _blank_and_comments(text: str) -> list[str]:
    """Comments on lines of their own, with single blank lines between.

    The text after the last newline is indent.
    """
    kept: list[str] = []
    for line in text.split("\n")[:-1]:
        line = line.strip(_SPACE)
        if line or not kept or kept[-1]:
            kept.append(line)
    return kept


def _inside(text: str, start: int, stop: int) -> list[str]:
    """Comments in the middle of a statement.

    They move above it: its lines are joined.
    """
    return [m[0].rstrip(_SPACE) for m in _COMMENT.finditer(text, start, stop) if m[0].startswith("#")]


# ---- columns ---------------------------------------------------------------------------------------------------------

_WIDTH_MAX = 120
_HEAD_MAX = 40  # a head longer than this does not push the others' columns out
_SEVERAL_MAX = 20  # of several left sides
_BODY_MAX = 64
_LISTS = frozenset({"assert", "block", "dim", "framework", "group", "import", "let", "plan", "use"})  # broken at commas
_NO_COMMA = r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]'  # parts of a left side: a comma outside of them parts two sides
_WORD = r'(?:"(?:[^"\\]|\\.)*"|[^",])+'
# Clauses that cannot start a line: there the word would start a statement (`dtype f32`) or be a name (`value [1]`).
_UNSTARTED = r"dtype |\w+ \["


@frozen
class _Piece:
    """A row with the notes around it."""

    row: StatementRow
    above: Sequence[str] = ()
    beside: str = ""
    body: tuple[str, ...] | None = field(default=None)  # the lines in braces, of a model or a layout


def format_text(text: str, name: str = "<text>", version: int | None = None) -> str:
    """Tidy a text: columns, comments kept, single blank lines.

    `version` of the language, if not the text's own. It parses to the same File, and formatting it again changes
    nothing. A comment inside a statement moves above it.
    Raises: UcplError, if the text does not parse.
    """
    file = parse(text, name)
    notes = comments_of(file)
    version = file.version if version is None else version

    def piece(
        item: nodes.Statement | nodes.ModelItem | nodes.LayoutItem, first: bool, row: StatementRow | None = None
    ) -> _Piece:
        start = item.span.start
        above = notes.above[start]
        above = above[1:] if first and above[:1] == [""] else above
        if not isinstance(item, nodes.Model | nodes.Layout):
            return _Piece(row or row_of(item, version), above, notes.beside[start])
        pieces = [piece(inner, i == 0, row) for i, (inner, row) in enumerate(statements_of(item.items, version))]
        body = [*_page(pieces, "  "), *_below(notes.below[start], "  ", bool(pieces))]
        opened = f"  {notes.opened[start]}" if notes.opened[start] else ""
        return _Piece(row_of(item, version), above, notes.beside[start], (f"{{{opened}", *body))

    header = f"ucpl {version}  {notes.header_beside[0]}".rstrip()
    lines = [*_strip(notes.header_above), header]
    if notes.header_above[-1:] == [""]:
        lines.insert(-1, "")
    lines += _page([piece(statement, False) for statement in file.statements], "")
    lines += _below(notes.below[-1], "", True)
    return "\n".join(lines) + "\n"


def upgraded(text: str, name: str = "<text>") -> str:
    """Tidy a text in the newest version of the language.

    Its comments are kept. Raises: UcplError, if the text does not parse, and E024 for each statement that has no form in
    the newest version.
    """
    file = parse(text, name)
    if file.version < VERSION:
        source = Source(name, text)
        found = [
            Diagnostic(
                "E024", f"version {VERSION} has no `{word}`", (source.label(span, "said here"),), remedy=INSTEAD[word]
            )
            for word, span in _gone(file)
        ]
        if found:
            raise UcplError(*found)
    return format_text(text, name, VERSION)


def _gone(file: nodes.File) -> Iterator[tuple[str, nodes.Span]]:
    """Words that version 2 does without, each with its place."""
    for node in walk(file):
        match node:
            case nodes.Clause(word="exact"):
                yield "exact", node.span
            case nodes.Clause(word="copies", args=("max", _)):
                yield "max", node.span
            case nodes.Domain():
                yield "domain", node.span
            case nodes.Plan():
                yield from ((word, node.span) for word in ("freeze", "train") if getattr(node, word))
            case nodes.Entry() | nodes.States():
                axes = node.shape if isinstance(node.shape, tuple) else ()
                if not any(isinstance(one, nodes.Flat) for one in walk(*axes)):
                    yield from (("buckets", clause.span) for clause in node.clauses if clause.word == "buckets")


def print_file(file: nodes.File) -> str:
    """The canonical text of a file, from records of any origin.

    It parses to an equal File.
    """

    def piece(item: nodes.Statement, before: nodes.Statement | None) -> _Piece:
        apart = before is None or type(before) is not type(item) or isinstance(item, nodes.Model | nodes.Layout)
        above = ("",) if apart else ()
        if not isinstance(item, nodes.Model | nodes.Layout):
            return _Piece(row_of(item, file.version), above)
        return _Piece(row_of(item, file.version), above, body=("{", *_body(item.items, file.version)))

    befores = (None, *file.statements)
    pieces = [piece(statement, before) for statement, before in zip(file.statements, befores, strict=False)]
    return "\n".join([f"ucpl {file.version}", *_page(pieces, "")]) + "\n"


def _body(items: Sequence[nodes.ModelItem] | Sequence[nodes.LayoutItem], version: int) -> list[str]:
    """The lines between the braces of a model or a layout."""
    out: list[str] = []
    pieces: list[_Piece] = []
    last = ""
    is_apart = not any(isinstance(item, nodes.Gone) for item in items)  # which shares columns with tensors
    for kind, some in groupby(items, key=type) if is_apart else ((None, items),):
        run = list(some)
        plain = rows_of_plain(run, version) if kind is nodes.Tensor else None  # type: ignore[arg-type]
        chapter = _chapter(run[0])
        if plain is not None:
            out += _page(pieces, "  ")
            pieces = []
            out += [""] if last not in ("", chapter) else []
            out += _plain_run(plain, "  ")
            last = chapter
            continue
        for inner, row in statements_of(run, version):  # type: ignore[arg-type]
            chapter = _chapter(inner)
            pieces.append(_Piece(row, () if last in ("", chapter) else ("",)))
            last = chapter
    return [*out, *_page(pieces, "  ")]


def _plain_run(rows: Sequence[tuple[str, StatementRow]], indent: str) -> list[str]:
    """The lines of one run of plain tensors, as `_run` writes them.

    Work for a line is done once for all tensors with equal columns.
    """
    forms = {id(row): row for _, row in rows}
    head = max((len(text) for text, _ in rows if len(text) <= _HEAD_MAX), default=0)
    body = _column(list(forms.values()), lambda row: row.body if row.tail else "", _BODY_MAX)
    ends: dict[int, tuple[str, int]] = {}  # of a line, and the width of the widest head before it
    for form, row in forms.items():
        line, *more = _lines(evolve(row, head=""), 0, body, "")
        ends[form] = line, -1 if more else _WIDTH_MAX - len(indent) - len(line)
    out: list[str] = []
    for text, row in rows:
        end, room = ends[id(row)]
        if max(head, len(text)) <= room:
            out.append(f"{indent}{text.ljust(head)}{end}")
        else:
            out += _lines(evolve(row, head=text), head, body, indent)
    return out


def _chapter(item: nodes.ModelItem | nodes.LayoutItem) -> str:
    """Statements of one chapter stand together; a blank line parts two chapters."""
    match item:
        case nodes.Tensor() | nodes.Alias() | nodes.Entry():
            return "tensors"
        case nodes.State() | nodes.States() | nodes.Derive() | nodes.Group() | nodes.DefaultDtype():
            return "states"
        case nodes.Files() | nodes.Framework() | nodes.Blob():
            return "files"
        case _:
            return "numbers"


def _strip(lines: Sequence[str]) -> list[str]:
    """Without blank lines at both ends."""
    kept = list(lines)
    while kept and not kept[0]:
        kept.pop(0)
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _below(lines: Sequence[str], indent: str, follows: bool) -> Iterator[str]:
    """Comments before the end of a body.

    They follow a blank line only if something is above it.
    """
    kept = _strip(lines)
    if kept and follows and not lines[0]:
        yield ""
    yield from (indent + line if line else "" for line in kept)


def _page(pieces: Sequence[_Piece], indent: str) -> list[str]:
    """Lines of consecutive statements.

    Neighbours of one kind, without a blank line, share columns.
    """
    out: list[str] = []
    begin = 0
    for stop in range(1, len(pieces) + 1):
        if stop < len(pieces):
            new = pieces[stop]
            if new.row.kind == pieces[begin].row.kind and "" not in new.above:
                continue
        out += _run(pieces[begin:stop], indent)
        begin = stop
    return out


def _run(pieces: Sequence[_Piece], indent: str) -> list[str]:
    """The lines of one run, in columns."""
    rows = [piece.row for piece in pieces]
    head = _column(rows, lambda row: row.head if row.sign and not _is_long_list(row) else "", _HEAD_MAX)
    body = _column(rows, lambda row: row.body if row.tail else "", _BODY_MAX)
    texts = [_lines(row, head, body, indent) for row in rows]
    widths = [len(lines[-1]) for lines, piece in zip(texts, pieces, strict=True) if piece.beside and not piece.body]
    comment = max((w for w in widths if w <= _WIDTH_MAX // 2 + _WIDTH_MAX // 4), default=0)
    out: list[str] = []
    for piece, lines in zip(pieces, texts, strict=True):
        if piece.above:
            out += [indent + line if line else "" for line in piece.above]
        if piece.body is not None:
            out += [*lines[:-1], f"{lines[-1]} {piece.body[0]}", *piece.body[1:]]
            lines = [f"{indent}}}"]
        if piece.beside:
            padded = lines[-1] if piece.body is not None else lines[-1].ljust(comment)
            lines = [*lines[:-1], f"{padded}  {piece.beside}"]
        out += lines
    return out


def _column(rows: Sequence[StatementRow], text: Callable[[StatementRow], str], most: int) -> int:
    """Width of a column: its widest text that is not too wide."""
    widths = (len(text(row)) for row in rows)
    return max((width for width in widths if width <= most), default=0)


def _lines(row: StatementRow, head: int, body: int, indent: str) -> list[str]:
    """One statement, on one line if it fits.

    Else its clauses are on lines of their own.
    """
    if not row.sign:
        line = padded = indent + row.head
        gap = " "
    else:
        line = f"{indent}{row.head.ljust(head)} {row.sign} {row.body}"
        padded = line + " " * max(0, body - len(row.body))
        gap = "  "
    for start in (padded, line):
        whole = f"{start}{gap}{' '.join(row.tail)}" if row.tail else line
        if len(whole) <= _WIDTH_MAX:
            return [whole]
    lines = _wrapped(line, indent) if row.kind in _LISTS or _has_several(row) else [line]
    for i, clause in enumerate(row.tail):
        stuck = re.match(_UNSTARTED, clause) is not None
        fits = (i > 0 or len(lines) > 1) and len(lines[-1]) + 1 + len(clause) <= _WIDTH_MAX
        if stuck or fits:
            lines[-1] += f" {clause}"
        else:
            lines.append(f"{indent}    {clause}")
    return lines


def _is_long_list(row: StatementRow) -> bool:
    """True if a statement's left sides are too long for columns.

    They push no other statement's columns out.
    """
    return len(row.head) > _SEVERAL_MAX and _has_several(row)


def _has_several(row: StatementRow) -> bool:
    """True if a statement has several left sides."""
    return row.kind in ("tensor", "entry") and "," in row.head and "," in re.sub(_NO_COMMA, "", row.head)


def _wrapped(line: str, indent: str) -> list[str]:
    """A list, broken after its commas where it is too long."""
    first, *words = (word.strip() for word in re.findall(_WORD, line))
    lines = [indent + first]
    for word in words:
        if len(lines[-1]) + len(word) + 3 <= _WIDTH_MAX:
            lines[-1] += f", {word}"
        else:
            lines[-1] += ","
            lines.append(f"{indent}    {word}")
    return lines
