"""Answers about the open texts, in this room's terms, without a protocol."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from attrs import field

from ucpl.errors import UcplError
from ucpl.lsp.completions import Completion, completions
from ucpl.lsp.context import CursorContext, context_at
from ucpl.lsp.definitions import Symbol, symbols
from ucpl.lsp.files import EditorTexts
from ucpl.lsp.findings import Finding, findings
from ucpl.lsp.hovers import Hover, hover
from ucpl.lsp.outline import Outline
from ucpl.lsp.references import NameUse, references, renamed, renamed_part
from ucpl.lsp.sizes import TextSizes, sizes_of
from ucpl.lsp.targets import Target, targets
from ucpl.lsp.tokens import LineStarts
from ucpl.records import define, frozen

__all__ = ["Edit", "Service"]


Answer = TypeVar("Answer")


@frozen
class Edit:
    """Lines first .. last (0-based, half-open) become this text."""

    first: int
    last: int
    text: str


@define
class Service:
    """The requests of an editor. Places are offsets in characters."""

    texts: EditorTexts = field(factory=EditorTexts)
    version: int = 0  # counts changes of any text or setting
    _sizes: dict[str, tuple[int, TextSizes]] = field(factory=dict)

    def put(self, path: str, text: str | None) -> None:
        """Set a text as the editor has it.

        None: it is closed, and the file counts again.
        """
        if text is None:
            self.texts.opened.pop(path, None)
        else:
            self.texts.opened[path] = text.replace("\r\n", "\n")
        self.version += 1

    def configure(self, config: str) -> None:
        """Set the config.json for sizes; "": the one in each file's folder."""
        self.texts.config_path = config
        self.version += 1

    def outline(self, path: str) -> Outline | None:
        return self.texts.outline(path)

    def lines(self, path: str) -> LineStarts:
        """Offsets of any file as lines and characters."""
        found = self.texts.outline(path) if path.endswith(".ucpl") else None
        return found.lines if found is not None else LineStarts(self.texts.text(path) or "")

    def sizes(self, path: str) -> TextSizes:
        known = self._sizes.get(path)
        if known is None or known[0] != self.version:
            known = self._sizes[path] = (self.version, sizes_of(self.texts, path))
        return known[1]

    def prepare(self, path: str) -> None:
        """Compute the data of hovers: the placement of a file's layouts."""
        sizes = self.sizes(path)
        for layout in sizes.layouts():
            sizes.placement(layout)

    def findings(self, path: str) -> list[Finding]:
        return findings(self.texts, path)

    def hover(self, path: str, offset: int) -> Hover | None:
        return self._at(path, offset, lambda c: hover(self.texts, c, self.sizes))

    def targets(self, path: str, offset: int) -> list[Target]:
        return self._at(path, offset, lambda c: targets(self.texts, c)) or []

    def references(self, path: str, offset: int) -> list[NameUse]:
        return self._at(path, offset, lambda c: references(self.texts, c)) or []

    def renamed_part(self, path: str, offset: int) -> Target | None:
        return self._at(path, offset, lambda c: renamed_part(self.texts, c))

    def renamed(self, path: str, offset: int, new: str) -> list[tuple[NameUse, str]]:
        """The uses of a name with their new texts. Raises: NotRenamed."""
        return self._at(path, offset, lambda c: renamed(self.texts, c, new)) or []

    def completions(self, path: str, offset: int) -> list[Completion]:
        return self._at(path, offset, lambda c: completions(self.texts, c)) or []

    def _at(self, path: str, offset: int, ask: Callable[[CursorContext], Answer]) -> Answer | None:
        context = context_at(self.texts, path, offset)
        return ask(context) if context is not None else None

    def symbols(self, path: str) -> list[Symbol]:
        outline = self.texts.outline(path)
        return symbols(outline) if outline is not None else []

    def formatting(self, path: str) -> list[Edit]:
        """The lines that `ucpl fmt` changes, as one edit.

        None for a text that does not parse.
        """
        from ucpl.language import format_text

        text = self.texts.text(path)
        if text is None:
            return []
        try:
            tidy = format_text(text, path)
        except UcplError:
            return []
        return _difference(text, tidy)


def _difference(before: str, after: str) -> list[Edit]:
    """One edit from the first line that differs to the last."""
    if before == after:
        return []
    old, new = re.findall(r"[^\n]*\n|[^\n]+", before), re.findall(r"[^\n]*\n|[^\n]+", after)
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    return [Edit(first, len(old) - last, "".join(new[first : len(new) - last]))]
