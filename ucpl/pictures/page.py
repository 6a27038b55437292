"""A self-contained HTML page: a picture and tables.

It has no script, and its policy forbids that anything is fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ucpl.extents import size_of
from ucpl.pictures.look import DARK, LIGHT, amount_text, count_text, markup

if TYPE_CHECKING:
    from ucpl.conversion.facts import Facts, TensorFacts
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["page", "picture_page", "policy_of", "table", "tag", "checkpoint_html"]

ROWS_MAX = 5_000  # of a table; the others are counted

STYLE = """
body{margin:0;padding:24px clamp(12px,3vw,40px);background:var(--paper);color:var(--ink);
 font:14px/1.45 system-ui,-apple-system,"Segoe UI","DejaVu Sans",Helvetica,Arial,sans-serif}
h1,p,td:first-child{overflow-wrap:anywhere}
h1{font-size:22px;line-height:1.25;margin:0 0 6px}h2{font-size:17px;margin:28px 0 4px}
p{margin:4px 0;color:var(--faint);max-width:110ch}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:12px;margin:8px 0}
td,th{padding:3px 8px;text-align:left;vertical-align:top;font-weight:400;border-top:1px solid var(--line)}
th{color:var(--faint);white-space:nowrap}td:first-child{min-width:22ch}
td.n{text-align:right;white-space:nowrap}
"""


def policy_of(*scripts: str) -> str:
    """The policy of a page: these scripts, and nothing loaded."""
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = "; script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) if digests else ""
    return f"default-src 'none'; style-src 'unsafe-inline'{allowed}"


def page(title: str, body: str) -> str:
    """A complete file. `body` is markup whose texts are already escaped."""
    schemes = (f":root{{{';'.join(f'--{n}:{c}' for n, c in paper.items())}}}" for paper in (LIGHT, DARK))
    light, dark = schemes
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy_of()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{markup(title)}</title>\n'
        f"<style>{light}\n@media (prefers-color-scheme:dark){{{dark}}}{STYLE}</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def picture_page(title: str, svg: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An SVG file in a page, with one table below it."""
    return page(title, f'<div class="wide">{svg}</div>\n{table(heads, rows)}')


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; numbers are at the right."""
    return "".join(_table(heads, rows))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f'<div class="wide"><table><thead><tr>{"".join(tag("th", head) for head in heads)}</tr></thead><tbody>\n'
    for row in rows[:ROWS_MAX]:
        yield f"<tr>{''.join(tag('td', text, kind='n' if text[:1].isdigit() else '') for text in row)}</tr>\n"
    yield "</tbody></table></div>\n"
    if len(rows) > ROWS_MAX:
        yield tag("p", f"and {len(rows) - ROWS_MAX:,} more")


def tag(name: str, text: str, kind: str = "") -> str:
    """An element with a text in it. `kind` is its class."""
    return f"<{name}{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{markup(text)}</{name}>"


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def checkpoint_html(checkpoint: Checkpoint, facts: Facts) -> str:
    """One file, made of headers. Raises nothing: names may be any text."""
    body = [*_head(facts), *_states(facts), *_files(checkpoint), *_tensors(facts), *_settings(facts)]
    return page(facts["checkpoint"], "\n".join(body))


def _head(f: Facts) -> Iterator[str]:
    yield tag("h1", f["checkpoint"] + (f", {f['tag']}" if f["tag"] else ""))
    mesh = " · ".join(f"{n} {v}" for n, v in f["mesh"].items()) or "one rank"
    kinds = [f"{_counted(n['tensors'], kind)} ({count_text(n['elements'])} elements)" for kind, n in f["kinds"].items()]
    said = [f"{f['framework']} {f['version']}".strip(), mesh, f"{f['files']:,} files, {amount_text(f['bytes'], 'B')}"]
    yield tag("p", " · ".join([*said, *kinds]))
    if f["container"] is not None:
        yield tag(
            "p", f"in a folder of {f['container']['title']}, {len(f['container']['files']):,} files next to the shards"
        )
    yield "<h2>Remarks</h2>"
    yield "".join(tag("p", text) for text in f["remarks"]) or tag("p", "nothing")


def _counted(many: int, kind: str) -> str:
    return f"{many:,} {kind}{'s' * (many != 1 and kind != 'frozen')}"


def _states(f: Facts) -> Iterator[str]:
    yield "<h2>States</h2>"
    elements = {t["name"]: prod(t["shape"]) for t in f["tensors"]}
    held = {state: sum(elements[t["name"]] for t in f["tensors"] if _has(t, state)) for state in f["states"]}
    rows = [(state, f"{held[state]:,} elements of {many:,} tensors") for state, many in f["states"].items()]
    yield table(("state", "stored"), rows)
    by = ", ".join(f"{d} {amount_text(n, 'B')}" for d, n in f["bytes_by_dtype"].items())
    yield tag("p", f"{f['stored_tensors']:,} stored tensors: {by}" if by else "no stored tensors")
    yield from (tag("p", f"{s}: {', '.join(map(str, v[:8]))}{', ...' * (len(v) > 8)}") for s, v in f["scalars"].items())
    yield from (tag("p", f"not stored: {text}") for text in f["not_stored"])


def _has(t: TensorFacts, state: str) -> bool:
    return state in t["states"] or (state == "weight" and t["kind"] == "parameter")


def _files(c: Checkpoint) -> Iterator[str]:
    yield "<h2>Files</h2><p>Bytes of the tensors in each, by dtype; other data of a file is not counted.</p>"
    stored: dict[str, dict[str, list[int]]] = {name: {} for name in c.files}
    for extent in c.extents.values():
        kinds = stored.setdefault(extent.file, {})
        kinds.setdefault(extent.dtype, []).append(size_of(extent.dtype, prod(extent.shape)))
    rows = [
        (
            name,
            f"{sum(map(len, kinds.values())):,}",
            ", ".join(f"{d} {amount_text(sum(n), 'B')}" for d, n in kinds.items()),
        )
        for name, kinds in stored.items()
    ]
    yield table(("file", "tensors", "bytes"), rows)
    if c.container is not None:
        beside = ", ".join(one.name for one in c.container.files)
        yield tag("p", f"companion files: {beside}" if beside else "no companion files")


def _tensors(f: Facts) -> Iterator[str]:
    yield f"<h2>Tensors</h2><p>{len(f['tensors']):,} of the model, unsplit.</p>"
    aliases: dict[str, list[str]] = {}
    for alias, owner in f["aliases"].items():
        aliases.setdefault(owner, []).append(alias)
    rows = [
        (
            t["name"] + "".join(f", also {a}" for a in aliases.get(t["name"], ())),
            " × ".join(f"{s:,}" for s in t["shape"]) or "one element",
            t["dtype"],
            t["kind"],
            ", ".join(t["states"]),
            f"{prod(t['shape']):,}",
        )
        for t in f["tensors"]
    ]
    yield table(("name", "shape", "dtype", "kind", "states", "elements"), rows)


def _settings(f: Facts) -> Iterator[str]:
    yield "<h2>Inferred settings</h2>"
    rows = [(name, str(s["value"]), s["origin"]) for name, s in f["settings"].items()]
    rows += [("cut over tp", f"{n:,} tensor{'s' * (n > 1)}", origin) for origin, n in f["cuts"].items()]
    for i, g in enumerate(f["groups"]):
        hyper = ", ".join(f"{k} {v}" for k, v in g["hyper"].items() if isinstance(v, int | float | tuple | list))
        rows.append((f"group {i}", f"{g['members']:,} parameters, {g['elements']:,} elements", hyper))
    rows += [("client_state", key, text) for key, text in f["client_state"].items()]
    rows += [("goes along", name, "") for name in f["carried"]]
    rows += [("unknown", name, "kept inert, never imported") for name in f["unknown_globals"]]
    yield table(("setting", "value", "from"), rows)
