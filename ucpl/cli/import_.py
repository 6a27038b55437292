"""Write a first spec of a model that another library knows.

`hf`: a transformers config, or a folder of safetensors files.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, write_text
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = """
ucpl import hf Llama-3.1-8B -o llama31.ucpl
ucpl import hf config.json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=["hf"], help="hf: Hugging Face")
    parser.add_argument("path", metavar="CONFIG|FOLDER", help="a config.json, or a folder with safetensors files")
    parser.add_argument("-o", "--output", metavar="FILE", help="write here instead of to standard output")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.inference.hf import import_hf

    text = import_hf(options.path)
    if options.output:
        write_text(Path(options.output), text)
        console.say(f"{options.output}: read it, correct it, then: ucpl check {options.output}")
    else:
        console.raw(text)
    console.answer({"text": text})
    return Exit.DONE
