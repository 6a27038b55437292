"""The site's page of errors, generated from the catalogue.

The page is not committed: `make docs` builds it into the site, and `ucpl explain CODE` prints one entry of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucpl.errors import CodeEntry, Exit, catalogue

__all__ = ["errors_markdown"]

HEAD = """\
# Errors

Every "no" of ucpl has a stable code, the place (two places where two lines disagree), a reason and a remedy.
`ucpl explain CODE` prints the same text as this page.

`make docs` generates this page from the catalogue in `ucpl/errors/catalogue/`: change an entry there.
"""

EXIT_MEANING = {
    Exit.DONE: "done, or equal",
    Exit.ANSWER_IS_NO: "the answer is no: diagnostics found, checkpoints differ, verification failed",
    Exit.WRONG_USAGE: "wrong usage",
    Exit.SOURCE_DAMAGED: "the source cannot be read or is damaged",
    Exit.TARGET_UNWRITABLE: "the target cannot be written",
    Exit.PLAN_DOES_NOT_FIT: "a plan does not fit its source",
    Exit.INTERRUPTED: "interrupted",
}


def errors_markdown() -> str:
    """The page: exit statuses, an index, one section per code."""
    entries = tuple(catalogue().values())
    parts = [
        HEAD,
        "## Exit status\n\n" + table(("status", "meaning"), [(str(s), text) for s, text in EXIT_MEANING.items()]),
        "## Index\n\n"
        + table(
            ("code", "title", "exit"),
            [(f"[{e.code}](#{e.code.lower()})", e.title, str(e.exit_status)) for e in entries],
        ),
        *(section(entry) for entry in entries),
    ]
    return "\n".join(parts)


def section(entry: CodeEntry) -> str:
    """One code.

    Its heading is the bare code, so that its anchor `#e101` stays when the title is reworded.
    """
    return (
        f"## {entry.code}\n\n"
        f"**{entry.title}** (exit status {entry.status_text})\n\n"
        f"{entry.meaning}\n\n"
        f"{fenced(entry.example)}\n\n"
        f"Remedy: {entry.remedy}\n"
    )


def fenced(text: str) -> str:
    """A code block with a fence longer than any backticks in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; a `|` in a cell is escaped."""
    lines = [head, tuple("---" for _ in head), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
