"""The verbs; a module each, imported when it is called."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib import import_module
from keyword import iskeyword
from typing import Protocol, cast

from ucpl.cli.console import Console

__all__ = ["VERBS", "Verb", "load_verb", "nearest"]

VERBS = {
    "demo": "convert a shipped real checkpoint in a temporary folder, and prove the result",
    "inspect": "describe a checkpoint: framework, mesh, tensors, states, sizes, problems",
    "infer": "write the .ucpl (model and layout) of a checkpoint found in the wild",
    "import": "write a first spec of a transformers model, from its config or its files",
    "check": "parse, resolve and type-check .ucpl files",
    "fmt": "tidy .ucpl files",
    "show": "a layout after each stage of the compiler, or as a picture",
    "plan": "plan a conversion and prove it, before any byte moves",
    "calibrate": "measure how fast a disk and this machine are, for estimates",
    "apply": "run exactly that plan; under torchrun, by the ranks of a job together",
    "convert": "infer, plan, apply and verify in one go",
    "export": "write a Hugging Face folder that from_pretrained loads, from any checkpoint",
    "resume": "the path that a restarted job loads: the newest checkpoint, converted if the ranks need it",
    "compare": "compare the logical states of two checkpoints, whatever their layouts",
    "verify": "read everything back: digests, CRCs, copies, weights against masters",
    "contingency": "plan ahead of a loss: layouts for the remaining ranks, and the plans to them",
    "diff": "compare two plans",
    "vault": "snapshots in memory that outlive the trainer, restored into any layout",
    "why": "where an element of a target comes from",
    "roundtrip": "property-test that layouts of a spec round-trip through changed degrees",
    "lsp": "a language server for editors: diagnostics while one types, sizes, definitions, completion",
    "explain": "a diagnostic code: meaning, example, remedy",
    "completion": "a script that completes verbs, options and values in bash, zsh or fish",
    "formats": "which forms of checkpoints are read and written, how far, with which releases",
}


class Verb(Protocol):
    """A module of a verb.

    Its docstring is the description, EXAMPLE the end of its --help.
    """

    EXAMPLE: str

    def arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, options: Namespace, console: Console) -> int: ...


def load_verb(name: str) -> Verb:
    return cast(Verb, import_module(f"ucpl.cli.{name}{'_' * iskeyword(name)}"))


def nearest(name: str, names: list[str], least: float = 0.6) -> str:
    """The name that was probably meant, or an empty text."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, 1, least)), "")
