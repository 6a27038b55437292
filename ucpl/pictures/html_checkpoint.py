"""A checkpoint as one HTML page: files, tensors, sizes and settings.

Each setting has its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ucpl.extents import size_of
from ucpl.pictures.look import amount_text, count_text
from ucpl.pictures.page import page, table, tag

if TYPE_CHECKING:
    from ucpl.conversion.facts import Facts, TensorFacts
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["checkpoint_html"]


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
