"""A self-contained HTML page: a picture and tables.

It has no script, and its policy forbids that anything is fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence

from ucpl.pictures.look import DARK, LIGHT, markup

__all__ = ["page", "picture_page", "policy_of", "table", "tag"]

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
