"""Export a checkpoint as a Hugging Face folder that from_pretrained loads.

Weights, config.json, tokenizer and custom code. The class of config.json must have each tensor and no other.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.convert import add_run, how_of, printer
from ucpl.cli.job import refuse_several
from ucpl.cli.options import add_json, given_of
from ucpl.errors import Exit
from ucpl.storage.resolve_url import resolve_target

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.engine import Event

EXAMPLE = """
ucpl export out/checkpoint-500 model --dtype bf16
ucpl export runs/iter_0001000 model --config Llama-3.1-8B
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="any checkpoint that `ucpl inspect` reads")
    parser.add_argument("target", metavar="DST", help="a new folder")
    parser.add_argument("--dtype", default="", help="bf16, f16 or f32 (default: each tensor keeps its own)")
    parser.add_argument("--shard", default="5GB", metavar="SIZE", help="the largest file of weights (default 5GB)")
    parser.add_argument(
        "--config",
        metavar="FOLDER",
        help="the folder of the base model, or its config.json (default: searched in the source, and near it)",
    )
    parser.add_argument(
        "--model",
        metavar="SPEC",
        help="the spec with the names of the source: llama, FILE.ucpl (default: the shipped one that has these names)",
    )
    parser.add_argument("--from", dest="layout", metavar="LAYOUT", help="the source's layout (default: inferred)")
    parser.add_argument("--drop", action="append", default=[], metavar="NAME", help="leave out a tensor; may repeat")
    parser.add_argument(
        "-D", dest="sizes", action="append", default=[], metavar="NAME=VALUE", help="a size of the spec"
    )
    parser.add_argument("--dry-run", action="store_true", help="plan and prove; write nothing")
    add_run(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.conversion.engine import Engine, asked_of
    from ucpl.conversion.exporting import demand_strict, folder_config, request

    refuse_several("export")
    spec, options.model = options.model or "", None
    if options.config is not None:
        options.config = str(folder_config(options.config))
    made = request(
        options.source, given_of(options), dtype=options.dtype, shard=options.shard, spec=spec, layout=options.layout
    )
    if made.notes:
        console.say(*(f"export        {note}" for note in made.notes))
    show = printer(console, after=loading)

    def watch(event: Event) -> None:
        demand_strict(event)
        show(event)

    engine = Engine(resolve_target(options.target), how_of(options), watch, console.progress)
    asked = asked_of(options.source, made.to, made.layout)
    if options.dry_run:
        engine.rehearse(asked, made.given)
    else:
        engine.convert(asked, made.given)
    return Exit.DONE


def loading(target: Path) -> str:
    """The line of Python that loads an export."""
    return f'AutoModelForCausalLM.from_pretrained("{target}")'
