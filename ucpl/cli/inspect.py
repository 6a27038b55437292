"""Say what a checkpoint is, from its headers alone: no tensor is read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucpl.cli.console import bytes_text
from ucpl.cli.options import add_json
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.stores.checkpoint import Checkpoint

EXAMPLE = "ucpl inspect runs/step-1000\nucpl inspect runs/step-1000 --tensors"
_DEGREES = ("dp", "tp", "pp", "ep")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a save folder, one step's folder, or a plain file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor of the model")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.api import open_checkpoint

    checkpoint = open_checkpoint(Path(options.checkpoint))
    found = facts(checkpoint)
    console.say("\n".join(lines(found, tensors=options.tensors)))
    console.answer(found)
    return Exit.DONE


def facts(c: Checkpoint) -> dict[str, Any]:
    """All that `inspect` says, as plain values."""
    from ucpl.extents import DTYPES
    from ucpl.proofs.values import value_text
    from ucpl.stores.pickles import unsafe_globals
    from ucpl.stores.registry import KNOWN_GLOBALS
    from ucpl.stores.scalars import number_of

    envelope = c.envelope
    elements = {t.name: _numel(t.shape) for t in c.tensors}
    held = [envelope.carried, envelope.blobs, [g.hyper for g in envelope.groups]]
    kinds: dict[str, dict[str, int]] = {}
    for t in c.tensors:
        entry = kinds.setdefault(t.kind, {"tensors": 0, "elements": 0})
        entry["tensors"] += 1
        entry["elements"] += _numel(t.shape)
    dtypes: dict[str, int] = {}
    for e in c.extents.values():
        dtypes[e.dtype] = dtypes.get(e.dtype, 0) + e.numel * DTYPES[e.dtype].itemsize
    states: dict[str, int] = {"weight": sum(1 for t in c.tensors if t.kind == "parameter")}
    for t in c.tensors:
        for s in t.states:
            states[s] = states.get(s, 0) + 1
    steps: dict[str, list[Any]] = {}
    for state, values in envelope.scalars.items():
        for value in values.values():
            number = number_of(value)
            if number not in steps.setdefault(state, []):
                steps[state].append(number)
    sizes = [(c.root / f).stat().st_size for f in c.files if (c.root / f).is_file()]
    return {
        "checkpoint": str(c.top),
        "framework": c.framework,
        "version": envelope.version or c.version,
        "tag": c.tag,
        "files": len(c.files),
        "bytes": sum(sizes),
        "mesh": {n: x.value for n in _DEGREES if (x := envelope.settings.get(n)) is not None},
        "settings": {
            n: {"value": s.value, "origin": s.origin} for n, s in envelope.settings.items() if n not in _DEGREES
        },
        "kinds": kinds,
        "stored_tensors": len(c.extents),
        "bytes_by_dtype": dtypes,
        "states": states,
        "scalars": steps,
        "groups": [
            {
                "members": len(g.members),
                "elements": sum(elements[m] for m in g.members if m in elements),
                "hyper": {k: _plain(number_of(v)) for k, v in g.hyper.items()},
            }
            for g in envelope.groups
        ],
        "aliases": dict(c.aliases),
        "frozen": [t.name for t in c.tensors if t.kind == "frozen"],
        "buffers": [t.name for t in c.tensors if t.kind == "buffer"],
        "carried": sorted(k for k in envelope.blobs),
        "client_state": {str(k): value_text(number_of(v)) for k, v in envelope.carried.items()},
        "unknown_globals": sorted(set(unsafe_globals(held)) - KNOWN_GLOBALS),
        "remarks": list(c.remarks),
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "kind": t.kind, "states": list(t.states)}
            for t in c.tensors
        ],
    }


def _plain(value: Any) -> Any:
    from ucpl.proofs.values import value_text

    return value if value is None or isinstance(value, (int, float, str, list, tuple)) else value_text(value)


def lines(f: dict[str, Any], *, tensors: bool = False) -> list[str]:
    mesh = " · ".join(f"{n} {v}" for n, v in f["mesh"].items()) or "one rank"
    out = [
        f"checkpoint    {f['checkpoint']}" + (f", {f['tag']}" if f["tag"] else ""),
        f"framework     {f['framework']} {f['version']}".rstrip(),
        f"mesh          {mesh}",
        f"files         {f['files']}, {bytes_text(f['bytes'])}",
    ]
    for kind, n in f["kinds"].items():
        word = {"parameter": "parameters", "frozen": "frozen", "buffer": "buffers"}.get(kind, kind)
        out.append(f"{word.ljust(13)} {n['tensors']:,} tensors, {n['elements']:,} elements")
    out.append("states        " + ", ".join(f"{s} of {n}" for s, n in f["states"].items()))
    out.append("dtypes        " + ", ".join(f"{d}: {bytes_text(n)}" for d, n in f["bytes_by_dtype"].items()))
    for state, values in f["scalars"].items():
        out.append(f"{state.ljust(13)} {', '.join(map(str, values[:8]))}" + (", ..." if len(values) > 8 else ""))
    for i, g in enumerate(f["groups"]):
        said = ", ".join(f"{k} {g['hyper'][k]}" for k in ("lr", "weight_decay", "betas", "momentum") if k in g["hyper"])
        out.append(
            f"group {str(i).ljust(7)} {g['members']:,} parameters, {g['elements']:,} elements"
            + (f"; {said}" if said else "")
        )
    out += [f"tied          {alias} is {owner}" for alias, owner in f["aliases"].items()]
    for name, word in (("frozen", "frozen"), ("buffers", "buffers")):
        if f[name]:
            shown = ", ".join(f[name][:6]) + (f" and {len(f[name]) - 6} more" if len(f[name]) > 6 else "")
            out.append(f"{(word + ':').ljust(13)} {shown}")
    out += [f"{name.ljust(16)} {s['value']}: {s['origin']}" for name, s in f["settings"].items()]
    if f["carried"]:
        out.append("goes along    " + ", ".join(f["carried"]))
    out += [f"client_state  {key}: {text}" for key, text in f["client_state"].items()]
    out += [
        f"unknown       {name}: kept inert, never imported; convert asks for --allow-global"
        for name in f["unknown_globals"]
    ]
    if tensors:
        out += [f"  {t['name']}  {t['shape']} {t['dtype']} {t['kind']}" for t in f["tensors"]]
    out += [f"looks wrong   {text}" for text in f["remarks"]] or ["looks wrong   nothing"]
    return out


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
