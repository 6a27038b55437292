"""Describe a checkpoint from its headers; no tensor is read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import add_json, write_text
from ucpl.errors import Exit, plural
from ucpl.extents.account import AccountEntry, entries_of

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.facts import ContainerFacts, Facts

EXAMPLE = """
ucpl inspect runs/step-1000
ucpl inspect runs/step-1000 --tensors
ucpl inspect runs/step-1000 --html step-1000.html
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a save folder, one step's folder, or a plain file")
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="its layout (default: inferred)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor of the model")
    parser.add_argument(
        "--html", metavar="FILE", help="write all of it as a page for browsers, which replaces a file that is there"
    )
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.conversion.facts import facts
    from ucpl.conversion.opening import open_checkpoint
    from ucpl.conversion.requests import called
    from ucpl.conversion.weights import open_for_inspection

    described = called(options.layout) if options.layout is not None else None
    checkpoint = open_for_inspection(lambda given: open_checkpoint(options.checkpoint, described, given))
    found = facts(checkpoint)
    if options.html is not None:
        from ucpl.pictures.page import checkpoint_html

        write_text(Path(options.html), checkpoint_html(checkpoint, found))
    console.say(*lines(found, tensors=options.tensors))
    if options.html is not None:
        console.say(f"written       {options.html}")
    console.answer(found)
    return Exit.DONE


def lines(f: Facts, *, tensors: bool = False) -> list[str]:
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
        sentence = ", ".join(
            f"{k} {g['hyper'][k]}" for k in ("lr", "weight_decay", "betas", "momentum") if k in g["hyper"]
        )
        out.append(
            f"group {str(i).ljust(7)} {g['members']:,} parameters, {g['elements']:,} elements"
            + (f"; {sentence}" if sentence else "")
        )
    out += [f"tied          {alias} is {owner}" for alias, owner in f["aliases"].items()]
    for word, names in (("frozen", f["frozen"]), ("buffers", f["buffers"])):
        if names:
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            out.append(f"{(word + ':').ljust(13)} {shown}")
    out += [f"not stored    {text}" for text in f["not_stored"]]
    out += [f"{name.ljust(16)} {s['value']}: {s['origin']}" for name, s in f["settings"].items()]
    out += [f"cut over tp   {n} tensor{'s' * (n > 1)}: {origin}" for origin, n in f["cuts"].items()]
    if f["carried"]:
        out.append("goes along    " + ", ".join(f["carried"]))
    out += [f"client_state  {key}: {text}" for key, text in f["client_state"].items()]
    out += [
        f"unknown       {name}: kept inert, never imported; convert asks for --allow-global"
        for name in f["unknown_globals"]
    ]
    if f["container"] is not None:
        out += container_lines(f["container"])
    if tensors:
        out += [f"  {t['name']}  {t['shape']} {t['dtype']} {t['kind']}" for t in f["tensors"]]
    out += [f"not read      {entry}" for entry in _not_read(f["not_read"])]
    out += [f"looks wrong   {text}" for text in f["remarks"]] or ["looks wrong   nothing"]
    return out


def _not_read(found: dict[str, str]) -> tuple[AccountEntry, ...]:
    return entries_of(("not read", "file", name, why) for name, why in found.items())


def container_lines(f: ContainerFacts) -> list[str]:
    """The folder around the shards, and its files by policy."""
    words = {"carry": "carried", "weights": "weights", "rank": "one a rank", "unknown": "not known"}
    out = [f"container     {f['title']}, {plural(len(f['files']), 'file')} next to the shards"]
    for fate, word in words.items():
        names = [name for name, mine in f["files"].items() if mine == fate]
        out += [f"  {word.ljust(12)}{', '.join(names)}"] if names else []
    return out + [f"  left out    {name}: {why}" for name, why in f["skipped"].items()]
