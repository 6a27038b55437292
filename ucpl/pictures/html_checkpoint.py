"""A checkpoint as one HTML page: files, tensors, sizes and settings.

Each setting has its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ucpl.extents import size_of
from ucpl.pictures.look import amount_text, count_text, printable, shade_of
from ucpl.pictures.page import bar, page, tag

if TYPE_CHECKING:
    from ucpl.conversion.facts import Facts, TensorFacts
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["checkpoint_html"]

FILES_MAX = 2_000
TENSORS_MAX = 5_000
STATES = 4  # that have a hatching of their own in bars


def checkpoint_html(checkpoint: Checkpoint, facts: Facts) -> str:
    """One file, made of headers. Raises nothing: names may be any text."""
    stored = _stored(checkpoint)
    body = [*_head(facts), *_states(facts), *_files(checkpoint, stored), *_tensors(facts), *_settings(facts)]
    return page(facts["checkpoint"], "\n".join(body))


def _stored(c: Checkpoint) -> dict[str, dict[str, tuple[int, int]]]:
    """file -> dtype -> how many tensors, and their bytes."""
    out: dict[str, dict[str, tuple[int, int]]] = {}
    for extent in c.extents.values():
        kinds = out.setdefault(extent.file, {})
        many, size = kinds.get(extent.dtype, (0, 0))
        kinds[extent.dtype] = many + 1, size + size_of(extent.dtype, prod(extent.shape))
    return out


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
    most = (max(held.values(), default=0) or 1) * 1.6
    yield '<div class="rows">'
    for n, (state, many) in enumerate(f["states"].items()):
        said = f"{held[state]:,} elements of {many:,} tensors"
        yield tag("span", state, kind="name")
        yield bar([(held[state] / most, f"s{shade_of(4 + 8 * (n % STATES))}", f"{printable(state)}: {said}", "")], said)
    yield "</div>"
    by = ", ".join(f"{d} {amount_text(n, 'B')}" for d, n in f["bytes_by_dtype"].items())
    yield tag("p", f"{f['stored_tensors']:,} stored tensors: {by}" if by else "no stored tensors")
    yield from (tag("p", f"{s}: {', '.join(map(str, v[:8]))}{', ...' * (len(v) > 8)}") for s, v in f["scalars"].items())
    yield from (tag("p", f"not stored: {text}") for text in f["not_stored"])


def _has(t: TensorFacts, state: str) -> bool:
    return state in t["states"] or (state == "weight" and t["kind"] == "parameter")


def _files(c: Checkpoint, stored: dict[str, dict[str, tuple[int, int]]]) -> Iterator[str]:
    yield "<h2>Files</h2><p>Bytes of the tensors in each, by dtype; other data of a file is not drawn.</p>"
    names = list(dict.fromkeys([*c.files, *stored]))
    dtypes = list(dict.fromkeys(d for kinds in stored.values() for d in kinds))
    entries = "".join(f'<li><i class="s{shade_of(9 * n)}"></i>{d}</li>' for n, d in enumerate(dtypes))
    most = (max((sum(n for _, n in kinds.values()) for kinds in stored.values()), default=0) or 1) * 1.9
    yield f'<ul class="legend">{entries}</ul><div class="rows">'
    for name in names[:FILES_MAX]:
        kinds = stored.get(name, {})
        parts = [
            (
                size / most,
                f"s{shade_of(9 * dtypes.index(d))}",
                f"{printable(name)}\n{many:,} tensors of {d}: {size:,} bytes",
                "",
            )
            for d, (many, size) in kinds.items()
        ]
        many = sum(n for n, _ in kinds.values())
        size = amount_text(sum(b for _, b in kinds.values()), "B")
        yield tag("span", name) + bar(parts, f"{size}, {many:,} tensor{'s' * (many != 1)}" if many else "no tensor")
    yield "</div>"
    if len(names) > FILES_MAX:
        yield tag("p", f"and {len(names) - FILES_MAX:,} files more")
    if c.container is not None:
        beside = ", ".join(one.name for one in c.container.files)
        yield tag("p", f"companion files: {beside}" if beside else "no companion files")


def _tensors(f: Facts) -> Iterator[str]:
    yield f"<h2>Tensors</h2><p>{len(f['tensors']):,} of the model, unsplit.</p>"
    most = max((prod(t["shape"]) for t in f["tensors"]), default=0) or 1
    yield '<div class="wide"><table class="lined"><thead><tr><th>name</th><th>shape</th><th>dtype</th><th>kind</th>'
    yield '<th>states</th><th class="n">elements</th><th>share of the largest</th></tr></thead><tbody>'
    aliases: dict[str, list[str]] = {}
    for alias, owner in f["aliases"].items():
        aliases.setdefault(owner, []).append(alias)
    for t in f["tensors"][:TENSORS_MAX]:
        n = prod(t["shape"])
        names = t["name"] + "".join(f", also {a}" for a in aliases.get(t["name"], ()))
        yield f"<tr>{tag('td', names, kind='name')}{tag('td', ' × '.join(f'{s:,}' for s in t['shape']) or 'one element')}"
        yield (
            tag("td", t["dtype"])
            + tag("td", t["kind"])
            + tag("td", ", ".join(t["states"]))
            + tag("td", f"{n:,}", kind="n")
        )
        title = f"{printable(t['name'])}: {n:,} elements"
        yield f'<td style="min-width:90px">{bar([(n / most, f"s{shade_of(4)}", title, "")], "")}</td></tr>'
    yield "</tbody></table></div>"
    if len(f["tensors"]) > TENSORS_MAX:
        yield tag("p", f"and {len(f['tensors']) - TENSORS_MAX:,} tensors more")


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
    yield '<div class="wide"><table class="lined"><tbody>'
    for name, value, origin in rows:
        yield f"<tr>{tag('th', name)}{tag('td', value)}{tag('td', origin)}</tr>"
    yield "</tbody></table></div>"
