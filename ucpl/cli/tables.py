"""Tables of answers, as lines for people."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["lines_of"]


def lines_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as wide as what is in it, without a frame."""
    from rich import box
    from rich.console import Console as Terminal
    from rich.table import Table

    made = Table(*head, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    terminal = Terminal(width=max(40, sum(max(map(len, column)) + 3 for column in zip(head, *rows, strict=True))))
    with terminal.capture() as shown:
        terminal.print(made, markup=False, highlight=False, no_wrap=True)
    return [line.rstrip() for line in shown.get().splitlines() if line.strip()]
