"""docs/RELEASES.md, written from results.json."""

from __future__ import annotations

import json
from typing import Any

from tests.releases.environments import HERE, ROOT, releases, table
from tests.releases.stand_ins import WORDS
from tests.releases.trials import PLANS, Cell

GOOD = ("passed", "back")
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "RELEASES.md"
Row = dict[str, Any]

INTRO = """\
# Releases

`make releases` writes this page from its trials. Each release has an environment of its own; all but torch's share one torch.
The release trains a small model for three steps, saves it, and trains on. `ucpl` converts the checkpoint, and the
release loads the target into a model with other values. No run clips gradients, so that losses can be compared.

Rows of another Python have the same release of torch, in its build for GPUs, without CUDA's libraries.

- **passed**: all weights, states of the optimizer, learning rates and steps are bit-equal with the run's, and the next
  losses are those of the run (within 1e-5, in bf16 1e-2: other degrees add in another order).
- **passed, and back**: the same but for the loss after the next step, which the release computes differently at
  these degrees. Converted back, all losses are bit-equal with the run's.
- **not run**: the column is newer than the release's last run.
- **refused**: `ucpl` refuses the conversion, with the code in the note. **not possible**: for the reason in the note.

A note next to "passed" names the values that the loader of the release leaves out. No cell is claimed that did not run.

CI tries two of these releases again for each commit, by its hash, within six minutes. `make test` reads small checkpoints of
releases, as they wrote them (`tests/fixtures/releases`), and compares all values.
"""
SIGNS = {
    "passed": "passed",
    "back": "passed, and back",
    "refused": "refused",
    "failed": "failed",
    "framework": "not possible",
    "not run": "not run",
}


def load() -> dict[str, Row]:
    found: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def rows(cells: dict[str, Cell]) -> dict[str, list[str]]:
    return {title: [cell.state, cell.why] for title, cell in cells.items()}


def short(row: Row) -> str:
    if "missing" in row:
        return f"did not run: {row['missing']}"
    return ", ".join(f"{title}: {state}{f' ({why})' if why else ''}" for title, (state, why) in row["cells"].items())


def worse(release: str, before: Row, after: Row) -> list[str]:
    """Cells that passed before, and do not now."""
    mine = after.get("cells", {})
    had = [title for title, (state, _) in before.get("cells", {}).items() if state in GOOD]
    lost = [title for title in had if mine.get(title, ["missing", after.get("missing", "")])[0] not in GOOD]
    return [f"{release}: {title} passed before: {mine.get(title, ['', after.get('missing', '')])[1]}" for title in lost]


def write(results: dict[str, Row]) -> None:
    order = [str(one) for one in releases()]
    results = {name: results[name] for name in order if name in results}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(text(results))


def text(results: dict[str, Row]) -> str:
    parts = [INTRO]
    for framework, held in table().items():
        mine = {one: results[str(one)] for one in releases() if one.framework == framework and str(one) in results}
        titles = [trial.title for trial in PLANS[framework].trials]
        lines = [f"## {held['title']}", "", f"| release | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
        notes: list[str] = []
        for one, row in mine.items():
            cells = [_cell(row, title, notes) for title in titles]
            lines.append(f"| {one.title} | {' | '.join(cells)} |")
        lines += [f"\n{n}. {note}" if n == 1 else f"{n}. {note}" for n, note in enumerate(notes, 1)]
        used = [name for name in WORDS if any(name in one.stand_ins for one in mine)]
        for name in used:
            which = ", ".join(one.title for one in mine if name in one.stand_ins)
            lines += [""] * (name == used[0]) + [f"- {WORDS[name]}: {which}"]
        parts.append("\n".join([*lines, "", _made_with(mine)]) + "\n")
    return "\n".join(parts)


def _cell(row: Row, title: str, notes: list[str]) -> str:
    if "missing" in row:
        return f"not installed{_note(row['missing'], notes)}"
    state, why = row["cells"].get(title, ("not run", ""))
    return SIGNS[state] + (_note(why, notes) if why else "")


def _note(why: str, notes: list[str]) -> str:
    why = why.replace("|", "\\|")
    if why not in notes:
        notes.append(why)
    return f" ({notes.index(why) + 1})"


def _made_with(mine: dict[Any, Row]) -> str:
    found = sorted(
        {tuple(sorted((k, v) for k, v in row.items() if k != "cells")) for row in mine.values() if "cells" in row}
    )
    return "Tried with " + "; ".join(", ".join(f"{k} {v}" for k, v in one) for one in found) + "."
